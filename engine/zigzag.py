"""The plan of zig-zag context parallelism: which rank holds, computes and sends which tokens. No tensors.

A micro-batch is rows, side by side along the flat token dimension. With c ranks each row is cut into 2c chunks, and
rank r holds chunks r and 2c - 1 - r of every row, the early one before the late one. Under a causal mask a chunk's cost
is proportional to its place, so an early and a late one together cost the same on every rank. Lengths need not divide:
chunks then differ by a token, and may be empty.

The order of the chunks determines what is computed. Rank r computes, with the keys of rank s:

| s        | who sees whom                                                          | one block a document |
|----------|------------------------------------------------------------------------|----------------------|
| s = r    | each chunk sees itself, the late one all of the early one              | all x all, causal    |
| s < r    | both chunks of r come after s's early chunk and before its late one    | all x early, full    |
| s > r    | r's late chunk comes after both chunks of s, its early one before both | late x all, full     |

A document with tokens in both chunks of a rank extends to the end of the early one and continues at the start of the
late one, so its tokens are contiguous there. Hence one block is enough for each document and pair of ranks, and a
causal block's two ranges are the same.

Assumes that documents do not cross rows and that their lengths are known on the host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """A range of places [start, stop) in some order of tokens."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Block(NamedTuple):
    """A block of attention: queries see all keys, or (causal, equal ranges) each sees itself and those before."""

    query: Span
    key: Span
    causal: bool


class Document(NamedTuple):
    """A document: the columns [start, stop) of a row."""

    row: int
    start: int
    stop: int


def rank_columns(row_length: int, size: int, rank: int) -> tuple[Span, Span]:
    """Returns the columns of a row that `rank` of `size` holds: its early chunk and its late one, either of which may
    be empty.

    Chunk i of 2 * size begins at column i * row_length // (2 * size).
    """

    def chunk(place: int) -> Span:
        return Span(place * row_length // (2 * size), (place + 1) * row_length // (2 * size))

    return chunk(rank), chunk(2 * size - 1 - rank)


def _clamped(document: Document, chunk: Span) -> Span:
    start = min(max(document.start, chunk.start), chunk.stop)
    return Span(start, max(start, min(document.stop, chunk.stop)))


def _joined(early: Span, late: Span) -> Span:
    """Joins a document's two spans on one rank; they are adjacent unless one is empty."""
    if not early.length or not late.length:
        return early if early.length else late
    assert early.stop == late.start, (early, late)
    return Span(early.start, late.stop)


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """Returns the same places in the same order, without empty spans and with adjacent ones merged."""
    found: list[Span] = []
    for span in spans:
        if not span.length:
            continue
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLayout:
    """The layout of one micro-batch on the ranks of the context axis.

    Args:
        size: ranks on the axis.
        row_lengths: tokens of each row of the whole micro-batch.
        document_lengths: along the flat tokens of the whole micro-batch; no document crosses rows.
    """

    size: int
    row_lengths: tuple[int, ...]
    document_lengths: tuple[int, ...]
    _documents: tuple[Document, ...] = field(init=False, repr=False, compare=False)
    _shared: tuple[Document, ...] = field(init=False, repr=False, compare=False)
    """Documents that cross a chunk's border, of which there are few: at most one per border."""

    def __post_init__(self) -> None:
        assert sum(self.document_lengths) == self.num_tokens, (self.document_lengths, self.num_tokens)
        documents = self.documents()
        assert all(one.stop <= self.row_lengths[one.row] for one in documents), "a document crosses rows"
        cuts = {
            length: sorted(span.start for rank in range(self.size) for span in rank_columns(length, self.size, rank))
            for length in set(self.row_lengths)
        }
        # the dataclass is frozen: derived values are set once, here
        object.__setattr__(self, "_documents", documents)
        object.__setattr__(
            self,
            "_shared",
            tuple(
                one
                for one in documents
                if bisect_right(cuts[self.row_lengths[one.row]], one.start)
                != bisect_left(cuts[self.row_lengths[one.row]], one.stop)
            ),
        )

    @classmethod
    def even(cls, *, size: int, num_rows: int, row_length: int, document_lengths: tuple[int, ...]) -> ContextLayout:
        """Returns the layout of rows of one length."""
        return cls(size=size, row_lengths=(row_length,) * num_rows, document_lengths=document_lengths)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all ranks together."""
        return sum(self.row_lengths)

    def tokens_on(self, rank: int) -> int:
        """Returns the number of tokens of the micro-batch that `rank` holds."""
        return self._firsts(rank)[-1]

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The number of tokens on each rank."""
        return tuple(self.tokens_on(rank) for rank in range(self.size))

    def documents(self) -> tuple[Document, ...]:
        """Returns the documents, in their order."""
        found = []
        row = place = 0
        for length in self.document_lengths:
            while row < len(self.row_lengths) - 1 and place == self.row_lengths[row]:
                row, place = row + 1, 0
            found.append(Document(row, place, place + length))
            place += length
        return tuple(found)

    def _firsts(self, rank: int) -> list[int]:
        """Returns the place of each row's first token among those of `rank`, and the number of these."""
        held = (rank_columns(length, self.size, rank) for length in self.row_lengths)
        return [0, *accumulate(early.length + late.length for early, late in held)]

    def _spans(self, documents: tuple[Document, ...], rank: int) -> list[tuple[Span, Span]]:
        """Returns each document's tokens in the early and the late chunk of `rank`, as places in that rank's flat
        tokens.
        """
        firsts = self._firsts(rank)
        found = []
        for document in documents:
            early, late = rank_columns(self.row_lengths[document.row], self.size, rank)
            first = firsts[document.row]
            in_early, in_late = _clamped(document, early), _clamped(document, late)
            to_early, to_late = first - early.start, first + early.length - late.start
            found.append(
                (
                    Span(in_early.start + to_early, in_early.stop + to_early),
                    Span(in_late.start + to_late, in_late.stop + to_late),
                )
            )
        return found

    def document_spans(self, rank: int) -> tuple[Span, ...]:
        """Returns the tokens of each document on `rank`, as places in that rank's flat tokens; may be none."""
        return tuple(_joined(*spans) for spans in self._spans(self._documents, rank))

    def blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """Returns the blocks of `query_rank` with the keys of `key_rank`: at most one per document, in their order.

        A block's query places count the flat tokens of `query_rank`, its key places those of `key_rank`.
        """
        documents = self._documents if key_rank == query_rank else self._shared
        found = []
        for queries, keys in zip(self._spans(documents, query_rank), self._spans(documents, key_rank), strict=True):
            if key_rank == query_rank:
                query = key = _joined(*queries)
            elif key_rank < query_rank:
                query, key = _joined(*queries), keys[0]
            else:
                query, key = queries[1], _joined(*keys)
            if query.length and key.length:
                found.append(Block(query, key, key_rank == query_rank))
        return tuple(found)

    def plain_order(self) -> tuple[Span, ...]:
        """Returns the places in the concatenated ranks' tokens, in the order of the plain flat tokens."""
        begins, found = [0, *accumulate(self.token_counts)], []
        firsts = [self._firsts(rank) for rank in range(self.size)]
        for row, length in enumerate(self.row_lengths):
            for place in range(2 * self.size):
                rank = min(place, 2 * self.size - 1 - place)
                early, late = rank_columns(length, self.size, rank)
                start = begins[rank] + firsts[rank][row] + (early.length if place != rank else 0)
                found.append(Span(start, start + (late if place != rank else early).length))
        return merged(found)

    def rank_order(self) -> tuple[Span, ...]:
        """Returns the places in the plain flat tokens in the order of the ranks' tokens: the inverse of
        `plain_order`.
        """
        found, starts = [], [0, *accumulate(self.row_lengths)]
        for rank in range(self.size):
            for start, length in zip(starts, self.row_lengths, strict=False):
                for columns in rank_columns(length, self.size, rank):
                    found.append(Span(columns.start + start, columns.stop + start))
        return merged(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """A rank's step of ring attention: a block for each document that it shares with `key_rank`, and its messages.

    Args:
        key_rank: whose keys this rank works on.
        query_rank: the rank that works on this rank's keys in the same step.
        blocks: key places count the tokens received from `key_rank` (in the first step, this rank's own tokens).
        sent: this rank's tokens whose keys and values `query_rank` needs, in the order in which it receives them.
        num_received: tokens whose keys and values arrive from `key_rank`; 0 in the first step.
    """

    key_rank: int
    query_rank: int
    blocks: tuple[Block, ...]
    sent: tuple[Span, ...]
    num_received: int

    @property
    def num_sent(self) -> int:
        """The number of tokens whose keys and values are sent to `query_rank`."""
        return sum(span.length for span in self.sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPlan:
    """A rank's plan for the attention of one micro-batch; the same for all layers.

    Args:
        layout: of the micro-batch.
        rank: whose plan this is.
        steps: of ring attention; the first is this rank with itself.
        plain_order, rank_order: of the layout, for Ulysses.
    """

    layout: ContextLayout
    rank: int
    steps: tuple[RingStep, ...]
    plain_order: tuple[Span, ...]
    rank_order: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """The number of tokens that this rank holds."""
        return self.layout.tokens_on(self.rank)


def _packed(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Returns the same blocks with their keys packed one after the other."""
    found, place = [], 0
    for block in blocks:
        found.append(block._replace(key=Span(place, place + block.key.length)))
        place += block.key.length
    return tuple(found)


def make_plan(layout: ContextLayout, rank: int) -> ContextPlan:
    """Returns the plan of `rank`: in step t it works on the keys of rank - t, while rank + t works on its own."""
    steps = []
    for distance in range(layout.size):
        key_rank, query_rank = (rank - distance) % layout.size, (rank + distance) % layout.size
        blocks = layout.blocks(rank, key_rank)
        wanted = layout.blocks(query_rank, rank) if distance else ()
        steps.append(
            RingStep(
                key_rank=key_rank,
                query_rank=query_rank,
                blocks=_packed(blocks) if distance else blocks,
                sent=merged([block.key for block in wanted]),
                num_received=sum(block.key.length for block in blocks) if distance else 0,
            )
        )
    return ContextPlan(
        layout=layout,
        rank=rank,
        steps=tuple(steps),
        plain_order=layout.plain_order(),
        rank_order=layout.rank_order(),
    )
