"""Adopted models answer questions about images as transformers' generate does, given what its processor makes, token
by token, with its log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from engine.adopted.images.family import AdoptedImages
from engine.adopted.images.processor import open_processor
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.files.documents import read_json
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from engine.vision.data.family import Conversation, Turn
from engine.vision.data.reader import ImageReader
from rankfold.generating.prompts import Writer, requests_of
from tests.adopted.image_models import MARKS, save_image_model
from tests.support.commands import run_tool
from tests.support.generation import Ids

CPU = torch.device("cpu")
NEW = 8
ASKED = [("<image>What is this?", ["a"]), ("Hello", []), ("<image>Is it larger than <image> here?", ["b", "a"])]
SIZES = {"a": (60, 60), "b": (56, 112)}


Answers = tuple[list[list[int]], Tensor]
"""The tokens of each answer, and the log-probabilities of all."""


def _answers(folder: Path, images: dict[str, Path]) -> Answers:
    """Returns the engine's, two rows at a time."""
    tokenizer = load_tokenizer(folder)
    family = AdoptedImages(read_json(folder / "config.json"), folder, tokenizer)
    prompts = []
    for text, names in ASKED:
        own = tuple(str(images[name]) for name in names)
        writer = Writer(tokenizer=tokenizer, chat=True, system=None, reader=ImageReader(family), images=own)
        prompts.append(writer.text(text, 1))
    launch = Launch(rank=0, world_size=1, device=CPU)
    model = open_for_generation(ModelChoice(path=folder, dtype="float32"), launch, Log(1))
    stage = InferenceStage(
        model.decoder,
        tp=model.mesh.tp,
        pp=model.mesh.pp,
        sampling=Sampling(),
        slots=2,
        length=max(len(prompt.ids) for prompt in prompts) + NEW,
        device=CPU,
        with_logps=True,
    )
    generator = Generator(stage, Limits(max_new_tokens=NEW, slots=2), Ids(), family=family)
    answers = generator.run(requests_of(prompts))
    return [list(answer.ids) for answer in answers], torch.tensor([answer.logps for answer in answers])


@torch.no_grad()
def _stock(model: nn.Module, folder: Path, images: dict[str, Path], mark: str) -> Answers:
    """Returns transformers', each prompt alone."""
    made: Any = model
    made.generation_config.eos_token_id = None
    processor = open_processor(folder, made.config.model_type)
    found, logps = [], []
    for text, names in ASKED:
        inputs = processor(
            text=[f"<|im_start|>user\n{text.replace('<image>', mark)}<|im_end|>\n<|im_start|>assistant\n"],
            images=[[Image.open(images[name]) for name in names]] if names else None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        out = made.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        found.append(out.sequences[0, inputs["input_ids"].shape[1] :].tolist())
        logps.append(torch.cat(out.logits).log_softmax(-1).amax(-1))  # the chosen are the most probable
    return found, torch.stack(logps)


@pytest.mark.slow
def test_records_are_shown_with_their_images(tmp_path: Path) -> None:
    save_image_model("qwen3_vl_moe", tmp_path)
    Image.new("RGB", (84, 56)).save(tmp_path / "a.png")
    answered = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Black."}]
    (tmp_path / "records.jsonl").write_text(json.dumps({"images": ["a.png"], "messages": answered}))
    shown = run_tool("preprocess", "--tokenizer", tmp_path, "--show", 1, tmp_path / "records.jsonl").stdout
    assert "<|vision_start|>⟨6 features⟩<|vision_end|>What?" in shown


def test_images_that_the_processor_refuses_are_named(tmp_path: Path) -> None:
    save_image_model("qwen3_vl_moe", tmp_path)
    family = AdoptedImages(read_json(tmp_path / "config.json"), tmp_path, load_tokenizer(tmp_path))
    asked = Conversation((Turn("user", (0, "What?")),))
    for refused in (lambda: family.prompt(asked, [(1, 3000)]), lambda: family.inputs([[Image.new("L", (1, 3000))]])):
        with pytest.raises(UserError, match="does not take images of 1 x 3000 pixels: .*; leave them out"):
            refused()


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "glm4v", "llava"])
def test_answers_about_images_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = save_image_model(model_type, tmp_path, std=0.2)
    images = {name: tmp_path / f"{name}.png" for name in SIZES}
    pixels = torch.randint(256, (120, 120, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4)).numpy()
    for name, (width, height) in SIZES.items():
        Image.fromarray(pixels[:height, :width]).save(images[name])
    tokens, logps = _answers(tmp_path, images)
    expected, expected_logps = _stock(model, tmp_path, images, MARKS[model_type])
    assert tokens == expected
    assert (logps - expected_logps).abs().max() < 1e-5
