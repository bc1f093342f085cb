"""Executes on a CPU the PTX that Triton compiles for a GPU.

The interpreter of Triton executes what a kernel says; this executes what the compiler made of it: layouts, vectorised
and predicated accesses, shared memory with its barriers and asynchronous copies, products of tensor cores, casts with a
GPU's rounding. All threads of several blocks lie side by side in numpy arrays.

    numbers.py        bfloat16, tf32, e4m3 and e5m2 as their bits
    program.py        text -> instructions
    machine.py        registers, divergent threads, barriers
    access_log.py     who has read and written each byte since when: races
    memory.py         global memory, which is the tensors of a launch, and shared memory
    instructions/     what each instruction does, a function for each family
    launching.py      compiles and executes in the place of a launch
    plugin.py         puts that under the tests of tests/kernels: pytest -p tests.ptx.plugin

Found, with the block, the thread, and the line of the kernel's source: accesses outside tensors, misaligned ones,
places that two blocks write or one writes and another reads, accesses of two warps to one place with no barrier between
them, different values that threads of a warp write to one place of global memory, results of asynchronous copies and
products taken, and their operands overwritten, before they are waited for, registers and shared memory read before they
are written, barriers that a part of a block reaches, atomic operations, grids that a GPU refuses.

Not seen: other races within a warp, products and sums that an assembler fuses and Triton did not, the order in which a
tensor core sums (here in fp64, rounded once) and the last bits of its approximate functions, tensor memory and
descriptors of later GPUs, and time. An instruction that no kernel has needed yet is refused.

With Triton 3.6, products of Hopper that read what cp.async wrote fail here: it puts no fence between them, which later
versions do (triton-lang/triton, pull request 9610).
"""
