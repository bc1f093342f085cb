"""The pass that gives a model's storages their places: what takes memory while the model is built, and the order in
which units are fetched ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.distributed.mesh import Axis
from engine.layers import host_storage
from engine.layers.context import TensorLayout
from engine.layers.host_copies import PlainHostMemory
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models import decoder
from engine.models.decoder import Decoder
from tests.distributed.cases import Case, small_config

CPU = torch.device("cpu")
LAYERS = 3
PLACES = {
    "spread": lambda: WeightPlacement(Axis("dp_cp", 2, 0)),
    "host": lambda: WeightPlacement(Axis("dp_cp"), host=PlainHostMemory()),
}


def _build(weights: WeightPlacement, *, tied: bool = False, trained: str = "", adapters: str = ".*_proj") -> Decoder:
    case = Case(config=small_config(num_layers=LAYERS, tied_embeddings=tied), adapters=adapters, trained=trained)
    return Decoder(
        case.config, layout=TensorLayout(), plan=case.plan(), device=CPU, dtype=torch.float32, weights=weights
    )


def _bytes_here(model: torch.nn.Module) -> int:
    """Bytes of the storages of a model's parameters that have memory."""
    storages = {entry.parameter.untyped_storage()._cdata: entry for entry in shard_entries(model)}
    return sum(entry.parameter.untyped_storage().nbytes() for entry in storages.values())


@pytest.mark.parametrize("place", PLACES)
def test_a_unit_gives_its_memory_up_before_the_next_one_is_built(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model larger than its device is never there as a whole."""
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1)
    built: list[torch.nn.Module] = []
    here: list[int] = []

    class Watched(decoder.DecoderLayer):
        def __init__(self, *args: Any, **options: Any) -> None:
            here.append(sum(map(_bytes_here, built)))
            super().__init__(*args, **options)
            assert _bytes_here(self) > 0
            built.append(self)

    monkeypatch.setattr(decoder, "DecoderLayer", Watched)
    model = _build(PLACES[place](), adapters="", trained="")
    assert len(built) == LAYERS and here == [0] * LAYERS
    # the last norm is read under a frozen head too, and stays
    assert model.norm is not None
    assert _bytes_here(model) == _bytes_here(model.norm) > 0


@pytest.mark.parametrize("place", PLACES)
def test_units_know_their_neighbours_in_forward_order(place: str) -> None:
    units = _build(PLACES[place]())._units
    assert len(units) == LAYERS + 2
    for index, unit in enumerate(units):
        assert unit.previous is (units[index - 1] if index else None)
        assert unit.next is (units[index + 1] if index + 1 < len(units) else None)
        assert unit.is_last == (index == LAYERS + 1)
    # frozen, the embedding is not read in backward, and the head's loss leaves its gradient in forward
    assert [unit.needs_backward for unit in units] == [False, *[True] * LAYERS, False]


def test_backward_reads_an_adapted_embedding_and_a_trained_head() -> None:
    units = _build(PLACES["spread"](), adapters="embed_tokens", trained="lm_head")._units
    assert [unit.needs_backward for unit in units] == [True] * (LAYERS + 2)


@pytest.mark.parametrize("place", PLACES)
def test_a_tied_matrix_comes_for_both_ends(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1)
    units = _build(PLACES[place](), tied=True)._units
    assert len(units[0].memory) == 1 and units[0].memory[0] in units[-1].memory
    assert not any(units[0].memory[0] in unit.memory for unit in units[1:-1])


def test_without_ranks_or_host_memory_everything_stays() -> None:
    weights = WeightPlacement(Axis("dp_cp"))
    model = _build(weights)
    assert all(weights.is_resident(entry.parameter) for entry in shard_entries(model))
    assert not any(unit.memory or unit.needs_backward for unit in model._units)
