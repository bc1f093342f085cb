"""Each family of instructions against numpy, or by hand from NVIDIA's description of PTX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from tests.ptx import numbers, small_kernels
from tests.ptx.assembly import each_thread, kernel
from tests.ptx.launching import compile_kernel
from tests.support.sweeps import sampled

RANDOM = np.random.default_rng(0)
LANES = np.arange(32)


def _integers(dtype: type[np.integer]) -> np.ndarray:
    limits = np.iinfo(dtype)
    values = RANDOM.integers(limits.min, limits.max, 32, dtype=dtype, endpoint=True)
    values[:4] = limits.min, limits.max, 1, 7
    return values


def _floats() -> np.ndarray:
    values = (RANDOM.standard_normal(32) * np.exp2(RANDOM.integers(-10, 10, 32))).astype(np.float32)
    values[:6] = 0, -0.0, np.inf, -np.inf, np.nan, 1
    return values


TYPES: dict[str, Any] = {
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["add", "sub", "min", "max", "mul.lo", "mad.lo", "div", "rem"])
def test_integers(name: str, kind: str) -> None:
    dtype = TYPES[kind]
    a, b, c = (_integers(dtype) for _ in range(3))
    b[b == 0] = 3
    with np.errstate(over="ignore"):
        computed: dict[str, Callable[[], np.ndarray]] = {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "min": lambda: np.minimum(a, b),
            "max": lambda: np.maximum(a, b),
            "mul.lo": lambda: a * b,
            "mad.lo": lambda: a * b + c,
            "div": lambda: np.array([_divided(*pair)[0] for pair in zip(a, b, strict=True)], dtype),
            "rem": lambda: np.array([_divided(*pair)[1] for pair in zip(a, b, strict=True)], dtype),
        }
        expected = computed[name]()
    operands = "{0}, {1}, {2}" if name == "mad.lo" else "{0}, {1}"
    np.testing.assert_array_equal(each_thread(f"{name}.{kind} {{out}}, {operands};", a, b, c, result=dtype), expected)


def _divided(a: np.integer, b: np.integer) -> tuple[int, int]:
    """Quotient, towards zero, and remainder."""
    quotient = abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, int(a) - quotient * int(b)


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_wide_products(kind: str) -> None:
    dtype, wide = TYPES[kind], TYPES[f"{kind[0]}64"]
    a, b, c = _integers(dtype), _integers(dtype), _integers(wide)
    found = each_thread(f"mul.wide.{kind} {{out}}, {{0}}, {{1}};", a, b, result=wide)
    np.testing.assert_array_equal(found, a.astype(wide) * b.astype(wide))
    with np.errstate(over="ignore"):
        expected = a.astype(wide) * b.astype(wide) + c
    found = each_thread(f"mad.wide.{kind} {{out}}, {{0}}, {{1}}, {{2}};", a, b, c, result=wide)
    np.testing.assert_array_equal(found, expected)
    found = each_thread(f"mul.hi.{kind} {{out}}, {{0}}, {{1}};", a, b, result=dtype)
    np.testing.assert_array_equal(found, [(int(x) * int(y)) >> 32 for x, y in zip(a, b, strict=True)])


def test_bits() -> None:
    a, b = _integers(np.uint32), _integers(np.uint32)
    for name, expected in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        np.testing.assert_array_equal(
            each_thread(f"{name}.b32 {{out}}, {{0}}, {{1}};", a, b, result=np.uint32), expected
        )
    np.testing.assert_array_equal(each_thread("not.b32 {out}, {0};", a, result=np.uint32), ~a)
    by = np.arange(0, 64, 2, dtype=np.uint32)
    signed = a.view(np.int32)
    left = [int(x) << int(n) & 0xFFFFFFFF for x, n in zip(a, by, strict=True)]
    np.testing.assert_array_equal(each_thread("shl.b32 {out}, {0}, {1};", a, by, result=np.uint32), left)
    right = [int(x) >> int(n) for x, n in zip(a, by, strict=True)]
    np.testing.assert_array_equal(each_thread("shr.u32 {out}, {0}, {1};", a, by, result=np.uint32), right)
    right = [int(x) >> int(n) for x, n in zip(signed, by, strict=True)]
    np.testing.assert_array_equal(each_thread("shr.s32 {out}, {0}, {1};", signed, by, result=np.int32), right)


@pytest.mark.parametrize(("mode", "most"), [("wrap", 31), ("clamp", 32)])
def test_shifts_of_two_words(mode: str, most: int) -> None:
    low, high, by = _integers(np.uint32), _integers(np.uint32), np.arange(0, 64, 2, dtype=np.uint32)
    steps = [int(n) & 31 if mode == "wrap" else min(int(n), most) for n in by]
    whole = [int(y) << 32 | int(x) for x, y in zip(low, high, strict=True)]
    found = each_thread(f"shf.l.{mode}.b32 {{out}}, {{0}}, {{1}}, {{2}};", low, high, by, result=np.uint32)
    np.testing.assert_array_equal(found, [both << n >> 32 & 0xFFFFFFFF for both, n in zip(whole, steps, strict=True)])
    found = each_thread(f"shf.r.{mode}.b32 {{out}}, {{0}}, {{1}}, {{2}};", low, high, by, result=np.uint32)
    np.testing.assert_array_equal(found, [both >> n & 0xFFFFFFFF for both, n in zip(whole, steps, strict=True)])


def test_fields_of_bits() -> None:
    a, b = _integers(np.uint32), _integers(np.uint32)
    found = each_thread("bfe.u32 {out}, {0}, 5, 9;", a, result=np.uint32)
    np.testing.assert_array_equal(found, a >> 5 & 511)
    found = each_thread("bfe.s32 {out}, {0}, 3, 4;", a, result=np.int32)
    field = (a >> 3 & 15).astype(np.int32)
    np.testing.assert_array_equal(found, np.where(field > 7, field - 16, field))
    found = each_thread("bfi.b32 {out}, {0}, {1}, 8, 4;", a, b, result=np.uint32)
    np.testing.assert_array_equal(found, b & ~np.uint32(0xF00) | (a & 15) << 8)


def test_bytes_in_another_order() -> None:
    a, b = np.full(32, 0x84838281, np.uint32), np.full(32, 0x08070605, np.uint32)
    for chosen, expected in ((0x5410, 0x06058281), (0x7771, 0x08080882), (0x3340, 0x84840581), (0xBBB3, 0xFFFFFF84)):
        found = each_thread(f"prmt.b32 {{out}}, {{0}}, {{1}}, {chosen:#x}U;", a, b, result=np.uint32)
        assert (found == expected).all(), f"{chosen:#x} {found[0]:#x}"


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div.full", "max", "min", "max.NaN"])
def test_floats(name: str) -> None:
    a, b = _floats(), RANDOM.permutation(_floats())
    with np.errstate(all="ignore"):
        expected = {
            "add": a + b, "sub": a - b, "mul": a * b, "div.full": a / b,
            "max": np.fmax(a, b), "min": np.fmin(a, b), "max.NaN": np.maximum(a, b),
        }[name]  # fmt: skip
    found = each_thread(f"{name}.f32 {{out}}, {{0}}, {{1}};", a, b, result=np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "function"),
    [("neg", np.negative), ("abs", np.abs), ("sqrt.rn", np.sqrt), ("ex2.approx", np.exp2), ("lg2.approx", np.log2)],
)
def test_functions_of_one_float(name: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    a = _floats()
    with np.errstate(all="ignore"):
        expected = function(a.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(each_thread(f"{name}.f32 {{out}}, {{0}};", a, result=np.float32), expected)


def test_a_fused_sum_is_rounded_once() -> None:
    """(1 + u)(1 - u) - 1 is -u^2, and 0 where the product is rounded. (1 + v)^2 lies in the middle of two numbers, and
    with 2^-80, which float64 has no place for, above it."""
    u, v = 2.0**-20, 2.0**-12
    given = [np.array(one, np.float32).repeat(16) for one in ([1 + u, 1 + v], [1 - u, 1 + v], [-1, 2.0**-80])]
    found = each_thread("fma.rn.f32 {out}, {0}, {1}, {2};", *given, result=np.float32)
    np.testing.assert_array_equal(found[[0, 16]], np.array([-(u**2), 1 + 2 * v + 2.0**-23], np.float32))
    apart = each_thread("mul.rn.f32 %r1, {0}, {1};\nadd.rn.f32 {out}, %r1, {2};", *given, result=np.float32)
    np.testing.assert_array_equal(apart[[0, 16]], np.array([0, 1 + 2 * v], np.float32))
    u = 2.0**-30
    given = [np.full(32, one, np.float64) for one in (1 + u, 1 - u, -1)]
    found = each_thread("fma.rn.f64 {out}, {0}, {1}, {2};", *given, result=np.float64)
    np.testing.assert_array_equal(found, -(u**2))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_sixteen_bit_arithmetic(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    a, b, c = (torch.randn(32, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3))
    words = [x.view(torch.int16).numpy() for x in (a, b, c)]
    for name, operands, expected in (
        ("fma.rn", "{0}, {1}, {2}", a.double() * b.double() + c.double()),
        ("mul", "{0}, {1}", a.double() * b.double()),
        ("sub", "{0}, {1}", a.double() - b.double()),
    ):
        found = each_thread(f"{name}.{kind} {{out}}, {operands};", *words, result=np.int16)
        assert torch.equal(torch.from_numpy(found).view(dtype), expected.to(dtype)), name
        pair = [np.ascontiguousarray(x).view(np.uint32) for x in words]
        found = each_thread(f"{name}.{kind}x2 {{out}}, {operands};", *pair, result=np.uint32)
        assert torch.equal(torch.from_numpy(found.view(np.int16)).view(dtype), expected.to(dtype)), f"{name} x2"


def test_flushed_to_zero() -> None:
    a = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1] * 8, np.float32)
    found = each_thread("mul.ftz.f32 {out}, {0}, 0f3F800000;", a, result=np.float32)
    np.testing.assert_array_equal(found, np.array([0, -0.0, 2.0**-126, 1] * 8, np.float32))


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "geu", "num", "nan"])
def test_comparisons_of_floats(name: str) -> None:
    a, b = _floats(), RANDOM.permutation(_floats())
    ordered = {
        "eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b,
        "equ": a == b, "neu": a != b, "ltu": a < b, "geu": a >= b,
    }.get(name)  # fmt: skip
    unordered = np.isnan(a) | np.isnan(b)
    if ordered is None:
        expected = unordered == (name == "nan")
    else:
        expected = np.where(unordered, name.endswith("u"), ordered)
    found = each_thread(f"setp.{name}.f32 %p1, {{0}}, {{1}};\nselp.b32 {{out}}, 1, 0, %p1;", a, b, result=np.uint32)
    np.testing.assert_array_equal(found.astype(bool), expected)


def test_comparisons_of_integers_know_signs() -> None:
    a, b = _integers(np.int32), _integers(np.int32)
    for name, expected in (("lt.s32", a < b), ("lt.u32", a.view(np.uint32) < b.view(np.uint32)), ("ge.s32", a >= b)):
        found = each_thread(f"setp.{name} %p1, {{0}}, {{1}};\nselp.b32 {{out}}, 1, 0, %p1;", a, b, result=np.uint32)
        np.testing.assert_array_equal(found.astype(bool), expected)


def test_moves_between_one_and_several_registers() -> None:
    a = _integers(np.uint32)
    found = each_thread("mov.b32 {%rs1, %rs2}, {0};\nmov.b32 {out}, {%rs2, %rs1};", a, result=np.uint32)
    np.testing.assert_array_equal(found, a << 16 | a >> 16)
    found = each_thread("mov.b32 {_, %rs2}, {0};\ncvt.u32.u16 {out}, %rs2;", a, result=np.uint32)
    np.testing.assert_array_equal(found, a >> 16)


@pytest.mark.parametrize(
    ("name", "dtype", "result"),
    [
        ("s64.s32", np.int32, np.int64), ("u64.u32", np.uint32, np.uint64), ("u32.u64", np.uint64, np.uint32),
        ("u16.u32", np.uint32, np.uint16), ("rn.f32.s32", np.int32, np.float32), ("rn.f32.s16", np.int16, np.float32),
        ("rn.f32.u32", np.uint32, np.float32),
    ],
)  # fmt: skip
def test_conversions(name: str, dtype: type[np.integer], result: type[np.generic]) -> None:
    a = _integers(dtype)
    np.testing.assert_array_equal(each_thread(f"cvt.{name} {{out}}, {{0}};", a, result=result), a.astype(result))


def test_conversions_to_integers_stay_within_their_range() -> None:
    a = np.array([2.5, 3.5, -2.5, 1e10, -1e10, np.nan, 127.6, -0.4] * 4, np.float32)
    expected = [2, 4, -2, 2**31 - 1, -(2**31), 0, 128, 0]
    np.testing.assert_array_equal(each_thread("cvt.rni.s32.f32 {out}, {0};", a, result=np.int32)[:8], expected)
    expected = [2, 3, -2, 2**31 - 1, -(2**31), 0, 127, 0]
    np.testing.assert_array_equal(each_thread("cvt.rzi.s32.f32 {out}, {0};", a, result=np.int32)[:8], expected)


def test_a_byte_is_extended_by_its_sign() -> None:
    a = _integers(np.int32)
    found = each_thread("cvt.s8.s32 %rs1, {0};\ncvt.s16.s8 {out}, %rs1;", a, result=np.int16)
    np.testing.assert_array_equal(found, a.astype(np.int8))


def test_casts_of_floats() -> None:
    a, b = _floats(), RANDOM.permutation(_floats())
    found = each_thread("cvt.rn.bf16x2.f32 {out}, {0}, {1};", a, b, result=np.uint32)
    np.testing.assert_array_equal(found & 0xFFFF, numbers.to_bfloat16(b))
    np.testing.assert_array_equal(found >> 16, numbers.to_bfloat16(a))
    found = each_thread("cvt.rn.bf16.f32 %rs1, {0};\ncvt.f32.bf16 {out}, %rs1;", a, result=np.float32)
    np.testing.assert_array_equal(found, numbers.from_bfloat16(numbers.to_bfloat16(a)))
    found = each_thread("cvt.rna.tf32.f32 {out}, {0};", a, result=np.uint32)
    np.testing.assert_array_equal(found, numbers.to_tf32(a))
    for kind, table in (("e4m3", numbers.E4M3), ("e5m2", numbers.E5M2)):
        found = each_thread(f"cvt.rn.satfinite.{kind}x2.f32 {{out}}, {{0}}, {{1}};", a, b, result=np.uint16)
        np.testing.assert_array_equal(found & 255, numbers.to_eight_bits(b, table))
        np.testing.assert_array_equal(found >> 8, numbers.to_eight_bits(a, table))
        back = each_thread(f"cvt.rn.f16x2.{kind}x2 {{out}}, {{0}};", found, result=np.uint32)
        np.testing.assert_array_equal((back >> 16).astype(np.uint16).view(np.float16), table[found >> 8])


@pytest.mark.parametrize(
    ("name", "source"),
    [("bfly", LANES ^ 8), ("up", np.where(LANES >= 8, LANES - 8, LANES)), ("idx", LANES * 0 + 8),
     ("down", np.where(LANES < 24, LANES + 8, LANES))],
)  # fmt: skip
def test_shuffles(name: str, source: np.ndarray) -> None:
    a = _integers(np.uint32)
    clamp = 0 if name == "up" else 31
    found = each_thread(f"shfl.sync.{name}.b32 {{out}}, {{0}}, 8, {clamp}, -1;", a, result=np.uint32)
    np.testing.assert_array_equal(found, a[source])


def test_reductions_of_a_warp() -> None:
    a = np.concatenate([_integers(np.int32), _integers(np.int32)])
    for name, function in (("max.s32", np.max), ("min.s32", np.min), ("add.s32", lambda x: x.sum(dtype=np.int32))):
        found = each_thread(f"redux.sync.{name} {{out}}, {{0}}, -1;", a, result=np.int32)
        np.testing.assert_array_equal(found, np.repeat([function(a[:32]), function(a[32:])], 32))


def test_threads_that_part_meet_again() -> None:
    """The odd threads go round once for each that is below them; all of them add afterwards."""
    body = """
	mov.u32 %r1, %tid.x;
	and.b32 %r2, %r1, 1;
	setp.eq.b32 %p1, %r2, 0;
	mov.b32 %r3, 0;
	mov.b32 %r4, 0;
	@%p1 bra $L__meet;
$L__again:
	add.s32 %r3, %r3, {0};
	add.s32 %r4, %r4, 1;
	setp.lt.s32 %p2, %r4, %r1;
	@%p2 bra $L__again;
$L__meet:
	shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1;
	add.s32 {out}, %r5, %r3;
"""
    found = each_thread(body, np.full(32, 3, np.int32), result=np.int32)
    np.testing.assert_array_equal(found, 3 * (LANES | 1))


MATRIX_BODY = """
	mov.u32 %r1, %tid.x;
	shl.b32 %r2, %r1, 4;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, %r2;
	st.shared.v4.b32 [%r4], {{{0}, {1}, {2}, {3}}};
	bar.warp.sync -1;
	{instruction}
	mov.b32 {{out}}, %r{register};
"""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_matrices_from_shared_memory(number: int, transposed: bool) -> None:
    """Four matrices of 8 x 8, whose rows the 32 threads have written."""
    elements = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    words = elements.reshape(32, 8).view(np.uint32)
    trans = ".trans" if transposed else ""
    body = MATRIX_BODY.format(
        "{0}", "{1}", "{2}", "{3}", register=20 + number,
        instruction=f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r4];",
    )  # fmt: skip
    found = each_thread(body, *(words[:, part] for part in range(4)), result=np.uint32, shared=512)
    matrix = elements[number].T if transposed else elements[number]
    row, column = LANES // 4, LANES % 4 * 2
    np.testing.assert_array_equal(found & 0xFFFF, matrix[row, column])
    np.testing.assert_array_equal(found >> 16, matrix[row, column + 1])


def test_matrices_to_shared_memory() -> None:
    """What ldmatrix has loaded goes back to where it was."""
    elements = np.arange(4 * 64, dtype=np.uint16)
    words = elements.reshape(32, 8).view(np.uint32)
    body = MATRIX_BODY.format(
        "{0}", "{1}", "{2}", "{3}", register=23,
        instruction="""ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r20, %r21, %r22, %r23}, [%r4];
	stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r4+512], {%r20, %r21, %r22, %r23};
	bar.warp.sync -1;
	ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r4+512];""",
    )  # fmt: skip
    found = each_thread(body, *(words[:, part] for part in range(4)), result=np.uint32, shared=1024)
    np.testing.assert_array_equal(found, words[:, 3])


PRODUCT = """
	ld.param.b64 %rd1, [small_param_0];
	ld.param.b64 %rd2, [small_param_1];
	ld.param.b64 %rd3, [small_param_2];
	mov.u32 %r30, %tid.x;
	mad.wide.u32 %rd4, %r30, 16, %rd1;
	mad.wide.u32 %rd5, %r30, 8, %rd2;
	mad.wide.u32 %rd6, %r30, 16, %rd3;
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd4];
	ld.global.v2.b32 {%r5, %r6}, [%rd5];
	ld.global.v4.b32 {%r7, %r8, %r9, %r10}, [%rd6];
	INSTRUCTION {%r7, %r8, %r9, %r10}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7, %r8, %r9, %r10};
	st.global.v4.b32 [%rd6], {%r7, %r8, %r9, %r10};
"""


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_products_of_a_warp(kind: str) -> None:
    """Fragments as NVIDIA draws them: thread 4 g + t has rows g and g + 8 of A, column g of B."""
    size, dtype = (4, torch.float32) if kind == "tf32" else (2, torch.bfloat16 if kind == "bf16" else torch.float16)
    depth, each = 32 // size, 4 // size
    a, b = (torch.randint(-8, 8, shape).to(dtype) for shape in ((16, depth), (depth, 8)))
    c = torch.randn(16, 8)
    group, member = torch.arange(32) // 4, torch.arange(32) % 4
    left = torch.stack(
        [a[group + 8 * (i % 2), each * member + 4 * each * (i // 2) + p] for i in range(4) for p in range(each)], 1
    )
    right = torch.stack([b[each * member + 4 * each * i + p, group] for i in range(2) for p in range(each)], 1)
    sums = torch.stack([c[group + 8 * (i // 2), 2 * member + i % 2] for i in range(4)], 1)
    name = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    out = sums.contiguous().clone()
    kernel(PRODUCT.replace("INSTRUCTION", name), parameters=3).launch(
        (1,), [left.contiguous(), right.contiguous(), out]
    )
    exact = (a.double() @ b.double() + c.double()).float()
    assert torch.equal(out, torch.stack([exact[group + 8 * (i // 2), 2 * member + i % 2] for i in range(4)], 1))


@pytest.mark.parametrize("x_turned", [0, 1])
@pytest.mark.parametrize("y_turned", [0, 1])
@pytest.mark.parametrize(
    ("columns", "dtype"), sampled([(16, "bf16"), (32, "fp16"), (128, "bf16"), (32, "fp32")], [(16, "bf16")])
)
def test_products_of_four_warps(columns: int, dtype: str, x_turned: int, y_turned: int) -> None:
    """wgmma as Triton writes it: operands in rows of 32 to 128 swizzled bytes, and with columns for rows."""
    if isinstance(small_kernels.turned_product, InterpretedFunction):
        pytest.skip("kernels are interpreted in this process")
    computed = compile_kernel(
        small_kernels.turned_product,
        {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "out_ptr": "*fp32"},
        {"N": columns, "X_TURNED": x_turned, "Y_TURNED": y_turned},
        arch=90,
    )
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    draw = torch.Generator().manual_seed(columns)
    x, y = (torch.randint(-8, 8, (64, width), generator=draw).to(kind) for width in (64, columns))
    out = torch.zeros(64, columns)
    computed.launch((1,), [x, y.t().contiguous() if y_turned else y, out])
    assert torch.equal(out, ((x.t() if x_turned else x).double() @ y.double()).float())
    assert any(name.startswith(f"wgmma.mma_async.sync.aligned.m64n{columns}k") for name in computed.opcodes())
