"""Rows of clients over the ranks of a layout: which of them a rank computes, and their results gathered on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch
from engine.config.parallel import ParallelOptions
from engine.data.collate import context_part
from engine.models.decoder import Decoder
from engine.ops.attention.token_context import TokenContext
from engine.training.build import Training
from engine.training.stage import ReadHead
from rankfold.serving.loss_request import ForwardBackward
from rankfold.serving.losses import TokenInputs
from rankfold.serving.ranks import Ranks
from rankfold.serving.rows import FILLER, documents_row, filled, micro_batches
from rankfold.serving.whole_rows import whole_row

_Key = TypeVar("_Key")


class Spread:
    """How rows are spread over the ranks.

    Args:
        base: the model without adapters.
        parallel: the layout.
        ranks: all of them.
        tokens: of a micro-batch, at most, unless one document alone has more.
    """

    def __init__(self, base: Training, parallel: ParallelOptions, ranks: Ranks, tokens: int) -> None:
        self._mesh, self._ranks, self._tokens = base.mesh, ranks, tokens
        chunks = 2 * parallel.context if parallel.context > 1 else 1  # each context rank holds two of a row
        self._multiple = chunks * (parallel.tensor if parallel.divides_tokens else 1)
        has_head = any(part.head is not None for part in base.parts)
        self._answers = has_head and self._mesh.tp.rank == self._mesh.cp.rank == 0

    def micro_batches(self, request: ForwardBackward) -> list[list[Batch]]:
        """Returns the whole micro-batches of each copy of the model; `own` has those of this rank."""
        return micro_batches(request, self._tokens, copies=self._mesh.dp.size, multiple=self._multiple)

    def rows(
        self,
        tokens: Sequence[NDArray[np.int64]],
        targets: Sequence[NDArray[np.int64]],
        dressed: Callable[[Batch, int], Batch] = lambda row, place: row,
    ) -> list[list[Batch]]:
        """Returns micro-batches of one document each, as `micro_batches`.

        Args:
            tokens: int64 [T] ids of each; the place of a micro-batch is that of its document.
            targets: int64 [T] or [T, K] what each position is to predict.
            dressed: returns a row with what it has beside tokens, such as images; takes its place, too.
        """
        copies: list[list[Batch]] = [[] for _ in range(self._mesh.dp.size)]
        for place, (ids, labels) in enumerate(zip(tokens, targets, strict=True)):
            inputs = TokenInputs(loss="cross_entropy", numbers={}, place=place, lengths=(len(ids),))
            row = dressed(documents_row([ids], [labels], self._multiple), place).with_parts(inputs)
            copies[place % len(copies)].append(row)
        return filled(copies, self._multiple)

    def own(self, batches: Sequence[Sequence[Batch]]) -> list[Batch]:
        """Returns this rank's part of micro-batches, on the host.

        Args:
            batches: whole ones of each copy of the model.
        """
        context = self._mesh.cp
        return [context_part(one, size=context.size, rank=context.rank) for one in batches[self._mesh.dp.rank]]

    def log_probabilities(self, training: Training, batches: Sequence[Sequence[Batch]]) -> dict[int, Tensor]:
        """Returns the fp32 log-probabilities of the labels of micro-batches by place, without gradient: on the ranks
        that have the last stage, of those rows that they compute. Collective.

        Args:
            training: the model.
            batches: whole ones of each copy of the model.
        """

        def read(model: Decoder, out: Tensor, batch: Batch, context: TokenContext) -> Tensor:
            return -model.token_figures(out, batch, context).losses_T

        return self.read(training, batches, read)

    def read(self, training: Training, batches: Sequence[Sequence[Batch]], head: ReadHead) -> dict[int, Tensor]:
        """Returns what a function makes of the last layer's output, as `log_probabilities`. Collective.

        Args:
            training, batches: as there.
            head: a result [T, ...], of the tokens that this rank holds.
        """
        own = self.own(batches)

        def read(model: Decoder, out: Tensor, batch: Batch, context: TokenContext) -> Tensor:
            inputs = batch.part(TokenInputs)
            assert inputs is not None
            return whole_row(head(model, out, batch, context), sum(inputs.lengths), self._mesh.cp)

        found = training.stages.read_head(own, read)
        return {} if found is None else dict(zip(map(place_of, own), found, strict=True))

    def gathered(self, found: Mapping[_Key, Mapping[int, Tensor]]) -> dict[_Key, list[Tensor]]:
        """Returns each request's log-probabilities on the host, in the order of its micro-batches, on rank 0; nothing
        elsewhere. Collective.

        Args:
            found: those that this rank knows, by place.
        """
        own: dict[_Key, dict[int, Tensor]] = {}
        if self._answers:
            own = {
                key: {place: logps.cpu() for place, logps in one.items() if place != FILLER}
                for key, one in found.items()
            }
        joined: dict[_Key, dict[int, Tensor]] = {key: {} for key in found}
        for part in self._ranks.gathered(own):
            for key, one in part.items():
                joined[key] |= one
        return {key: [one[place] for place in sorted(one)] for key, one in joined.items()}


def place_of(batch: Batch) -> int:
    """Returns the place of a micro-batch."""
    inputs = batch.part(TokenInputs)
    assert inputs is not None
    return inputs.place
