"""Products with frozen weights, alone, beside adapters in one product, or with adapters as columns of the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.native import adapted, product
from engine.ops.kernels.op import Op


class Product(Protocol):
    """left right, [T, N], of [T, K] and [K, N]: into `out`, whose rows may have any stride, where that is given."""

    def __call__(self, left_TK: Tensor, right_KN: Tensor, /, *, out: Tensor | None = None) -> Tensor: ...


PRODUCT = Op(reference=torch.mm, native=product.product, triton=torch.mm, shape=torch.mm)


class AddProduct(Protocol):
    """buffer += scale * left right, rounded to fp32 once where the operands are fp32; the buffer is fp32 [N, M]."""

    def __call__(self, buffer_NM: Tensor, left_NT: Tensor, right_TM: Tensor, scale: float = 1.0, /) -> None: ...


ADD_PRODUCT = Op(
    reference=reference.add_product,
    native=product.add_product,
    triton=reference.add_product,
    shape=reference.add_product,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedProducts:
    """A linear and its adapters as one product each way.

    Args:
        fits: x and W^T, or dY and W: whether these products take the operands and are faster than separate ones.
        forward: (x, weight_OI, a_RI, sections, *, mask, keep_scale, h_TR) -> y = x W^T + H B^T, [T, O], and
            H = s keep_scale drop(x) A^T, [T, R]. An H that is given is not recomputed.
        backward: (dy, weight_OI, a_RI, sections, *, h_TR, mask, keep_scale, updates) -> dX = dY W, [T, I], and
            dH = s dY B, [T, R]; dB = dY^T H is added to the sections' `db`. With `updates` dX gets the adapters' part,
            keep_scale * mask * (dH A).
    """

    fits: Callable[[Tensor, Tensor], bool]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor]]


ADAPTED = Op(native=AdaptedProducts(fits=product.fits_tiles, forward=adapted.forward, backward=adapted.backward))

FOLD_MULTIPLE = 8
"""To which columns beside a weight are padded: the alignment of a CPU's matrix units."""
GPU_FOLD_MULTIPLE = 64
"""The same on a GPU. Rows of 16-bit numbers then start at a cache line. With less than 16, kernels would not know when
they are compiled that rows are aligned, and load and store number by number. More costs memory, but no time: matrix
products take 64 columns at once."""


class Folds(NamedTuple):
    """The directions, of a linear's forward and its backward, that multiply with [W | B] (see ops.products)."""

    forward: bool
    backward: bool


def _always(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> Folds:
    """Folds both directions.

    Whether backward should on a GPU is a question to `rankfold benchmark kernels --only product`, by the cases with dB.
    Counting does not answer it: with Llama-3-8B's 8192 tokens and 4096 inputs the further columns make 1088 tiles of
    1024, nine waves of 132 multiprocessors instead of eight, if the library takes tiles of 128 x 256, but eight as
    before if it takes 256 x 128.
    """
    return Folds(forward=True, backward=True)


def _folds_on_a_cpu(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> Folds:
    """Folds by measurement (BENCHMARKS.md, what adapters cost): the further columns widen the input gradient's product,
    which only a much larger output hides; below that the compiled skinny products are as fast or faster. Where one
    product takes the adapters along, nothing is to be gained."""
    pays = num_outputs >= 4 * num_inputs and not (dtype == torch.float32 and product.has_tiles())
    return Folds(forward=pays, backward=pays)


FOLDS = Op(reference=_always, native=_folds_on_a_cpu, triton=_always, shape=_folds_on_a_cpu, triton_shape=_always)
FOLDED_COLUMNS = Op(
    reference=FOLD_MULTIPLE,
    native=FOLD_MULTIPLE,
    triton=GPU_FOLD_MULTIPLE,
    shape=FOLD_MULTIPLE,
    triton_shape=GPU_FOLD_MULTIPLE,
)
