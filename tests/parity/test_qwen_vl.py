"""Qwen2.5-VL, Qwen3-VL, Qwen3.5 and MiniCPM-V 4.6 and 4.7 against transformers: logits, loss, every gradient, and
training against PEFT's."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from engine.batch import Batch
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_weights import open_source
from engine.data.tokenizer import load_tokenizer
from engine.distributed.mesh import single_process_mesh
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, Sampling
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.layers.recompute import MemoryPlan
from engine.models.decoder import Decoder
from engine.objectives.language_modeling import LanguageModeling
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from engine.vision.batch_parts import Images
from engine.vision.data.families import read_vision_family
from engine.vision.data.reader import ImageReader
from rankfold.generating.prompts import Prompt, Writer, requests_of
from tests.distributed.cases import relative_error, uncut
from tests.parity.test_generate_images import opened
from tests.support.generation import Ids
from tests.support.peft_following import ALONE, DECAY, LR, build
from tests.support.qwen_vl import KINDS, batch_of, make_model, stock_images, stock_loss, stock_outputs
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

CPU = torch.device("cpu")
CASES = [(kind, packing) for kind in KINDS for packing in (False, True)]
QUICK = [case for number, case in enumerate(CASES) if number % 4 == 1]
"""Every other kind, in rows of several documents."""


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="qwen-vl-")


@functools.cache
def saved(kind: str) -> tuple[Path, Any, int]:
    """The folder, transformers' model, and the token that stands for a feature."""
    folder = Path(_root().name) / kind
    folder.mkdir(exist_ok=True)  # where a test before was skipped for lack of data
    model = make_model(kind, folder)
    return folder, model, model.config.image_token_id


def our_model(folder: Path, memory: MemoryPlan) -> tuple[Decoder, FlatParameters, TrainStep, Any]:
    source = open_source(folder)
    plan = TrainingPlan(trains=lambda _: True)
    model = Decoder(
        source.model.decoder, layout=TensorLayout(), plan=plan, device=CPU, dtype=torch.float32, memory=memory
    )
    load_parameters([entry.shard for entry in shard_entries(model)], source)
    mesh, flat = single_process_mesh(), FlatParameters(shard_entries(model), CPU)
    load_parameters(flat.master_shards(), source)
    optimizer = FlatAdamW(flat, mesh, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip_grad_norm=0.0)
    reducer = GradientReducer(flat, mesh, bucket_bytes=1 << 20)
    step = TrainStep(Stages.whole(ModelStage(model, LanguageModeling(), CPU)), reducer, optimizer, mesh)
    return model, flat, step, source.model.names.live.stack()


@pytest.mark.parametrize(("kind", "packing"), sampled(CASES, QUICK))
def test_logits_loss_and_every_gradient_are_transformers(kind: str, packing: bool) -> None:
    folder, stock, pad = saved(kind)
    batch = batch_of(folder, packing=packing)
    assert batch.part(Images) is not None and len(batch.part(Images).grids) >= 3
    memory = MemoryPlan(recompute="full") if packing else MemoryPlan()
    model, flat, step, names = our_model(folder, memory)
    with torch.no_grad():
        context = model.context(batch, torch.tensor(0), training=False)
        logits = model.logits(model.run_layers(model.embed(batch), context), context)
        for span, expected, _ in stock_outputs(stock, batch, pad):
            atol = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(logits[span, : expected.shape[1]], expected, rtol=0, atol=atol)
    stock.zero_grad()
    expected_loss = stock_loss(stock, batch, pad)
    expected_loss.backward()
    loss = step.gradients([batch], float(batch.loss_weights_BS.sum()))
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    expected = {name: value.grad for name, value in stock.named_parameters()}
    places = {slot.entry.name: names.to_hf(slot.entry.name) for slot in flat.slots}
    assert {place.name for place in places.values()} == expected.keys()
    errors = {}
    for slot in flat.slots:
        found, place = uncut(slot.view(flat.gradient), slot.entry.spec), places[slot.entry.name]
        wanted = expected[place.name] if place.expert is None else place.expert.of(expected[place.name])
        if slot.entry.name.startswith("vision.") and place.name.endswith("self_attn.k_proj.bias"):
            assert max(found.abs().max(), wanted.abs().max()) < 1e-6  # without rotation it moves no softmax
            continue
        errors[slot.entry.name] = relative_error(found, wanted) if wanted.any() else float(found.any())
    assert max(errors.values()) < 2e-4, {name: error for name, error in errors.items() if error >= 2e-4}


STEPS = 20
TARGETS = "q_proj|v_proj|gate_proj|down_proj"
_DELTA_TARGETS = "q_proj|v_proj|in_proj_qkv|in_proj_a|out_proj"
TARGETS_OF = {"qwen3_5": f"{_DELTA_TARGETS}|gate_proj|down_proj", "qwen3_5_moe": _DELTA_TARGETS}
TARGETS_OF |= dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), TARGETS_OF["qwen3_5"])
"""Stacked experts are no modules to PEFT."""
SAVED = {
    "qwen2_5_vl": ("visual.merger",),
    "minicpmv4_6": ("model.merger",),
    "minicpmv4_7": ("model.merger",),
    "qwen3_5": ("visual.merger",),
    "qwen3_5_moe": ("visual.merger",),
    "qwen3_vl": ("visual.merger", *(f"visual.deepstack_merger_list.{number}" for number in range(3))),
}


def peft_start(kind: str, folder: Path, start: Path) -> nn.Module:
    """The stock model under PEFT, saved in `start`; B is drawn."""
    import transformers
    from peft import LoraConfig, get_peft_model

    # grouped products take no float64
    more = {"experts_implementation": "eager"} if kind == "qwen3_5_moe" else {}
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder, **more)
    torch.manual_seed(3)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=rf"model\.language_model\..*\.({TARGETS_OF.get(kind, TARGETS)})",
        modules_to_save=list(SAVED[kind]),
    )  # fmt: skip
    model = get_peft_model(base, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    model.save_pretrained(start)
    return model


def their_losses(model: nn.Module, batch: Batch, pad: int) -> list[float]:
    """The loss before each step, in fp64. Norms and biases are not decayed: Trainer goes by names, and decays the
    merger's norm of Qwen2.5-VL, which is called ln_q."""
    model = model.double().train()
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    groups = [
        {"params": [value for value in trained.values() if (value.dim() > 1) == decays], "weight_decay": amount}
        for decays, amount in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for _ in range(STEPS):
        loss = stock_loss(model, batch, pad)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", sampled(KINDS, ("qwen3_vl",)))
def test_adapters_and_mergers_train_as_under_peft(kind: str, tmp_path: Path) -> None:
    folder, _, pad = saved(kind)
    stock = peft_start(kind, folder, tmp_path / "start")
    batch = batch_of(folder, packing=True)
    given = {
        "model.path": folder, "lora.rank": 3, "lora.alpha": 5,
        "lora.targets": TARGETS_OF.get(kind, TARGETS).replace("|", ","),
        "trainable": ",".join(SAVED[kind]), "lora.init_from": tmp_path / "start",
    }  # fmt: skip
    training, _ = build(folder, given, ALONE)
    targets = float(batch.loss_weights_BS.sum())
    ours = [training.step([batch], targets, LR).loss.item() for _ in range(STEPS)]
    theirs = their_losses(stock, batch, pad)
    assert theirs[-1] < theirs[0] - 0.1, "nothing is learnt, so that agreement says little"
    assert ours == pytest.approx(theirs, abs=1e-4)


NEW = 6
TEXTS = ("What is this?", "Which of them is larger?", "Look!")


def prompts(folder: Path) -> list[Prompt]:
    """About an image, about two, and of text alone."""
    tokenizer = load_tokenizer(folder)
    family = read_vision_family(folder, tokenizer)
    assert family is not None
    files = [str(folder / f"{number}.png") for number in range(2)]
    return [
        Writer(tokenizer=tokenizer, chat=True, system=None, reader=ImageReader(family), images=own).text(text, 1)
        for text, own in zip(TEXTS, (tuple(files[1:]), tuple(files), ()), strict=True)
    ]


def our_tokens(folder: Path, **place: int) -> list[list[int]]:
    """What the engine continues the prompts with, two at a time, so that rows come and go."""
    asked, model = prompts(folder), opened(folder, **place)
    stage = InferenceStage(
        model.decoder, tp=model.mesh.tp, pp=model.mesh.pp, sampling=Sampling(), slots=2,
        length=max(len(prompt.ids) for prompt in asked) + NEW, device=CPU,
    )  # fmt: skip
    family = read_vision_family(folder, load_tokenizer(folder))
    answers = Generator(stage, Limits(max_new_tokens=NEW, slots=2), Ids(), family=family).run(requests_of(asked))
    return [list(answer.ids) for answer in answers]


def their_tokens(folder: Path, stock: Any, pad: int) -> list[list[int]]:
    family = read_vision_family(folder, load_tokenizer(folder))
    assert family is not None
    stock.generation_config.eos_token_id = None
    found = []
    for prompt in prompts(folder):
        ids = torch.tensor([prompt.ids])
        tiles = [family.tiles(Image.open(image.file).convert("RGB")) for image in prompt.images]
        grids = [grid for one in tiles for grid in one.grids]
        more = stock_images(stock, ids, [torch.from_numpy(one.patches_PF) for one in tiles], grids, pad)
        out = stock.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            **more,
        )  # fmt: skip
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("kind", sampled(KINDS, ("qwen3_5",)))
def test_greedy_tokens_are_those_of_transformers_generate(kind: str) -> None:
    folder, stock, pad = saved(kind)
    expected = their_tokens(folder, stock, pad)
    assert len({tuple(tokens) for tokens in expected}) == 3 and len(set(expected[0])) > 1
    assert our_tokens(folder) == expected


def _tokens_on_ranks(folder: str, places: list[dict[str, int]]) -> list[list[list[int]]]:
    return [our_tokens(Path(folder), **place) for place in places]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", sampled(KINDS, ()))
def test_ranks_generate_the_same_tokens(kind: str) -> None:
    """Qwen3-VL's features for later layers cross the pipeline once, with the prompt."""
    folder, stock, pad = saved(kind)
    places = [{"pipeline": 2}, {"tensor": 2}]
    for found in spawn(_tokens_on_ranks, world=2, args=(str(folder), places), timeout=110):
        assert found == [their_tokens(folder, stock, pad)] * 2
