"""Whole training steps of one rank on a GPU that does not exist.

torch's FakeTensorMode gives tensors on cuda:0 without numbers, and refuses to mix devices as a GPU does. What else a
GPU and NCCL would mind is looked for by stand-ins:

    device.cpp, library.py   the guard and hooks without which a build for CPUs cannot index tensors of a GPU
    timelines.py             which stream, collective or host code has touched which memory, and what it waited for
    cuda.py                  torch.cuda: streams, events, graphs
    nccl.py                  a process group with the rules of NCCL's
    recorder.py              every operation of torch: host reads, copies between host and device, memory it touches
    triton_launches.py       Triton's launches, which are checked and do nothing
    refusals.py              what flash attention and grouped products refuse of their arguments
    arithmetic.py            the random bits, whose rounds are many operations
    models.py, layouts.py    small models, and the cases
    waits.py                 where the host may wait
    images.py                images for their documents and prompts
    rank_run.py              what a case runs
    serving.py               the process in which it runs, because the hooks come before torch
    mistakes.py              one mistake of each kind, made on purpose

Not seen: numbers, the time that anything takes, what the allocator does beyond giving memory out again, and whether
Triton compiles.
"""
