"""The way around weights that a micro-batch does not reach, as an expert without tokens."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.module import shard_entries
from engine.ops.gradients import past_unused
from engine.ops.inputs import LinearInput, NormInput


def bypassed(x: Tensor, module: nn.Module, source: LinearInput) -> Tensor:
    """Returns x, in whose backward the sinks report that `module` and `source` would add to, and nothing is added.

    Args:
        module: its trained parameters were not used.
        source: nor was its norm.
    """
    pairs = [(entry.parameter, entry.sink) for entry in shard_entries(module) if entry.sink is not None]
    sinks = [sink for _, sink in pairs]
    if isinstance(source, NormInput) and source.sink is not None:
        sinks.append(source.sink)
    return past_unused(x, sinks, [*(parameter for parameter, _ in pairs), *source.leaves()])
