"""Tokens, labels, image bounds and pixels of each family, against what the originals' own code gave."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from engine.batch import IGNORE_LABEL
from engine.errors import UserError
from engine.vision.data.cogvlm import CogVLM
from engine.vision.data.family import Conversation, EncodedChat, Turn
from engine.vision.data.minicpm_v import MiniCPMV
from engine.vision.data.omnilmm import OmniLMM
from engine.vision.data.slicing import SlicingRule
from tests.support.shared_data import shared
from tests.support.vision_data import chat, fixture_tokenizer, read_json, turns


def size_of(folder: str, name: str) -> tuple[int, int]:
    with Image.open(shared("vision") / folder / "images" / name) as image:
        return image.size


def opened_image(folder: str, name: str) -> Image.Image:
    return Image.open(shared("vision") / folder / "images" / name).convert("RGB")


def labels(encoded: EncodedChat) -> list[int]:
    """What each position must predict."""
    following = [
        token if target else IGNORE_LABEL for token, target in zip(encoded.ids[1:], encoded.targets[1:], strict=True)
    ]
    found = [*following, IGNORE_LABEL]
    for at, label in encoded.odd_labels.items():
        assert found[at] == IGNORE_LABEL
        found[at] = label
    return found


def bounds(encoded: EncodedChat) -> list[list[int]]:
    return [list(span) for spans in encoded.spans for span in spans]


def only(items: Any) -> EncodedChat:
    (item,) = items
    return item


def flat(pixels: np.ndarray, patch: int = 14) -> np.ndarray:
    """Patches of an image [3, H, W], one by one."""
    _, height, width = pixels.shape
    return np.stack(
        [
            pixels[:, y : y + patch, x : x + patch].ravel()
            for y in range(0, height, patch)
            for x in range(0, width, patch)
        ]
    )


@pytest.mark.parametrize(
    ("folder", "table"), [("minicpm-v-2", "slicing_table"), ("minicpm-v-2_6", "slicing_table_448_max9")]
)
def test_images_are_cut_into_the_originals_tiles(folder: str, table: str) -> None:
    rows = read_json(folder, "preprocess.json")[table]
    assert len(rows) in (14, 48)
    for row in rows:
        rule = SlicingRule(row.get("max_slice_nums", 9), row.get("scale_resolution", 448), row.get("patch_size", 14))
        slices = rule.slices(tuple(row["image_wh"]))
        assert slices.source == tuple(row["source_wh"]), row
        grid = [slices.columns, slices.rows] if slices.columns else None
        assert grid == row["best_grid_cols_rows"], row
        tiles = [tuple(tile) for line in row["tiles_wh"] for tile in line]
        assert slices.sizes()[1:] == tiles, row
        if row.get("refine_wh"):
            assert slices.refined == tuple(row["refine_wh"]), row


@pytest.mark.parametrize("name", ["1.jpg", "2.jpg", "3.jpg"])
def test_resized_tiles_of_photos_have_the_originals_bytes(name: str, tmp_path: Path) -> None:
    expected = read_json("minicpm-v-2", "preprocess.json")["real_settings"][name]
    with Image.open(shared("multimodal/mllm_demo_data") / name) as photo:
        image = photo.convert("RGB")
    tiles = list(SlicingRule().slices(image.size).tiles(image))
    found = [hashlib.sha256(np.asarray(tile).tobytes()).hexdigest() for tile in tiles]
    assert found == expected["tile_sha256_uint8_rgb"]
    config = read_json("minicpm-v-2", "config.json") | {"scale_resolution": 448}
    family = MiniCPMV(config, {}, fixture_tokenizer(tmp_path, "minicpm-v-2"))
    mean = family.tiles(image).patches_PF.mean(dtype=np.float64)
    assert abs(mean - expected["tile_mean_normalised"][0]) < 1e-6


class TestMiniCPMV2:
    @pytest.fixture
    def family(self, tmp_path: Path) -> MiniCPMV:
        return MiniCPMV(read_json("minicpm-v-2", "config.json"), {}, fixture_tokenizer(tmp_path, "minicpm-v-2"))

    @pytest.fixture
    def cases(self) -> dict[str, Any]:
        return read_json("minicpm-v-2", "preprocess.json")["cases"]

    @pytest.mark.parametrize("name", ["chat_sliced", "chat_multiturn_small"])
    def test_training(self, family: MiniCPMV, cases: dict[str, Any], name: str) -> None:
        case = cases[name]
        encoded = only(family.encode(chat(case["messages"]), [tuple(case["size_wh"])], learn="answers"))
        assert encoded.ids == case["training_input_ids"]
        assert labels(encoded) == case["training_labels_preshifted"]
        assert bounds(encoded) == case["training_image_bound"]

    @pytest.mark.parametrize("name", ["chat_sliced", "chat_multiturn_small"])
    def test_inference(self, family: MiniCPMV, cases: dict[str, Any], name: str) -> None:
        case = cases[name]
        encoded = family.prompt(chat(case["messages"][:-1]), [tuple(case["size_wh"])])
        assert encoded.ids == case["inference_input_ids"]
        assert bounds(encoded) == case["inference_image_bound"]
        assert not any(encoded.targets) and not encoded.odd_labels

    def test_text_alone(self, family: MiniCPMV, cases: dict[str, Any]) -> None:
        messages = cases["text_only_training"]["messages"]
        encoded = only(family.encode(chat(messages), [], learn="answers"))
        assert encoded.ids == cases["text_only_training"]["training_input_ids"]
        assert labels(encoded) == cases["text_only_training"]["training_labels_preshifted"]
        assert family.prompt(chat(messages[:-1]), []).ids == cases["text_only_inference"]["inference_input_ids"]

    def test_only_the_last_answer(self, family: MiniCPMV, cases: dict[str, Any]) -> None:
        case = cases["chat_multiturn_small"]
        encoded = only(family.encode(chat(case["messages"]), [tuple(case["size_wh"])], learn="last"))
        expected = np.array(case["training_labels_preshifted"])
        expected[:45] = IGNORE_LABEL
        assert labels(encoded) == expected.tolist()

    def test_everything_but_stand_ins(self, family: MiniCPMV, cases: dict[str, Any]) -> None:
        case = cases["chat_multiturn_small"]
        encoded = only(family.encode(chat(case["messages"]), [tuple(case["size_wh"])], learn="all"))
        (start, end), *_ = bounds(encoded)
        assert [at for at, target in enumerate(encoded.targets) if not target] == [0, *range(start, end)]

    @pytest.mark.parametrize(
        ("name", "sample"),
        [("chat_sliced", "chat_sliced.pixel_values.0"), ("chat_multiturn_small", "chat_batch.pixel_values.0")],
    )
    def test_pixels(self, family: MiniCPMV, cases: dict[str, Any], name: str, sample: str) -> None:
        inputs = load_file(shared("vision") / "minicpm-v-2" / "inputs.safetensors")
        expected = [inputs[key] for key in sorted(inputs) if key.startswith(sample + ".")]
        tiles = family.tiles(opened_image("minicpm-v-2", cases[name]["image"]))
        assert tiles.grids == tuple((pixels.shape[1] // 14, pixels.shape[2] // 14) for pixels in expected)
        np.testing.assert_array_equal(tiles.patches_PF, np.concatenate([flat(pixels) for pixels in expected]))

    def test_a_system_turn_is_refused(self, family: MiniCPMV) -> None:
        turned = Conversation((Turn("system", ("Be kind.",)), Turn("user", ("Hi",)), Turn("assistant", ("Hi",))))
        with pytest.raises(UserError, match="no system turn"):
            only(family.encode(turned, [], learn="answers"))

    def test_a_tokenizer_without_its_tokens_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no token <image>"):
            MiniCPMV(read_json("minicpm-v-2", "config.json"), {}, fixture_tokenizer(tmp_path, "cogvlm-v1"))


class TestMiniCPMV26:
    MARKERS = ("<image>", "<image_00>", "<image_01>")

    @pytest.fixture
    def tokenizer_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    def family(self, folder: Path, **options: Any) -> MiniCPMV:
        tokenizer = fixture_tokenizer(folder, "minicpm-v-2_6")
        return MiniCPMV(read_json("minicpm-v-2_6", "config.json"), {}, tokenizer, **options)

    def case(self, name: str) -> tuple[dict[str, Any], Conversation]:
        case = read_json("minicpm-v-2_6", "preprocess.json")["cases"][name]
        placing = "split" if len(case["images"]) > 1 else "in_place"
        return case, Conversation(turns(case["messages"], markers=self.MARKERS), placing)

    @pytest.mark.parametrize("name", ["chat_sliced", "chat_two_images"])
    @pytest.mark.parametrize("learn_header", [False, True])
    def test_training(self, tmp_path: Path, name: str, learn_header: bool) -> None:
        case, given = self.case(name)
        sizes = [tuple(size) for size in case["sizes_wh"]]
        encoded = only(self.family(tmp_path, learn_header=learn_header).encode(given, sizes, learn="answers"))
        assert encoded.ids == case["training_input_ids"]
        version = "2024_10" if learn_header else "head_2025_09"
        assert labels(encoded) == case[f"training_labels_preshifted_{version}"]
        assert bounds(encoded) == case["training_image_bound"]

    @pytest.mark.parametrize("name", ["chat_sliced", "chat_two_images"])
    def test_inference(self, tmp_path: Path, name: str) -> None:
        case, given = self.case(name)
        sizes = [tuple(size) for size in case["sizes_wh"]]
        prompt = Conversation(given.turns[:-1], given.placing)
        encoded = self.family(tmp_path).prompt(prompt, sizes)
        assert encoded.ids == case["inference_input_ids"]
        assert bounds(encoded) == case["inference_image_bound"]

    def test_parts_of_a_list_are_joined_as_at_inference(self, tmp_path: Path) -> None:
        case, given = self.case("chat_two_images")
        sizes = [tuple(size) for size in case["sizes_wh"]]
        first = Turn("user", (0, 1, "Compare them."))
        listed = Conversation((first, *given.turns[1:-1]), "parts")
        assert self.family(tmp_path).prompt(listed, sizes).ids == case["inference_input_ids"]

    @pytest.mark.parametrize(
        ("name", "sample"),
        [("chat_sliced", "chat_batch.pixel_values.0"), ("chat_two_images", "chat_batch.pixel_values.1")],
    )
    def test_pixels(self, tmp_path: Path, name: str, sample: str) -> None:
        case, _ = self.case(name)
        inputs = load_file(shared("vision") / "minicpm-v-2_6" / "inputs.safetensors")
        expected = [inputs[key] for key in sorted(inputs) if key.startswith(sample + ".")]
        family = self.family(tmp_path)
        tiles = [family.tiles(opened_image("minicpm-v-2_6", image)) for image in case["images"]]
        assert [list(grid) for one in tiles for grid in one.grids] == case["tgt_sizes"]
        patches = [flat(pixels[:, :, x : x + 14]) for pixels in expected for x in range(0, pixels.shape[2], 14)]
        np.testing.assert_array_equal(np.concatenate([one.patches_PF for one in tiles]), np.concatenate(patches))


def cogvlm(tmp_path: Path, folder: str, template: str | None = None) -> CogVLM:
    tokenizer = fixture_tokenizer(tmp_path, folder)
    return CogVLM(read_json(folder, "config.json"), tokenizer, bos=1, eos=2, template=template)


def rounds(case: dict[str, Any], *, answered: bool) -> Conversation:
    pairs = [*(case["history"] or ()), (case["query"], case.get("answer"))]
    found = [Turn(role, (text,)) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    return Conversation(tuple(found if answered else found[:-1]))


@pytest.mark.parametrize("folder", ["cogvlm-v1", "cogvlm2"])
@pytest.mark.parametrize("name", ["chat_image", "chat_history", "vqa", "base_text"])
def test_cogvlm(folder: str, name: str, tmp_path: Path) -> None:
    case = read_json(folder, "preprocess.json")["cases"][name]
    family = cogvlm(tmp_path, folder, case["template_version"])
    sizes = [size_of(folder, case["image"])] if case["image"] else []
    *_, encoded = family.encode(rounds(case, answered=True), sizes, learn="answers")
    assert encoded.ids == case["input_ids"]
    assert [IGNORE_LABEL, *labels(encoded)[:-1]] == case["labels"]
    spans = [span for spans in encoded.spans for span in spans]
    types = np.zeros(len(encoded.ids), dtype=int)
    for start, end in spans:
        types[start:end] = 1
    assert types.tolist() == case["token_type_ids"]
    assert family.positions(np.asarray(encoded.ids), spans, sizes).tolist() == case["position_ids"]
    # the experts' rule, by token types: a vision token is one whose successor is of the image too
    vision = [at for at in range(len(types) - 1) if types[at] == types[at + 1] == 1]
    assert [at for start, end in family.expert_spans(spans) for at in range(start, end)] == vision
    if sizes:
        inputs = load_file(shared("vision") / folder / "inputs.safetensors")
        tiles = family.tiles(opened_image(folder, case["image"]))
        if name == "chat_image":
            np.testing.assert_array_equal(tiles.patches_PF, flat(inputs["chat_image.images.0.0"]))
        prompt = family.prompt(rounds(case, answered=False), sizes)
        assert prompt.ids == case["input_ids"][: len(prompt.ids)]
        assert labels(encoded)[len(prompt.ids) - 1] == encoded.ids[len(prompt.ids)]


def test_each_answer_of_a_cogvlm_record_is_a_document(tmp_path: Path) -> None:
    case = read_json("cogvlm2", "preprocess.json")["cases"]["chat_history"]
    family = cogvlm(tmp_path, "cogvlm2")
    first, second = family.encode(rounds(case, answered=True), [(9, 9)], learn="answers")
    assert second.ids == case["input_ids"]
    ((question, answer),) = case["history"]
    short = case | {"history": None, "query": question, "answer": answer}
    assert first.ids == only(family.encode(rounds(short, answered=True), [(9, 9)], learn="answers")).ids
    assert only(family.encode(rounds(case, answered=True), [(9, 9)], learn="last")).ids == second.ids


@pytest.mark.parametrize("name", ["chat", "chat_old", "vqa", "base"])
def test_cogagent(name: str, tmp_path: Path) -> None:
    case = read_json("cogagent", "preprocess.json")["cases"][name]
    family = cogvlm(tmp_path, "cogagent", name)
    encoded = family.prompt(rounds(case, answered=False), [size_of("cogagent", "a.png")])
    assert encoded.ids == case["input_ids"]
    ((span,),) = encoded.spans
    assert [int(span[0] <= at < span[1]) for at in range(len(encoded.ids))] == case["token_type_ids"]
    inputs = load_file(shared("vision") / "cogagent" / "inputs.safetensors")
    image = opened_image("cogagent", "a.png")
    np.testing.assert_array_equal(family.tiles(image).patches_PF, flat(inputs["chat_image.images.0.0"]))
    cross = family.cross_tiles(image)
    assert cross is not None and cross.grids == ((7, 7),)
    np.testing.assert_array_equal(cross.patches_PF, flat(inputs["chat_image.cross_images.0.0"]))


def test_cogvlm_refuses_what_its_layout_has_no_room_for(tmp_path: Path) -> None:
    family, agent = cogvlm(tmp_path / "a", "cogvlm2"), cogvlm(tmp_path / "b", "cogagent")
    question, answer = Turn("user", ("Who?",)), Turn("assistant", ("He.",))
    with pytest.raises(UserError, match="2 images, but the model takes one"):
        only(family.encode(Conversation((question, answer)), [(9, 9)] * 2, learn="answers"))
    with pytest.raises(UserError, match="two turns of one role"):
        only(family.encode(Conversation((question, question, answer)), [], learn="answers"))
    with pytest.raises(UserError, match="no image, but the model's layers attend to one"):
        only(agent.encode(Conversation((question, answer)), [], learn="answers"))
    with pytest.raises(UserError, match="room for one question"):
        list(
            cogvlm(tmp_path / "c", "cogagent", "vqa").encode(
                Conversation((question, answer) * 2), [(9, 9)], learn="answers"
            )
        )
    with pytest.raises(UserError, match="expected one of chat, vqa, base"):
        cogvlm(tmp_path / "d", "cogvlm2", "mine")


class TestOmniLMM:
    @pytest.fixture
    def family(self, tmp_path: Path) -> OmniLMM:
        return OmniLMM(read_json("omnilmm", "config.json"), fixture_tokenizer(tmp_path, "omnilmm"), bos=1)

    @pytest.mark.parametrize("marker", ["<image>\n", ""])
    def test_training(self, family: OmniLMM, marker: str) -> None:
        case = read_json("omnilmm", "preprocess.json")["cases"]["chat_training"]
        messages = json.loads(json.dumps(case["messages_after_expansion"]))
        messages[0]["content"] = marker + messages[0]["content"].partition("\n")[2]
        encoded = only(family.encode(chat(messages), [(9, 9)], learn="answers"))
        assert encoded.ids == case["input_ids"]
        assert [IGNORE_LABEL, *labels(encoded)[:-1]] == case["labels"]
        ((span,),) = encoded.spans
        assert [at for at, token in enumerate(encoded.ids) if token == 512] == list(range(*span))

    def test_inference(self, family: OmniLMM) -> None:
        case = read_json("omnilmm", "preprocess.json")["cases"]["chat_inference"]
        encoded = family.prompt(chat([{"role": "user", "content": "<image>\nWho are they?"}]), [(9, 9)])
        assert encoded.ids == case["input_ids"]

    def test_pixels(self, family: OmniLMM) -> None:
        inputs = load_file(shared("vision") / "omnilmm" / "inputs.safetensors")
        tiles = family.tiles(opened_image("omnilmm", "a.png"))
        np.testing.assert_array_equal(tiles.patches_PF, flat(inputs["chat_training.images"][0]))
        assert tiles.grids == ((6, 6),)
