"""Failures that hybrids were shipped with elsewhere, each as a test of its name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.config.load import parse_config
from engine.distributed.mesh import Axis
from engine.distributed.ranks import RankGrid
from engine.hybrids.families.qwen import QWEN3_5_TEXT, QWEN3_NEXT
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.initialise import fresh_values, initialise_weights
from engine.models.names import NameMap
from engine.training.module_plan import training_plan
from tests.distributed.cases import Case, build, make_batch, relative_error, trained_names
from tests.distributed.sharded_runs import assemble, put
from tests.hybrids.layouts import EVERY_LINEAR, MODELS, Place, Seen, step, step_of_documents
from tests.support.commands import options
from tests.support.spawning import spawn

CPU = torch.device("cpu")
HYBRIDS = ("qwen3.5", "qwen3 next", "granite hybrid", "falcon h1")
MIXER = re.compile(r"layers\.\d+\.(linear_attention|mamba)\.")


def _batch(first: int = 5, second: int = 70) -> Batch:
    length = first + second
    return make_batch([(0, (first, second))], row_length=length, seq_length=length, vocab_size=67, seed=1)


def _losses(name: str) -> Callable[[Batch], Tensor]:
    built = build(Case(config=MODELS[name], trained=".*"))

    def losses(batch: Batch) -> Tensor:
        with torch.no_grad():
            found: Tensor = built.model(batch, built.stage.step)
        return found

    return losses


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("first", [3, 40], ids=["the convolution's tail", "the state"])
def test_automodel_2131_2147_nothing_leaks_from_a_packed_document_into_the_next(name: str, first: int) -> None:
    """The second document's losses have the same bits whatever the first one says; of three, fewer than the taps,
    the convolution would read all."""
    losses, batch = _losses(name), _batch(first)
    other = batch.tokens_BS.clone()
    other[:, :first] = (other[:, :first] + 1) % 67
    seen, again = losses(batch), losses(replace(batch, tokens_BS=other))
    assert torch.equal(seen[first:], again[first:]) and not torch.equal(seen[: first - 1], again[: first - 1])


@functools.cache
def _expected(place: Place) -> dict[str, Tensor]:
    seen = step_of_documents(Place(model=place.model, grid=RankGrid(), rows=place.rows))
    return assemble([seen.gradients])


def _errors(place: Place) -> dict[str, float]:
    ranks: list[Seen] = spawn(step, world=2, args=(place,))
    found = assemble([one.gradients for one in ranks])
    return {name: relative_error(found[name], value) for name, value in _expected(place).items() if value.any()}


@pytest.mark.distributed
def test_prime_rl_3001_3003_a_state_is_not_lost_at_a_context_border_inside_a_document() -> None:
    """The rows' long documents lie on both ranks. Without the state that comes in, gradients are off by tenths."""
    errors = _errors(Place(model="qwen3.5", grid=RankGrid(cp=2), rows="short"))
    mixers = {name: error for name, error in errors.items() if MIXER.match(name)}
    assert len(mixers) == 3 * (5 * 2 + 4) and max(mixers.values()) < 5e-6, max(mixers, key=mixers.__getitem__)


@pytest.mark.distributed
def test_mcore_bridge_162_169_173_sequence_parallelism_neither_drops_a_mixer_nor_a_replicated_gradient() -> None:
    """A factors of the first product, B of the last one, and the gated norm's weight are replicated over ranks that see
    some tokens or heads each."""
    errors = _errors(Place(model="qwen3.5", grid=RankGrid(tp=2), rows="short", sequence=True))
    shared = {name: one for name, one in errors.items() if re.search(r"in_proj_\w+\.lora_A|out_proj.lora_B|norm", name)}
    assert len(shared) > 20 and max(shared.values()) < 5e-6, max(shared, key=shared.__getitem__)
    assert max(errors.values()) < 1e-5


def _plan_of(config: DecoderConfig, names: NameMap, **given: object) -> set[str]:
    run = parse_config(options({"model.path": "m", "data.train": "d", "train.steps": 1, **given}))
    plan = training_plan(run, config, names)
    places = Case(config=config, adapters=EVERY_LINEAR)
    modules = {name.rpartition(".")[0] for name in trained_names(places)}
    return {module for module in modules if plan.adapter(module) is not None and MIXER.match(module)}


@pytest.mark.parametrize(
    ("name", "names", "linears"),
    [
        ("qwen3.5", QWEN3_5_TEXT, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
        ("qwen3 next", QWEN3_NEXT, ("in_proj_qkvz", "in_proj_ba", "out_proj")),
    ],
)
@pytest.mark.parametrize("targets", [{}, {"lora.targets": "all-linear"}], ids=["default", "all-linear"])
def test_peft_3554_skyrl_2093_sglang_30499_every_projection_of_every_mixer_has_an_adapter(
    name: str, names: object, linears: tuple[str, ...], targets: dict[str, object]
) -> None:
    """With in_proj_ba, which servers dropped, and not on the four attention layers of 56 alone."""
    config = MODELS[name]
    found = _plan_of(config, names.names, **targets)  # type: ignore[attr-defined]
    assert found == {f"layers.{layer}.linear_attention.{leaf}" for layer in (0, 1, 3) for leaf in linears}


_VLLM = {
    "qwen3.5": {"in_proj_qkv": ["in_proj_qkv"], "in_proj_z": ["in_proj_z"], "in_proj_ba": ["in_proj_b", "in_proj_a"]},
    "qwen3 next": {"in_proj_qkvz": ["in_proj_qkvz"], "in_proj_ba": ["in_proj_ba"]},
}
"""vLLM's `packed_modules_mapping` of a delta net where LoRA is enabled: its linear -> the names that an adapter has."""


@pytest.mark.parametrize(("name", "family"), [("qwen3.5", QWEN3_5_TEXT), ("qwen3 next", QWEN3_NEXT)])
def test_vllm_35286_36825_exported_names_are_those_that_vllm_packs(name: str, family: object) -> None:
    modules = {one.rpartition(".")[0] for one in trained_names(Case(config=MODELS[name], adapters=EVERY_LINEAR))}
    exported = {family.names.module_to_hf(one) for one in modules if MIXER.match(one)}  # type: ignore[attr-defined]
    packed = [part for parts in _VLLM[name].values() for part in parts] + ["out_proj"]
    assert exported == {f"model.layers.{layer}.linear_attn.{leaf}" for layer in (0, 1, 3) for leaf in packed}


def _fresh(name: str, ranks: int) -> dict[str, Tensor]:
    """Vectors of a fresh model's mixers, whole."""
    whole: dict[str, Tensor] = {}
    for rank in range(ranks):
        layout = TensorLayout(tp=Axis("tp", size=ranks, rank=rank))
        model = Decoder(MODELS[name], layout=layout, plan=TrainingPlan(), device=CPU, dtype=torch.float32)
        entries = list(shard_entries(model))
        shards = [entry.shard for entry in entries]
        initialise_weights(shards, 1, 0.02, norm=0.0, fresh=fresh_values(entries))
        for key, tensor, spec in shards:
            if MIXER.match(key) and len(spec.global_shape) == 1:
                put(tensor, whole.setdefault(key, torch.full(spec.global_shape, torch.nan)), spec, out_of_whole=False)
    return whole


@pytest.mark.parametrize("name", HYBRIDS)
def test_megatron_bridge_5840_initial_values_of_a_do_not_depend_on_tensor_ranks(name: str) -> None:
    """Heads forget at several rates. Norms whose weight is all that they multiply by start from ones, also where the
    model's others start from zeros, so that a fresh mixer has an output."""
    one, two = _fresh(name, 1), _fresh(name, 2)
    assert one.keys() == two.keys() and all(torch.equal(value, two[key]) for key, value in one.items())
    rates = next(value.exp() for key, value in one.items() if key.endswith(".A_log.weight"))
    assert rates.min() > 0.9 and rates.max() < 16.1 and rates.unique().numel() == rates.numel()
    rest = {key: value for key, value in one.items() if not key.endswith(("A_log.weight", ".bias"))}
    assert len(rest) >= 6 and all(bool((value == 1).all()) for value in rest.values())
