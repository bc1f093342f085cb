"""The place and dtype in which tensors that layers leave for backward are kept.

Hooks on saved tensors see everything that autograd keeps of a layer; under recomputation that is the input of the
region alone. A storage is treated once, however many operations saved it or a view of it. Left alone are parameters,
what all layers share (rotary tables, token indices) and what is small; rounding also leaves alone masks, integers, H
and statistics, which it tells from activations by their shape.

Within a micro-batch backward goes through the layers in reverse. The first tensor of a layer that is asked for starts
the way back of all others of that layer and of the layer before it, which is needed next. The last layer's stay on the
device: backward begins with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engine.errors import UserError
from engine.layers.host_copies import CudaTransfer, Transfer
from engine.layers.recompute import MemoryPlan
from engine.layers.rounding import Rounded, RoundingReport, restored, round_rows
from engine.ops.attention.token_context import TokenContext

MIN_ROUNDED_ELEMENTS = 1024
MIN_MOVED_BYTES = 2**16
"""A copy of less takes longer to start than to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationShapes:
    """The sizes by which activations are told from H and from statistics, which may be of the same dtype.

    Args:
        dtype: of activations.
        head_dims: last dimensions of queries, keys, values and attention's output, as [T, heads, head_dim] or
            [rows, heads, length, head_dim]. Statistics of attention are [T, heads] or [rows, heads, length].
        min_width: the least features of an activation [T, features]. Of H and of statistics it is more than the rank,
            and more than the number of heads.
    """

    dtype: torch.dtype
    head_dims: tuple[int, ...]
    min_width: int

    def is_activation(self, tensor: Tensor, num_tokens: int) -> bool:
        """Returns whether `tensor`, saved by a layer that works on `num_tokens` tokens, is one and worth rounding."""
        if tensor.dtype != self.dtype or tensor.numel() < MIN_ROUNDED_ELEMENTS:
            return False
        shape = tensor.shape
        if tensor.dim() == 2:
            return shape[1] >= self.min_width
        by_head = shape[-1] > 1 and shape[-1] in self.head_dims
        return by_head and (tensor.dim() == 4 or (tensor.dim() == 3 and shape[0] == num_tokens))


class _Stored:
    """One storage, or a view that does not fill its storage, on its way through forward and backward.

    Args:
        flat: its elements, 1-dimensional.
        width: of a row that gets one scale.
        dtype: to round to; None keeps the elements as they are.
        transfer: to move it away with; None keeps it here.
        report: measures the rounding; None where that is over.
    """

    def __init__(
        self,
        flat: Tensor,
        width: int,
        *,
        dtype: torch.dtype | None,
        transfer: Transfer | None,
        report: RoundingReport | None,
    ) -> None:
        self._dtype, self._transfer = flat.dtype, transfer
        self._scales: Tensor | None = None
        held, self._rounded = flat, dtype is not None
        if dtype is not None:
            x = flat.view(-1, width)
            rounded = round_rows(x, dtype)
            if report is not None:
                report.add(x, rounded)
            held, self._scales = rounded.codes, rounded.scales
        self._here: Tensor | None = held if transfer is None else None
        self._away = transfer.send(held) if transfer is not None else None
        self._coming: Any = None
        self._flat: Tensor | None = None

    def fetch(self) -> None:
        """Starts its way back."""
        if self._away is not None and self._coming is None and self._flat is None:
            assert self._transfer is not None
            self._coming = self._transfer.fetch(self._away)

    def flat(self) -> Tensor:
        """Returns the elements, rounded where they were; made once, since several operations may ask for them."""
        if self._flat is None:
            held = self._here
            if held is None:
                assert self._transfer is not None
                self.fetch()
                held, self._coming = self._transfer.wait(self._coming), None
            self._flat = restored(Rounded(held, self._scales), self._dtype).view(-1) if self._rounded else held
            self._here = self._away = None
        return self._flat


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that an operation saved: a view of something stored. The stored tensor goes when its last view does."""

    stored: _Stored
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _LayerTensors(AbstractContextManager[None]):
    """The tensors that one layer leaves of one micro-batch: entered around the layer's forward."""

    def __init__(
        self,
        owner: SavedTensors,
        *,
        num_tokens: int,
        fixed: frozenset[int | tuple[int, int]],
        transfer: Transfer | None,
        report: RoundingReport | None,
        before: _LayerTensors | None,
    ) -> None:
        self._owner, self._num_tokens, self._fixed = owner, num_tokens, fixed
        self._transfer, self._report, self._before = transfer, report, before
        self._stored: list[weakref.ref[_Stored]] = []
        self._seen: dict[tuple[Any, ...], tuple[_Stored, Tensor]] = {}
        self._hooks: saved_tensors_hooks | None = None
        self._reached = False

    def __enter__(self) -> None:
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def __exit__(self, *exception: Any) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*exception)
        self._hooks = None
        self._seen.clear()

    def fetch(self) -> None:
        """Starts the way back of everything that is still wanted."""
        for reference in reversed(self._stored):  # as backward asks for them
            if (stored := reference()) is not None:
                stored.fetch()

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if storage._cdata in self._fixed or _place(tensor) in self._fixed:
            return tensor
        fills = _fills_storage(tensor)
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        key = (storage._cdata, tensor._version, tensor.dtype, None if fills else (shape, stride, offset))
        if key not in self._seen:
            stored = self._store(tensor, fills=fills)
            if stored is None:
                return tensor
            # the tensor lives until the layer is done, so that its storage stands for it alone
            self._seen[key] = stored, tensor
            self._stored.append(weakref.ref(stored))
        stored = self._seen[key][0]
        if fills:
            return _View(stored, shape, stride, offset)
        return _View(stored, shape, _without_gaps(shape), 0)

    def _store(self, tensor: Tensor, *, fills: bool) -> _Stored | None:
        owner = self._owner
        rounds = owner.stored_dtype is not None and owner.shapes.is_activation(tensor, self._num_tokens)
        moves = self._transfer is not None and tensor.nbytes >= MIN_MOVED_BYTES
        if not rounds and not moves:
            return None
        width = tensor.shape[-1] if tensor.dim() else 1
        if fills:
            flat = tensor.as_strided((tensor.numel(),), (1,), 0)
            if tensor.dim() > 2:
                width *= tensor.shape[1]  # of all heads of a token
        else:
            flat = tensor.contiguous().view(-1)
        return _Stored(
            flat,
            width,
            dtype=owner.stored_dtype if rounds else None,
            transfer=self._transfer if moves else None,
            report=self._report,
        )

    @torch.no_grad()
    def _unpack(self, kept: Tensor | _View) -> Tensor:
        if not self._reached:
            self._reached = True
            self.fetch()
            if self._before is not None:
                self._before.fetch()
        if isinstance(kept, Tensor):
            return kept
        return kept.stored.flat().as_strided(kept.shape, kept.stride, kept.offset)


def check_offload(device: torch.device) -> None:
    """Checks whether tensors can be moved off `device` into host memory.

    Raises:
        UserError: its memory is the host's.
    """
    if device.type != "cuda":
        raise UserError(
            f"memory.offload_activations is true and the device is {device.type}, whose memory is the host's already: "
            "set memory.offload_activations to false, or train on a GPU."
        )


class SavedTensors:
    """Keeps what the layers of a model leave for backward as its plan says.

    Args:
        plan: what to do.
        device: that the layers run on.
        shapes: of activations.
        transfer: moves tensors away; None takes pinned memory and streams of a GPU.

    Raises:
        UserError: tensors are to be moved off a device whose memory is the host's.
    """

    def __init__(
        self, plan: MemoryPlan, device: torch.device, shapes: ActivationShapes, transfer: Transfer | None = None
    ) -> None:
        self.stored_dtype, self.shapes = plan.stored_dtype, shapes
        self._transfer = transfer if plan.offload else None
        if plan.offload and transfer is None and device.type != "meta":
            check_offload(device)
            self._transfer = CudaTransfer(device)
        self._parameters: frozenset[int] | None = None
        self._report = RoundingReport(plan.stored_dtype) if plan.stored_dtype is not None else None
        self._measured = self._report is None

    def layers(
        self, count: int, context: TokenContext, parameters: Iterable[Tensor]
    ) -> Iterator[AbstractContextManager[None]]:
        """One context manager for each of `count` layers, to be entered around its forward, in order.

        Args:
            context: of the micro-batch.
            parameters: of the layers; looked at in the first call only.
        """
        if not torch.is_grad_enabled() or (self._transfer is None and self.stored_dtype is None):
            yield from (nullcontext() for _ in range(count))
            return
        if self._parameters is None:
            self._parameters = frozenset(map(_identity, parameters))
        shared = [context.documents.offsets, *(getattr(context, field.name) for field in fields(context))]
        fixed = self._parameters | {_identity(value) for value in shared if isinstance(value, Tensor)}
        for tensor in (tensor for part in context.parts for tensor in part.shared()):
            # a stage may have one and its input from one message
            fixed |= {_identity(tensor) if _fills_storage(tensor) else _place(tensor)}
        layer = None
        for index in range(count):
            layer = _LayerTensors(
                self,
                num_tokens=context.token_index.shape[0],
                fixed=fixed,
                transfer=self._transfer if index < count - 1 else None,
                report=None if self._measured else self._report,
                before=layer,
            )
            yield layer
        self._measured = True

    def take_report(self) -> RoundingReport | None:
        """Returns what rounding did in the first micro-batch, once that is known; None from then on, or without it."""
        if not self._measured or self._report is None:
            return None
        report, self._report = self._report, None
        return report


def _without_gaps(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def _identity(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage, which meta tensors have too, although they have no address."""
    return tensor.untyped_storage()._cdata


def _fills_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _place(tensor: Tensor) -> tuple[int, int]:
    """Returns the identity of a tensor's storage, and where the tensor begins in it."""
    return _identity(tensor), tensor.storage_offset()
