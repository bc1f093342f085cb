"""The runs of a rank's tokens along which a state is carried.

A state never crosses a document, but a document that continues another begins with that one's last state
(`engine.branches`). On context ranks a document is cut at the borders of chunks (`engine.zigzag`), and its state goes
from piece to piece: every rank knows all pieces, so that each can tell whose states it needs.

Legend: T tokens of this rank, P pieces, L tokens of a chunk of the computation, W taps of a convolution, R received
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.branches import Parents, check_parents, depths
from engine.layers import host_copies
from engine.ops.attention.token_context import ContextPart
from engine.spans import Span, merged
from engine.zigzag import ContextLayout, rank_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A piece that begins with another one's last state, or whose last state another one begins with.

    Args:
        rank: context rank that has it.
        sent, received: its place among the pieces that this rank sends, and receives; -1 where it is not one.
        index: of the piece on that rank.
        length: tokens.
        after: number of the link whose last state it begins with, an earlier one; -1 where it begins with zeros.
        origin: place of that state among those that this rank's received pieces begin with; -1 where there is none.
    """

    rank: int
    sent: int
    received: int
    index: int
    length: int
    after: int
    origin: int


class Level(NamedTuple):
    """The documents that continue equally many others, directly or not, on one process.

    Args:
        pieces: these documents; those that others continue are sent, and all are received but in the first level.
        tokens: theirs, int64, or a slice where they lie side by side.
        starts: int64 [R], which of the states that the level before sends each begins with; None in the first level.
        branches: how many documents continue each of those that the level before sends, whose numbers are neighbours.
    """

    pieces: Pieces
    tokens: Tensor | slice
    starts: Tensor | None
    branches: tuple[int, ...]


class Chunks(NamedTuple):
    """Pieces cut into chunks of at most L tokens, step by step: the first chunks of all pieces, then the second ones.

    Args:
        tokens: int64 [chunks, L], the token of each place; T where a chunk is shorter.
        counts: of each step, the chunks. Those of a step are those of the first pieces in `order`.
        order: pieces, the longest first.
    """

    tokens: Tensor
    counts: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces(ContextPart):
    """The runs of this rank's T tokens that share a state each.

    Args:
        lengths: of the pieces, each 1 or more; they sum to T.
        offsets: int32 [P + 1], cumulative, on the device.
        received: pieces that have an initial state.
        sent: pieces whose last state is asked for.
        parents: the piece that each one continues, where documents are whole on one process; () for none.
        links: pieces with states that others begin with, or that begin with one; the same on all context ranks.
        branches: how many of the received pieces begin with each of the states that this rank receives: neighbours.
        rank: of this rank among the context ranks.
        most_sent, most_received, most_states: the most pieces that any of these ranks sends, and receives, and the most
            states that it receives.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    parents: Parents = ()
    links: tuple[Link, ...] = ()
    branches: tuple[int, ...] = ()
    rank: int = 0
    most_sent: int = 0
    most_received: int = 0
    most_states: int = 0
    _made: dict[tuple[str, int], object] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        *,
        received: tuple[int, ...] = (),
        sent: tuple[int, ...] = (),
    ) -> Pieces:
        """Returns pieces of these lengths on one rank."""
        offsets = host_copies.sent(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
        return cls(lengths=tuple(lengths), offsets=offsets, received=received, sent=sent)

    @classmethod
    def of_batch(cls, batch: Batch) -> Pieces:
        """Returns the pieces of a micro-batch that this rank has."""
        device, parents = batch.tokens_BS.device, batch.document_parents
        if batch.context_plan is None:
            return cls(
                lengths=batch.document_lengths,
                offsets=batch.document_offsets,
                received=tuple(index for index, parent in enumerate(parents) if parent >= 0),
                parents=parents if max(parents, default=-1) >= 0 else (),
            )
        plan = batch.context_plan
        return cls.of_context(plan.layout, plan.rank, device, parents)

    @classmethod
    def of_context(cls, layout: ContextLayout, rank: int, device: torch.device, parents: Parents = ()) -> Pieces:
        """Returns the pieces that one of the context ranks has.

        Args:
            parents: of the documents.
        """
        check_parents(parents, len(layout.document_lengths))
        lengths: list[list[int]] = [[] for _ in range(layout.size)]
        documents = _documents_by_row(layout)
        pieces: dict[tuple[int, int], tuple[int, int]] = {}  # (document, chunk) -> (rank, index)
        for one in range(layout.size):
            for row, row_length in enumerate(layout.row_lengths):
                for chunk, columns in zip(
                    (one, 2 * layout.size - 1 - one), rank_columns(row_length, layout.size, one), strict=True
                ):
                    for number, start, stop in documents[row]:
                        length = min(stop, columns.stop) - max(start, columns.start)
                        if length > 0:
                            pieces[number, chunk] = (one, len(lengths[one]))
                            lengths[one].append(length)
        of_documents = [
            [pieces[number, chunk] for chunk in range(2 * layout.size) if (number, chunk) in pieces]
            for number in range(len(layout.document_lengths))
        ]
        links, received, sent = _linked(of_documents, parents, lengths)
        states = [
            [link.origin for link in links if link.rank == one and link.received >= 0] for one in range(layout.size)
        ]
        return cls(
            lengths=tuple(lengths[rank]),
            offsets=host_copies.sent(torch.tensor([0, *accumulate(lengths[rank])], dtype=torch.int32), device),
            received=tuple(received[rank]),
            sent=tuple(sent[rank]),
            links=links,
            branches=tuple(len(tuple(same)) for _, same in groupby(sorted(states[rank]))),
            rank=rank,
            most_sent=max(map(len, sent)),
            most_received=max(map(len, received)),
            most_states=max(len(set(own)) for own in states),
        )

    def shared(self) -> tuple[Tensor, ...]:
        return (self.offsets,)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def firsts(self) -> list[int]:
        """The first token of each piece."""
        return [0, *accumulate(self.lengths)][:-1]

    def chosen(self, indices: Sequence[int], *, received: bool, sent: bool) -> tuple[Pieces, Tensor]:
        """Returns some of the pieces as pieces of their own, and their tokens, int64.

        Args:
            received, sent: whether each of them has an initial state, and is asked for its last one.
        """
        lengths, firsts, device = [self.lengths[index] for index in indices], self.firsts, self.offsets.device
        every = tuple(range(len(lengths)))
        tokens = [torch.arange(firsts[index], firsts[index] + self.lengths[index]) for index in indices]
        pieces = Pieces.of_lengths(lengths, device, received=every if received else (), sent=every if sent else ())
        return pieces, host_copies.sent(torch.cat(tokens), device)

    def places(self, indices: tuple[int, ...]) -> Tensor | None:
        """Returns int32 [P], the place of each piece among some of them, -1 where it is none of them; None where it is
        piece i that has place i."""
        if indices == tuple(range(len(self.lengths))):
            return None
        name = "received" if indices is self.received else "sent"
        if (name, 0) not in self._made:
            places = torch.full((len(self.lengths),), -1, dtype=torch.int32)
            places[list(indices)] = torch.arange(len(indices), dtype=torch.int32)
            self._made[name, 0] = host_copies.sent(places, self.offsets.device)
        found = self._made[name, 0]
        assert isinstance(found, Tensor)
        return found

    def all_sent(self) -> Pieces:
        """Returns the pieces, of all of which the last states are asked for."""
        key = ("all sent", 0)
        if key not in self._made:
            self._made[key] = replace(self, sent=tuple(range(len(self.lengths))), _made={})
        found = self._made[key]
        assert isinstance(found, Pieces)
        return found

    def first_received(self) -> Pieces:
        """Returns the pieces, of which the first one alone has an initial state."""
        key = ("first received", 0)
        if key not in self._made:
            self._made[key] = replace(self, received=(0,), _made={})
        found = self._made[key]
        assert isinstance(found, Pieces)
        return found

    def last_tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the last tokens of each piece, int64 [P, count], and where there are none, bool: there it is 0."""
        key = ("last", count)
        if key not in self._made:
            ends = torch.tensor([*accumulate(self.lengths)])[:, None]
            tokens = ends + torch.arange(-count, 0)
            missing = tokens < torch.tensor(self.firsts)[:, None]
            device = self.offsets.device
            self._made[key] = tuple(host_copies.sent(one, device) for one in (tokens.masked_fill(missing, 0), missing))
        tokens, missing = self._made[key]  # type: ignore[misc]
        return tokens, missing

    def starts(self) -> Tensor | None:
        """Returns int64 [R], which of the states that this rank receives each received piece begins with; None where
        each has one of its own."""
        if len(self.branches) == len(self.received):
            return None
        if ("starts", 0) not in self._made:
            starts = torch.arange(len(self.branches)).repeat_interleave(torch.tensor(self.branches))
            self._made["starts", 0] = host_copies.sent(starts, self.offsets.device)
        found = self._made["starts", 0]
        assert isinstance(found, Tensor)
        return found

    def levels(self) -> tuple[Level, ...]:
        """Returns the pieces by how many others they continue; those of `parents`."""
        if ("levels", 0) not in self._made:
            self._made["levels", 0] = self._split()
        found = self._made["levels", 0]
        assert isinstance(found, tuple)
        return found

    def _split(self) -> tuple[Level, ...]:
        device, found = self.offsets.device, []
        of_depth = depths(self.parents)
        before: dict[int, int] = {}  # piece that the level before sends -> its place among these
        for depth in range(max(of_depth) + 1):
            own = [index for index, one in enumerate(of_depth) if one == depth]
            continued = {self.parents[index] for index, one in enumerate(of_depth) if one == depth + 1}
            starts = [before[self.parents[index]] for index in own if depth]
            found.append(
                Level(
                    pieces=Pieces.of_lengths(
                        [self.lengths[index] for index in own],
                        device,
                        received=tuple(range(len(own))) if depth else (),
                        sent=tuple(place for place, index in enumerate(own) if index in continued),
                    ),
                    tokens=self._tokens_of(own),
                    starts=host_copies.sent(torch.tensor(starts), device) if depth else None,
                    branches=tuple(len(tuple(same)) for _, same in groupby(starts)),
                )
            )
            before = {index: place for place, index in enumerate(sorted(continued))}
        return tuple(found)

    def level_order(self) -> Tensor | None:
        """Returns int64 [T], the place of each token among those of the levels one after the other; None where these
        are in order."""
        if ("order", 0) not in self._made:
            of_depth, firsts = depths(self.parents), self.firsts
            indices = sorted(range(len(of_depth)), key=lambda index: of_depth[index])
            tokens = [torch.arange(firsts[index], firsts[index] + self.lengths[index]) for index in indices]
            is_sorted = indices == list(range(len(of_depth)))
            order = None if is_sorted else host_copies.sent(torch.cat(tokens).argsort(), self.offsets.device)
            self._made["order", 0] = order
        found = self._made["order", 0]
        assert found is None or isinstance(found, Tensor)
        return found

    def _tokens_of(self, indices: Sequence[int]) -> Tensor | slice:
        """Returns the tokens of some pieces."""
        firsts = self.firsts
        spans = merged([Span(firsts[index], firsts[index] + self.lengths[index]) for index in indices])
        if len(spans) == 1:
            return slice(*spans[0])
        return host_copies.sent(torch.cat([torch.arange(*span) for span in spans]), self.offsets.device)

    def tokens_before(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the last tokens before each received piece in the documents that it continues, int64 [R, count], and
        where there are none, bool: there it is 0."""
        key = ("before", count)
        if key not in self._made:
            rows, device = torch.tensor(self._before(count), dtype=torch.int64), self.offsets.device
            self._made[key] = tuple(host_copies.sent(one, device) for one in (rows.clamp(min=0), rows < 0))
        tokens, missing = self._made[key]  # type: ignore[misc]
        return tokens, missing

    def readers_before(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the tokens that are in `tokens_before`, int64 [N], each once, and the places that have each among all
        R * count, int64 [N, most], R * count where there are fewer."""
        key = ("readers", count)
        if key not in self._made:
            places: dict[int, list[int]] = {}
            for place, token in enumerate(token for row in self._before(count) for token in row):
                if token >= 0:
                    places.setdefault(token, []).append(place)
            most, none = max(map(len, places.values()), default=0), count * len(self.received)
            table = [[*found, *[none] * (most - len(found))] for found in places.values()]
            given = (
                torch.tensor(list(places), dtype=torch.int64),
                torch.tensor(table, dtype=torch.int64).view(len(places), most),
            )
            self._made[key] = tuple(host_copies.sent(one, self.offsets.device) for one in given)
        tokens, readers = self._made[key]  # type: ignore[misc]
        return tokens, readers

    def _before(self, count: int) -> list[list[int]]:
        """Returns the last tokens before each received piece, -1 where there are none."""
        firsts, rows = self.firsts, []
        for index in self.received:
            row: list[int] = []
            before = self.parents[index]
            while before >= 0 and len(row) < count:
                row = [*range(firsts[before], firsts[before] + self.lengths[before])][len(row) - count :] + row
                before = self.parents[before]
            rows.append([-1] * (count - len(row)) + row)
        return rows

    def chunks(self, length: int) -> Chunks:
        """Returns the pieces cut into chunks of at most `length` tokens."""
        if ("chunks", length) not in self._made:
            self._made["chunks", length] = self._cut(length)
        found = self._made["chunks", length]
        assert isinstance(found, Chunks)
        return found

    def _cut(self, length: int) -> Chunks:
        order = sorted(range(len(self.lengths)), key=lambda index: -self.lengths[index])
        firsts, total = self.firsts, self.num_tokens
        rows, counts = [], []
        for step in range(-(-max(self.lengths) // length)):
            alive = [index for index in order if self.lengths[index] > step * length]
            counts.append(len(alive))
            for index in alive:
                row = torch.full((length,), total, dtype=torch.int64)
                held = min(length, self.lengths[index] - step * length)
                row[:held] = torch.arange(firsts[index] + step * length, firsts[index] + step * length + held)
                rows.append(row)
        return Chunks(host_copies.sent(torch.stack(rows), self.offsets.device), tuple(counts), tuple(order))

    def taps(self, width: int) -> Tensor:
        """Returns int64 [W, T], which row each tap of a causal convolution reads for each token, the token's own last:
        of the tokens, then one of zeros, then the W - 1 before each received piece."""
        if ("taps", width) not in self._made:
            total, rows = self.num_tokens, []
            for index, (first, length) in enumerate(zip(self.firsts, self.lengths, strict=True)):
                before = torch.full((width - 1,), total, dtype=torch.int64)
                if index in self.received:
                    start = total + 1 + self.received.index(index) * (width - 1)
                    before = torch.arange(start, start + width - 1)
                rows.append(torch.cat((before, torch.arange(first, first + length))).unfold(0, width, 1))
            self._made["taps", width] = host_copies.sent(torch.cat(rows).T.contiguous(), self.offsets.device)
        found = self._made["taps", width]
        assert isinstance(found, Tensor)
        return found


def _linked(
    of_documents: list[list[tuple[int, int]]], parents: Parents, lengths: list[list[int]]
) -> tuple[tuple[Link, ...], list[list[int]], list[list[int]]]:
    """Returns the links of pieces, and the pieces that each context rank receives, and sends.

    Args:
        of_documents: rank and index of each piece of each document.
        parents: of the documents.
        lengths: of each rank's pieces.
    """
    sent: list[list[int]] = [[] for _ in lengths]
    links: list[Link] = []
    ends: dict[int, int] = {}  # document -> its last link
    of_branches = set(parents)
    for number, found in enumerate(of_documents):
        parent, continued = parents[number] if parents else -1, number in of_branches
        after = ends[parent] if parent >= 0 else -1
        for place, (rank, index) in enumerate(found if len(found) > 1 or continued or after >= 0 else ()):
            is_sent = place < len(found) - 1 or continued
            links.append(
                Link(
                    rank=rank,
                    sent=len(sent[rank]) if is_sent else -1,
                    received=-1,
                    index=index,
                    length=lengths[rank][index],
                    after=after,
                    origin=-1,
                )
            )
            after = len(links) - 1
            if is_sent:
                sent[rank].append(index)
        ends[number] = after
    received: list[list[int]] = [[] for _ in lengths]
    origins: list[list[int]] = [[] for _ in lengths]
    for number in sorted((one for one, link in enumerate(links) if link.after >= 0), key=lambda one: links[one].after):
        link = links[number]
        if link.after not in origins[link.rank][-1:]:
            origins[link.rank].append(link.after)
        place, origin = len(received[link.rank]), len(origins[link.rank]) - 1
        links[number] = replace(link, received=place, origin=origin)
        received[link.rank].append(link.index)
    return tuple(links), received, sent


def _documents_by_row(layout: ContextLayout) -> list[list[tuple[int, int, int]]]:
    """Returns for each row its documents: number, first column, and the column after the last one."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in layout.row_lengths]
    for number, (row, start, stop) in enumerate(layout.documents()):
        rows[row].append((number, start, stop))
    return rows
