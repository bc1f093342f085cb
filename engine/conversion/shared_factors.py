"""Adapters whose factors the experts of a layer share, as if each expert had its own, and the other way round.

A run with `lora.experts shared_outer` or `shared` trains `layers.3.mlp.experts.gate_proj.lora_A` once for all experts.
Merging, exporting and generating read a pair of factors for each expert, which `EachExpert` gives them without a copy.
A run that starts from a folder with a pair for each expert finds their common factors in `CommonFactors`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.checkpoint.reader import Renamed, TensorReader
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.names import is_shared_factor, own_names


class EachExpert(Renamed):
    """A reader with both factors of every expert's adapters under the expert's name.

    Args:
        trained: trained values; those that experts share, once.
        decoder: of the model.
    """

    def __init__(self, trained: TensorReader, decoder: DecoderConfig) -> None:
        super().__init__(trained, {own: name for name in trained.tensor_names() for own in own_names(name, decoder)})


class CommonFactors(Renamed):
    """Reads a folder that has a factor for each expert, with one name for those that experts share.

    Args:
        adapter: both factors of every expert's adapters.
        wanted: names that a run trains.
        decoder: of the model.

    Raises:
        UserError: a factor that the run shares differs between experts.
    """

    def __init__(self, adapter: TensorReader, wanted: Sequence[str], decoder: DecoderConfig) -> None:
        shared = {name: own_names(name, decoder) for name in wanted if is_shared_factor(name)}
        replaced = {own for names in shared.values() for own in names}
        stored = {name: name for name in adapter.tensor_names() if name not in replaced}
        for name, (first, *others) in shared.items():
            if first not in adapter:
                continue
            value = adapter.read_whole(first)
            for other in others:
                if other not in adapter or not torch.equal(adapter.read_whole(other), value):
                    raise UserError(
                        f"lora.experts asks for one {name.rpartition('.')[2]} for all experts, but {first} and {other} "
                        f"differ in {adapter.label}: set lora.experts to per_expert."
                    )
            stored[name] = first
        super().__init__(adapter, stored)
