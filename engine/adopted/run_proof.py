"""The proof at the start of a run: a small model of the make of the run's, computed as the run will compute it.

Rows that pack documents, pipeline stages, tensor ranks and expert ranks are each compared with transformers' own model
of each document alone: token losses, and the gradients of what the run trains. What differs by more than rounding, or
raises, is refused with the layout that works. No weights are read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from engine.adopted.config import AdoptedConfig
from engine.adopted.expert_proof import expert_difference
from engine.adopted.forms import written_config
from engine.adopted.proof import (
    BOUND,
    Computed,
    Difference,
    Small,
    Trained,
    agreement,
    computed,
    difference,
    raised,
    reference,
    small_of,
)
from engine.adopted.small import chosen_layers, layer_kind
from engine.adopted.structure import FAULTS
from engine.batch import Batch
from engine.distributed.collectives import gather_objects
from engine.distributed.failures import CommunicationError
from engine.distributed.mesh import Axis, Mesh
from engine.errors import LostRankError, UserError
from engine.layers.context import TensorLayout
from engine.models.run_proof import AskedOfModel, ProofRow, RunProof

_PACKED, _SINGLE = (11, 13), (16,)
_SHOWN = 8
"""Layers to begin a stage at that a refusal lists."""
Failed = str
"""A phrase on what differs, or on what was raised."""


def prove(
    decoder: AdoptedConfig, asked: AskedOfModel, *, mesh: Mesh | None, world: Axis, device: torch.device
) -> RunProof:
    """Compares what a run asks for with transformers' model. Collective.

    Args:
        mesh: with the groups of tensor and expert ranks; None where there is one of each.
        world: all ranks.
        device: on which these compute.

    Raises:
        UserError: something of it is not the model, on every rank alike.
    """
    began = time.perf_counter()
    prefix = f"a small {decoder.family} model"
    trained = Trained.of(asked.trained)
    alone = _Case(decoder, trained, ranks=1, device=None)
    kinds = "documents packed into rows" if decoder.keeps_documents_apart else "rows of one document"
    whole = alone.cut((alone.small.config.num_layers,))
    rows = [_agreed(world, kinds, whole, lambda why: f"{prefix} is not transformers' own: {why}")]
    if len(asked.layers) > 1:
        rows.append(_stages(alone, asked.layers, world))
    if mesh is not None and mesh.tp.size > 1:
        with _exact_convolutions():
            rows.append(_tensor_ranks(decoder, trained, mesh, world, device))
    if mesh is not None and mesh.ep.size > 1:
        with _exact_convolutions():
            rows.append(_expert_ranks(decoder, trained, mesh, world, device))
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
        self.small = _small(decoder, trained, ranks=ranks, device=device)
        self.decoder = decoder
        batch = self.small.batch(_PACKED if decoder.keeps_documents_apart else _SINGLE)
        self.batch: Batch = batch if device is None else batch.to(device)
        self.wanted: Computed = reference(self.small, self.batch)

    def cut(self, layers: tuple[int, ...]) -> Difference | Failed:
        """Returns how far stages of so many layers are from it, or what they raised."""
        try:
            return agreement(self.small, self.batch, layers, self.wanted)
        except FAULTS as error:
            return raised(error)


def _small(decoder: AdoptedConfig, trained: Trained, *, ranks: int, device: torch.device | None) -> Small:
    small = small_of(json.loads(decoder.hf_config), trained, ranks, device)
    return replace(small, config=replace(small.config, attention=decoder.attention))


def _stages(case: _Case, layers: tuple[int, ...], world: Axis) -> ProofRow:
    """Compares stages: cut between all layers, or, where that is not the model, between layers as the run cuts.

    Args:
        layers: of each of the run's stages.
    """
    count, cuts = case.small.config.num_layers, list(accumulate(layers[:-1]))
    found = case.cut((1,) * count)
    wrong: list[int] = []
    right: list[int] = []
    if not _is_right(found):
        config = written_config(json.loads(case.decoder.hf_config))
        alike = [_alike(config, cut, case.decoder) for cut in range(1, case.decoder.num_layers)]
        single = {place: case.cut((place, count - place)) for place in range(1, count)}
        right = [cut for cut, places in enumerate(alike, 1) if all(_is_right(single[place]) for place in places)]
        wrong = [cut for cut in cuts if cut not in right]
        if wrong:
            found = next(single[place] for place in alike[wrong[0] - 1] if not _is_right(single[place]))
        else:
            places = sorted({place for cut in cuts for place in alike[cut - 1]})
            found = case.cut(tuple(stop - start for start, stop in pairwise((0, *places, count))))

    def refusal(why: str) -> str:
        where = f" where a stage begins at layer {wrong[0]}" if wrong else ""
        begins = f"{', '.join(map(str, right[:_SHOWN]))}{', ..' if len(right) > _SHOWN else ''}"
        instead = f", or parallel.layers_per_stage so that stages begin at layers of {begins}" if right else ""
        return (
            f"parallel.pipeline cuts the model into stages of [{', '.join(map(str, layers))}] layers, but a small "
            f"{case.decoder.family} model in stages is not the whole one{where}: {why}; set parallel.pipeline to 1"
            f"{instead}"
        )

    return _agreed(world, f"{len(layers)} stages", found, refusal)


def _is_right(found: Difference | Failed) -> bool:
    return isinstance(found, Difference) and found.is_rounding


def _alike(config: dict[str, Any], cut: int, decoder: AdoptedConfig) -> list[int]:
    """Returns the boundaries of the small model that are like one of the whole model: between layers of the same kinds,
    or else before a layer of the same kind, or else all. Where images are seen the first layers may be given features
    of them, so that only boundaries as deep, or the deepest, are like one.

    Args:
        config: of the whole model.
        decoder: its record.
        cut: the layer behind the boundary; so are those of the result, in the small model.
    """
    kinds = [layer_kind(config, index) for index in chosen_layers(config)]
    before, behind = layer_kind(config, cut - 1), layer_kind(config, cut)
    places = range(1, len(kinds))
    same = [place for place in places if (kinds[place - 1], kinds[place]) == (before, behind)]
    found = same or [place for place in places if kinds[place] == behind] or list(places)
    return [place for place in found if place >= min(cut, found[-1])] if decoder.sees_images else found


@contextmanager
def _exact_convolutions() -> Iterator[None]:
    """Keeps a GPU's convolutions from rounding to TF32 within, as they do by default."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _tensor_ranks(decoder: AdoptedConfig, trained: Trained, mesh: Mesh, world: Axis, device: torch.device) -> ProofRow:
    size = mesh.tp.size

    def built() -> Callable[[], Difference]:
        case = _Case(decoder, trained, ranks=size, device=device)
        parts = case.small.parts(layout=TensorLayout.over(mesh, cp=Axis("cp")))
        return lambda: difference(computed(parts, case.batch, mesh), case.wanted, parts)

    def refusal(why: str) -> str:
        return (
            f"parallel.tensor is {size}, but a small {decoder.family} model on {size} tensor ranks is not the one of "
            f"one rank: {why}; set parallel.tensor to 1"
        )

    return _over_ranks(world, f"{size} tensor ranks", built, refusal)


def _expert_ranks(decoder: AdoptedConfig, trained: Trained, mesh: Mesh, world: Axis, device: torch.device) -> ProofRow:
    size = mesh.ep.size

    def built() -> Callable[[], Difference]:
        small = _small(decoder, trained, ranks=size, device=device)
        layout = TensorLayout.over(mesh, cp=Axis("cp"))
        parts = small.parts(layout=layout)
        return lambda: expert_difference(small, parts, layout)

    def refusal(why: str) -> str:
        return (
            f"parallel.expert is {size}, but a small {decoder.family} model on {size} expert ranks is not the one of "
            f"one rank: {why}; leave parallel.expert out"
        )

    return _over_ranks(world, f"{size} expert ranks", built, refusal)


def _over_ranks(
    world: Axis, name: str, built: Callable[[], Callable[[], Difference]], refusal: Callable[[str], str]
) -> ProofRow:
    """Compares what ranks compute together. Collective.

    Args:
        built: builds this rank's part, and returns what computes and compares it.
    """
    why: Difference | Failed | None = None
    try:
        compare = built()
    except FAULTS as error:
        why = raised(error)
    if failed := next((one for one in gather_objects(why, world) if one is not None), None):
        raise UserError(f"{refusal(str(failed))}.")
    try:
        why = compare()
    except (CommunicationError, LostRankError):
        raise
    except FAULTS as error:  # at once, and not where all agree: the others may wait in a sum, which ends with this rank
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
