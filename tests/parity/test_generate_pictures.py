"""Text about pictures: tokens with a cache are those of whole passes without one, and of the originals' logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch, ExpertTokens, Images
from engine.data.tokenizer import load_tokenizer
from engine.data.vision.families import read_vision_family
from engine.data.vision.family import Tiles, VisionFamily
from engine.data.vision.reader import PictureReader
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.models.decoder import Decoder
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import OpenedModel, open_for_generation
from rankfold.generating.prompts import Prompt, Writer, requests_of
from tests.commands import run_tool
from tests.generation import Ids
from tests.shared_data import shared
from tests.spawning import spawn
from tests.vision_data import read_json, write_tokenizer
from tests.vision_fixtures import VisionFixture, flatten_picture

CPU = torch.device("cpu")
NAMES = ("minicpm-v-2", "minicpm-v-2_6", "omnilmm", "cogvlm-v1", "cogvlm2", "cogagent")
SEVERAL = ("minicpm-v-2", "minicpm-v-2_6", "omnilmm")
"""Models that take several pictures."""
NEW = 6
TEXTS = ("What is this?", "Who are they, and where do they go?", "Look!")


def model_folder(name: str, folder: Path) -> Path:
    """The fixture as a released folder, with its tokenizer."""
    write_tokenizer(folder, name)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(shared(f"vision/{name}") / file, folder)
    return folder


def pictures(name: str) -> list[Path]:
    return sorted((shared("vision") / name / "images").glob("*.png"))


def prompts(name: str, folder: Path) -> list[Prompt]:
    """Of several lengths: with a picture, with two or another, and, where the model takes such, of text alone."""
    tokenizer = load_tokenizer(folder)
    family = read_vision_family(folder, tokenizer)
    assert family is not None
    files = [str(path) for path in pictures(name)]
    images = [tuple(files[:1]), tuple(files[:2] if name in SEVERAL else files[-1:]), ()]
    return [
        Writer(tokenizer=tokenizer, chat=True, system=None, reader=PictureReader(family), images=own).text(text, 1)
        for text, own in zip(TEXTS, images, strict=True)
        if own or name != "cogagent"
    ]


def opened(folder: Path, **place: int) -> OpenedModel:
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    launch = Launch(rank=ranks[0], world_size=ranks[1], device=CPU)
    return open_for_generation(ModelChoice(path=folder, dtype="float32", **place), launch, Log(1))


def cached_tokens(name: str, folder: Path, *, slots: int = 2, **place: int) -> list[list[int]]:
    """What the engine continues all prompts with; two rows at a time, so that they come and go."""
    asked = prompts(name, folder)
    model = opened(folder, **place)
    stage = InferenceStage(
        model.decoder, tp=model.mesh.tp, pp=model.mesh.pp, sampling=Sampling(), slots=slots,
        length=max(len(prompt.ids) for prompt in asked) + NEW, device=CPU,
    )  # fmt: skip
    family = read_vision_family(folder, load_tokenizer(folder))
    limits = Limits(max_new_tokens=NEW, slots=slots)
    answers = Generator(stage, limits, Ids(), family=family).run(requests_of(asked))
    return [list(answer.ids) for answer in answers]


def rule_of(name: str, length: int, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Positions and the vision expert's tokens, as the originals' code has them."""
    if not name.startswith("cog") or not spans:
        return list(range(length)), []
    ((start, end),) = spans
    assert start == 1  # begin token, boi, patches at one position, eoi, text
    patches = end - start - 2
    return [0, 1, *[2] * patches, *range(3, length - patches + 2)], list(range(start, end - 1))


def images_of(tiles: list[Tiles], spans: Sequence[tuple[int, int]], features: int) -> Images:
    return Images(
        patches_PF=torch.cat([torch.empty(0, features), *(torch.from_numpy(one.patches_PF) for one in tiles)]),
        grids=tuple(grid for one in tiles for grid in one.grids),
        documents=tuple(0 for one in tiles for _ in one.grids),
        places_K=torch.tensor([at for span in spans for at in range(*span)], dtype=torch.int64),
    )


def whole_batch(name: str, family: VisionFamily, prompt: Prompt, ids: list[int]) -> Batch:
    """All tokens so far as one row."""
    spans = [span for picture in prompt.pictures for span in picture.spans]
    opened = [Image.open(picture.file).convert("RGB") for picture in prompt.pictures]
    positions, vision = rule_of(name, len(ids), spans)
    cross_images = None
    if family.cross_patch_features is not None:
        cross = [tiles for one in opened if (tiles := family.cross_tiles(one)) is not None]
        cross_images = images_of(cross, (), family.cross_patch_features)
    language = sorted(set(range(len(ids))) - set(vision))
    tokens = torch.tensor([ids])
    return Batch(
        tokens_BS=tokens,
        labels_BS=torch.full_like(tokens, IGNORE_LABEL),
        positions_BS=torch.tensor([positions]),
        token_index_BS=torch.arange(len(ids))[None],
        loss_weights_BS=torch.zeros(tokens.shape),
        document_offsets=torch.tensor([0, len(ids)], dtype=torch.int32),
        document_lengths=(len(ids),),
        images=images_of([family.tiles(one) for one in opened], spans, family.patch_features),
        cross_images=cross_images,
        experts=ExpertTokens(
            vision_V=torch.tensor(vision, dtype=torch.int64), language_L=torch.tensor(language, dtype=torch.int64)
        ),
    )


def last_logits(model: Decoder, batch: Batch) -> Tensor:
    with torch.no_grad():
        context = model.context(batch, torch.tensor(0), training=False)
        logits = model.logits(model.run_layers(model.embed(batch), context), context)
    return logits[-1, : model.config.vocab_size]


def uncached_tokens(name: str, folder: Path) -> list[list[int]]:
    family = read_vision_family(folder, load_tokenizer(folder))
    assert family is not None
    model = opened(folder).decoder
    answers = []
    for prompt in prompts(name, folder):
        ids = list(prompt.ids)
        for _ in range(NEW):
            ids.append(int(last_logits(model, whole_batch(name, family, prompt, ids)).argmax()))
        answers.append(ids[len(prompt.ids) :])
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_whole_passes(name: str, tmp_path: Path) -> None:
    folder = model_folder(name, tmp_path)
    expected = uncached_tokens(name, folder)
    assert cached_tokens(name, folder) == expected
    assert cached_tokens(name, folder, slots=1) == expected
