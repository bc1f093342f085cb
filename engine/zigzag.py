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

Documents may continue others (`engine.branches`). Their tokens see all of those that they continue, which lie before
them, so this needs no order of chunks: of a document that is continued, and of the tokens that continue it, a rank has
one span each, for the same reason as above, and the two spans of two ranks are a full block. One block is enough for
each document, level and pair of ranks. What a chunk costs then depends on where branches lie, and ranks differ: with 8
continuations of 1024 tokens of a document of 4096, the busiest of 4 ranks has 1.23 times the mean.

Assumes that documents do not cross rows and that their lengths are known on the host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from engine.branches import Parents, check_parents, continuations, depths
from engine.spans import Block, Span, merged


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLayout:
    """The layout of one micro-batch on the ranks of the context axis.

    Args:
        size: ranks on the axis.
        row_lengths: tokens of each row of the whole micro-batch.
        document_lengths: along the flat tokens of the whole micro-batch; no document crosses rows.
        document_parents: the document that each one continues, in the same row; () where none continues another.
    """

    size: int
    row_lengths: tuple[int, ...]
    document_lengths: tuple[int, ...]
    document_parents: Parents = ()
    _documents: tuple[Document, ...] = field(init=False, repr=False, compare=False)
    _shared: tuple[Document, ...] = field(init=False, repr=False, compare=False)
    """Documents that cross a chunk's border, of which there are few: at most one per border."""
    _continued: tuple[tuple[tuple[Document, Document], ...], ...] = field(init=False, repr=False, compare=False)
    """For each level, the documents that others continue, and the tokens of all that continue them."""

    def __post_init__(self) -> None:
        assert sum(self.document_lengths) == self.num_tokens, (self.document_lengths, self.num_tokens)
        documents = self.documents()
        assert all(one.stop <= self.row_lengths[one.row] for one in documents), "a document crosses rows"
        check_parents(self.document_parents, len(documents))
        parents = zip(documents, self.document_parents, strict=False)
        assert all(parent < 0 or documents[parent].row == one.row for one, parent in parents), "a branch crosses rows"
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
        object.__setattr__(self, "_continued", self._levels(documents))

    @classmethod
    def even(
        cls,
        *,
        size: int,
        num_rows: int,
        row_length: int,
        document_lengths: tuple[int, ...],
        document_parents: Parents = (),
    ) -> ContextLayout:
        """Returns the layout of rows of one length."""
        return cls(
            size=size,
            row_lengths=(row_length,) * num_rows,
            document_lengths=document_lengths,
            document_parents=document_parents,
        )

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

    def _levels(self, documents: tuple[Document, ...]) -> tuple[tuple[tuple[Document, Document], ...], ...]:
        """Returns what `_continued` is."""
        if not self.document_parents:
            return ()
        found: list[list[tuple[Document, Document]]] = [[] for _ in range(max(depths(self.document_parents)))]
        spans = continuations(self.document_lengths, self.document_parents)
        for one, span, depth in zip(documents, spans, depths(self.document_parents), strict=True):
            if span.length:
                found[depth].append((one, Document(one.row, one.stop, one.stop + span.length)))
        return tuple(map(tuple, found))

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

    def rounds(self, query_rank: int, key_rank: int) -> tuple[tuple[Block, ...], ...]:
        """Returns the blocks of `query_rank` with the keys of `key_rank`, in rounds whose blocks share neither queries
        nor keys: each document's with itself, then those of each level of documents that are continued. A round has at
        most one block per document, in their order, and may have none.

        A block's query places count the flat tokens of `query_rank`, its key places those of `key_rank`.
        """
        return (
            self._own_blocks(query_rank, key_rank),
            *(self._level_blocks(level, query_rank, key_rank) for level in self._continued),
        )

    def _level_blocks(
        self, level: tuple[tuple[Document, Document], ...], query_rank: int, key_rank: int
    ) -> tuple[Block, ...]:
        queries = self._spans(tuple(behind for _, behind in level), query_rank)
        keys = self._spans(tuple(one for one, _ in level), key_rank)
        found = (Block(_joined(*query), _joined(*key), causal=False) for query, key in zip(queries, keys, strict=True))
        return tuple(block for block in found if block.query.length and block.key.length)

    def _own_blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
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
    """A rank's step of ring attention: the blocks of documents that it shares with `key_rank`, and its messages.

    Args:
        key_rank: whose keys this rank works on.
        query_rank: the rank that works on this rank's keys in the same step.
        rounds: of blocks that share neither queries nor keys, none of them empty. Key places count the tokens received
            from `key_rank` (in the first step, this rank's own tokens), which the rounds share.
        sent: this rank's tokens whose keys and values `query_rank` needs, in the order in which it receives them: each
            once, whatever the rounds.
        num_received: tokens whose keys and values arrive from `key_rank`; 0 in the first step.
    """

    key_rank: int
    query_rank: int
    rounds: tuple[tuple[Block, ...], ...]
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


def _keys(rounds: tuple[tuple[Block, ...], ...]) -> tuple[Span, ...]:
    """Returns the tokens that are keys of any block, each once, in their order."""
    found: list[Span] = []
    for span in sorted(block.key for blocks in rounds for block in blocks):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return tuple(found)


def _packed(rounds: tuple[tuple[Block, ...], ...], keys: tuple[Span, ...]) -> tuple[tuple[Block, ...], ...]:
    """Returns the same blocks where `keys`, which have all of theirs, lie one after the other."""
    starts = [span.start for span in keys]
    places = [0, *accumulate(span.length for span in keys)]

    def packed(key: Span) -> Span:
        number = bisect_right(starts, key.start) - 1
        first = places[number] + key.start - starts[number]
        return Span(first, first + key.length)

    return tuple(tuple(block._replace(key=packed(block.key)) for block in blocks) for blocks in rounds)


def make_plan(layout: ContextLayout, rank: int) -> ContextPlan:
    """Returns the plan of `rank`: in step t it works on the keys of rank - t, while rank + t works on its own."""
    steps = []
    for distance in range(layout.size):
        key_rank, query_rank = (rank - distance) % layout.size, (rank + distance) % layout.size
        rounds = tuple(blocks for blocks in layout.rounds(rank, key_rank) if blocks)
        keys = _keys(rounds)
        steps.append(
            RingStep(
                key_rank=key_rank,
                query_rank=query_rank,
                rounds=_packed(rounds, keys) if distance else rounds,
                sent=_keys(layout.rounds(query_rank, rank)) if distance else (),
                num_received=sum(span.length for span in keys) if distance else 0,
            )
        )
    return ContextPlan(
        layout=layout,
        rank=rank,
        steps=tuple(steps),
        plain_order=layout.plain_order(),
        rank_order=layout.rank_order(),
    )
