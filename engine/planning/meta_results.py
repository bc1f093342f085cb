"""The results of operations on the meta device.

Torch has a rule for each, in Python for many, and the common ones import its compiler when they first run, which takes
seconds: more than all that a prediction computes. Those of a text run are here, and those that torch lacks. A rule
checks nothing: the engine's own code runs on the meta device, after it has run elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def _like(x: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = None, **_: Any) -> Tensor:
    """Returns a tensor with the strides of x where they leave no gaps, as torch's.

    Whether a product copies its operand depends on them.
    """
    if x.is_contiguous() or memory_format == torch.contiguous_format or not _is_dense(x):
        return _empty(x, *x.shape, dtype=dtype)
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")


def _is_dense(x: Tensor) -> bool:
    """Returns whether a permutation of the dimensions makes x contiguous."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _grouped(x: Tensor, w: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
    """Rows in groups with a matrix each, or the product of each group of columns and rows."""
    groups = () if x.dim() + w.dim() == 5 else (w.shape[0] if offsets is None else offsets.shape[0],)
    return _empty(x, *groups, x.shape[-2], w.shape[-1])


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.empty_like.default: _like,
    _aten.ones_like.default: _like,
    _aten.zeros_like.default: _like,
    _aten.mm.default: lambda x, w: _empty(x, x.shape[0], w.shape[1]),
    _aten.mm.out: lambda x, w, *, out: out,
    _aten.addmm_.default: lambda written, *_, **__: written,
    # the meta device has no such operation
    _aten._scaled_mm.out: lambda *_, out, **__: out,
    # the meta device's refuses sizes that only a GPU's does; the seventh argument is the dtype of the product
    _aten._scaled_mm.default: lambda x, w, *more: _empty(x, x.shape[0], w.shape[1], dtype=more[4]),
    # the meta device's refuses float32
    _aten._grouped_mm.default: _grouped,
    # allocates nothing, and the meta device adds one by one
    _aten._foreach_add_.List: lambda *_, **__: None,
}


def result_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of an operation, computed if its tensors are elsewhere."""
    if not _is_on_meta(args) or kwargs.get("device") not in (None, torch.device("meta")):
        return func(*args, **kwargs)
    if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
        return True  # transformers asks whether something holds for all tokens, as it does of rows of one document
    if (rule := _RULES.get(func)) is not None:
        return rule(*args, **kwargs)
    if func is _aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.int64:
        return _empty(args[0], *args[1][0].shape, *args[0].shape[1:])
    if torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1:
        return _pointwise(func, args, kwargs)
    return func(*args, **kwargs)


def _is_on_meta(args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    given = first if isinstance(first, list | tuple) else args
    return any(isinstance(one, Tensor) and one.is_meta for one in given)


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the result of an operation element by element, whose dtype the CPU tells from tensors without any."""
    if func._schema.is_mutable:
        written: Tensor = kwargs.get("out", args[0])
        return written
    given = [one for one in args if isinstance(one, Tensor)]
    none = [torch.ones((0,) * one.dim(), dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
    shape, dtype = torch.broadcast_tensors(*given)[0].shape, func(*none, **kwargs).dtype
    whole = next((one for one in given if one.shape == shape), None)
    if whole is None:
        return _empty(given[0], *shape, dtype=dtype)
    return _like(whole, dtype=dtype, memory_format=kwargs.get("memory_format"))
