"""Conversations and pixels of families that transformers has, against its own processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from engine.data.collate import rank_batch
from engine.data.row_shape import WHOLE, RowShape
from engine.data.text_reader import build_texts
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.vision.batch_parts import GridPositions, Images
from engine.vision.data.columns import VisionColumns
from engine.vision.data.families import read_vision_family
from engine.vision.data.family import Conversation, Turn
from engine.vision.data.reader import ImageReader
from tests.support.shared_data import shared
from tests.support.stock_vision import pinpoints

SIZES = [(61, 43), (90, 200)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}MARK{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = Conversation(
    (
        Turn("user", (0, "\nWho is this, and who is this? ", 1)),
        Turn("assistant", ("He.",)),
        Turn("user", ("Why?",)),
        Turn("assistant", ("So.",)),
    )
)
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": "Who is this, and who is this? "},
            {"type": "image"},
        ],
    },
    {"role": "assistant", "content": "He."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]

SMALL = {"height": 28, "width": 28}
UNEVEN = {"height": 30, "width": 30}
"""No whole patches."""
PINPOINTS = pinpoints(30)
NESTED = ("gemma3", "llava_onevision")
"""Whose processors take the images of each conversation as a list."""
KINDS: dict[str, dict[str, Any]] = {
    "llava": {
        "config": {"vision_config": {"patch_size": 7, "image_size": 28, "model_type": "clip_vision_model"}},
        "tokens": {"image_token": "<image>"},
        "mark": "<image>\n",
        "images": lambda: CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SMALL),
        "processor": LlavaProcessor,
        "options": {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
    "llava_next": {
        "config": {
            "vision_config": {"patch_size": 7, "image_size": 30, "model_type": "clip_vision_model"},
            "image_grid_pinpoints": PINPOINTS,
        },
        "tokens": {"image_token": "<image>"},
        "mark": "<image>\n",
        "images": lambda: LlavaNextImageProcessorPil(
            size={"shortest_edge": 30}, crop_size=UNEVEN, image_grid_pinpoints=PINPOINTS
        ),
        "processor": LlavaNextProcessor,
        "options": {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
    "llava_onevision": {
        "config": {
            "vision_config": {"patch_size": 7, "image_size": 30, "model_type": "siglip_vision_model"},
            "vision_aspect_ratio": "anyres_max_2",
            "image_grid_pinpoints": PINPOINTS,
        },
        "tokens": {"image_token": "<image>", "video_token": "<video>"},
        "mark": "<image>\n",
        "images": lambda: LlavaOnevisionImageProcessorPil(size=UNEVEN, image_grid_pinpoints=PINPOINTS),
        "processor": LlavaOnevisionProcessor,
        "options": {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
    },
    "gemma3": {
        "config": {"vision_config": {"patch_size": 7, "image_size": 28}, "mm_tokens_per_image": 4},
        "tokens": {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        "mark": "<start_of_image>",
        "images": lambda: Gemma3ImageProcessorPil(size=SMALL, do_pan_and_scan=False),
        "processor": Gemma3Processor,
        "options": {"image_seq_length": 4},
    },
    "internvl": {
        "config": {"vision_config": {"patch_size": [7, 7], "image_size": [28, 28]}},
        "tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "mark": "<IMG_CONTEXT>\n",
        "images": lambda: GotOcr2ImageProcessorPil(size=SMALL, min_patches=1, max_patches=6),
        "processor": InternVLProcessor,
        "options": {"image_seq_length": 4},
    },
    "qwen2_5_vl": {
        "config": {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}},
        "tokens": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        "mark": "<|vision_start|><|image_pad|><|vision_end|>",
        "images": lambda: Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 32}),
        "processor": Qwen2_5_VLProcessor,
        "options": {},
    },
    "qwen3_vl": {
        "config": {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}},
        "tokens": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        "mark": "<|vision_start|><|image_pad|><|vision_end|>",
        "images": lambda: Qwen2VLImageProcessorPil(
            patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 32}
        ),
        "processor": Qwen3VLProcessor,
        "options": {},
    },
}
KINDS["qwen3_5"] = KINDS["qwen3_5_moe"] = KINDS["qwen3_vl"]
BY_GRID = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")


def written(kind: str, folder: Path) -> tuple[Any, Any]:
    """Writes a model's folder; returns transformers' tokenizer and image processor."""
    case = KINDS[kind]
    tokens = case["tokens"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(shared("tokenizers/minimind"))
    tokenizer.add_tokens([*tokens.values(), "<|vision_start|>", "<|vision_end|>"], special_tokens=True)
    for name, token in tokens.items():
        tokenizer.__dict__[name] = token
        tokenizer.__dict__[f"{name}_id"] = tokenizer.convert_tokens_to_ids(token)
    tokenizer.chat_template = TEMPLATE.replace("MARK", case["mark"])
    tokenizer.save_pretrained(folder)
    images = case["images"]()
    images.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **case["config"]}))
    return tokenizer, images


def processor_of(kind: str, tokenizer: Any, images: Any, case: dict[str, Any] | None = None) -> Any:
    """Returns the processor for text and images, without its parts for videos, which need torchvision."""
    case = case or KINDS[kind]
    kept = case["processor"].check_argument_for_proper_class
    case["processor"].check_argument_for_proper_class = lambda *arguments: None
    try:
        return case["processor"](
            image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **case["options"]
        )
    finally:
        case["processor"].check_argument_for_proper_class = kept


def saved_images(folder: Path) -> list[Image.Image]:
    made = []
    for number, size in enumerate(SIZES):
        noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        made.append(Image.fromarray(noise))
        made[-1].save(folder / f"{number}.png")
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_pixels_are_those_of_transformers_processor(kind: str, tmp_path: Path) -> None:
    tokenizer, images = written(kind, tmp_path)
    processor = processor_of(kind, tokenizer, images)
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert family is not None
    made = saved_images(tmp_path)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    found = processor(text=[text], images=[made] if kind in NESTED else made, return_tensors="pt")
    (encoded,) = family.encode(CHAT, SIZES, learn="answers")
    assert encoded.ids == found["input_ids"][0].tolist()
    prompt = tokenizer.apply_chat_template(MESSAGES[:-1], tokenize=False, add_generation_prompt=True)
    shorter = processor(text=[prompt], images=[made] if kind in NESTED else made, return_tensors="pt")["input_ids"][0]
    assert family.prompt(Conversation(CHAT.turns[:-1]), SIZES).ids == shorter.tolist()
    # the answers and what ends them
    targets = tokenizer.decode(
        [token for token, is_target in zip(encoded.ids, encoded.targets, strict=True) if is_target]
    )
    assert targets == "He.<|im_end|>\nSo.<|im_end|>\n"
    feature = KINDS[kind]["tokens"].get("context_image_token", KINDS[kind]["tokens"].get("image_token"))
    places = [at for at, token in enumerate(encoded.ids) if token == tokenizer.convert_tokens_to_ids(feature)]
    assert [at for spans in encoded.spans for span in spans for at in range(*span)] == places
    tiles = [family.tiles(image, is_only_image=False) for image in made]
    patches = np.concatenate([one.patches_PF for one in tiles])
    pixels = found["pixel_values"]
    if kind not in BY_GRID:
        shown = [unfolded(one.patches_PF) for one in tiles]
        if kind == "llava_next":  # of as many tiles as the image with the most has
            pixels = torch.cat([own[: len(mine)] for own, mine in zip(pixels, shown, strict=True)])
        pixels, patches = pixels[..., :28, :28], np.concatenate(shown)
    np.testing.assert_array_equal(patches, pixels.reshape(patches.shape).numpy())
    assert all(one.patches_PF.shape[1] == family.patch_features for one in tiles)
    assert [family.grids(image.size, is_only_image=False) for image in made] == [one.grids for one in tiles]
    if kind in BY_GRID:
        assert [list(grid) for one in tiles for grid in one.grids] == found["image_grid_thw"][:, 1:].tolist()


@pytest.mark.parametrize("writes_bos", [False, True])
def test_a_document_begins_with_the_token_that_the_tokenizer_adds(writes_bos: bool, tmp_path: Path) -> None:
    """Once, also where the template writes it; LLaVA 1.5's does not."""
    tokenizer, images = written("llava", tmp_path)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    if writes_bos:
        tokenizer.chat_template = "<s>" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    processor = processor_of("llava", tokenizer, images)
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert family is not None
    made = saved_images(tmp_path)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    found = processor(text=[text], images=made, add_special_tokens=not writes_bos, return_tensors="pt")["input_ids"][0]
    (encoded,) = family.encode(CHAT, SIZES, learn="answers")
    assert encoded.ids == found.tolist() and encoded.ids.count(tokenizer.bos_token_id) == 1
    learnt = [token for token, is_target in zip(encoded.ids, encoded.targets, strict=True) if is_target]
    assert tokenizer.decode(learnt) == "He.<|im_end|>\nSo.<|im_end|>\n"
    for (start, end), *_ in encoded.spans:
        assert set(encoded.ids[start:end]) == {tokenizer.convert_tokens_to_ids("<image>")}
    prompt = family.prompt(Conversation(CHAT.turns[:-1]), SIZES).ids
    assert prompt == encoded.ids[: len(prompt)]


@pytest.mark.parametrize("size", [(61, 43), (90, 200), (28, 28), (300, 40), (17, 200), (57, 55), (113, 112), (5, 300)])
@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision"])
def test_one_image_in_tiles_is_that_of_transformers_processor(size: tuple[int, int], kind: str, tmp_path: Path) -> None:
    """Tokens, pixels and grids; padded above and beside, and LLaVA-OneVision's scaled down and not."""
    tokenizer, images = written(kind, tmp_path)
    processor = processor_of(kind, tokenizer, images)
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert family is not None
    noise = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = processor(text=[text], images=[[Image.fromarray(noise)]], return_tensors="pt")
    encoded = family.prompt(Conversation((Turn("user", (0, "Who?")),)), [size])
    assert encoded.ids == found["input_ids"][0].tolist()
    tiles = family.tiles(Image.fromarray(noise))
    ((rows, columns, *_),) = tiles.grids
    assert tiles.patches_PF.shape == (rows * columns, family.patch_features)
    np.testing.assert_array_equal(unfolded(tiles.patches_PF), found["pixel_values"][0, ..., :28, :28].numpy())


def test_a_image_whose_neighbour_is_cut_away_keeps_its_pixels(tmp_path: Path) -> None:
    """One image is cut into tiles, two are not, whatever truncation leaves of them."""
    written("llava_onevision", tmp_path)
    saved_images(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    family = read_vision_family(tmp_path, tokenizer)
    assert family is not None
    turns = [("user", "<image>\nWho?"), ("assistant", "He."), ("user", "<image>\nAnd who?"), ("assistant", "She.")]
    record = {"images": ["0.png", "1.png"], "messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "x.jsonl").write_text(json.dumps(record))
    rows, length = [], 512
    for _ in range(2):
        dataset = build_texts(tmp_path / "x.jsonl", tokenizer=tokenizer, seq_length=length, images=ImageReader(family))
        rows.append(rank_batch(dataset, [0], [0], WHOLE))
        assert dataset.extra(VisionColumns) is not None
        length = int(dataset.extra(VisionColumns).spans[-1, 0])  # where the second image begins
    whole, cut = (one.part(Images) for one in rows)
    assert whole is not None and cut is not None
    assert whole.grids == ((4, 4), (4, 4)) and cut.grids == ((4, 4),)
    assert 2 * len(cut.places_K) == len(whole.places_K)
    assert torch.equal(cut.patches_PF, whole.patches_PF[: len(cut.patches_PF)])


@pytest.mark.parametrize(
    ("changes", "processor", "words"),
    [
        ({"vision_aspect_ratio": "square"}, {}, "vision_aspect_ratio 'square', but anyres_max_ and a number"),
        ({"image_grid_pinpoints": [[28, 28]]}, {}, "and config.json have other image_grid_pinpoints"),
        ({}, {"image_grid_pinpoints": [[28, 30]]}, "image_grid_pinpoints that are not whole tiles of 30 pixels"),
        ({"vision_config": {"patch_size": 7, "image_size": 35}}, {}, "images of 30 x 30 pixels, but .* for 35 x 35"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    changes: dict[str, Any], processor: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written("llava_onevision", tmp_path)
    for name, more in (("config.json", changes), ("preprocessor_config.json", processor)):
        file = tmp_path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    with pytest.raises(UserError, match=words):
        family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
        assert family is not None
        family.prompt(Conversation((Turn("user", (0, "Who?")),)), [(61, 43)])


@pytest.mark.parametrize(
    ("kind", "config", "processor", "words"),
    [
        ("qwen3_vl", {}, {"patch_size": 14}, r"merge_size \(14, 2, 2\) and do_resize True, but .* \(16, 2, 2\)"),
        ("qwen2_5_vl", {}, {"merge_size": 1}, r"merge_size \(14, 2, 1\) and"),
        ("qwen2_5_vl", {}, {"temporal_patch_size": 1}, r"merge_size \(14, 1, 2\) and"),
        ("qwen2_5_vl", {}, {"do_resize": False}, r"\(14, 2, 2\) and do_resize False, but"),
        ("llava", {}, {"do_center_crop": False}, r"no fixed height and width \(size {'shortest_edge': 28}"),
        ("internvl", {}, {"do_resize": False}, "no fixed height and width .*, do_resize False"),
        ("llava", {"vision_config": {"patch_size": None, "image_size": 28}}, {}, "^config.json has .*patch_size None"),
        ("internvl", {"vision_config": {"patch_size": [7, 8]}}, {}, r"^config.json has .*patch_size \[7, 8\], but"),
        ("llava", {"vision_config": None}, {}, "^config.json lacks vision_config"),
        (
            "qwen2_5_vl",
            {},
            {"size": {"min_pixels": 784, "max_pixels": 9000}},
            r"has size {.*}, but shortest_edge and longest_edge",
        ),
        ("llava", {}, {"image_mean": [0.5]}, "makes no image of 64 x 64 .mean must have 3 elements"),
        ("qwen3_vl", {}, {"rescale_factor": None}, "makes no image of 64 x 64"),
        ("gemma3", {}, {"image_std": [0.0, 0.5, 0.5]}, "numbers that are not finite"),
        ("llava", {"architectures": 3, "vision_config": None}, {}, "^config.json lacks vision_config"),
        ("internvl", {}, {"image_processor_type": 3}, "none that transformers can open"),
    ],
)
def test_processors_that_do_not_fit_the_tower_are_refused(
    kind: str, config: dict[str, Any], processor: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written(kind, tmp_path)
    for name, more in (("config.json", config), ("preprocessor_config.json", processor)):
        file = tmp_path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    with pytest.raises(UserError, match=words) as refused:
        read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert str(refused.value).startswith("config.json" if config else str(tmp_path / "preprocessor_config.json"))


@pytest.mark.parametrize("written_as", ["Qwen2_5_VLImageProcessor", "Qwen2VLImageProcessorFast", None])
def test_processors_by_former_names_are_the_same(written_as: str | None, tmp_path: Path) -> None:
    """Names of releases that are over, of which today's transformers knows the second, and settings without a name."""
    _, images = written("qwen2_5_vl", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor_type"] = written_as
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert family is not None
    for image in saved_images(tmp_path):
        expected = images(images=[image], return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(family.tiles(image).patches_PF, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("parts", "content"),
    [
        (("\nLook: \n", 0, "\n\nWho is this?\n"), ["\nLook: ", None, "Who is this?\n"]),
        ((0, "\n", "\nWho?\n\n"), [None, "\nWho?\n\n"]),
        (("\n", 0, "\n", 1, " Who?\n"), [None, None, " Who?\n"]),
    ],
)
def test_line_breaks_that_are_beside_no_marker_stay(
    kind: str, parts: tuple[str | int, ...], content: list[str | None], tmp_path: Path
) -> None:
    """Those beside a marker are the template's; where all at a turn's ends went, tokens were fewer."""
    tokenizer, images = written(kind, tmp_path)
    processor = processor_of(kind, tokenizer, images)
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert family is not None
    shown = saved_images(tmp_path)[: sum(isinstance(part, int) for part in parts)]
    numbered = iter(shown)
    asked = [
        {"type": "image", "image": next(numbered)} if text is None else {"type": "text", "text": text}
        for text in content
    ]
    found = processor.apply_chat_template(
        [{"role": "user", "content": asked}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="np",
    )
    ids = np.asarray(found["input_ids"]).reshape(-1).tolist()
    prompt = family.prompt(Conversation((Turn("user", parts),)), [image.size for image in shown])
    assert prompt.ids == ids


def unfolded(patches: np.ndarray) -> np.ndarray:
    """Pixels [tiles, 3, 28, 28] of tiles of 4 x 4 patches of side 7."""
    return patches.reshape(-1, 4, 4, 3, 7, 7).transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, 28, 28)


@pytest.mark.parametrize(("kind", "stock"), [("qwen2_5_vl", Qwen2_5_VLModel), ("qwen3_vl", Qwen3VLModel)])
def test_positions_are_those_of_transformers_in_rows_of_several_documents(
    kind: str, stock: type[torch.nn.Module], tmp_path: Path
) -> None:
    tokenizer, _ = written(kind, tmp_path)
    saved_images(tmp_path)
    loaded = load_tokenizer(tmp_path)
    family = read_vision_family(tmp_path, loaded)
    assert family is not None
    records = [
        {"images": ["0.png", "1.png"], "messages": MESSAGES},
        {"messages": MESSAGES[2:]},
        {"images": ["1.png"], "messages": [{"role": "user", "content": "<image>Who?"}, MESSAGES[1]]},
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    dataset = build_texts(file, tokenizer=loaded, seq_length=256, packing=True, images=ImageReader(family))
    batch = rank_batch(dataset, [0], [0], WHOLE)
    assert batch.part(Images) is not None and batch.part(GridPositions) is not None
    model: Any = stock.__new__(stock)
    torch.nn.Module.__init__(model)
    model.config = type("C", (), {"vision_config": type("V", (), {"spatial_merge_size": 2, "tokens_per_second": 2})})
    pad, start = tokenizer.convert_tokens_to_ids("<|image_pad|>"), 0
    for number, length in enumerate(batch.document_lengths):
        ids = batch.tokens_BS[:, start : start + length]
        grids = [
            (1, *grid)
            for grid, owner in zip(batch.part(Images).grids, batch.part(Images).documents, strict=True)
            if owner == number
        ]
        expected, _ = model.get_rope_index(
            ids, (ids == pad).long(), image_grid_thw=torch.tensor(grids) if grids else None
        )
        assert torch.equal(batch.part(GridPositions).positions_3BS[:, :, start : start + length], expected)
        start += length
    halves = [
        rank_batch(dataset, [0], [0], RowShape(pad_multiple=4, context_size=2, context_rank=rank)) for rank in (0, 1)
    ]
    for half in halves:
        columns = half.token_index_BS[0]
        assert half.part(GridPositions) is not None
        assert torch.equal(
            half.part(GridPositions).positions_3BS, batch.part(GridPositions).positions_3BS[:, :, columns]
        )


def test_marks_that_are_no_images_are_refused(tmp_path: Path) -> None:
    written("qwen2_5_vl", tmp_path)
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert family is not None
    turns = (Turn("user", (0, "and <|image_pad|>")), Turn("assistant", ("He.",)))
    with pytest.raises(UserError, match="writes 2 times <|image_pad|>, but the record has 1 images"):
        list(family.encode(Conversation(turns), SIZES[:1], learn="answers"))


def test_images_that_a_processor_refuses_are_refused(tmp_path: Path) -> None:
    written("qwen2_5_vl", tmp_path)
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert family is not None
    turns = (Turn("user", (0,)), Turn("assistant", ("He.",)))
    with pytest.raises(UserError, match="refuses an image of 3000 x 2 .absolute aspect ratio"):
        list(family.encode(Conversation(turns), [(3000, 2)], learn="answers"))
