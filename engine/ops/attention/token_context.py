"""The coordinates of a micro-batch's tokens, which every layer takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from engine.experts.ops.load_balance import LoadBalance
from engine.kernels.records import Documents
from engine.ops.attention.cache_protocol import KeyValueCache
from engine.vision.batch_parts import BidirectionalSpans
from engine.vision.ops.cross_attention import EncodedSpan
from engine.zigzag import ContextPlan


class PackedTokens(NamedTuple):
    """Some of the T tokens, one after the other.

    Args:
        index: int64 [N] where they are among the T.
        token_index: int64 [N], their dropout coordinates.
    """

    index: Tensor
    token_index: Tensor

    @property
    def count(self) -> int:
        """N, known on the host."""
        return self.index.shape[0]


class Experts(NamedTuple):
    """The tokens of each expert: a partition of the T tokens."""

    language: PackedTokens
    vision: PackedTokens


class Encoded(NamedTuple):
    """What the layers of a model with cross attention attend to.

    Args:
        features_KC: encoded rows of all images; on every rank all of them.
        spans: who attends to which, in the order of the tokens; see ops.attention.cross.
        row_index_K: int64, the rows' dropout coordinates; None where nothing is dropped.
    """

    features_KC: Tensor
    spans: tuple[EncodedSpan, ...]
    row_index_K: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenContext:
    """The coordinates of the T tokens of one micro-batch (T = rows * row length, row after row).

    Args:
        num_rows, row_length: of the micro-batch; T is their product.
        document_lengths: lengths of the documents along the tokens of the whole micro-batch; empty where only the
            device knows them.
        context_plan: who attends to whom where rows are split over context-parallel ranks; None where they are whole.
        cos, sin: fp32 [ropes * T, rotary_dim / 2] rotary tables, those of all ropes one after the other.
        token_index: int64 [T], the dropout coordinate of every token.
        local_token_index: that of the tokens this rank holds under sequence parallelism (equal to `token_index`
            without).
        step: int64 0-dim device tensor, the optimizer step; the fourth dropout coordinate.
        training: False turns dropout off.
        adapters: False computes with the base alone, as if there were no adapters; for passes without gradients.
        document_offsets: int32 [D + 1] cumulative document lengths on the device; see engine.kernels.records.Documents.
        cache: keys and values of earlier tokens, when text is generated; None where attention sees these tokens alone.
        experts: which weights each token takes; None for a model with one set of them.
        encoded: images that layers attend to; None where there are none.
        bidirectional: tokens that see what comes after them too; None where none does.
        padding_T: bool, the tokens that are padding; None where none is.
        balance: the auxiliary loss of a mixture's routers; None without one.
    """

    repeats: ClassVar[bool] = False
    """Whether backward runs this again, to recompute it."""
    num_rows: int
    row_length: int
    document_lengths: tuple[int, ...]
    context_plan: ContextPlan | None
    cos: Tensor
    sin: Tensor
    token_index: Tensor
    local_token_index: Tensor
    step: Tensor
    training: bool
    document_offsets: Tensor | None = None
    adapters: bool = True
    cache: KeyValueCache | None = None
    experts: Experts | None = None
    encoded: Encoded | None = None
    bidirectional: BidirectionalSpans | None = None
    padding_T: Tensor | None = None
    balance: LoadBalance | None = None

    @property
    def trains(self) -> bool:
        """Whether this is a step's own pass: not one for counting before it, nor a part that backward runs again."""
        return self.training and not self.repeats and (self.balance is None or not self.balance.rehearses)

    def of_tokens(self, tokens: PackedTokens) -> Self:
        """Returns the coordinates that a linear on these tokens alone takes."""
        return replace(self, token_index=tokens.token_index, local_token_index=tokens.token_index)

    def of_encoded(self) -> Self:
        """Returns the coordinates that a linear on the encoded rows takes; without dropout, they matter to nobody."""
        assert self.encoded is not None
        index = self.encoded.row_index_K
        return self if index is None else replace(self, token_index=index, local_token_index=index)

    @property
    def documents(self) -> Documents:
        """The documents of the whole micro-batch, for an attention that sees all of its tokens."""
        # where only the device knows the lengths: no document crosses a row, and rows are whole
        longest = max(self.document_lengths, default=self.row_length)
        return Documents(
            lengths=self.document_lengths,
            offsets=self.document_offsets,
            max_length=longest,
            bidirectional=self.bidirectional,
        )
