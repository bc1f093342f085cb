"""How much the planner builds and traces for an answer: each kind of layer once, whatever the number of layers, and
nothing of a layout that cannot fit."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.lora import LoraOptions
from engine.config.parallel import ParallelOptions
from engine.layers.module import shard_entries
from engine.layers.recompute import Level, MemoryPlan
from engine.models import decoder as decoders
from engine.models.decoder_layer import DecoderLayer
from engine.models.describe import meta_model, trained_shapes
from engine.models.families import family_of
from engine.models.layer_kinds import layer_kinds
from engine.planning import traces
from engine.planning.machine import MACHINES
from engine.planning.peak import predict_layout
from engine.planning.rank_layout import Layout
from engine.planning.search import SearchRequest, SearchResult, search
from engine.training.module_plan import training_plan
from tests.unit.test_planning_experts import MIXTURE
from tests.unit.test_planning_search import SMALL, _config, _workload

H100 = MACHINES["h100-80"]
WINDOWS = {
    **SMALL, "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
DENSE_FIRST = {**MIXTURE, "mlp_only_layers": [0, 1], "decoder_sparse_step": 1}
UPPER = LoraOptions(rank=4, targets=("layers[.][4567][.].*_proj",))
UNEVEN = LoraOptions(rank=4, rank_pattern={"layers[.]3[.]mlp[.]experts[.]5[.]down_proj": 8}, targets=(".*_proj",))
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "all alike": (SMALL, {}, (0,) * 8),
    "upper layers train": (SMALL, {"lora": UPPER}, (0, 0, 0, 0, 4, 4, 4, 4)),
    "one norm trains": (SMALL, {"trainable": ("layers[.]6[.]input_norm",)}, (0, 0, 0, 0, 0, 0, 6, 0)),
    "windows in turn": (WINDOWS, {}, (0, 1) * 4),
    "dense layers first": (DENSE_FIRST, {}, (0, 0, 2, 2)),
    "one expert of another rank": (MIXTURE, {"lora": UNEVEN}, (0, 0, 0, 3)),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_a_kind_are_built_alike(name: str) -> None:
    """As the whole model has them: the same names, shards, and trained parameters in each layer of a kind."""
    hf, changes, expected = KINDS[name]
    family, text = family_of(hf)
    decoder = family.config_from_hf(text)
    plan = training_plan(_config(**changes), decoder, family.names)
    assert layer_kinds(decoder, plan) == expected
    model = meta_model(decoder, plan=plan)
    layers = [
        [(one.name.split(".", 2)[2], one.spec, one.sink is None) for one in shard_entries(layer)]
        for layer in model.layers
    ]
    assert all(layers[index] == layers[kind] for index, kind in enumerate(expected))
    trained = {one.name: one.spec.global_shape for one in shard_entries(model) if one.sink is not None}
    assert trained_shapes(decoder, plan) == trained


class _Effort:
    """Counts the layers that are built, and the routings under which one is traced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers, self.routings = 0, list[str]()
        monkeypatch.setattr(decoders, "DecoderLayer", self._layer)
        monkeypatch.setattr(traces, "_tracer", self._trace)

    def _layer(self, *args: Any, **kwargs: Any) -> DecoderLayer:
        self.layers += 1
        return DecoderLayer(*args, **kwargs)

    def _trace(self, workload: Any, parallel: Any, part: Any, *options: Any) -> Any:
        if part.last > part.first:
            self.routings.append(workload.routing)
        return TRACER(workload, parallel, part, *options)


TRACER = traces._tracer


def test_what_is_built_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (4, 24):
        workload = _workload({**MIXTURE, "num_hidden_layers": layers, "vocab_size": 1999}, _config(500))
        effort = _Effort(monkeypatch)
        predict_layout(workload, Layout(parallel=ParallelOptions(expert=2), data=2), MemoryPlan())
        counts.append((effort.layers, effort.routings))
    # one that tells the kinds of layers apart, one for the sizes, and one for both traces: the first layer's, whose
    # input needs no gradient, and all others'
    assert counts == [(3, ["balanced"] * 2)] * 2


def test_the_ends_of_a_text_model_are_built_once() -> None:
    """Positions, embedding and head are traced on one model, and the layer on another."""
    workload = _workload({**SMALL, "vocab_size": 1997}, _config(492))
    before = traces._tracer.cache_info().misses
    predict_layout(workload, Layout(), MemoryPlan())
    assert traces._tracer.cache_info().misses - before == 2


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("level", ["selective", "full"])
@pytest.mark.parametrize("hf", [SMALL, MIXTURE], ids=["dense", "mixture"])
def test_a_piece_is_traced_again_as_if_it_were_new(hf: dict[str, Any], level: Level, defers: bool) -> None:
    """Whichever of the two was the first; with adapters, and with weights that train."""
    workload = _workload(hf, _config(512, lora=LoraOptions(targets=(".*_proj",)), trainable=("input_norm",)))
    found = []
    for order in ((True, False), (False, True), (True, True), (False, False)):
        traces._tracer.cache_clear()
        for needs in order:
            model = traces.RankModel(workload, ParallelOptions())  # knows no trace yet
            trace = model.layer(0, MemoryPlan(recompute=level), needs=needs, defers=defers)
            found.append((needs, trace))
    for needs in (True, False):
        first, *others = [trace for each, trace in found if each is needs]
        assert all(one == first for one in others)
    assert found[0][1] != found[1][1]


def _search(capacity: float, **changes: Any) -> SearchResult:
    config = _config(496)
    workload = _workload({**MIXTURE, "vocab_size": 1998}, config)
    wanted = SearchRequest(config=config, devices=2, capacity=capacity, **changes)
    return search(wanted, workload, H100)


def test_the_worst_routing_is_traced_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = _Effort(monkeypatch)
    found = _search(2**36)
    assert set(effort.routings) == {"balanced"}
    assert any(one.layout.parallel.expert > 1 for one in found.fitting)
    _search(2**36, routing="worst")
    assert set(effort.routings) == {"balanced", "worst"}


def test_weights_that_do_not_fit_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the few smallest layouts, whose steps an answer shows."""
    effort = _Effort(monkeypatch)
    found = _search(2**20)
    traced = [one for one in found.too_large if one.traced]
    assert not found.fitting and len(traced) == 8 < len(found.too_large)
    assert len(effort.routings) <= 2 * len(traced)
    smallest = found.too_large[0]
    assert smallest.traced and smallest.memory.recompute == "full"
    assert smallest.peak == min(one.peak for one in traced)
    for one in found.too_large[8:]:
        (static,) = {max(sum(rank.static.values()) for rank in one.estimates)}
        assert 2**20 < static <= one.peak
