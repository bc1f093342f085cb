"""The description of one op: its specification, its function in each backend, its shapes and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.seams import resolve


class Cost(NamedTuple):
    """What a call of an op costs on a GPU.

    Args:
        launches: kernels.
        nbytes: read and written.
        flops: of its products.
        kind: "grouped product" for products of many experts, which have a speed of their own; see
            `engine.planning.launches.Launch`.
        result: rows and columns of such a product, of each expert; None for all else.
        products: how many of them.
    """

    launches: int
    nbytes: int
    flops: float = 0.0
    kind: str = "kernel"
    result: tuple[int, int] | None = None
    products: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op. Its functions in all backends have one signature, which its module explains.

    Args:
        reference: the specification in plain torch; None where other ops compute it, as in every backend that lacks it.
        native, triton: of these backends, the object or "module:NAME" of it; None where the backend lacks it. Triton's
            modules must be named, because they are imported late.
        shape: stands for the kernel on the meta device: allocates its results and its buffers, and computes nothing.
            None where the planner has the op computed by others.
        triton_shape: the same for the Triton kernel; None where its allocations are the native one's.
        flops: of the same arguments, those of products with adapters; None for none.
        triton_cost: of the same arguments, what the Triton kernels take; None where it is one, or two with a sum, that
            read the arguments and write the results.
    """

    reference: Any = None
    native: Any = None
    triton: Any = None
    shape: Any = None
    triton_shape: Any = None
    flops: Callable[..., float] | None = None
    triton_cost: Callable[..., Cost] | None = None

    def implementation(self, backend: str) -> Any:
        """Returns the function of a backend, or the record of several; None where it lacks the op."""
        found = getattr(self, backend)
        if is_dataclass(found) and not isinstance(found, type):
            named = {one.name: getattr(found, one.name) for one in fields(found)}
            return replace(found, **{key: resolve(name) for key, name in named.items() if isinstance(name, str)})
        return resolve(found) if isinstance(found, str) else found

    def stand_in(self, backend: str) -> Any:
        """Returns `shape` for a compiled backend; None where it lacks the op."""
        if getattr(self, backend) is None:
            return None
        return self.triton_shape if backend == "triton" and self.triton_shape is not None else self.shape


def write_in_place(*_: Any, **__: Any) -> None:
    """Stands for a kernel that writes into its arguments."""


def like(x: Tensor) -> Tensor:
    """Allocates a dense tensor of the shape and dtype of `x`."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def wide(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Allocates statistics and sums, which are fp32, where `x` lies."""
    return torch.empty(tuple(shape), dtype=torch.float32, device=x.device)


def codes(x: Tensor) -> Tensor:
    """Allocates e4m3 codes of the shape of `x`."""
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)


def row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates e4m3 codes of `x` [T, F] and a scale for each row, [T, 1]."""
    return codes(x), wide(x, (x.shape[0], 1))
