"""Small kernels: with mistakes that the interpreter of Triton forgives and without them, and products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows(x_ptr, out_ptr, stride, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Copies rows that may lie more than 2^31 elements apart, which a product of 32 bits does not hold (WIDE = 0)."""
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    columns_C = tl.arange(0, COLUMNS)
    tl.store(out_ptr + row * COLUMNS + columns_C, tl.load(x_ptr + row * stride + columns_C))


@triton.jit
def multiply_and_add(x_ptr, y_ptr, z_ptr, out_ptr, SIZE: tl.constexpr):
    """x * y + z, each rounded, where the compiler may not fuse them."""
    places = tl.arange(0, SIZE)
    product = tl.load(x_ptr + places) * tl.load(y_ptr + places)
    tl.store(out_ptr + places, product + tl.load(z_ptr + places))


@triton.jit
def add_products(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    """The sum of x * y. With fewer elements than threads several have copies of one, and of what is added to it."""
    places = tl.arange(0, SIZE)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + places) * tl.load(y_ptr + places), 0))


@triton.jit
def multiply(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """A product of two square matrices in float32."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    x, y = tl.load(x_ptr + rows * SIZE + columns), tl.load(y_ptr + rows * SIZE + columns)
    tl.store(out_ptr + rows * SIZE + columns, tl.dot(x, y, input_precision=PRECISION))


@triton.jit
def turn_over(x_ptr, out_ptr, SIZE: tl.constexpr, WAITS: tl.constexpr):
    """Stores a tile, loads it again from the last row to the first, and stores that; with or without a barrier."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + rows * SIZE + columns, tl.load(x_ptr + rows * SIZE + columns))
    if WAITS:
        tl.debug_barrier()
    turned = tl.load(out_ptr + (SIZE - 1 - rows) * SIZE + columns)
    tl.store(out_ptr + SIZE * SIZE + rows * SIZE + columns, turned)


@triton.jit
def add_up(x_ptr, out_ptr, SIZE: tl.constexpr, ATOMIC: tl.constexpr):
    """Sums all programs' rows by atomic additions, or gives each program's to a place of its own."""
    places, row = tl.arange(0, SIZE), tl.program_id(0)
    x = tl.load(x_ptr + row * SIZE + places)
    if ATOMIC:
        tl.atomic_add(out_ptr + places, x)
    else:
        tl.store(out_ptr + row * SIZE + places, x)


@triton.jit
def write_rows(x_ptr, out_ptr, SIZE: tl.constexpr, APART: tl.constexpr):
    """Writes a row of SIZE for each program, APART elements after the one before."""
    places, row = tl.arange(0, SIZE), tl.program_id(0)
    tl.store(out_ptr + row * APART + places, tl.load(x_ptr + row * SIZE + places))


@triton.jit
def shift_rows(x_ptr, SIZE: tl.constexpr, BY: tl.constexpr):
    """Moves each program's row to that of program + BY."""
    places, row = tl.arange(0, SIZE), tl.program_id(0)
    tl.store(x_ptr + (row + BY) * SIZE + places, tl.load(x_ptr + row * SIZE + places))


@triton.jit
def copy_masked(x_ptr, out_ptr, length, SIZE: tl.constexpr, CHECKED: tl.constexpr):
    """Copies what is shorter than a block."""
    places = tl.arange(0, SIZE)
    ok = places < length
    tl.store(out_ptr + places, tl.load(x_ptr + places, mask=ok if CHECKED else places >= 0, other=0.0), mask=ok)


@triton.jit
def looped_product(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    """x [SIZE, LENGTH] @ y [LENGTH, SIZE] in steps of SIZE, whose operands are copied ahead."""
    near = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, LENGTH, SIZE):
        x = tl.load(x_ptr + near[:, None] * LENGTH + start + near[None, :])
        y = tl.load(y_ptr + (start + near[:, None]) * SIZE + near[None, :])
        total = tl.dot(x, y, total)
    tl.store(out_ptr + near[:, None] * SIZE + near[None, :], total)


@triton.jit
def turned_product(x_ptr, y_ptr, out_ptr, N: tl.constexpr, X_TURNED: tl.constexpr, Y_TURNED: tl.constexpr):
    """x [64, 64] @ y [64, N], each of which may lie with its columns for rows."""
    long, near = tl.arange(0, 64), tl.arange(0, N)
    x = tl.load(x_ptr + long[:, None] * 64 + long[None, :])
    if Y_TURNED:
        y = tl.trans(tl.load(y_ptr + near[:, None] * 64 + long[None, :]))
    else:
        y = tl.load(y_ptr + long[:, None] * N + near[None, :])
    if X_TURNED:
        x = tl.trans(x)
    tl.store(out_ptr + long[:, None] * N + near[None, :], tl.dot(x, y))
