"""What the tests of the compiled CPU kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kernels.native.dropout import dropout_bits
from engine.kernels.native.loader import best_instruction_set, native_status
from engine.kernels.records import AdapterSection, DropoutKey
from rankfold.benchmarking import oracles

_ORDER = ("baseline", "avx2", "avx512")
INSTRUCTION_SETS = _ORDER[: _ORDER.index(best_instruction_set()) + 1]
"""Those that this processor can run; it picks the last one by itself."""

needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)
ON_EVERY_INSTRUCTION_SET = [needs_native, pytest.mark.usefixtures("instruction_set")]
"""The marks of a module whose tests run once with each of them."""


def unpack_bits(bits: Tensor, num_features: int) -> Tensor:
    """bool [T, num_features] of packed bits."""
    return ((bits[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)[:, :num_features].bool()


def a_section(da: Tensor, first_row: int = 0) -> AdapterSection:
    """An adapter of which only dA is asked for."""
    return AdapterSection(first_column=0, num_columns=0, first_row=first_row, num_ranks=da.shape[0], da=da)


def b_section(db: Tensor, first_column: int = 0, first_row: int = 0) -> AdapterSection:
    """An adapter of which only dB is asked for."""
    (num_columns, num_ranks), first = db.shape, first_column
    return AdapterSection(first_column=first, num_columns=num_columns, first_row=first_row, num_ranks=num_ranks, db=db)


def packed_mask(tokens: int, features: int, offset: int) -> Tensor:
    """A mask that drops a fifth, in bits."""
    key = DropoutKey(
        token_index=torch.arange(tokens), step=3, seed=1, site=2, probability=0.2, num_features=features,
        feature_offset=offset,
    )  # fmt: skip
    return dropout_bits(key)


def drawn_bits(tokens: int, features: int) -> tuple[Tensor, Tensor]:
    """A packed mask, and the same as fp32."""
    bits = packed_mask(tokens, features, 5)
    return bits, unpack_bits(bits, features).float()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same_on_any_threads(run: Callable[[], tuple[Tensor, ...]]) -> None:
    """Bitwise equal results with 1, 2 and 3 threads."""
    with threads(1):
        expected = run()
    for count in (2, 3):
        with threads(count):
            for one, other in zip(run(), expected, strict=True):
                assert torch.equal(one, other), count


def widened(matrix: Tensor, extra: int = 5) -> Tensor:
    """The same values as a column slice of a wider buffer, whose other columns are NaN."""
    buffer = matrix.new_full((*matrix.shape[:-1], matrix.shape[-1] + extra), float("nan"))
    view = buffer[..., : matrix.shape[-1]]
    view.copy_(matrix)
    return view


_ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9}


def assert_accurate(ours: Tensor, torchs: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """Error against fp64 at most twice that of torch in the same dtype, by the norm over all elements.

    One rounding of the result is allowed in any case, or four of the `terms` whose sum it is where they may cancel:
    torch may be exact by luck where there are few elements.
    """
    assert ours.shape == torchs.shape == exact.shape and exact.dtype == torch.float64
    assert ours.dtype == torchs.dtype, (ours.dtype, torchs.dtype)
    rounding = _ROUNDING[ours.dtype]
    error = (ours.double() - exact).norm().item()
    allowed = 2 * (torchs.double() - exact).norm().item() + (
        exact.norm().item() * rounding if terms is None else terms.norm().item() * 4 * rounding
    )
    assert error <= allowed, (error, allowed)


def attention_by_torch(
    inputs: tuple[Tensor, ...], lengths: tuple[int, ...], scale: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv by torch's plain products, a document at a time, in `dtype`, for (q, k, v, dout)."""
    attend = partial(oracles.attention_by_document, lengths=lengths, scale=scale)
    with sdpa_kernel(SDPBackend.MATH):
        return oracles.with_gradients(attend, inputs[:3], inputs[3:], dtype)
