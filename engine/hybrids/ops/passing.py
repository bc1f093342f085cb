"""States on their way from one context rank to the next, and their gradients on the way back.

A piece does to a state what its tokens do, S -> M S + C. M and C do not depend on S, so all ranks compute those of
their pieces at the same time, exchange them, and each puts together the state that its own pieces begin with. In
backward a piece does M^T to the gradient of its last state and adds D, what its own outputs give. A state that several
pieces begin with, of documents that continue one, has the sum of their gradients.

Legend: R received pieces of this rank, N heads, K, V features of a key and a value, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather
from engine.distributed.mesh import Axis
from engine.hybrids.pieces import Link, Pieces

Apply = Callable[[Tensor, Tensor], Tensor]
"""(M, state) -> M state, for one piece."""


def gathered(own: Tensor, most: int, axis: Axis) -> Tensor:
    """Returns [ranks, most, ...], of all ranks what each has of its pieces, [pieces, ...]; zeros beyond. Collective."""
    room = own.new_zeros((most, *own.shape[1:]))
    room[: own.shape[0]] = own
    return all_gather(room, axis).unflatten(0, (axis.size, most))


def first_states(moves: Tensor, adds: Tensor, pieces: Pieces, apply: Apply) -> Tensor:
    """Returns the states that this rank's received pieces begin with, each once, [states, ...].

    Args:
        moves, adds: M and C of all ranks' sent pieces, [ranks, most, ...]; M of one that receives nothing is not read.
    """
    found: dict[int, Tensor] = {}
    last: dict[int, Tensor] = {}
    for number, link in enumerate(pieces.links):
        if link.rank == pieces.rank and link.received >= 0:
            found[link.origin] = last[link.after]
        if link.sent >= 0:
            add = adds[link.rank, link.sent]
            last[number] = add if link.after < 0 else apply(moves[link.rank, link.sent], last[link.after]) + add
    return _in_order(found, adds)


def last_gradients(moves: Tensor, adds: Tensor, pieces: Pieces, apply: Apply) -> Tensor:
    """Returns the gradients of the last states of this rank's sent pieces, [sent, ...].

    Args:
        moves: M of all ranks' sent pieces, [ranks, most sent, ...].
        adds: of all ranks and the states that they receive, D of the pieces that begin with each, [ranks, most states,
            ...].
        apply: M^T.
    """
    last: dict[int, Tensor] = {}
    seen = set[tuple[int, int]]()
    for number, link in reversed(list(enumerate(pieces.links))):
        if link.after < 0:
            continue
        found = [last[link.after]] if link.after in last else []
        if (link.rank, link.origin) not in seen:
            seen.add((link.rank, link.origin))
            found.append(adds[link.rank, link.origin])
        if link.sent >= 0:
            found.append(apply(moves[link.rank, link.sent], last[number]))
        last[link.after] = reduce(torch.add, found)
    mine = {pieces.links[number].sent: one for number, one in last.items() if pieces.links[number].rank == pieces.rank}
    return _in_order(mine, adds)


def _in_order(found: dict[int, Tensor], like: Tensor) -> Tensor:
    if not found:
        return like.new_zeros((0, *like.shape[2:]))
    return torch.stack([found[place] for place in sorted(found)])


def received_tails(x_TC: Tensor, taps: int, pieces: Pieces, axis: Axis) -> Tensor:
    """Returns the inputs of a convolution before each received piece, [R, W - 1, C], zeros before a document.
    Collective.

    Args:
        taps: W.
    """
    width, firsts = taps - 1, pieces.firsts
    own = x_TC.new_zeros((len(pieces.sent), width, x_TC.shape[1]))
    for place, index in enumerate(pieces.sent):
        count, stop = min(width, pieces.lengths[index]), firsts[index] + pieces.lengths[index]
        own[place, width - count :] = x_TC[stop - count : stop]
    ends = gathered(own, pieces.most_sent, axis)
    found = own.new_zeros((len(pieces.received), width, x_TC.shape[1]))
    for link in pieces.links:
        if link.rank == pieces.rank and link.received >= 0:
            for before, row, count in _shares(pieces, link, width):
                found[link.received, row : row + count] = ends[before.rank, before.sent, width - count :]
    return found


def add_tail_gradients(dx_TC: Tensor, d_tail: Tensor, pieces: Pieces, axis: Axis) -> None:
    """Adds to dx the gradients of what other pieces' convolutions read of this rank's inputs. Collective.

    Args:
        d_tail: [R, W - 1, C], of this rank's received pieces.
    """
    firsts = pieces.firsts
    every = gathered(d_tail, pieces.most_received, axis)
    for link in pieces.links:
        for before, row, count in _shares(pieces, link, d_tail.shape[1]):
            if before.rank == pieces.rank:
                stop = firsts[before.index] + before.length
                dx_TC[stop - count : stop] += every[link.rank, link.received, row : row + count]


def _shares(pieces: Pieces, link: Link, width: int) -> list[tuple[Link, int, int]]:
    """Returns the pieces whose last inputs fill the `width` rows before a piece: the piece, the first row that it
    fills, and how many."""
    found, stop = [], width
    while link.after >= 0 and stop:
        link = pieces.links[link.after]
        count = min(stop, link.length)
        found.append((link, stop - count, count))
        stop -= count
    return found


def continued_tails(x_TC: Tensor, taps: int, pieces: Pieces) -> Tensor:
    """Returns the inputs of a convolution before each piece that continues others on this process, [R, W - 1, C], zeros
    before the first of these.

    Args:
        taps: W.
    """
    tokens, missing = pieces.tokens_before(taps - 1)
    return x_TC[tokens].masked_fill_(missing[..., None], 0)


def add_continued_gradients(dx_TC: Tensor, d_tail: Tensor, pieces: Pieces) -> None:
    """Adds to dx the gradients of what the convolutions of other pieces read; in one order always, which additions at
    indices would not have.

    Args:
        d_tail: [R, W - 1, C].
    """
    tokens, readers = pieces.readers_before(d_tail.shape[1])
    rows = torch.cat((d_tail.flatten(0, 1), d_tail.new_zeros((1, d_tail.shape[2]))))
    dx_TC.index_add_(0, tokens, rows[readers].sum(1))
