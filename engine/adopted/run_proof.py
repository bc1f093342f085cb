"""The proof at the start of a run: a small model of the make of the run's, computed as the run will compute it.

Rows that pack documents, pipeline stages and tensor ranks are each compared with transformers' own model of each
document alone: token losses, and the gradients of what the run trains. What differs by more than rounding, or raises,
is refused with the layout that works. No weights are read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from engine.adopted.config import AdoptedConfig
from engine.adopted.forms import written_config
from engine.adopted.proof import (
    BOUND,
    RAISED,
    Computed,
    Difference,
    Small,
    Trained,
    attention_proof,
    computed,
    difference,
    proof_batch,
    raised,
    reference,
    small_of,
)
from engine.adopted.small import chosen_layers, layer_kind
from engine.batch import Batch
from engine.distributed.collectives import gather_objects
from engine.distributed.failures import CommunicationError
from engine.distributed.mesh import Axis, Mesh
from engine.errors import LostRankError, UserError
from engine.layers.context import TensorLayout
from engine.models.decoder import Decoder
from engine.models.run_proof import AskedOfModel, ProofRow, RunProof

_LENGTHS = {"engine": (11, 13), "own": (16,)}
Failed = str
"""A phrase on what differs, or on what was raised."""


def prove(
    decoder: AdoptedConfig, asked: AskedOfModel, *, mesh: Mesh | None, world: Axis, device: torch.device
) -> RunProof:
    """Compares what a run asks for with transformers' model. Collective.

    Args:
        mesh: with the tensor ranks' groups; None where there is one tensor rank.
        world: all ranks.
        device: on which tensor ranks compute.

    Raises:
        UserError: something of it is not the model, on every rank alike.
    """
    began = time.perf_counter()
    attention = attention_proof(decoder.hf_config)
    prefix = f"a small {decoder.family} model"
    if asked.packs_rows and decoder.attention == "own":
        packed = attention.packed
        reason = packed.sentence() if isinstance(packed, Difference) else packed
        raise UserError(
            f"data.packing puts several documents into a row, but {prefix} does not keep them apart: {reason}; set "
            "data.packing to false."
        )
    trained = Trained.of(asked.trained)
    rows = []
    alone = _Case(decoder, trained, ranks=1, device=None)
    kinds = "documents packed into rows" if decoder.attention == "engine" else "rows of one document"
    rows.append(
        _agreed(world, kinds, alone.found(alone.small.parts()), lambda why: f"{prefix} is not the model: {why}")
    )
    if len(asked.layers) > 1:
        rows.append(_stages(alone, asked.layers, world))
    if mesh is not None and mesh.tp.size > 1:
        rows.append(_tensor_ranks(decoder, trained, mesh, world, device))
    model = f"a small {decoder.family} model with what the run trains"
    return RunProof(model=model, rows=tuple(rows), seconds=time.perf_counter() - began)


class _Case:
    """A small model and what transformers computes of its batch.

    Args:
        decoder: of the run.
        trained: what the run trains.
        ranks: tensor ranks that divide it.
        device: None for the CPU.
    """

    def __init__(self, decoder: AdoptedConfig, trained: Trained, *, ranks: int, device: torch.device | None) -> None:
        small = small_of(json.loads(decoder.hf_config), trained, ranks, device)
        self.small: Small = replace(small, config=replace(small.config, attention=decoder.attention))
        self.decoder = decoder
        batch = proof_batch(_LENGTHS[decoder.attention], self.small.config.vocab_size)
        self.batch: Batch = batch if device is None else batch.to(device)
        self.wanted: Computed = reference(self.small, self.batch)

    def found(self, parts: Sequence[Decoder]) -> Difference:
        """Returns how far the parts are from it."""
        return difference(computed(list(parts), self.batch), self.wanted)

    def cut(self, layers: tuple[int, ...]) -> Difference | Failed:
        """Returns how far stages of so many layers are from it, or what they raised."""
        try:
            return self.found(self.small.parts(layers))
        except RAISED as error:
            return raised(error)


def _stages(case: _Case, layers: tuple[int, ...], world: Axis) -> ProofRow:
    """Compares stages: cut between all layers, or, where that is not the model, as the run cuts.

    Args:
        layers: of each of the run's stages.
    """
    name, count = f"{len(layers)} stages", case.small.config.num_layers
    everywhere = case.cut((1,) * count)
    if not _is_right(everywhere):
        config = written_config(json.loads(case.decoder.hf_config))
        right = _right_cuts(config, {cut: case.cut((cut, count - cut)) for cut in range(1, count)})
        wrong = [cut for cut in accumulate(layers[:-1]) if cut not in right]
        if not wrong:
            places = sorted(_small_cuts(config, list(accumulate(layers[:-1]))))
            everywhere = case.cut(tuple(stop - start for start, stop in pairwise((0, *places, count))))
    else:
        wrong, right = [], set()

    def refusal(why: str) -> str:
        where = f" where a stage begins at layer {wrong[0]}" if wrong else ""
        begins = ", ".join(map(str, sorted(right)[:8]))
        instead = f", or parallel.layers_per_stage so that stages begin at layers among {begins}" if right else ""
        return (
            f"parallel.pipeline cuts the model into stages of {_listed(layers)} layers, but a small "
            f"{case.decoder.family} model in stages is not the whole one{where}: {why}; set parallel.pipeline to 1"
            f"{instead}"
        )

    return _agreed(world, name, everywhere, refusal)


def _is_right(found: Difference | Failed) -> bool:
    return isinstance(found, Difference) and found.is_rounding


def _kinds(config: dict[str, Any], cut: int) -> tuple[str, str]:
    return layer_kind(config, cut - 1), layer_kind(config, cut)


def _small_cuts(config: dict[str, Any], cuts: Sequence[int]) -> set[int]:
    """Returns where the small model has boundaries of the kinds that the model has at `cuts`."""
    chosen = chosen_layers(config)
    wanted = {_kinds(config, cut) for cut in cuts}
    pairs = {
        place: (layer_kind(config, chosen[place - 1]), layer_kind(config, chosen[place]))
        for place in range(1, len(chosen))
    }
    return {place for place, kinds in pairs.items() if kinds in wanted}


def _right_cuts(config: dict[str, Any], found: dict[int, Difference | Failed]) -> set[int]:
    """Returns the layers of the whole model at which a stage may begin.

    Args:
        config: of the model.
        found: of a small model cut in two, by the layer at which the second begins.
    """
    chosen = chosen_layers(config)
    by_kinds: dict[tuple[str, str], bool] = {}
    by_later: dict[str, bool] = {}
    for place, one in found.items():
        before, later = (layer_kind(config, chosen[index]) for index in (place - 1, place))
        by_kinds[before, later] = by_kinds.get((before, later), True) and _is_right(one)
        by_later[later] = by_later.get(later, True) and _is_right(one)
    count = max(chosen) + 1
    return {cut for cut in range(1, count) if by_kinds.get(_kinds(config, cut), by_later.get(_kinds(config, cut)[1]))}


def _tensor_ranks(decoder: AdoptedConfig, trained: Trained, mesh: Mesh, world: Axis, device: torch.device) -> ProofRow:
    size = mesh.tp.size
    why: Difference | Failed | None = None
    try:
        case = _Case(decoder, trained, ranks=size, device=device)
        parts = case.small.parts(layout=TensorLayout.over(mesh))
    except RAISED as error:
        why = raised(error)

    def refusal(why: str) -> str:
        return (
            f"parallel.tensor is {size}, but a small {decoder.family} model on {size} tensor ranks is not the one of "
            f"one rank: {why}; set parallel.tensor to 1"
        )

    name = f"{size} tensor ranks"
    if failed := next((one for one in gather_objects(why, world) if one is not None), None):
        raise UserError(f"{refusal(str(failed))}.")
    try:
        why = difference(computed(parts, case.batch, mesh), case.wanted, parts)
    except (CommunicationError, LostRankError):
        raise
    except RAISED as error:  # at once, and not where all agree: the others may wait in a sum, which ends with this rank
        raise UserError(f"{refusal(raised(error))}.") from None
    return _agreed(world, name, why, refusal)


def _agreed(world: Axis, name: str, found: Difference | Failed, refusal: Callable[[str], str]) -> ProofRow:
    """Returns the row of the rank that is furthest. Collective.

    Raises:
        UserError: on every rank, where one's differs by more than rounding.
    """
    all_found = gather_objects(found if isinstance(found, str) else tuple(found), world)
    phrases = [one for one in all_found if isinstance(one, str)]
    if phrases:
        raise UserError(f"{refusal(phrases[0])}.")
    worst = max((Difference(*one) for one in all_found), key=lambda one: one.severity)  # type: ignore[misc]
    if not worst.is_rounding:
        raise UserError(f"{refusal(worst.sentence())}.")
    return ProofRow(name, worst.figure, worst.worst, BOUND)


def _listed(layers: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, layers)) + "]"
