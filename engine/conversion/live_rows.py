"""Runs a model over rows of data with the engine's own decoder, on the CPU in fp32, one layer in memory at a time.

What is kept of the rows between two layers is their residual streams. Layers that need more of others than that are in
memory all at once.

Legend: T tokens, I input features of a linear, G blocks of C of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.conversion.live_logits import loaded, parts_of
from engine.conversion.proof import Live
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear

Watch = Callable[[nn.Module], AbstractContextManager[None]]
"""Watches a part of the model while all rows go through it."""


def mean_loss(live: Live, batches: Sequence[Batch], watch: Watch = lambda part: nullcontext()) -> float:
    """Returns the mean negative log-likelihood over the targets of all rows.

    Args:
        live: the model.
        batches: of rows; the memory of one batch's activations is taken beside a layer.
    """
    step, weight = torch.zeros((), dtype=torch.int64), 0.0
    streams: list[Tensor] = [torch.empty(0)] * len(batches)
    total = 0.0
    with torch.no_grad():
        for part in parts_of(live.config):
            model = loaded(live.config, part, live.tensors, live.plan)
            with watch(model):
                for place, batch in enumerate(batches):
                    context = model.context(batch, step, training=False)
                    x = model.embed(batch) if part.embedding else streams[place]
                    x = model.run_layers(x, context) if part.last > part.first else x
                    if part.head:
                        losses_T = model.token_losses(x, batch, context).double()
                        weights_T = batch.loss_weights_BS.flatten().double()
                        total += float((losses_T * weights_T).sum())
                        weight += float(weights_T.sum())
                    streams[place] = x
    return total / max(weight, 1e-30)


class InputMoments:
    """The second moments of linears' inputs: for each weight the mean product, over tokens, of any two input features
    of a block.

    Linears of a mixture's experts are not among them: an expert sees other tokens than its neighbours.

    Args:
        width: features of a block.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def of(self, name: str) -> Tensor | None:
        """Returns fp32 [G, C, C] of a weight by its logical name, the last block filled up with zeros; None where its
        inputs were not seen."""
        if (first := self._first.get(name)) is None:
            return None
        return self._sums[first] / max(1, self._tokens[first])

    @contextmanager
    def watch(self, part: nn.Module) -> Iterator[None]:
        """Adds up the inputs of all linears of a part while it runs."""
        linears = [one for one in part.modules() if isinstance(one, ColumnParallelLinear | RowParallelLinear)]
        handles = [one.register_forward_pre_hook(self._take) for one in linears]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, linear: nn.Module, given: Sequence[Any]) -> None:
        assert isinstance(linear, ColumnParallelLinear | RowParallelLinear), linear
        u, source = given[0], given[1]
        kernels, stream = linear.operands.kernels, source.stream
        if stream is not None and stream.passes(u) and stream.added is not None:
            x_TI = source.make_sum(u, stream.added, None, kernels)[0]
        else:
            x_TI = source.make(u, None, kernels)[0]
        x_TI = nn.functional.pad(x_TI.float(), (0, -x_TI.shape[1] % self.width))
        x_GTC = x_TI.unflatten(1, (-1, self.width)).transpose(0, 1)
        names = [entry.name for entry in linear.entries if entry.name.endswith(".weight")]
        for name in names:
            self._first[name] = names[0]
        if names:
            products = x_GTC.transpose(1, 2) @ x_GTC
            self._sums[names[0]] = self._sums[names[0]].add_(products) if names[0] in self._sums else products
            self._tokens[names[0]] = self._tokens.get(names[0], 0) + x_TI.shape[0]
