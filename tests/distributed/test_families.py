"""Every family under tensor, context and pipeline parallelism against one process, which is held to transformers
elsewhere.

All families share the processes of one spawn: losses, every parameter's and every adapter's gradient.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import Batch, Embeddings
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.import_export import import_checkpoint
from engine.data.collate import context_part
from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Part, build_decoder
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.attention.blocks import REFERENCE_BLOCKS
from engine.ops.attention.context_parallel import Method
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.pipeline.schedules import ScheduleChoice
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from tests.distributed.cases import cut, relative_error, uncut
from tests.support.family_models import (
    batch_of,
    engine_model,
    gradient_errors,
    make_model,
    stock_gradient,
    stock_losses,
)
from tests.support.family_table import FAMILIES
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

ADAPTERS = r"layers\..*(?<!weights)_proj"
KINDS = {
    "whole": {"trained": ".*"},
    "adapters": {"trained": "", "adapters": ADAPTERS},
    "whole sequence": {"trained": ".*", "sequence_parallel": True},
    "adapters sequence": {"trained": "", "adapters": ADAPTERS, "sequence_parallel": True},
}
QUICK_KINDS = ("whole", "adapters sequence")
QUICK = (
    "llama fused", "qwen3", "granite", "smollm3 with windows", "olmo2", "exaone4 with windows", "phi3 longrope",
    "gemma2", "gemma3", "mixtral", "qwen2 moe", "gpt oss", "deepseek v3 yarn", "glm moe dsa", "minimax m2",
    "qwen3.5 moe", "falcon h1 with norms", "nemotron h latent", "kimi linear",
)  # fmt: skip
"""Each kind of layer, head, norm and router that ranks divide."""
every_family = pytest.mark.parametrize("name", sampled(FAMILIES, QUICK))
Seen = tuple[Tensor, dict[str, Tensor], dict[str, ShardSpec]]


@functools.cache
def _alone(name: str, kind: str) -> Seen:
    return _run(_model(name), kind, single_process_mesh())


def _run(folder: Path, kind: str, mesh: Mesh) -> Seen:
    """Losses, gradients summed over the ranks that share them, and where they lie."""
    built, batch = engine_model(folder, mesh, **KINDS[kind]), batch_of()
    with torch.no_grad():
        losses = built.model(batch, built.stage.step)
    built.step.gradients([batch], 1.0)
    return losses, built.gradients(), built.specs()


_AT_ONCE = 16


def _beside(name: str) -> tuple[str, ...]:
    """The families that share one spawn with this one: each spawn has a time limit."""
    every = [one for one in FAMILIES if (one in QUICK) == (name in QUICK)]
    first = every.index(name) // _AT_ONCE * _AT_ONCE
    return tuple(every[first : first + _AT_ONCE])


def _run_all(folder: str, names: tuple[str, ...], kinds: tuple[str, ...]) -> dict[tuple[str, str], Seen]:
    seen = {}
    for name in names:
        place = Path(folder) / name.replace(" ", "-")
        kv_heads = open_source(place).model.decoder.num_kv_heads
        mesh = build_mesh(RankGrid(tp=dist.get_world_size()), device_type="cpu", num_kv_heads=kv_heads)
        for kind in kinds:
            seen[name, kind] = _run(place, kind, mesh)
    return seen


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="families-")


@functools.cache
def _model(name: str) -> Path:
    """A family's model in the folder; every other family's partitioned for two ranks."""
    place = Path(_folder().name) / name.replace(" ", "-")
    if [*FAMILIES].index(name) % 2:
        make_model(name, place)
    else:
        stock = place.with_name(f"stock-{place.name}")
        make_model(name, stock)
        import_checkpoint(open_source(stock), place, tensor=2)
    return place


def _models(names: tuple[str, ...]) -> str:
    """The folder in which these families' models are."""
    for name in names:
        _model(name)
    return _folder().name


FOUR = ("olmo2",)
"""On four ranks too: with two key heads, each on two ranks, a norm over all heads counts every head once."""


@functools.cache
def _ranks(names: tuple[str, ...], world: int, quick: bool) -> list[dict[tuple[str, str], Seen]]:
    kinds = tuple(kind for kind in KINDS if (kind in QUICK_KINDS) == quick)
    return spawn(_run_all, world=world, args=(_models(names), names, kinds), timeout=110)


@pytest.mark.parametrize("kind", sampled(KINDS, QUICK_KINDS))
@pytest.mark.parametrize(
    ("name", "world"),
    sampled(
        [*((name, 2) for name in FAMILIES), *((name, 4) for name in FOUR)],
        [*((name, 2) for name in QUICK), *((name, 4) for name in FOUR)],
    ),
)
def test_ranks_equal_one_process(name: str, world: int, kind: str):
    expected_losses, local, whole = _alone(name, kind)
    expected = {key: uncut(value, whole[key]) for key, value in local.items()}
    names = _beside(name) if world == 2 else FOUR
    for losses, gradients, specs in (rank[name, kind] for rank in _ranks(names, world, kind in QUICK_KINDS)):
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=2e-5)
        assert gradients.keys() == expected.keys()
        errors = gradient_errors(gradients, {key: cut(value, specs[key]) for key, value in expected.items()})
        # fp32 sums of a few hundred terms in another order
        assert max(errors.values()) < 2e-5, {key: error for key, error in errors.items() if error >= 2e-5}


METHODS = ("ring", "ulysses")


def _methods(source: WeightSource) -> tuple[Method, ...]:
    """How a family's rows may be split: ring attention has neither windows nor soft caps."""
    decoder = source.model.decoder
    if decoder.unread_modules:  # an indexer, which compares whole documents
        return ()
    plain = decoder.attention_softcap is None and all(kind.window is None for kind in decoder.layer_kinds)
    return METHODS if plain else ("ulysses",)


def _run_context(folder: str, names: tuple[str, ...]) -> dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]]:
    """The rank's own tokens: their coordinates, losses, and the gradient that reaches their embeddings."""
    mesh = build_mesh(RankGrid(cp=2), device_type="cpu", num_kv_heads=2)
    batch = context_part(batch_of(), size=2, rank=mesh.cp.rank)
    seen = {}
    for name in names:
        source = open_source(Path(folder) / name.replace(" ", "-"))
        for method in _methods(source):
            layout = TensorLayout(cp=mesh.cp, context_method=method, attention_blocks=REFERENCE_BLOCKS)
            seen[name, method] = _embedding_gradient(source, layout, batch)
    return seen


def _embedding_gradient(source: WeightSource, layout: TensorLayout, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    common = {"plan": TrainingPlan(), "device": torch.device("cpu"), "dtype": torch.float32}
    model = build_decoder(source.model.decoder, layout=layout, **common)
    load_parameters([entry.shard for entry in shard_entries(model)], source)
    x = model.embed(batch).detach().requires_grad_()
    losses = model(batch.with_parts(Embeddings(embeddings_TH=x)), torch.tensor(0))
    losses.sum().backward()
    return batch.token_index_BS.flatten(), losses.detach(), x.grad


@functools.cache
def _context_ranks(names: tuple[str, ...]) -> list[dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]]]:
    return spawn(_run_context, world=2, args=(_models(names), names), timeout=110)


@every_family
def test_rows_over_context_ranks(name: str):
    """Windows and soft caps under Ulysses, which sees whole documents; the others under ring attention too."""
    source = open_source(_model(name))
    place, expected_losses, expected = _embedding_gradient(source, TensorLayout(), batch_of())
    order = {int(index): row for row, index in enumerate(place)}
    assert ("ring" in _methods(source)) == (name in WITHOUT_WINDOWS)
    for method in _methods(source):
        for own, losses, gradient in (rank[name, method] for rank in _context_ranks(_beside(name))):
            rows = torch.tensor([order[int(index)] for index in own])
            torch.testing.assert_close(losses, expected_losses[rows], rtol=0, atol=2e-5)
            assert relative_error(gradient, expected[rows]) < 2e-5, method


def _run_sinks(folder: str, world: int) -> dict[str, Tensor]:
    """The gradients of all ranks' tokens; those of the losses' sum."""
    mesh = build_mesh(RankGrid(cp=world), device_type="cpu", num_kv_heads=2)
    built = engine_model(Path(folder), mesh)
    built.step.gradients([context_part(batch_of(), size=world, rank=mesh.cp.rank)], 1.0)
    return built.gradients()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sinks_in_ring_attention_are_transformers(world: int, tmp_path: Path):
    """Without its windows, gpt-oss has the gradients of transformers' model, those of the sinks among them. With sinks
    that are taken in twice they are off by up to 1.3."""
    stock = make_model("gpt oss", tmp_path / "hf", layer_types=["full_attention"] * 4)
    assert not any(kind.window for kind in open_source(tmp_path / "hf").model.decoder.layer_kinds)
    stock_losses(stock, batch_of())[1].sum().backward()
    ranks = spawn(_run_sinks, world=world, args=(str(tmp_path / "hf"), world), timeout=110)
    for found in ranks:
        assert sum(name.endswith(".sinks.weight") for name in found) == 4
        errors = gradient_errors(found, {name: stock_gradient(stock, tmp_path / "hf", name) for name in found})
        assert max(errors.values()) < 2e-5, {key: error for key, error in errors.items() if error >= 2e-5}


WITHOUT_WINDOWS = (
    "llama", "llama fused", "mistral without window", "qwen2", "qwen3", "granite", "minicpm", "smollm3", "olmo2",
    "olmo hybrid", "lfm2", "lfm2 with biases", "lfm2 moe",
    "olmo2 one head each", "phi3 longrope", "gemma3 without windows", "qwen2 moe", "qwen3 moe", "olmoe",
    "qwen3 next", "qwen3.5", "qwen3.5 moe", "bamba", "granite hybrid", "granite hybrid moe", "nemotron h",
    "nemotron h latent",
    "kimi linear", "falcon h1", "falcon h1 with norms",
    "glm4 moe", "glm4 moe without groups", "deepseek v2", "deepseek v2 greedy", "deepseek v3", "deepseek v3 yarn",
    "glm4 moe lite", "minimax m2", "seed oss", "exaone4", "arcee", "ernie 4.5", "ernie 4.5 moe", "hunyuan",
    "hunyuan moe", "ministral3", "glm", "glm4",
)  # fmt: skip


def _run_pipeline(folder: str, names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """Gradients of the parameters on this rank's half of the layers, everything trained."""
    mesh = build_mesh(RankGrid(pp=2), device_type="cpu", num_kv_heads=2)
    return {name: _half(Path(folder) / name.replace(" ", "-"), mesh) for name in names}


def _half(folder: Path, mesh: Mesh) -> dict[str, Tensor]:
    source, device, rank = open_source(folder), torch.device("cpu"), mesh.pp.rank
    model = build_decoder(
        source.model.decoder,
        layout=TensorLayout(pp_ends=mesh.pp_ends),
        plan=TrainingPlan(trains=lambda _: True),
        device=device,
        dtype=torch.float32,
        part=Part(first=2 * rank, last=2 * rank + 2, embedding=rank == 0, head=rank == 1),
    )
    stage = ModelStage(model, LanguageModeling(), device, gives_gradient=rank > 0, step=torch.tensor(0))
    stages = Stages({rank: stage}, mesh.pp, ScheduleChoice(name="1f1b", num_ranks=2))
    flat = FlatParameters(stages.entries(), device)
    buffers = [entry.shard for entry in stages.entries() if entry.sink is None]
    load_parameters([*buffers, *flat.master_shards()], source)
    flat.publish()
    optimizer = FlatAdamW(flat, mesh, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, clip_grad_norm=0.0)
    step = TrainStep(stages, GradientReducer(flat, mesh, bucket_bytes=2048), optimizer, mesh)
    batch = batch_of()
    step.gradients([batch, batch], 2.0)  # two micro-batches, so that both stages work at once
    return {slot.entry.name: slot.view(flat.gradient).clone() for slot in flat.slots}


@functools.cache
def _pipeline_ranks(names: tuple[str, ...]) -> list[dict[str, dict[str, Tensor]]]:
    return spawn(_run_pipeline, world=2, args=(_models(names), names), timeout=110)


@every_family
def test_layers_over_pipeline_ranks(name: str):
    """Kinds of layers keep their numbers, ropes and windows; tied matrices lie on both ends."""
    _, expected, _ = _alone(name, "whole")
    halves = [rank[name] for rank in _pipeline_ranks(_beside(name))]
    assert set(halves[0]) | set(halves[1]) == set(expected)
    for half in halves:
        errors = gradient_errors(half, {key: expected[key] for key in half})
        # fp32 sums of a few hundred terms in another order
        assert max(errors.values()) < 2e-5, {key: error for key, error in errors.items() if error >= 2e-5}
