"""Mistakes that interpreted tests pass, each planted in a small kernel and seen when its PTX is executed.

Each test first executes the kernel without the mistake.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from tests.ptx import small_kernels
from tests.ptx.assembly import kernel
from tests.ptx.faults import Fault
from tests.ptx.launching import Kernel, compile_kernel

if not hasattr(small_kernels.copy_rows, "arg_names"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

SIZE = 256


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_an_index_of_32_bits_overflows() -> None:
    """The memory between the rows is never touched, so that it is not there."""
    apart = 2**30
    whole = torch.empty(2 * apart + SIZE, dtype=torch.int8)
    rows = whole.as_strided((3, SIZE), (apart, 1))
    rows.copy_(torch.arange(3 * SIZE).view(3, SIZE) % 100)
    for wide in (1, 0):
        copied = compile_kernel(
            small_kernels.copy_rows,
            {"x_ptr": "*i8", "out_ptr": "*i8", "stride": "i32"},
            {"WIDE": wide, "COLUMNS": SIZE},
        )
        out = torch.zeros(3, SIZE, dtype=torch.int8)
        if wide:
            copied.launch((3,), [rows, out, apart])
            assert torch.equal(out, rows)
        else:
            with pytest.raises(Fault, match=r"block \(2, 0, 0\), thread 0, accesses memory at byte -?\d+ of a tensor"):
                copied.launch((3,), [rows, out, apart])


def test_a_grid_has_limits() -> None:
    with pytest.raises(Fault, match="a grid of 65536 along y, where a GPU takes 65535"):
        kernel("", parameters=1).launch((1, 65536), [torch.zeros(1)])


def test_fused_products_and_sums_change_bits() -> None:
    x, y, z = _random(3, SIZE)
    signature = dict.fromkeys(("x_ptr", "y_ptr", "z_ptr", "out_ptr"), "*fp32")
    for fusion, same in ((False, True), (True, False)):
        computed = compile_kernel(small_kernels.multiply_and_add, signature, {"SIZE": SIZE}, enable_fp_fusion=fusion)
        out = torch.empty(SIZE)
        computed.launch((1,), [x, y, z, out])
        assert torch.equal(out, x * y + z) == same
        assert any(name.startswith("fma") for name in computed.opcodes()) != same


def test_copies_of_a_fused_sum_differ() -> None:
    """Two threads that each add the other's product to their own, fused, round one product each: of the sum that both
    have there are two values, and both are stored in one place of shared memory."""
    x, y = _random(64), _random(64 + 1)[1:].contiguous()
    signature = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp32")
    for fusion in (False, True):
        computed = compile_kernel(small_kernels.add_products, signature, {"SIZE": 64}, enable_fp_fusion=fusion)
        out = torch.empty(1)
        if fusion:
            with pytest.raises(Fault, match="writes what another warp, with no barrier .*, writes at the same time"):
                computed.launch((1,), [x, y, out])
        else:
            computed.launch((1,), [x, y, out])
            torch.testing.assert_close(out[0].double(), x.double() @ y.double(), rtol=1e-6, atol=1e-6)


def test_threads_of_a_warp_write_one_place() -> None:
    """Which of them a GPU does last is not defined, and is no matter where all write the same."""
    body = """
	ld.param.b64 %rd1, [small_param_0];
	mov.u32 %r1, {value};
	st.global.b32 [%rd1], %r1;
"""
    out = torch.zeros(1, dtype=torch.int32)
    kernel(body.format(value="7"), parameters=1).launch((1,), [out])
    assert out.item() == 7
    with pytest.raises(Fault, match="thread 0, writes where another thread of its warp writes something else"):
        kernel(body.format(value="%tid.x"), parameters=1).launch((1,), [out])


@pytest.mark.parametrize("arch", [80, 90])
def test_products_of_float32_in_tf32_are_inexact(arch: int) -> None:
    x, y = _random(64, 64), _random(64, 64 + 1)[:, 1:].contiguous()
    exact = x.double() @ y.double()
    for precision, error in (("ieee", 1e-6), ("tf32", 1e-3)):
        computed = compile_kernel(
            small_kernels.multiply,
            dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp32"),
            {"SIZE": 64, "PRECISION": precision},
            arch=arch,
        )
        out = torch.empty(64, 64)
        computed.launch((1,), [x, y, out])
        found = ((out - exact).abs().max() / exact.abs().max()).item()
        assert error / 10 < found < error, (precision, found)
        name = "wgmma.mma_async" if arch == 90 else "mma.sync"
        assert any(one.startswith(name) for one in computed.opcodes()) == (precision == "tf32")


def test_what_was_stored_is_read_without_a_barrier() -> None:
    x = _random(64, 64)
    for waits in (1, 0):
        turned = compile_kernel(
            small_kernels.turn_over, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"SIZE": 64, "WAITS": waits}
        )
        out = torch.empty(2, 64, 64)
        if waits:
            turned.launch((1,), [x, out])
            assert torch.equal(out[1], x.flip(0))
        else:
            with pytest.raises(Fault, match=r"reads what another warp, with no barrier .* \(small_kernels.py:\d+\)"):
                turned.launch((1,), [x, out])


def test_atomic_sums_have_no_order() -> None:
    x = _random(3, SIZE)
    for atomic in (0, 1):
        added = compile_kernel(
            small_kernels.add_up, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"SIZE": SIZE, "ATOMIC": atomic}
        )
        out = torch.zeros_like(x)
        if atomic:
            with pytest.raises(Fault, match="computes in an order that no other run repeats: .*atom"):
                added.launch((3,), [x, out])
        else:
            added.launch((3,), [x, out])
            assert torch.equal(out, x)


def test_two_blocks_write_one_place() -> None:
    x = _random(3, SIZE)
    for apart in (SIZE, SIZE - 1):
        written = compile_kernel(
            small_kernels.write_rows, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"SIZE": SIZE, "APART": apart}
        )
        out = torch.zeros_like(x)
        if apart == SIZE:
            written.launch((3,), [x, out])
            assert torch.equal(out, x)
        else:
            with pytest.raises(Fault, match="writes what another block writes"):
                written.launch((3,), [x, out])


@pytest.mark.parametrize("by", [1, -1])
def test_a_block_reads_what_another_writes(by: int) -> None:
    """Launches 40 blocks, more than lie side by side, in whatever order."""
    shifted = compile_kernel(small_kernels.shift_rows, {"x_ptr": "*fp32"}, {"SIZE": SIZE, "BY": 40})
    x = _random(80, SIZE)
    expected = x[:40].clone()
    shifted.launch((40,), [x])
    assert torch.equal(x[40:], expected)
    shifted = compile_kernel(small_kernels.shift_rows, {"x_ptr": "*fp32"}, {"SIZE": SIZE, "BY": by})
    with pytest.raises(Fault, match="(reads|writes) what another block (reads|writes)"):
        shifted.launch((40,), [_random(42, SIZE)[1:]])


def test_a_mask_is_missing() -> None:
    for checked in (1, 0):
        copied = compile_kernel(
            small_kernels.copy_masked,
            {"x_ptr": "*fp32", "out_ptr": "*fp32", "length": "i32"},
            {"SIZE": SIZE, "CHECKED": checked},
        )
        x, out = _random(100), torch.zeros(SIZE)
        if checked:
            copied.launch((1,), [x, out, 100])
            assert torch.equal(out[:100], x) and (out[100:] == 0).all()
        else:
            with pytest.raises(Fault, match="accesses memory at byte 400 of a tensor of 400 bytes"):
                copied.launch((1,), [x, out, 100])


MASKED = """
	ld.param.b64 %rd1, [small_param_0];
	mov.u32 %r1, %tid.x;
	mad.wide.u32 %rd2, %r1, 4, %rd1;
	setp.lt.u32 %p1, %r1, 20;
	{zero}
	@%p1 ld.global.b32 %r2, [%rd2];
	add.s32 %r3, %r2, 1;
	st.global.b32 [%rd2], %r3;
"""


def test_a_masked_load_leaves_a_register_unwritten() -> None:
    """Triton writes zeros first, also where a kernel names no other value; without them numbers would be anything."""
    kernel(MASKED.format(zero="mov.b32 %r2, 0;"), parameters=1).launch((1,), [torch.zeros(32, dtype=torch.int32)])
    with pytest.raises(Fault, match=r"thread 20, reads %r3, which it never wrote: st.global.b32 .* \(small.py:7\)"):
        kernel(MASKED.format(zero=""), parameters=1).launch((1,), [torch.zeros(32, dtype=torch.int32)])


EXCHANGED = """
	ld.param.b64 %rd1, [small_param_0];
	mov.u32 %r1, %tid.x;
	mad.wide.u32 %rd2, %r1, 4, %rd1;
	setp.lt.u32 %p1, %r1, 4;
	@%p1 ld.global.b32 %r2, [%rd2];
	shfl.sync.bfly.b32 %r3, %r2, {by}, 31, -1;
	add.s32 %r4, %r2, %r3;
	@%p1 st.global.b32 [%rd2], %r4;
"""


def test_lanes_exchange_what_only_some_have_loaded() -> None:
    """Triton 3.6 sums so over warps: what was never written may be computed with, and reach no memory."""
    x = torch.arange(32, dtype=torch.int32)
    kernel(EXCHANGED.format(by=2), parameters=1).launch((1,), [x])
    assert x[:5].tolist() == [2, 4, 2, 4, 4]
    with pytest.raises(Fault, match=r"thread 0, reads %r4, which it never wrote: @%p1 st.global.b32"):
        kernel(EXCHANGED.format(by=4), parameters=1).launch((1,), [x])


def _multiplies(arch: int) -> tuple[str, int]:
    """Returns the PTX of a product of 64 x 64 that loads its operands asynchronously, and its shared bytes."""
    compiled = compile_kernel(
        small_kernels.looped_product,
        {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*fp32"},
        {"SIZE": 64, "LENGTH": 256},
        arch=arch,
        num_stages=3,
    )
    return compiled.text, compiled.shared_bytes


MISSING = {
    "a barrier": (80, r"bar\.sync \t?0;", "(reads|writes) what another warp"),
    "the wait for a copy": (80, r"cp\.async\.wait_group\s+\w+;", "asynchronous copy writes, which nobody waited for"),
    "the wait for a product": (90, r"wgmma\.wait_group\.sync\.aligned \d+;", "waited for"),
    "the fence before a product": (90, r"fence\.proxy\.async\S*;", "with no fence.proxy.async since"),
    "a copy": (80, r"(@\S+ )?cp\.async\.cg\S* \[[^;]*;", "shared memory that was never written"),
}
"""What is missing -> the architecture, what finds it in the text, and what is said."""


@pytest.mark.parametrize("missing", MISSING)
def test_an_instruction_of_a_pipeline_is_missing(missing: str) -> None:
    """Deletes one kind of instruction from what Triton compiled."""
    arch, pattern, message = MISSING[missing]
    text, shared = _multiplies(arch)
    if arch == 90 and "fence.proxy.async" not in text:
        pytest.skip("this Triton puts no fence between asynchronous copies and a product")
    x, y, out = _random(64, 256).bfloat16(), _random(256, 64).bfloat16(), torch.empty(64, 64)
    Kernel(text, shared).launch((1,), [x, y, out])
    exact = x.double() @ y.double()
    assert (out - exact).abs().max() < 1e-5 * exact.abs().max()
    broken, count = re.subn(pattern, "", text)
    assert count > 0
    with pytest.raises(Fault, match=message):
        Kernel(broken, shared).launch((1,), [x, y, out])


def test_a_barrier_that_a_part_of_the_block_reaches() -> None:
    body = """
	mov.u32 %r1, %tid.x;
	setp.lt.u32 %p1, %r1, 32;
	@%p1 bra $L__beyond;
	bar.sync 0;
$L__beyond:
	mov.u32 %r2, %r1;
"""
    with pytest.raises(Fault, match="thread 0, does not reach a barrier"):
        kernel(body, parameters=1, threads=64).launch((1,), [torch.zeros(1)])


def test_a_wide_access_has_to_begin_at_its_multiple() -> None:
    body = """
	ld.param.b64 %rd1, [small_param_0];
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
"""
    x = torch.zeros(64, dtype=torch.float32)
    kernel(body, parameters=1).launch((1,), [x])
    with pytest.raises(Fault, match="accesses 16 bytes at no multiple of 16"):
        kernel(body, parameters=1).launch((1,), [x[1:]])


def test_scopes_are_no_end_of_a_kernel() -> None:
    """Triton's own assembly opens some, with braces at the beginning of a line."""
    body = """
	ld.param.b64 %rd1, [small_param_0];
	mov.u32 %r1, %tid.x;
	// begin inline asm
	{
add.u32 %r2, %r1, 5;
}
	// end inline asm
	mad.wide.u32 %rd2, %r1, 4, %rd1;
	st.global.b32 [%rd2], %r2;
"""
    out = torch.zeros(32, dtype=torch.int32)
    kernel(body, parameters=1).launch((1,), [out])
    assert torch.equal(out, torch.arange(5, 37, dtype=torch.int32))


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(Fault, match="tests.ptx does not execute frobnicate"):
        kernel("frobnicate.b32 %r1, %r2;", parameters=1).launch((1,), [torch.zeros(1)])


def test_blocks_are_executed_in_any_order() -> None:
    """All of them, and each once."""
    body = """
	ld.param.b64 %rd1, [small_param_0];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ctaid.y;
	mov.u32 %r3, %nctaid.x;
	mad.lo.s32 %r4, %r2, %r3, %r1;
	mov.u32 %r5, %tid.x;
	setp.eq.s32 %p1, %r5, 0;
	mad.wide.u32 %rd2, %r4, 4, %rd1;
	@%p1 st.global.b32 [%rd2], %r4;
"""
    for seed in (1, 2):
        out = torch.full((7 * 50,), -1, dtype=torch.int32)
        kernel(body, parameters=1).launch((7, 50), [out], seed=seed)
        np.testing.assert_array_equal(out.numpy(), np.arange(350))
