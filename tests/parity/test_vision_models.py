"""Whole vision-language models against what the originals' own code gave: logits, loss and every recorded gradient."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_weights import open_source
from engine.config.matching import matches_target, matches_trainable
from engine.distributed.mesh import single_process_mesh
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder
from engine.models.names import NameMap
from engine.objectives.language_modeling import LanguageModeling
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from engine.vision.batch_parts import Images
from tests.distributed.cases import relative_error
from tests.support.shared_data import DATA, shared
from tests.support.vision_fixtures import VisionFixture, flatten_image

CPU = torch.device("cpu")
CASES = {
    "minicpm-v-2": ("one_image", "two_images", "text_only", "chat_batch", "chat_sliced"),
    "minicpm-v-2_6": ("one_image", "two_images_slices", "text_only", "mixed_image_and_text", "chat_batch"),
    "omnilmm": ("one_image", "two_samples", "text_only", "text_then_image", "chat_training", "image_size_of_pos_grid"),
}


@dataclass(frozen=True)
class Built:
    model: Decoder
    step: TrainStep
    flat: FlatParameters
    names: NameMap


def build(name: str, plan: TrainingPlan, *, decay: float = 0.0, beta2: float = 0.999) -> Built:
    """The whole model in fp32 on one process; adapters are zero."""
    source = open_source(shared(f"vision/{name}"))
    model = Decoder(source.model.decoder, layout=TensorLayout(), plan=plan, device=CPU, dtype=torch.float32)
    load_parameters([entry.shard for entry in shard_entries(model) if "lora" not in entry.name], source)
    mesh, flat = single_process_mesh(), FlatParameters(shard_entries(model), CPU)
    load_parameters([shard for shard in flat.master_shards() if "lora" not in shard.name], source)
    optimizer = FlatAdamW(flat, mesh, betas=(0.9, beta2), eps=1e-8, weight_decay=decay, clip_grad_norm=0.0)
    stage = ModelStage(model, LanguageModeling(), CPU)
    reducer = GradientReducer(flat, mesh, bucket_bytes=1 << 20)
    return Built(model, TrainStep(Stages.whole(stage), reducer, optimizer, mesh), flat, source.model.names)


def _images(fixture: VisionFixture, case: str, patch: int) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """Patches and grid of each tile of a case."""
    tiles = fixture.series(f"{case}.pixel_values")
    sizes = torch.cat(fixture.series(f"{case}.tgt_sizes") or [torch.empty(0, 2, dtype=torch.int32)]).tolist()
    if f"{case}.images" in fixture.inputs:
        tiles = list(fixture.inputs[f"{case}.images"])
    for number, tile in enumerate(tiles):
        patches = flatten_image(tile, patch)
        grid = sizes[number] if sizes else [length // patch for length in tile.shape[1:]]
        yield patches, (grid[0], grid[1])


def _places(fixture: VisionFixture, case: str, ids_BS: Tensor) -> Tensor:
    """Tokens that features replace."""
    mask = torch.zeros_like(ids_BS, dtype=torch.bool)
    if "im_patch" in str(fixture.hf.get("fixture_ids", "")) or fixture.hf["model_type"] == "omnilmm":
        mask = ids_BS == _omnilmm_patch(fixture, case, ids_BS)
    for row in range(ids_BS.shape[0]):
        for first, last in fixture.inputs.get(f"{case}.image_bound.{row}", torch.empty(0, 2)).int().tolist():
            mask[row, first:last] = True
    return mask.flatten().nonzero().flatten()


def _omnilmm_patch(fixture: VisionFixture, case: str, ids_BS: Tensor) -> int:
    """<im_patch>, which the fixture's tokenizer has as the most frequent id behind its 512 pieces."""
    added = ids_BS[ids_BS >= 512]
    return int(added.mode().values) if added.numel() else -1


def make_batch(fixture: VisionFixture, case: str) -> Batch:
    """The case's input; padding is a document of its own."""
    ids, labels = fixture.inputs[f"{case}.input_ids"], fixture.inputs[f"{case}.labels"]
    if fixture.hf["model_type"] == "omnilmm":  # whose model shifts labels
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_LABEL)], dim=1)
    rows, length = ids.shape
    held = fixture.inputs[f"{case}.attention_mask"].sum(1).tolist()
    lengths = tuple(one for count in held for one in (count, length - count) if one)
    images = list(_images(fixture, case, 14))
    return Batch(
        tokens_BS=ids,
        labels_BS=labels,
        positions_BS=torch.arange(length).expand(rows, length),
        token_index_BS=torch.arange(ids.numel()).view_as(ids),
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        document_lengths=lengths,
    ).with_parts(
        Images(
            patches_PF=torch.cat([patches for patches, _ in images]) if images else torch.empty(0, 588),
            grids=tuple(grid for _, grid in images),
            documents=(0,) * len(images),
            places_K=_places(fixture, case, ids),
        )
    )


@functools.cache
def fixture_of(name: str) -> VisionFixture:
    return VisionFixture(name)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_equals_the_original(name: str, case: str):
    fixture, built = fixture_of(name), build(name, TrainingPlan(trains=lambda _: True))
    batch = make_batch(fixture, case)
    expected = {
        key.removeprefix(f"{case}."): value for key, value in fixture.expected.items() if key.startswith(f"{case}.")
    }
    real = fixture.inputs[f"{case}.attention_mask"].bool()
    with torch.no_grad():
        context = built.model.context(batch, torch.tensor(0), training=False)
        x = built.model.embed(batch)
        logits = built.model.logits(built.model.run_layers(x, context), context).view(*real.shape, -1)
    vocabulary = fixture.hf["vocab_size"]
    if "inputs_embeds" in expected:
        torch.testing.assert_close(x.view(*real.shape, -1)[real], expected["inputs_embeds"][real], rtol=0, atol=1e-5)
    if "logits" in expected:
        torch.testing.assert_close(logits[..., :vocabulary][real], expected["logits"][real], rtol=0, atol=1e-5)
    count = float(batch.loss_weights_BS.sum())
    loss = built.step.gradients([batch], count)
    assert loss.item() == pytest.approx(expected["loss"].item(), abs=1e-5)
    norm = torch.linalg.vector_norm(built.flat.gradient.double())
    assert norm.item() == pytest.approx(expected["grad_norm_all"].item(), rel=2e-4)
    found = {built.names.to_hf(slot.entry.name): slot.view(built.flat.gradient) for slot in built.flat.slots}
    by_name = {location.name: value for location, value in found.items()}
    for key, value in expected.items():
        kind, _, parameter = key.partition(".")
        if kind == "grad_norm":
            assert by_name[parameter].norm().item() == pytest.approx(value.item(), rel=2e-4), key
        elif kind == "grad":
            assert relative_error(by_name[parameter], value) < 2e-4, key
        elif kind.startswith("grad_stride"):
            assert relative_error(by_name[parameter][:: int(kind.removeprefix("grad_stride"))], value) < 2e-4, key
        elif kind == "grad_rows":
            rows = expected[f"grad_row_index.{parameter}"]
            assert relative_error(by_name[parameter][rows], value) < 2e-4, key


def _lora_runs() -> list[tuple[str, str]]:
    files = sorted(path for name in CASES for path in (DATA / "vision" / name).glob("lora*.safetensors"))
    return [(path.parent.name, path.stem) for path in files]


@pytest.mark.parametrize(("name", "run"), _lora_runs())
def test_adapters_train_as_in_peft(name: str, run: str):
    """Five steps of torch's AdamW on the original model under PEFT: losses, and every tensor that was kept."""
    facts = json.loads((shared(f"vision/{name}") / "lora.json").read_text(encoding="utf-8"))
    facts = facts.get(run, facts)
    stored = load_file(shared(f"vision/{name}") / f"{run}.safetensors")
    names = open_source(shared(f"vision/{name}")).model.names
    targets = (facts["target"],) if "target" in facts else tuple(facts["target_modules"])
    start = load_file(shared(f"vision/{name}") / "lora.safetensors")  # of every run in the folder
    settings = AdapterSettings(rank=facts["r"], scale=facts["scaling"], dropout=0.0)

    def adapter(module: str) -> AdapterSettings | None:
        return settings if matches_target(module, targets, (names.module_to_hf(module),)) else None

    def trains(module: str) -> bool:
        return matches_trainable(module, facts.get("modules_to_save", ()), (names.module_to_hf(module),))

    plan = TrainingPlan(trains=trains, adapter=adapter)
    options = facts["optimizer"]
    built = build(name, plan, decay=options["weight_decay"], beta2=options["betas"][1])
    for shard in built.flat.master_shards():
        if "lora" in shard.name:
            shard.tensor.copy_(start[f"init.{peft_name(names, shard.name)}"])
    built.flat.publish()
    batch = make_batch(fixture_of(name), facts["case"])
    count = float(batch.loss_weights_BS.sum())
    losses = [built.step([batch], count, options["lr"]).loss.item() for _ in range(5)]
    losses.append(built.step.gradients([batch], count).item())
    assert losses == pytest.approx(facts["losses_before_each_of_5_steps_then_after"], abs=1e-4)
    found = {peft_name(names, shard.name): shard.tensor for shard in built.flat.master_shards()}
    compared = set()
    for key, value in stored.items():
        kind, _, rest = key.partition(".")
        parameter = rest.removeprefix("final.")
        if kind == "final":
            ours = found[rest]
            if ours.dim() == 1:  # the engine's decay leaves vectors out, the run's did not
                ours = ours * (1 - options["lr"] * options["weight_decay"]) ** 5
            if rest.endswith("in_proj_bias"):
                # a bias of keys shifts all scores of a query alike, so that its gradient is rounding, which Adam scales
                width = value.shape[0] // 3
                ours, value = (torch.cat([one[:width], one[2 * width :]]) for one in (ours, value))
            torch.testing.assert_close(ours, value, rtol=0, atol=1e-4)
        elif kind.startswith("stride"):
            torch.testing.assert_close(found[parameter][:: int(kind.removeprefix("stride"))], value, rtol=0, atol=1e-4)
        elif kind == "norm":
            assert found[parameter].norm().item() == pytest.approx(value.item(), abs=1e-3)
        if kind != "init":
            compared.add(rest.removeprefix("final."))
    assert compared >= found.keys() or run != "lora", found.keys() - compared


def peft_name(names: NameMap, name: str) -> str:
    """What PEFT calls a parameter in a saved adapter."""
    suffix = ".weight" if name.endswith(("lora_A", "lora_B")) else ""
    return f"base_model.model.{names.to_hf(name).name}{suffix}"
