"""What torch's CUDA operations refuse of their arguments, or misread without a word; tensors without numbers take it.

The rules are those of torch's sources, under aten/src/ATen/native:

    transformers/cuda/flash_attn/flash_api.cpp   mha_varlen_fwd, mha_varlen_bwd, and mha_fwd, mha_bwd for equal lengths:
                                                 bf16 or fp16, heads of at most 256 features and a multiple of 8, last
                                                 dimension contiguous, int32 offsets that are dense on the device, heads
                                                 of queries a multiple of those of keys
    GroupedMMUtils.h                             _grouped_mm_validate_inputs: aligned memory and rows, offsets where one
                                                 of both is 2-D, int32
    cuda/GroupedBlas.cpp                         _grouped_mm_cuda: other dtypes than bf16 take a loop of the host, which
                                                 reads the offsets; so do other GPUs than sm_90 and sm_100
    cuda/GroupMM.cu                              fewer than 1024 groups, and offsets that the device reads

What a kernel assumes and no check refuses is among them: loads of 16 bytes, and a log sum exp that is dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)
_BYTES = 16
"""That the kernels load at once."""

Bound = dict[str, Any]
"""The arguments of an operation by name."""


def refusals(func: Any, args: Any, kwargs: Any) -> list[str]:
    """Returns what the operation would refuse, in words; nothing where there are no rules for it."""
    rules = _RULES.get(func.overloadpacket.__name__)
    if rules is None:
        return []
    names = [argument.name for argument in func._schema.arguments]
    bound = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    first = next(value for value in bound.values() if isinstance(value, Tensor))
    return list(rules(bound)) if first.device.type == "cuda" else []


def reads_on_host(func: Any, args: Any) -> bool:
    """Returns whether a grouped product is a loop of the host, which waits for the offsets."""
    if func.overloadpacket.__name__ != "_grouped_mm" or args[0].device.type != "cuda":
        return False
    in_one_launch = torch.cuda.get_device_capability(args[0].device) in ((9, 0), (10, 0))
    return not in_one_launch or {args[0].dtype, args[1].dtype} != {torch.bfloat16}


def _on_device(given: Bound, *names: str) -> Iterator[str]:
    for name in names:
        if given[name].device.type != "cuda":
            yield f"{name} on {given[name].device}, not on the device"


def _aligned(name: str, x: Tensor) -> Iterator[str]:
    """The allocator's memory begins at multiples of 512 bytes."""
    if x.storage_offset() * x.element_size() % _BYTES:
        yield f"{name}, which begins {x.storage_offset()} numbers into its memory, at no multiple of 16 bytes"


def _heads(given: Bound, *names: str, heads_at: int) -> Iterator[str]:
    """Queries, keys, values and what has their shapes."""
    q, k = given["query"], given["key"]
    if q.dtype not in _HALVES:
        yield f"query in {q.dtype}, neither bfloat16 nor float16"
    for name in names:
        x = given[name]
        if x.dtype != q.dtype:
            yield f"{name} in {x.dtype} beside query in {q.dtype}"
        if x.stride(-1) != 1:
            yield f"{name} with strides {x.stride()}: features lie apart"
        if x.shape[-1] > 256 or x.shape[-1] % 8:
            yield f"{name} with heads of {x.shape[-1]} features, where up to 256 and multiples of 8 are taken"
        yield from _aligned(name, x)
        apart = [stride for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1]
        if any(stride * x.element_size() % _BYTES for stride in apart):
            yield f"{name} with strides {x.stride()}: rows begin at no multiple of 16 bytes"
    if q.shape[heads_at] % k.shape[heads_at]:
        yield f"{q.shape[heads_at]} heads of queries and {k.shape[heads_at]} of keys"
    if given["value"].shape != k.shape:
        yield f"keys of shape {tuple(k.shape)} and values of {tuple(given['value'].shape)}"


def _ends(given: Bound) -> Iterator[str]:
    """The documents' ends, and bounds of their lengths."""
    q, k = given["query"], given["key"]
    for name in ("cum_seq_q", "cum_seq_k"):
        offsets = given[name]
        if offsets.dtype != torch.int32:
            yield f"{name} in {offsets.dtype}, not in int32"
        if offsets.dim() != 1 or not offsets.is_contiguous() or offsets.shape[0] < 2:
            yield f"{name} of shape {tuple(offsets.shape)} and strides {offsets.stride()}, not two or more, densely"
    for name in ("max_q", "max_k"):
        if not isinstance(given[name], int):
            yield f"{name} that is {type(given[name]).__name__}, not a number of the host"
    # one query each is decoding: heads that share keys are moved beside each other, as many rows as documents
    if given["max_q"] == 1 and q.shape[1] > k.shape[1] and q.shape[0] != given["cum_seq_q"].shape[0] - 1:
        yield f"max_q of 1 for {q.shape[0]} rows of {given['cum_seq_q'].shape[0] - 1} documents"


def _varlen(given: Bound) -> Iterator[str]:
    yield from _on_device(given, "query", "key", "value", "cum_seq_q", "cum_seq_k")
    yield from _heads(given, "query", "key", "value", heads_at=1)
    yield from _ends(given)


def _varlen_backward(given: Bound) -> Iterator[str]:
    names = ("query", "key", "value", "out", "grad_out")
    yield from _on_device(given, *names, "logsumexp", "cum_seq_q", "cum_seq_k")
    yield from _heads(given, *names, heads_at=1)
    yield from _ends(given)
    tokens, heads = given["query"].shape[:2]
    yield from _statistics(given, (heads, tokens))


def _flash(given: Bound) -> Iterator[str]:
    """With heads before tokens."""
    yield from _on_device(given, "query", "key", "value")
    yield from _heads(given, "query", "key", "value", heads_at=1)


def _flash_backward(given: Bound) -> Iterator[str]:
    names = ("query", "key", "value", "out", "grad_out")
    yield from _on_device(given, *names, "logsumexp")
    yield from _heads(given, *names, heads_at=1)
    yield from _statistics(given, tuple(given["query"].shape[:3]))


def _statistics(given: Bound, shape: tuple[int, ...]) -> Iterator[str]:
    lse = given["logsumexp"]
    if lse.dtype != torch.float32 or tuple(lse.shape) != shape or not lse.is_contiguous():
        yield (
            f"logsumexp in {lse.dtype} of shape {tuple(lse.shape)} and strides {lse.stride()}, where the kernel "
            f"reads a dense {list(shape)} in float32"
        )


def _grouped(given: Bound) -> Iterator[str]:
    a, b, offsets = given["self"], given["mat2"], given["offs"]
    yield from _on_device(given, "self", "mat2")
    if a.dtype != b.dtype or a.dtype not in (*_HALVES, torch.float32):
        yield f"matrices in {a.dtype} and {b.dtype}"
    if not {a.dim(), b.dim()} <= {2, 3}:
        yield f"matrices of {a.dim()} and {b.dim()} dimensions"
        return
    if a.shape[-1] != b.shape[-2]:
        yield f"matrices of shapes {tuple(a.shape)} and {tuple(b.shape)}"
    for name, x in (("self", a), ("mat2", b)):
        yield from _aligned(name, x)
        yield from _rows(name, x)
    if given["bias"] is not None or given["out_dtype"] not in (None, a.dtype):
        yield "a bias, or a result in another dtype"
    if (offsets is not None) != (2 in (a.dim(), b.dim())):
        yield "offsets where both matrices are 3-D, or none where one is 2-D"
    elif offsets is not None:
        yield from _group_ends(a, b, offsets)


def _rows(name: str, x: Tensor) -> Iterator[str]:
    """One of the last two dimensions is dense, and lines along it begin at multiples of 16 bytes."""
    (rows, columns), (by_row, by_column) = x.shape[-2:], x.stride()[-2:]
    if by_row == 1 and by_column >= max(1, rows):
        apart = by_column
    elif by_column == 1 and by_row >= max(1, columns):
        apart = by_row
    else:
        yield f"{name} of shape {tuple(x.shape)} with strides {x.stride()}"
        return
    if apart * x.element_size() % _BYTES:
        yield f"{name} with strides {x.stride()}: lines begin at no multiple of 16 bytes"


def _group_ends(a: Tensor, b: Tensor, offsets: Tensor) -> Iterator[str]:
    if offsets.device.type != "cuda":
        yield f"offs on {offsets.device}, not on the device"
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        yield f"offs in {offsets.dtype} of {offsets.dim()} dimensions, not one in int32"
    groups = b.shape[0] if b.dim() == 3 else a.shape[0] if a.dim() == 3 else offsets.shape[0]
    if offsets.shape[0] != groups:
        yield f"{offsets.shape[0]} offsets for {groups} matrices"
    if groups >= 1024:
        yield f"{groups} groups, where fewer than 1024 are taken"


_RULES: dict[str, Callable[[Bound], Iterator[str]]] = {
    "_flash_attention_forward": _varlen,
    "_flash_attention_backward": _varlen_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_grouped_mm": _grouped,
}
