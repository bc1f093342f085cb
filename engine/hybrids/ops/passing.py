"""States on their way from one context rank to the next, and their gradients on the way back.

A piece does to a state what its tokens do, S -> M S + C. M and C do not depend on S, so all ranks compute those of
their pieces at the same time, exchange them, and each puts together the state that its own pieces begin with. In
backward a piece does M^T to the gradient of its last state and adds D, what its own outputs give.

Legend: R received pieces of this rank, N heads, K, V features of a key and a value, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable

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
    """Returns the states that this rank's received pieces begin with, [R, ...].

    Args:
        moves, adds: M and C of all ranks' sent pieces, [ranks, most, ...]; M of a document's first piece is not read.
    """
    found: list[tuple[int, Tensor]] = []
    for chain in pieces.chains:
        state = adds[chain[0].rank, chain[0].sent]
        for link in chain[1:]:
            if link.rank == pieces.rank:
                found.append((link.received, state))
            if link.sent >= 0:
                state = apply(moves[link.rank, link.sent], state) + adds[link.rank, link.sent]
    return _in_order(found, adds)


def last_gradients(moves: Tensor, adds: Tensor, pieces: Pieces, apply: Apply) -> Tensor:
    """Returns the gradients of the last states of this rank's sent pieces, [sent, ...].

    Args:
        moves: M of all ranks' sent pieces, [ranks, most sent, ...].
        adds: D of all ranks' received pieces, [ranks, most received, ...].
        apply: M^T.
    """
    found: list[tuple[int, Tensor]] = []
    for chain in pieces.chains:
        gradient: Tensor | None = None
        for link, after in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
            own = adds[after.rank, after.received]
            gradient = own if gradient is None else own + apply(moves[after.rank, after.sent], gradient)
            if link.rank == pieces.rank:
                found.append((link.sent, gradient))
    return _in_order(found, adds)


def _in_order(found: list[tuple[int, Tensor]], like: Tensor) -> Tensor:
    if not found:
        return like.new_zeros((0, *like.shape[2:]))
    return torch.stack([one for _, one in sorted(found, key=lambda pair: pair[0])])


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
    for chain in pieces.chains:
        for place, link in enumerate(chain):
            if link.rank == pieces.rank and link.received >= 0:
                for before, row, count in _shares(chain[:place], width):
                    found[link.received, row : row + count] = ends[before.rank, before.sent, width - count :]
    return found


def add_tail_gradients(dx_TC: Tensor, d_tail: Tensor, pieces: Pieces, axis: Axis) -> None:
    """Adds to dx the gradients of what other pieces' convolutions read of this rank's inputs. Collective.

    Args:
        d_tail: [R, W - 1, C], of this rank's received pieces.
    """
    firsts = pieces.firsts
    every = gathered(d_tail, pieces.most_received, axis)
    for chain in pieces.chains:
        for place in range(1, len(chain)):
            for link, row, count in _shares(chain[:place], d_tail.shape[1]):
                if link.rank == pieces.rank:
                    stop = firsts[link.index] + link.length
                    dx_TC[stop - count : stop] += every[chain[place].rank, chain[place].received, row : row + count]


def _shares(links: tuple[Link, ...], width: int) -> list[tuple[Link, int, int]]:
    """Returns the pieces whose last inputs fill the `width` rows before the next one: the piece, the first row that it
    fills, and how many."""
    found, stop = [], width
    for link in reversed(links):
        count = min(stop, link.length)
        if count:
            found.append((link, stop - count, count))
        stop -= count
    return found
