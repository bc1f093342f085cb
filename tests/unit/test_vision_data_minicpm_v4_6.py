"""Conversations, pixels and positions of MiniCPM-V 4.6 and 4.7 against transformers' processor and model."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.vision.data.families import read_vision_family
from engine.vision.data.family import Conversation, Turn, VisionFamily
from tests.support.minicpm_v4_6 import KINDS, PATCH, written
from tests.support.shared_data import shared
from tests.support.sweeps import sampled

pytestmark = pytest.mark.skipif("minicpmv4_7" not in MODEL_MAPPING_NAMES, reason="transformers lacks the models")

SIZES = [(150, 60), (60, 40), (400, 300), (97, 350), (1000, 80), (112, 112), (113, 112), (5, 300)]
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "image"}]},
    {"role": "assistant", "content": "He."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": "So."},
]
CHAT = Conversation(
    (
        Turn("user", ("Look: ", 0, 1)),
        Turn("assistant", ("He.",)),
        Turn("user", (2, "Why?")),
        Turn("assistant", ("So.",)),
    )
)


def family_of(folder: Path) -> VisionFamily:
    family = read_vision_family(folder, load_tokenizer(folder))
    assert family is not None
    return family


def noise(size: tuple[int, int]) -> Image.Image:
    made = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(made)


def check(family: VisionFamily, processor: Any, images: list[Image.Image]) -> dict[str, Any]:
    """The tokens and pixels of MESSAGES with three images are the processor's, which this returns."""
    sizes = [image.size for image in images]
    text = processor.tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    found = processor(text=[text], images=images, return_tensors="pt")
    (encoded,) = family.encode(CHAT, sizes, learn="answers")
    assert encoded.ids == found["input_ids"][0].tolist()
    places = [at for at, token in enumerate(encoded.ids) if token == processor.image_token_id]
    assert [at for spans in encoded.spans for span in spans for at in range(*span)] == places
    learnt = [token for token, is_target in zip(encoded.ids, encoded.targets, strict=True) if is_target]
    assert processor.tokenizer.decode(learnt) == "He.<|im_end|>\nSo.<|im_end|>\n"
    tiles = [family.tiles(image) for image in images]
    grids = [list(grid) for one in tiles for grid in one.grids]
    assert [list(grid) for size in sizes for grid in family.grids(size)] == grids == found["target_sizes"].tolist()
    patches = rearrange(found["pixel_values"][0].numpy(), "c y (l x) -> l (c y x)", x=PATCH)
    np.testing.assert_array_equal(np.concatenate([one.patches_PF for one in tiles]), patches)
    return dict(found)


@pytest.mark.parametrize(
    "options",
    [{}, {"downsample_mode": "4x"}, {"use_image_id": False, "max_slice_nums": 4}, {"slice_mode": False}],
    ids=["released", "4x", "no numbers", "whole"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_pixels_are_those_of_transformers_processor(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    processor = written(kind, tmp_path, **options)
    family = family_of(tmp_path)
    for sizes in (SIZES[:3], SIZES[3:6], SIZES[5:]) if kind == KINDS[0] else (SIZES[:3],):
        check(family, processor, [noise(size) for size in sizes])


def test_real_images_are_those_of_transformers_processor(tmp_path: Path) -> None:
    processor = written("minicpmv4_7", tmp_path, scale_resolution=224)
    images = [Image.open(shared(f"multimodal/mllm_demo_data/{number}.jpg")).convert("RGB") for number in (1, 2, 3)]
    family = family_of(tmp_path)
    check(family, processor, images)
    assert max(len(family.grids(image.size)) for image in images) > 2


@pytest.mark.parametrize(
    ("behind", "numbers"),
    sampled(product(("", "\n", "</image>\n\n"), (True, False)), [("\n", True), ("", False), ("</image>\n\n", False)]),
)
def test_positions_are_those_of_transformers_model(behind: str, numbers: bool, tmp_path: Path) -> None:
    """Images one after the other with nothing but markers between them, and with text; both modes."""
    from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

    for mode in ("16x", "4x"):
        folder = tmp_path / mode
        folder.mkdir()
        processor = written("minicpmv4_7", folder, behind=behind, downsample_mode=mode, use_image_id=numbers)
        config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
        stock = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)
        torch.nn.Module.__init__(stock)
        stock.config = config  # which is all that positions depend on
        family = family_of(folder)
        for sizes in (SIZES[:3], SIZES[3:6], SIZES[5:]):
            found = check(family, processor, [noise(size) for size in sizes])
            (encoded,) = family.encode(CHAT, sizes, learn="answers")
            for first in (0, encoded.spans[0][0][0] - 1):  # where nothing is before the first image, too
                ids = found["input_ids"][:, first:]
                expected, delta = stock.get_rope_index(
                    ids, mm_token_type_ids=found["mm_token_type_ids"][:, first:], target_sizes=found["target_sizes"]
                )
                spans = [(start - first, end - first) for own in encoded.spans for start, end in own]
                positions = family.positions(ids[0].numpy(), spans, sizes)
                assert positions.tolist() == expected[:, 0].tolist()
                assert positions.max() + 1 - ids.shape[1] == int(delta)
    text = np.arange(5)
    assert family.positions(text, (), ()).tolist() == [text.tolist()] * 3


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        ({"image_token_id": 70}, {}, "image_token_id 70, which is no added token"),
        ({"newline_id": None}, {}, "newline_id None, but the id of the token"),
        ({"downsample_mode": "4x"}, {}, r"downsample_mode \(14, '16x'\) and do_resize True, but .* \(14, '4x'\)"),
        ({}, {"patch_size": 16}, r"downsample_mode \(16, '16x'\) and do_resize True, but .* \(14, '16x'\)"),
        ({}, {"do_resize": False}, "do_resize False, but"),
        ({}, {"max_slice_nums": 0}, "max_slice_nums 0, but a whole number from 1 to 256"),
        ({}, {"scale_resolution": 99.5}, "scale_resolution 99.5, but a whole number from 1 to 4,096"),
        ({"vision_config": None}, {}, "lacks vision_config"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    config: dict[str, Any], processor: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written("minicpmv4_7", tmp_path)
    for name, more in (("config.json", config), ("preprocessor_config.json", processor)):
        file = tmp_path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    with pytest.raises(UserError, match=words):
        family_of(tmp_path)
