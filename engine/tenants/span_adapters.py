"""The adapters of a linear whose tokens are of several tenants.

Tokens of one tenant lie beside each other. The base multiplies all tokens at once; adapters multiply each tenant's
alone, with the shapes that these products have where the tenant is alone, and so with the same bits.

Legend: T tokens held here, I input and O output features, R the largest rank of a tenant's stacked A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.ops.adapters import LowRank, NormFactors
from engine.ops.attention.token_context import TokenContext
from engine.ops.kernels import Kernels
from engine.ops.operands import LinearOperands


class Span(NamedTuple):
    """Neighbouring tokens of one tenant, [first, last) of those of a micro-batch that its context ranks hold here."""

    tenant: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """The adapters of one span.

    Args:
        span: its tokens.
        low_rank: the adapters.
        step: of the tenant's optimizer, 0-dim int64; a coordinate of its dropout masks.
    """

    span: Span
    low_rank: LowRank
    step: Tensor

    def rows(self, held: Tensor, total: int, rank: int) -> slice:
        """Returns the span's rows of a tensor that holds all `total` tokens, or this tensor rank's part of them."""
        start = 0 if held.shape[0] == total else rank * held.shape[0]
        first, last = (min(max(one - start, 0), held.shape[0]) for one in self.span[1:])
        return slice(first, last)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanLowRank(LowRank):
    """The adapters of all spans; `LowRank` says what its functions do.

    Args:
        own: of each span whose tenant has adapters here.
        total: tokens of the micro-batch that its context ranks hold here.
        tensor_rank: which part of them this rank holds under sequence parallelism.
    """

    is_one: ClassVar[bool] = False
    own: tuple[Own, ...]
    total: int
    tensor_rank: int

    def _each(self, held: Tensor) -> list[tuple[Own, slice]]:
        """Returns each span that has rows here, with its rows."""
        found = [(own, own.rows(held, self.total, self.tensor_rank)) for own in self.own]
        return [(own, rows) for own, rows in found if rows.start < rows.stop]

    def mask(self, context: TokenContext, token_index: Tensor, features: int, kernels: Kernels) -> Tensor | None:
        if not context.training or not any(own.low_rank.dropout for own in self.own):
            return None
        whole: Tensor | None = None
        for own, rows in self._each(token_index):
            drawn = own.low_rank.mask(replace(context, step=own.step), token_index[rows], features, kernels)
            if drawn is not None:
                if whole is None:
                    whole = drawn.new_zeros((token_index.shape[0], *drawn.shape[1:]))
                whole[rows] = drawn
        return whole

    def project(
        self, x_TI: Tensor, mask: Tensor | None, kernels: Kernels, out: Tensor, *, copy: Tensor | None = None
    ) -> Tensor:
        if copy is not None:
            copy.copy_(x_TI)
        out.zero_()
        for own, rows in self._each(x_TI):
            own.low_rank.project(x_TI[rows], _part(own, mask, rows), kernels, _columns(own, out[rows]))
        return out

    def expand(self, y_TO: Tensor, h_TR: Tensor) -> None:
        for own, rows in self._each(y_TO):
            own.low_rank.expand(y_TO[rows], _columns(own, h_TR[rows]))

    def projection_gradient(self, dy_TO: Tensor) -> Tensor:
        dh = dy_TO.new_zeros(dy_TO.shape[0], self.rank)
        for own, rows in self._each(dy_TO):
            _columns(own, dh[rows]).copy_(own.low_rank.projection_gradient(dy_TO[rows]))
        return dh

    def output_gradients(self, dy_TO: Tensor, h_TR: Tensor, kernels: Kernels) -> Tensor:
        dh = dy_TO.new_zeros(dy_TO.shape[0], self.rank)
        for own, rows in self._each(dy_TO):
            made = own.low_rank.output_gradients(dy_TO[rows], _columns(own, h_TR[rows]), kernels)
            _columns(own, dh[rows]).copy_(made)
        return dh

    def accumulate_a(
        self, dh_TR: Tensor, x_TI: Tensor, mask: Tensor | None, kernels: Kernels, norm: NormFactors | None = None
    ) -> None:
        assert norm is None, "dA is made from x"
        for own, rows in self._each(x_TI):
            own.low_rank.accumulate_a(_columns(own, dh_TR[rows]), x_TI[rows], _part(own, mask, rows), kernels)

    def accumulate_b(self, dy_TO: Tensor, h_TR: Tensor, kernels: Kernels) -> None:
        for own, rows in self._each(dy_TO):
            own.low_rank.accumulate_b(dy_TO[rows], _columns(own, h_TR[rows]), kernels)

    def updated(
        self, dx_TI: Tensor, dh_TR: Tensor, mask: Tensor | None, h_TR: Tensor | None, kernels: Kernels
    ) -> tuple[Tensor, InputUpdate | None]:
        for own, rows in self._each(dx_TI):
            update = own.low_rank.input_update(_columns(own, dh_TR[rows]), _part(own, mask, rows))
            part = dx_TI[rows]
            added = kernels.apply_update(part, update)
            if added.data_ptr() != part.data_ptr():
                part.copy_(added)
        return dx_TI, None


def _columns(own: Own, of_TR: Tensor) -> Tensor:
    return of_TR[:, : own.low_rank.rank]


def _part(own: Own, mask: Tensor | None, rows: slice) -> Tensor | None:
    """Returns the mask of a span's rows; None where its tenant drops nothing."""
    return None if mask is None or own.low_rank.dropout is None else mask[rows]


class Peers(NamedTuple):
    """One linear of all tenants.

    Args:
        operands: of each tenant that has adapters there, by its number: a linear's, or those of a kind of layer that
            reads them by `AdapterChoice.each`.
        leaves: its trained tensors, by the same.
        counted: what counts its rows, of each tenant that counts them.
    """

    operands: dict[int, Any]
    leaves: dict[int, tuple[Tensor, ...]]
    counted: dict[int, Tensor]


class SpanChoice:
    """The adapters of the tokens of a micro-batch; see `AdapterChoice`.

    Args:
        spans: its tokens.
        peers: by the linear's name.
        step: a tenant's number -> the step of its optimizer.
        total: tokens that its context ranks hold here.
    """

    def __init__(
        self, spans: Sequence[Span], peers: Mapping[str, Peers], step: Callable[[int], Tensor], total: int
    ) -> None:
        self._spans, self._peers, self._step, self._total = tuple(spans), peers, step, total

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(span.last - span.first for span in self._spans)

    def each(self, name: str) -> list[tuple[Any, Tensor] | None]:
        peers = self._peers.get(name)
        found = [None if peers is None else peers.operands.get(span.tenant) for span in self._spans]
        return [
            None if one is None else (one, self._step(span.tenant))
            for one, span in zip(found, self._spans, strict=True)
        ]

    def counted(self, name: str) -> list[Tensor | None]:
        peers = self._peers.get(name)
        return [None if peers is None else peers.counted.get(span.tenant) for span in self._spans]

    def part(self, first: int, last: int) -> Self:
        cut = [Span(tenant, *(min(max(end, first), last) - first for end in ends)) for tenant, *ends in self._spans]
        return type(self)(cut, self._peers, self._step, last - first)

    def chosen(self, operands: LinearOperands) -> LinearOperands:
        """Returns the operands with the adapters of each span."""
        peers = self._peers.get(operands.name)
        own: list[Own] = []
        without_rows = operands.extended_OE.shape[0] == 0
        for span in self._spans:
            if peers is not None and (peer := peers.operands.get(span.tenant)) is not None:
                low_rank = (peer.without_rows() if without_rows else peer).low_rank
                assert low_rank is not None
                own.append(Own(span=span, low_rank=low_rank, step=self._step(span.tenant)))
        if not own:
            return operands
        widest = max(own, key=lambda one: one.low_rank.rank).low_rank
        return replace(
            operands,
            low_rank=SpanLowRank(
                a_RI=widest.a_RI,
                adapters=(),
                dropout=None,
                own=tuple(own),
                total=self._total,
                tensor_rank=operands.axis.rank,
            ),
        )

    def leaves(self, name: str) -> tuple[Tensor, ...]:
        """Returns the trained tensors of these tenants in a linear."""
        peers = self._peers.get(name)
        if peers is None:
            return ()
        tenants = dict.fromkeys(span.tenant for span in self._spans)
        return tuple(leaf for tenant in tenants for leaf in peers.leaves.get(tenant, ()))
