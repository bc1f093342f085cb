"""A tensor without memory that remembers which numbers of which stored tensors it is made of.

transformers' operations on the weights of a checkpoint are run on such tensors: what they stack, concatenate, cut,
transpose and reshape is so known to the number, whatever they are called. An operation that computes new numbers is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.adopted.arrangement import contiguous_strides
from engine.errors import UserError

_ATEN = torch.ops.aten


class Traced(NamedTuple):
    """A box of a traced tensor; see `engine.adopted.arrangement.StoredPart`."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: str
    offset: int
    strides: tuple[int, ...]

    def cut(self, dim: int, start: int, stop: int) -> Traced | None:
        """Returns what lies in [start, stop) along a dimension, as a box of those numbers alone; None for nothing."""
        first, last = max(self.starts[dim], start), min(self.starts[dim] + self.sizes[dim], stop)
        if first >= last:
            return None
        return Traced(
            _with(self.starts, dim, first - start),
            _with(self.sizes, dim, last - first),
            self.stored,
            self.offset + (first - self.starts[dim]) * self.strides[dim],
            self.strides,
        )

    def moved(self, dim: int, by: int) -> Traced:
        """Returns the same further on along a dimension."""
        return self._replace(starts=_with(self.starts, dim, self.starts[dim] + by))

    def permuted(self, dims: Sequence[int]) -> Traced:
        """Returns the same with dimensions in another order."""
        starts, sizes, strides = (tuple(each[dim] for dim in dims) for each in self._shape)
        return Traced(starts, sizes, self.stored, self.offset, strides)

    def with_dim(self, dim: int) -> Traced:
        """Returns the same with a dimension of size 1 more."""
        starts, sizes, strides = self._shape
        return Traced(
            (*starts[:dim], 0, *starts[dim:]),
            (*sizes[:dim], 1, *sizes[dim:]),
            self.stored,
            self.offset,
            (*strides[:dim], 1, *strides[dim:]),
        )

    def without_dim(self, dim: int) -> Traced:
        """Returns the same without a dimension of size 1."""
        starts, sizes, strides = ((*each[:dim], *each[dim + 1 :]) for each in self._shape)
        return Traced(starts, sizes, self.stored, self.offset, strides)

    @property
    def _shape(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.starts, self.sizes, self.strides

    def rows(self, dim: int) -> Iterator[Traced]:
        """Yields the box in slices of size 1 along a dimension."""
        for index in range(self.sizes[dim]):
            yield self._replace(
                starts=_with(self.starts, dim, self.starts[dim] + index),
                sizes=_with(self.sizes, dim, 1),
                offset=self.offset + index * self.strides[dim],
            )


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


class TracedTensor(Tensor):
    """A tensor of a shape, without memory; `boxes` are its parts."""

    boxes: tuple[Traced, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], boxes: Sequence[Traced]) -> TracedTensor:
        made = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32, device="meta")
        made.boxes = tuple(boxes)
        return made  # type: ignore[no-any-return]

    def __init__(self, shape: Sequence[int], boxes: Sequence[Traced]) -> None:
        super().__init__()

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> TracedTensor:
        """Returns all of a stored tensor."""
        shape = tuple(shape)
        return cls(shape, [Traced((0,) * len(shape), shape, name, 0, contiguous_strides(shape))])

    def __deepcopy__(self, memo: Any) -> TracedTensor:
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        if packet not in _OPERATIONS:
            raise UserError(
                f"transformers makes weights of this model by {packet.__name__}, which is no rearrangement of what is "
                "stored: convert the checkpoint with transformers' save_pretrained(save_original_format=False) first."
            )
        return _OPERATIONS[packet](*args, **(kwargs or {}))


def _same(x: TracedTensor, *_: Any, **__: Any) -> TracedTensor:
    return TracedTensor(x.shape, x.boxes)


def _slice(
    x: TracedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TracedTensor:
    size = x.shape[dim]
    dim %= x.dim()
    first, last, _ = slice(start, end).indices(size)
    cut = [box for whole in x.boxes if (box := whole.cut(dim, first, last)) is not None]
    if step == 1:
        return TracedTensor(_with(tuple(x.shape), dim, max(0, last - first)), cut)
    rows = [row for box in cut for row in box.rows(dim) if row.starts[dim] % step == 0]
    rows = [row._replace(starts=_with(row.starts, dim, row.starts[dim] // step)) for row in rows]
    return TracedTensor(_with(tuple(x.shape), dim, -(-(last - first) // step)), rows)


def _split_with_sizes(x: TracedTensor, sizes: Sequence[int], dim: int = 0) -> list[TracedTensor]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [_slice(x, dim, start, end) for start, end in pairwise(ends)]


def _split(x: TracedTensor, size: int, dim: int = 0) -> list[TracedTensor]:
    length = x.shape[dim]
    return [_slice(x, dim, start, min(start + size, length)) for start in range(0, length, size)]


def _select(x: TracedTensor, dim: int, index: int) -> TracedTensor:
    index %= x.shape[dim]
    return _squeeze(_slice(x, dim, index, index + 1), dim)


def _unbind(x: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    dim %= tensors[0].dim()
    first, boxes = 0, []
    for tensor in tensors:
        if tensor.dim() != tensors[0].dim() or _with(tuple(tensor.shape), dim, 0) != _with(
            tuple(tensors[0].shape), dim, 0
        ):
            raise ValueError(f"tensors of shapes {list(tensors[0].shape)} and {list(tensor.shape)} are joined")
        boxes += [box.moved(dim, first) for box in tensor.boxes]
        first += tensor.shape[dim]
    return TracedTensor(_with(tuple(tensors[0].shape), dim, first), boxes)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(x: TracedTensor, dim: int) -> TracedTensor:
    dim %= x.dim() + 1
    return TracedTensor((*x.shape[:dim], 1, *x.shape[dim:]), [box.with_dim(dim) for box in x.boxes])


def _squeeze(x: TracedTensor, dims: int | Sequence[int] | None = None) -> TracedTensor:
    wanted = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    for dim in sorted({dim % x.dim() for dim in wanted}, reverse=True):
        if x.shape[dim] == 1:
            x = TracedTensor((*x.shape[:dim], *x.shape[dim + 1 :]), [box.without_dim(dim) for box in x.boxes])
    return _same(x)


def _permute(x: TracedTensor, dims: Sequence[int]) -> TracedTensor:
    dims = [dim % x.dim() for dim in dims]
    return TracedTensor([x.shape[dim] for dim in dims], [box.permuted(dims) for box in x.boxes])


def _transpose(x: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    dims = list(range(x.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(x, dims)


def _view(x: TracedTensor, shape: Sequence[int]) -> TracedTensor:
    """Joins and divides dimensions, from the last one to the first."""
    wanted = list(shape)
    if -1 in wanted:
        wanted[wanted.index(-1)] = x.numel() // -prod(wanted)
    if 0 in wanted or prod(wanted) != x.numel():
        raise ValueError(f"shape {list(x.shape)} cannot become {wanted}")
    for done, size in enumerate(reversed(wanted)):  # the last `done` dimensions are as they are wanted
        dim = x.dim() - 1 - done
        if dim < 0:
            x = _unsqueeze(x, 0)
            dim = 0
        while x.shape[dim] % size:  # or less than it
            assert dim > 0, (x.shape, shape)
            x, dim = _joined(x, dim - 1), dim - 1
        if x.shape[dim] != size:
            x = _divided(x, dim, size)
    while x.dim() > len(wanted):
        x = _squeeze(x, 0)
    assert list(x.shape) == wanted, (x.shape, wanted)
    return x


def _joined(x: TracedTensor, dim: int) -> TracedTensor:
    """Returns the tensor with `dim` and the dimension after it as one."""
    inner, boxes = x.shape[dim + 1], []
    for whole in x.boxes:
        starts, sizes, _, _, strides = whole
        fits = sizes[dim + 1] == inner and (sizes[dim] == 1 or strides[dim] == inner * strides[dim + 1])
        for box in [whole] if fits or sizes[dim] == 1 else whole.rows(dim):
            starts, sizes = box.starts, box.sizes
            joined = box.without_dim(dim)
            boxes.append(
                joined._replace(
                    starts=_with(joined.starts, dim, starts[dim] * inner + starts[dim + 1]),
                    sizes=_with(joined.sizes, dim, sizes[dim] * sizes[dim + 1]),
                )
            )
    return TracedTensor((*x.shape[:dim], x.shape[dim] * inner, *x.shape[dim + 2 :]), boxes)


def _divided(x: TracedTensor, dim: int, inner: int) -> TracedTensor:
    """Returns the tensor with `dim` as two dimensions, the second one of size `inner`."""
    boxes = []
    for whole in x.boxes:
        start, size = whole.starts[dim], whole.sizes[dim]
        is_even = start % inner == 0 and size % inner == 0
        first, last = start // inner, -(-(start + size) // inner)
        spans = [(start, start + size)] if is_even else [(row * inner, (row + 1) * inner) for row in range(first, last)]
        for begin, end in spans:
            cut = whole.cut(dim, begin, end)
            assert cut is not None
            offset, length = cut.starts[dim], cut.sizes[dim]
            outer = length // inner if is_even else 1
            wider = cut.with_dim(dim)
            boxes.append(
                wider._replace(
                    starts=_with(_with(wider.starts, dim, begin // inner), dim + 1, offset),
                    sizes=_with(_with(wider.sizes, dim, outer), dim + 1, length // outer),
                    strides=_with(wider.strides, dim, inner * cut.strides[dim]),
                )
            )
    return TracedTensor((*x.shape[:dim], x.shape[dim] // inner, inner, *x.shape[dim + 1 :]), boxes)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _ATEN._to_copy: _same,
    _ATEN._unsafe_view: _view,
    _ATEN.alias: _same,
    _ATEN.cat: _cat,
    _ATEN.clone: _same,
    _ATEN.detach: _same,
    _ATEN.permute: _permute,
    _ATEN.select: _select,
    _ATEN.slice: _slice,
    _ATEN.split: _split,
    _ATEN.split_with_sizes: _split_with_sizes,
    _ATEN.squeeze: _squeeze,
    _ATEN.stack: _stack,
    _ATEN.t: lambda x: _transpose(x, 0, 1) if x.dim() == 2 else _same(x),
    _ATEN.transpose: _transpose,
    _ATEN.unbind: _unbind,
    _ATEN.unsqueeze: _unsqueeze,
    _ATEN.view: _view,
}
