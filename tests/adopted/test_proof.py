"""The proof at the start: what a run may ask of an adopted model, and each way to break it, refused by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding, pad

from engine.adopted import forms, proof, stage_ends, structure
from engine.adopted.config import AdoptedConfig, adopted_config
from engine.adopted.run_proof import prove
from engine.conversion.live_logits import live_logits
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.describe import meta_model
from engine.models.run_proof import AskedOfModel, RunProof
from engine.training.start_proof import prove_model
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

CPU = torch.device("cpu")


def _config(model_type: str, **sizes: int) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    found = json.loads(json.dumps(CONFIG_MAPPING[model_type](**sizes).to_dict(), default=str))
    return {**found, "model_type": model_type}


def _proof(decoder: AdoptedConfig, *, stages: tuple[int, ...] = (), ranks: int = 1) -> RunProof:
    """Proves a run that trains adapters on all linears, and norms."""
    settings = AdapterSettings(rank=2, scale=1.0, dropout=0.0)
    plan = TrainingPlan(
        adapter=lambda name: settings if ".module." in name else None, trains=lambda name: "norm" in name
    )
    trained = tuple(entry.name for entry in shard_entries(meta_model(decoder, plan=plan)) if entry.sink is not None)
    asked = AskedOfModel(trained=trained, layers=stages or (decoder.num_layers,))
    mesh, world = None, Axis("world")
    if ranks > 1:
        mesh = build_mesh(RankGrid(tp=ranks), device_type="cpu", num_kv_heads=decoder.num_kv_heads)
        world = Axis("world", ranks, dist.get_rank(), dist.group.WORLD)
    return prove(decoder, asked, mesh=mesh, world=world, device=CPU)


def _refusal(decoder: AdoptedConfig, **asked: Any) -> str:
    with pytest.raises(UserError) as error:
        _proof(decoder, **asked)
    return str(error.value)


@pytest.fixture
def afresh() -> Iterator[None]:
    """Forgets what is known of models, before and after their classes are patched."""
    known = (
        structure.whole_module,
        structure.structure_of,
        forms.forms_of,
        proof.attention_proof,
        stage_ends.stage_ends,
    )
    for found in known:
        found.cache_clear()
    yield
    for found in known:
        found.cache_clear()


@pytest.mark.parametrize("model_type", sampled(["glm4", "opt", "bloom", "rembert", "deepseek_v4"], ["glm4", "bloom"]))
def test_stages_are_the_model_also_where_something_comes_before_the_first_layer(model_type: str) -> None:
    decoder = adopted_config(_config(model_type, is_decoder=True))
    half = decoder.num_layers // 2
    found = _proof(decoder, stages=(half, decoder.num_layers - half))
    assert [row.compared for row in found.rows][1:] == ["2 stages"]
    assert all(row.worst <= row.bound for row in found.rows)
    assert RunProof.of(found.record()).table() == found.table()
    assert "2 stages" in found.line() and "2 stages" in found.facts()


@pytest.mark.parametrize("model_type", ["gpt2", "nanochat"])
def test_live_logits_are_transformers(model_type: str) -> None:
    """One layer at a time, with what comes before the first; or all at once, where later ones need the first input."""
    small = proof.small_of(_config(model_type))
    batch, (whole,) = proof.proof_batch((16,), small.config.vocab_size), small.parts()
    held = {entry.name: entry.parameter.detach() for entry in shard_entries(whole)}
    reader: Any = SimpleNamespace(read=lambda name, spec, out: out.copy_(held[name]))
    with torch.no_grad():
        found = live_logits(small.config, reader, batch.tokens_BS, small.plan())
        wanted = small.model(input_ids=batch.tokens_BS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "ctrl"])
def test_all_weights_train_where_linears_are_transposed_and_bodies_change_embeddings_in_place(model_type: str) -> None:
    decoder = adopted_config(_config(model_type))
    every = TrainingPlan(trains=lambda name: True)
    trained = tuple(entry.name for entry in shard_entries(meta_model(decoder, plan=every)) if entry.sink is not None)
    asked = AskedOfModel(trained=trained, layers=(decoder.num_layers,))
    (row,) = prove(decoder, asked, mesh=None, world=Axis("world"), device=CPU).rows
    assert row.worst <= row.bound


def test_stages_that_share_what_one_begins_with_are_refused() -> None:
    decoder = adopted_config(_config("hy_v4"))
    sentence = _refusal(decoder, stages=(16, decoder.num_layers - 16))
    assert "Shared DSA layers require top-k indices" in sentence
    assert "or parallel.layers_per_stage so that stages begin at layers of 1, 5, 9" in sentence


def test_a_stage_that_is_cut_inside_a_shared_block_is_refused_with_the_cuts_that_work(
    monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3TextModel

    whole, layer = Gemma3TextModel.forward, Gemma3DecoderLayer.forward
    shared: list[Tensor] = []

    @functools.wraps(whole)
    def runs(self: Any, *arguments: Any, **named: Any) -> Any:
        shared.clear()
        return whole(self, *arguments, **named)

    def shares(self: Any, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        """Has a layer with full attention read what went into the layer before it."""
        if self.self_attn.layer_type == "full_attention":
            return layer(self, hidden_states + sum(shared[-1:]), *arguments, **named)
        shared.append(hidden_states)
        return layer(self, hidden_states, *arguments, **named)

    monkeypatch.setattr(Gemma3TextModel, "forward", runs)
    monkeypatch.setattr(Gemma3DecoderLayer, "forward", shares)
    decoder = adopted_config(_config("gemma3_text", num_hidden_layers=12))
    sentence = _refusal(decoder, stages=(5, 7))
    assert "stages of [5, 7] layers" in sentence and "where a stage begins at layer 5: " in sentence
    assert "the gradient of layers." in sentence or "loss differs" in sentence
    assert sentence.endswith("so that stages begin at layers of 1, 2, 3, 4, 6, 7, 8, 9, ...")
    assert _proof(decoder, stages=(6, 6)).rows[-1].compared == "2 stages"


def test_a_mixer_that_leaks_between_documents_is_refused(monkeypatch: pytest.MonkeyPatch, afresh: None) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    plain = LlamaAttention.forward

    def leaks(self: Any, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        return plain(self, hidden_states + pad(hidden_states, (0, 0, 1, 0))[:, :-1], *arguments, **named)

    monkeypatch.setattr(LlamaAttention, "forward", leaks)
    decoder = adopted_config(_config("llama"))
    assert decoder.attention == "own"
    with pytest.raises(UserError, match=r"loss differs from transformers' own .* set data.packing to false"):
        decoder.check_packing()
    assert _proof(decoder).rows[0].compared == "rows of one document"


@pytest.mark.parametrize("looks_up_itself", [False, True])
def test_an_embedding_with_a_hidden_scale_is_computed_or_refused(
    looks_up_itself: bool, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    plain = LlamaModel.forward

    def scaled(self: Any, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **named: Any) -> Any:
        if inputs_embeds is None:
            table = self.embed_tokens
            found = embedding(input_ids, table.weight) if looks_up_itself else table(input_ids)
            inputs_embeds = found * 3.0
        return plain(self, inputs_embeds=inputs_embeds, **named)

    monkeypatch.setattr(LlamaModel, "forward", scaled)
    if looks_up_itself:
        with pytest.raises(UserError, match=r"cannot be adopted"):
            adopted_config(_config("llama"))
    else:
        assert adopted_config(_config("llama")).attention == "engine"


def _changed(config: Any, style: Callable[[dict[str, str]], dict[str, str]], decoder: AdoptedConfig) -> str:
    plan = config.base_model_tp_plan
    config.base_model_tp_plan = style(dict(plan))
    structure.whole_module.cache_clear()
    try:
        _proof(decoder, ranks=2)
    except UserError as error:
        return str(error)
    finally:
        config.base_model_tp_plan = plan
        structure.whole_module.cache_clear()
    return "proven"


def _broken_tensor_plans() -> list[str]:
    """Returns what the proof says on this rank: of a plan as it is, and of broken ones."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    dense = adopted_config(_config("qwen3", num_hidden_layers=2))
    mixture = adopted_config(_config("qwen3_moe", num_hidden_layers=2, num_experts=8))

    def without(name: str) -> Callable[[dict[str, str]], dict[str, str]]:
        return lambda plan: {key: value for key, value in plan.items() if key != name}

    found = [
        _changed(Qwen3Config, lambda plan: plan, dense),
        _changed(Qwen3Config, without("layers.*.self_attn.q_norm"), dense),
        _changed(Qwen3Config, lambda plan: {**plan, "layers.*.self_attn.o_proj": "colwise"}, dense),
        _changed(Qwen3MoeConfig, lambda plan: plan, mixture),
        _changed(Qwen3MoeConfig, without("layers.*.mlp.experts"), mixture),
    ]
    plain = proof.Small.parts
    if dist.get_rank() == 1:  # alone

        def fails(*arguments: Any, layout: Any = None, **named: Any) -> Any:
            if layout is not None:
                raise TypeError("of rank 1")
            return plain(*arguments, **named)

        proof.Small.parts = fails  # type: ignore[method-assign]
    found.append(_changed(Qwen3Config, lambda plan: plan, dense))
    return found


@pytest.mark.distributed
def test_tensor_plans_that_miss_a_sum_are_refused_on_every_rank() -> None:
    first, second = spawn(_broken_tensor_plans, world=2)
    assert first == second
    intact, norm, shape, mixture, experts, alone = first
    assert intact == mixture == "proven"
    assert "self_attn.q_norm.weight differs" in norm and "set parallel.tensor to 1" in norm
    assert "it raises RuntimeError" in shape
    assert "differs from transformers' own" in experts
    assert "it raises TypeError (of rank 1)" in alone


def test_the_proof_is_skipped_by_name_alone() -> None:
    said: list[str] = []
    config = SimpleNamespace(model=SimpleNamespace(proof=False))
    source = SimpleNamespace(model=SimpleNamespace(decoder=SimpleNamespace(proof="engine.adopted.run_proof:prove")))
    plan = SimpleNamespace()
    log = SimpleNamespace(warning=said.append)
    assert prove_model(config, None, log, source, plan) == (plan, None)  # type: ignore[arg-type, comparison-overlap]
    assert len(said) == 1 and "model.proof is false" in said[0]
