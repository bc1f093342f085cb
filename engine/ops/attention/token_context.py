"""The coordinates of a micro-batch's tokens, which every layer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from torch import Tensor

from engine.kernels.records import Documents
from engine.ops.attention.cache_protocol import KeyValueCache
from engine.zigzag import ContextPlan

Part = TypeVar("Part")


class ContextPart:
    """Data that some layers read beside the coordinates; defined beside these layers, and looked up by class."""

    __slots__ = ()

    def shared(self) -> tuple[Tensor, ...]:
        """Returns the tensors that all layers of a micro-batch read, and which so outlive each of them."""
        return ()


class AuxiliaryLoss(ContextPart):
    """A loss of the layers, whose gradient follows from counts over the global batch: these come first."""

    __slots__ = ()

    def begin(self, *, counts_alone: bool) -> None:
        """Counts from now on, until `finish_counts`.

        Args:
            counts_alone: whether the next pass only counts, without a backward.
        """
        raise NotImplementedError

    def finish_counts(self) -> None:
        """Puts the ranks' counts together, if they have been counting. Collective."""
        raise NotImplementedError


class AdapterChoice(Protocol):
    """The adapters of each token, where several models read one base and tokens of several are in a micro-batch: in
    spans of neighbours, which are the same, though not as long, on ranks that exchange tokens."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns how many tokens each span has."""

    def chosen(self, operands: Any) -> Any:
        """Returns the operands of a linear, which has no adapters, with those of its tokens."""

    def each(self, name: str) -> Sequence[tuple[Any, Tensor] | None]:
        """Returns for each span the operands of its model's linear of this name, and the step that its dropout masks
        are drawn for; None where that linear has no adapters."""

    def counted(self, name: str) -> Sequence[Tensor | None]:
        """Returns for each span what counts the rows of its model's linear of this name, or None."""

    def leaves(self, name: str) -> tuple[Tensor, ...]:
        """Returns the trainable tensors of these, for a linear whose first logical one has this name."""

    def part(self, first: int, last: int) -> Self:
        """Returns the adapters of the tokens [first, last), in as many spans."""


@dataclass(frozen=True, slots=True)
class TokenCounts(ContextPart):
    """How often tokens count in a loss of the layers.

    Args:
        counts_T: float32, the documents that a token is a part of (`engine.branches`); 0 for padding.
    """

    counts_T: Tensor

    def shared(self) -> tuple[Tensor, ...]:
        return (self.counts_T,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenContext:
    """The coordinates of the T tokens of one micro-batch (T = rows * row length, row after row).

    Args:
        documents: of the whole micro-batch, for an attention that sees all of its tokens.
        context_plan: the ranks that attend to each other where rows are split over context-parallel ranks; None where
            they are whole.
        cos, sin: fp32 [ropes * T, rotary_dim / 2] rotary tables, those of all ropes one after the other.
        token_index: int64 [T], the dropout coordinate of every token.
        local_token_index: that of the tokens this rank holds under sequence parallelism (equal to `token_index`
            without).
        step: int64 0-dim device tensor, the optimizer step; the fourth dropout coordinate.
        training: False turns dropout off.
        adapters: False computes with the base alone, as if there were no adapters; for passes without gradients.
        choice: of the adapters of each token; None where all have those of the model.
        cache: keys and values of earlier tokens, when text is generated; None where attention sees these tokens alone.
        parts: data that some layers read beside these, at most one of each class; see `part`.
    """

    repeats: ClassVar[bool] = False
    """Whether backward runs this again, to recompute it."""
    documents: Documents
    context_plan: ContextPlan | None
    cos: Tensor
    sin: Tensor
    token_index: Tensor
    local_token_index: Tensor
    step: Tensor
    training: bool
    adapters: bool = True
    choice: AdapterChoice | None = None
    cache: KeyValueCache | None = None
    parts: tuple[ContextPart, ...] = ()

    def part(self, kind: type[Part]) -> Part | None:
        """Returns the part of exactly this class; None where there is none."""
        for part in self.parts:
            if type(part) is kind:
                return part
        return None

    def of_tokens(self, token_index: Tensor) -> Self:
        """Returns the coordinates that a linear takes on other rows, all of which this rank holds.

        Args:
            token_index: int64 [N], their dropout coordinates.
        """
        return replace(self, token_index=token_index, local_token_index=token_index)
