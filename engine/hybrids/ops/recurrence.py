"""A linear recurrence of states within documents, also where these lie on several context ranks.

One function of autograd serves all rules; a `Rule` says what is computed within pieces, and what a piece does to a
state, S -> M S + C. See `engine.hybrids.ops.passing` for how states reach the next rank. Documents that continue others
are computed after these, level by level, by a second one.

Legend: T tokens, N heads, R received pieces of this rank.
"""

from __future__ import annotations

from itertools import islice
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.hybrids.ops.passing import first_states, gathered, last_gradients
from engine.hybrids.pieces import Pieces

Inputs = tuple[Tensor, ...]


class Rule(Protocol):
    """What a recurrence computes. Its first input is [T, ..], or as the rule says."""

    by_token: ClassVar[tuple[bool, ...]]
    """Of each input, whether it has a row for each token."""

    def forward(
        self, inputs: Inputs, pieces: Pieces, initial: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Returns the output, the last states of `pieces.sent` (None where none is), and tensors for `backward`.

        Args:
            initial: fp32, the states that `pieces.received` begin with; None where none is received.
            keep: whether a backward follows.
        """
        ...

    def backward(
        self,
        d_out: Tensor,
        d_final: Tensor | None,
        inputs: Inputs,
        pieces: Pieces,
        initial: Tensor | None,
        kept: tuple[Tensor, ...],
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the inputs, and of the initial states last."""
        ...

    def step(self, inputs: Inputs, states: Tensor) -> Tensor:
        """Returns the output of a token of each row, and updates the rows' states, fp32, where they are."""
        ...

    def state_shape(self, inputs: Inputs) -> tuple[int, ...]:
        """Returns the shape of a state, heads first."""
        ...

    def reduced(self, inputs: Inputs, pieces: Pieces) -> tuple[Tensor, Tensor]:
        """Returns M and C of the sent pieces, fp32 [sent, N, ..]; M of a document's first piece is not read."""
        ...

    def moved(self, move: Tensor, state: Tensor) -> Tensor:
        """Returns M S."""
        ...

    def moved_back(self, move: Tensor, gradient: Tensor) -> Tensor:
        """Returns M^T dS."""
        ...


def of_tokens(rule: Rule, inputs: Inputs, tokens: Tensor | slice) -> Inputs:
    """Returns the inputs of these tokens, int64."""
    return tuple(rows_of(one, tokens) if has_rows else one for one, has_rows in zip(inputs, rule.by_token, strict=True))


def rows_of(x: Tensor, tokens: Tensor | slice) -> Tensor:
    """Returns the rows of these tokens, int64. On CPUs indexing by a tensor takes eight times as long."""
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, pieces: Pieces, axis: Axis, *inputs: Tensor) -> Tensor:
        states = moves = None
        if axis.size > 1 and pieces.links:
            states, moves = _received(rule, inputs, pieces, axis)
        out, _, kept = rule.forward(inputs, pieces, _initial(states, pieces), keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(states, moves, *inputs, *kept)
        ctx.rule, ctx.pieces, ctx.axis, ctx.count = rule, pieces, axis, len(inputs)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        states, moves, *saved = ctx.saved_tensors
        initial = _initial(states, ctx.pieces)
        inputs, kept = tuple(saved[: ctx.count]), tuple(saved[ctx.count :])
        d_out, d_final = d_out.contiguous(), None
        if moves is not None:
            d_final = _last(ctx.rule, d_out, inputs, ctx.pieces, initial, moves, ctx.axis)
        found = ctx.rule.backward(d_out, d_final, inputs, ctx.pieces, initial, kept)
        return None, None, None, *found[:-1]


def _initial(states: Tensor | None, pieces: Pieces) -> Tensor | None:
    """Returns the states that received pieces begin with, of those that this rank receives."""
    starts = None if states is None else pieces.starts()
    return states if states is None or starts is None else states[starts]


def _received(rule: Rule, inputs: Inputs, pieces: Pieces, axis: Axis) -> tuple[Tensor | None, Tensor]:
    """Returns the states that received pieces begin with, each once, None where none is received; and M of all ranks'
    sent pieces, [ranks, most sent, N, ..]. Collective."""
    moves, adds = rule.reduced(inputs, pieces)
    sizes = [prod(one.shape[2:]) for one in (adds, moves)]
    every = gathered(torch.cat((adds.flatten(2), moves.flatten(2)), dim=2), pieces.most_sent, axis)
    every_adds, every_moves = (
        part.unflatten(-1, one.shape[2:]) for part, one in zip(every.split(sizes, dim=-1), (adds, moves), strict=True)
    )
    states = first_states(every_moves, every_adds, pieces, rule.moved)
    return states if pieces.received else None, every_moves


def _last(
    rule: Rule, d_out: Tensor, inputs: Inputs, pieces: Pieces, initial: Tensor | None, moves: Tensor, axis: Axis
) -> Tensor | None:
    """Returns the gradients of the last states of sent pieces; None where none is sent. Collective."""
    adds = moves.new_zeros((0, *rule.state_shape(inputs)))
    if initial is not None:
        own, tokens = pieces.chosen(pieces.received, received=True, sent=False)
        parts = of_tokens(rule, inputs, tokens)
        # what the pieces' own outputs give; kernels keep nothing of this part of the tokens
        _, _, kept = rule.forward(parts, own, initial, keep=True)
        found = rule.backward(d_out[tokens], None, parts, own, initial, kept)[-1]
        assert found is not None
        adds = found if pieces.starts() is None else _sums(found, pieces.branches)
    every = gathered(adds, pieces.most_states, axis)
    gradients = last_gradients(moves, every, pieces, rule.moved_back)
    return gradients if pieces.sent else None


class _OfBranches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, pieces: Pieces, *inputs: Tensor) -> Tensor:
        keep, outs, finals, kept = any(ctx.needs_input_grad), list[Tensor](), list[Tensor](), list[tuple[Tensor, ...]]()
        for level in pieces.levels():
            initial = None if level.starts is None else finals[-1][level.starts]
            parts = of_tokens(rule, inputs, level.tokens)
            out, final, more = rule.forward(parts, level.pieces, initial, keep=keep)
            outs.append(out)
            kept.append(more)
            if final is not None:
                finals.append(final)
        ctx.save_for_backward(*inputs, *finals, *(one for more in kept for one in more))
        ctx.rule, ctx.pieces, ctx.counts = rule, pieces, (len(inputs), len(finals), *map(len, kept))
        return _joined(outs, pieces)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        rule, pieces, saved = ctx.rule, ctx.pieces, iter(ctx.saved_tensors)
        inputs, finals, *kept = (tuple(islice(saved, count)) for count in ctx.counts)
        found, d_final = list[tuple[Tensor | None, ...]](), None
        for place, level in reversed(list(enumerate(pieces.levels()))):
            initial = None if level.starts is None else finals[place - 1][level.starts]
            parts = of_tokens(rule, inputs, level.tokens)
            d_own = rows_of(d_out, level.tokens).contiguous()
            *gradients, d_initial = rule.backward(d_own, d_final, parts, level.pieces, initial, kept[place])
            found.append(tuple(gradients))
            d_final = None if d_initial is None else _sums(d_initial, level.branches)
        merged = list[Tensor | None]()
        for has_rows, own in zip(rule.by_token, zip(*reversed(found), strict=True), strict=True):
            given = [one for one in own if one is not None]
            merged.append(_joined(given, pieces) if has_rows else torch.stack(given).sum(0) if given else None)
        return None, None, *merged


def _joined(of_levels: list[Tensor], pieces: Pieces) -> Tensor:
    """Returns rows of all tokens, of those of each level."""
    order = pieces.level_order()
    rows = torch.cat(of_levels)
    return rows if order is None else rows.index_select(0, order)


def _sums(gradients: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Returns the sums of as many gradients each; in one order always, which additions at indices would not have."""
    if len(set(counts)) == 1:
        return gradients.unflatten(0, (len(counts), counts[0])).sum(1)
    return torch.stack([own.sum(0) for own in gradients.split(counts)])


def recurrence(rule: Rule, inputs: Inputs, pieces: Pieces, axis: Axis) -> Tensor:
    """Computes a rule within documents.

    Args:
        inputs: of the rule.
        pieces: of this rank's tokens.
        axis: the context ranks.
    """
    if pieces.parents:
        of_branches: Tensor = _OfBranches.apply(rule, pieces, *inputs)
        return of_branches
    out: Tensor = _Recurrence.apply(rule, pieces, axis, *inputs)
    return out
