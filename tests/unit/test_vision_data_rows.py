"""Records with images become rows: places, positions, pixels, context parts, threads and resuming."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from engine.batch import IGNORE_LABEL, Batch
from engine.data.blend import blend
from engine.data.collate import rank_batch
from engine.data.dataset import TokenDataset, dataset_of
from engine.data.hold_out import hold_out
from engine.data.loader import DataLoader
from engine.data.mapped_dataset import map_dataset, save_dataset
from engine.data.preview import first_documents, preview
from engine.data.python_records import PythonRecords
from engine.data.row_shape import RowShape
from engine.data.text_reader import build_texts
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.preferences.batch_parts import Answers
from engine.preferences.data.answer_columns import answer_columns
from engine.preferences.data.judged import MISMATCHED
from engine.vision.batch_parts import CrossImages, ExpertTokens, Images
from engine.vision.data import row_images as row_images
from engine.vision.data.columns import VisionColumns
from engine.vision.data.families import vision_family
from engine.vision.data.reader import ImageReader
from tests.support.answer_data import build_judged, build_pairs
from tests.support.shared_data import shared
from tests.support.vision_data import fixture_tokenizer, read_json

LENGTH = 192
ANSWER = {"role": "assistant", "content": "They are two football players."}
WHO = "Who are they?"


def opened(folder: str, tmp_path: Path, image_folder: Path | None = None) -> tuple[Tokenizer, ImageReader]:
    tokenizer = fixture_tokenizer(tmp_path / f"tokenizer-{folder}", folder)
    family = vision_family(read_json(folder, "config.json"), tmp_path, tokenizer)
    assert family is not None
    return tokenizer, ImageReader(family, image_folder)


def copy_images(folder: str, target: Path) -> Path:
    shutil.copytree(shared("vision") / folder / "images", target, dirs_exist_ok=True)
    return target


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def minicpm_records() -> list[dict[str, Any]]:
    """An image in tiles, a conversation of two rounds with a small one, and text alone: cases of the fixture."""
    cases = read_json("minicpm-v-2", "preprocess.json")["cases"]
    records = [
        {"image": case["image"], "conversations": case["messages"]}
        for case in (cases["chat_sliced"], cases["chat_multiturn_small"])
    ]
    return [*records, {"conversations": cases["text_only_training"]["messages"]}]


def minicpm(
    tmp_path: Path, *, packing: Any = False, records: list[dict[str, Any]] | None = None, **more: Any
) -> TokenDataset:
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    copy_images("minicpm-v-2", tmp_path)
    file = write(tmp_path / "records.jsonl", minicpm_records() if records is None else records)
    settings = {"seq_length": LENGTH, **more}
    return build_texts(file, tokenizer=tokenizer, packing=packing, images=images, **settings)


def batch_of(dataset: TokenDataset, rows: list[int | None], **more: Any) -> Batch:
    return rank_batch(dataset, rows, range(len(rows)), RowShape(**{"pad_token": 7} | more))


def tiles_of(folder: str, sample: str) -> list[np.ndarray]:
    inputs = load_file(shared("vision") / folder / "inputs.safetensors")
    return [inputs[key] for key in sorted(inputs) if key.startswith(sample + ".")]


def flat(pixels: np.ndarray) -> np.ndarray:
    _, height, width = pixels.shape
    patches = [pixels[:, y : y + 14, x : x + 14].ravel() for y in range(0, height, 14) for x in range(0, width, 14)]
    return np.stack(patches)


FORMS: dict[str, dict[str, Any]] = {
    "minicpm": {"image": "a.png", "conversations": [{"role": "user", "content": WHO}, ANSWER]},
    "minicpm with a marker": {
        "image": "a.png",
        "conversations": [{"role": "user", "content": f"<image>\n{WHO}"}, ANSWER],
    },
    "minicpm map": {"image": {"<image>": "a.png"}, "conversations": [{"role": "user", "content": WHO}, ANSWER]},
    "llava": {
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": f"<image>\n{WHO}"},
            {"from": "gpt", "value": ANSWER["content"]},
        ],
    },
    "swift": {"images": ["a.png"], "messages": [{"role": "user", "content": f"<image>\n{WHO}"}, ANSWER]},
    "swift with objects": {
        "images": [{"path": "a.png", "bytes": None}],
        "messages": [{"role": "user", "content": f"<image>\n{WHO}"}, ANSWER],
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": WHO}]},
            {"role": "assistant", "content": [{"type": "text", "text": ANSWER["content"]}]},
        ]
    },
    "parts and a list": {
        "images": ["a.png"],
        "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": WHO}]}, ANSWER],
    },
    "parts of OpenAI": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "file://a.png"}}, {"type": "text", "text": WHO}],
            },
            ANSWER,
        ]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_a_record_gives_the_originals_tokens(form: str, tmp_path: Path) -> None:
    case = read_json("minicpm-v-2", "preprocess.json")["cases"]["chat_sliced"]
    dataset = minicpm(tmp_path, records=[FORMS[form]])
    ((tokens, _),) = dataset.documents(0)
    assert tokens.tolist() == case["training_input_ids"]
    assert (
        dataset.extra(VisionColumns) is not None
        and dataset.extra(VisionColumns).spans.tolist() == case["training_image_bound"]
    )


def test_images_in_memory_give_the_rows_of_their_files(tmp_path: Path) -> None:
    """Pillow's, and the bytes that `datasets` keeps, whatever the form of the record."""
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    folder = copy_images("minicpm-v-2", tmp_path)
    file = folder / "a.png"
    held: list[Any] = [Image.open(file), {"bytes": file.read_bytes(), "path": None}, file]

    def with_image(value: Any, image: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_image(one, image) for key, one in value.items()}
        return (
            [with_image(one, image) for one in value]
            if isinstance(value, list)
            else image
            if value == "a.png"
            else value
        )

    for name in ("minicpm", "swift", "parts", "parts and a list"):
        expected = batch_of(minicpm(tmp_path, records=[FORMS[name]]), [0]).part(Images)
        for image in held:
            with PythonRecords("data", [with_image(FORMS[name], image)]) as source:
                dataset = build_texts(source, tokenizer=tokenizer, seq_length=LENGTH, images=images)
                batch = batch_of(dataset, [0])
            found = batch.part(Images)
            assert found is not None and expected is not None
            for field in fields(expected):
                own, other = getattr(found, field.name), getattr(expected, field.name)
                assert torch.equal(own, other) if isinstance(own, torch.Tensor) else own == other, (name, field.name)


def test_packed_rows_have_the_originals_labels_places_and_pixels(tmp_path: Path) -> None:
    dataset = minicpm(tmp_path, packing=True)
    assert len(dataset) == 1
    batch = batch_of(dataset, [0, None])
    cases = read_json("minicpm-v-2", "preprocess.json")["cases"]
    names = {59: "chat_sliced", 68: "chat_multiturn_small", 28: "text_only_training"}
    labels, places, pixels, documents = [], [], [], []
    for number, length in enumerate(batch.document_lengths[:2] + (28,)):
        case, start = cases[names[length]], len(labels)
        labels += case["training_labels_preshifted"]
        places += [start + at for span in case.get("training_image_bound", ()) for at in range(*span)]
        own = {59: "chat_sliced.pixel_values.0", 68: "chat_batch.pixel_values.0"}.get(length)
        found = tiles_of("minicpm-v-2", own) if own else []
        pixels += found
        documents += [number] * len(found)
    assert batch.labels_BS[0, : len(labels)].tolist() == labels
    assert (batch.labels_BS[0, len(labels) :] == IGNORE_LABEL).all()
    assert dataset.target_counts.tolist() == [sum(label != IGNORE_LABEL for label in labels)]
    assert batch.loss_weights_BS.sum() == dataset.target_counts[0]
    images = batch.part(Images)
    assert images is not None and images.features_K is None
    assert images.places_K.tolist() == places
    assert (batch.tokens_BS.flatten()[images.places_K] == 0).all()
    assert images.documents == tuple(documents)
    assert images.grids == tuple((one.shape[1] // 14, one.shape[2] // 14) for one in pixels)
    np.testing.assert_array_equal(images.patches_PF, np.concatenate([flat(one) for one in pixels]))
    assert batch.positions_BS[0].tolist() == [*range(68), *range(59), *range(28 + LENGTH - len(labels))]
    assert batch.part(CrossImages) is None and batch.part(ExpertTokens) is None
    moved = batch.map(lambda tensor: tensor + 1)
    assert torch.equal(moved.part(Images).places_K, images.places_K + 1)
    empty = batch_of(dataset, [None]).part(Images)
    assert empty is not None and empty.patches_PF.shape == (0, 3 * 14 * 14) and empty.grids == ()


def test_context_parts_place_each_feature_once_in_the_column_that_has_it(tmp_path: Path) -> None:
    dataset = minicpm(tmp_path, packing=True)
    whole = batch_of(dataset, [0, 0])
    images = whole.part(Images)
    assert images is not None
    seen = []
    for rank in range(3):
        part = batch_of(dataset, [0, 0], context_size=3, context_rank=rank, pad_multiple=6)
        held = part.part(Images)
        assert held is not None and held.features_K is not None
        assert torch.equal(held.patches_PF, images.patches_PF)
        assert held.grids == images.grids and held.documents == images.documents
        at = part.token_index_BS.flatten()[held.places_K]
        assert torch.equal(at, whole.token_index_BS.flatten()[images.places_K[held.features_K]])
        seen += held.features_K.tolist()
    assert sorted(seen) == list(range(len(images.places_K)))


def cogvlm(folder: str, tmp_path: Path, *, packing: bool) -> TokenDataset:
    tokenizer, images = opened(folder, tmp_path)
    copy_images(folder, tmp_path)
    names = sorted(path.name for path in (shared("vision") / folder / "images").iterdir())
    records = [
        {
            "image": name,
            "conversations": [
                {"from": "human", "value": f"<image>\n{WHO * (1 + at)}"},
                {"from": "gpt", "value": "Me."},
            ],
        }
        for at, name in enumerate(names)
    ]
    if folder != "cogagent":
        records.append({"conversations": [{"from": "human", "value": WHO}, {"from": "gpt", "value": "We."}]})
    file = write(tmp_path / "records.jsonl", records)
    return build_texts(file, tokenizer=tokenizer, seq_length=LENGTH, packing=packing, images=images)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("context", [1, 2])
def test_token_types_of_cogvlm_rows_decide_positions_and_experts(tmp_path: Path, packing: bool, context: int) -> None:
    dataset = cogvlm("cogvlm2", tmp_path, packing=packing)
    rows = list(range(len(dataset)))
    whole = batch_of(dataset, rows, pad_multiple=4)
    types = (whole.tokens_BS.flatten() == 514).int()
    assert whole.part(Images) is not None and torch.equal(types.nonzero()[:, 0], whole.part(Images).places_K)
    follows = torch.cat([types[1:], types.new_zeros(1)])
    # the original's positions and experts, document by document, from its token types
    vision, positions, start = [], [], 0
    for length in whole.document_lengths:
        own = types[start : start + length].tolist()
        position, found = -1, []
        for at, kind in enumerate(own):
            inside = kind and at and own[at - 1] and at + 1 < length and own[at + 1]
            held = inside and own[at - 2]  # the first patch advances
            position += not held
            found.append(position)
        positions += found
        start += length
    assert whole.positions_BS.flatten().tolist() == positions
    vision = (types * follows).nonzero()[:, 0]
    index = whole.token_index_BS.flatten()
    seen = {"vision": [], "language": []}
    for rank in range(context):
        part = batch_of(dataset, rows, pad_multiple=4, context_size=context, context_rank=rank)
        assert part.part(ExpertTokens) is not None
        both = torch.cat([part.part(ExpertTokens).vision_V, part.part(ExpertTokens).language_L])
        assert torch.equal(both.sort().values, torch.arange(part.num_tokens))
        assert torch.equal(part.part(ExpertTokens).vision_V, part.part(ExpertTokens).vision_V.sort().values)
        seen["vision"] += part.token_index_BS.flatten()[part.part(ExpertTokens).vision_V].tolist()
    assert sorted(seen["vision"]) == index[vision].tolist()


def test_a_second_tower_gets_the_same_images_and_knows_their_documents(tmp_path: Path) -> None:
    dataset = cogvlm("cogagent", tmp_path, packing=False)
    batch = batch_of(dataset, [0, 0])
    assert batch.part(Images) is not None and batch.part(CrossImages) is not None
    assert batch.part(Images).documents == batch.part(CrossImages).documents == (0, 1)
    assert batch.part(CrossImages).grids == ((7, 7), (7, 7)) and batch.part(CrossImages).places_K.numel() == 0
    (pixels,) = tiles_of("cogagent", "chat_image.cross_images.0")
    np.testing.assert_array_equal(batch.part(CrossImages).patches_PF[49:], flat(pixels))


def equal(first: Batch, second: Batch) -> bool:
    assert first.part(Images) is not None and second.part(Images) is not None
    return (
        torch.equal(first.tokens_BS, second.tokens_BS)
        and torch.equal(first.labels_BS, second.labels_BS)
        and torch.equal(first.part(Images).patches_PF, second.part(Images).patches_PF)
        and torch.equal(first.part(Images).places_K, second.part(Images).places_K)
        and first.part(Images).grids == second.part(Images).grids
    )


def loader(dataset: TokenDataset, **more: Any) -> DataLoader:
    return DataLoader(dataset, global_batch_size=2, seed=3, **more)


def test_threads_resuming_and_mapped_files_give_the_same_batches(tmp_path: Path) -> None:
    dataset = minicpm(tmp_path, records=minicpm_records() * 4)
    expected = [loader(dataset).batches(step * 2) for step in range(6)]
    with_threads = list(loader(dataset, num_workers=3).stream(0, 6))
    resumed = list(loader(dataset, num_workers=2).stream(6, 3))
    (tmp_path / "mapped").mkdir()
    save_dataset(dataset, tmp_path / "mapped")
    mapped = map_dataset(tmp_path / "mapped")
    mapped.read_with(dataset.family)
    assert mapped.fingerprint() == dataset.fingerprint()
    shared_by_ranks = list(loader(mapped, num_workers=1).stream(0, 6))
    for step in range(6):
        for micro in range(2):
            assert equal(with_threads[step][micro], expected[step][micro])
            assert equal(shared_by_ranks[step][micro], expected[step][micro])
            if step >= 3:
                assert equal(resumed[step - 3][micro], expected[step][micro])


def test_mapped_columns_may_be_empty(tmp_path: Path) -> None:
    dataset = minicpm(tmp_path, records=minicpm_records()[2:])
    (tmp_path / "mapped").mkdir()
    save_dataset(dataset, tmp_path / "mapped")
    mapped = map_dataset(tmp_path / "mapped")
    mapped.read_with(dataset.family)
    assert equal(batch_of(mapped, [0]), batch_of(dataset, [0]))


def test_rows_held_out_and_blended_keep_their_images(tmp_path: Path) -> None:
    dataset = minicpm(tmp_path, records=minicpm_records() * 2)
    rows = [batch_of(dataset, [row]) for row in range(6)]
    left, held = hold_out(dataset, 0.34, seed=0)
    found = [batch_of(left, [row]) for row in range(len(left))] + [batch_of(held, [row]) for row in range(len(held))]
    assert len(found) == 6 and all(any(equal(one, other) for other in rows) for one in found)
    text = dataset_of([([1, 2, 3], [False, True, True])], seq_length=LENGTH)
    blended = blend([dataset, text, held], [1.0, 1.0, 1.0])
    parts = [dataset, text, held]
    text.read_with(dataset.family)
    starts = np.cumsum([0, *(len(blended) // 3 for _ in range(3))])
    for row in range(len(blended)):
        part = int(np.searchsorted(starts, row, side="right")) - 1
        own = parts[part]
        assert equal(batch_of(blended, [row]), batch_of(own, [(row - int(starts[part])) % len(own)]))


def test_pixels_are_decoded_when_a_row_is_built_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = row_images.read_image
    names: list[str] = []

    def counted(path: Path, *arguments: Any, **options: Any) -> Any:
        names.append(path.name)
        return read(path, *arguments, **options)

    monkeypatch.setattr(row_images, "read_image", counted)
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    copy_images("minicpm-v-2", tmp_path)
    first = minicpm_records()[0]
    pair = {
        "image": "a.png",
        "conversations": first["conversations"][:1],
        "chosen": {"role": "assistant", "content": "Players."},
        "rejected": {"role": "assistant", "content": "Nobody at all."},
    }
    dataset = build_pairs(write(tmp_path / "pairs.jsonl", [pair]), tokenizer=tokenizer, seq_length=96, images=images)
    assert names == []
    batch = batch_of(dataset, [0])
    assert names == ["a.png"]
    images, answers = batch.part(Images), batch.part(Answers)
    assert images is not None and images.documents == (0, 0, 0, 1, 1, 1) and answers is not None
    places = images.places_K.tolist()
    assert (batch.tokens_BS.flatten()[places] == 0).all() and len(places) == 2 * 3 * 4
    # of compared answers only their own tokens and the end token count
    assert answers.lengths.tolist() == [len(tokenizer.encode(text)) + 1 for text in ("Players.", "Nobody at all.")]


def test_judged_answers_take_their_questions_images_to_the_mismatched_ones(tmp_path: Path) -> None:
    """Mismatched answers are what the conversations of one record's question and another's answer would be."""
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    copy_images("minicpm-v-2", tmp_path)
    questions: list[dict[str, Any]] = [
        {"image": name, "messages": [{"role": "user", "content": f"<image>\n{text}"}]}
        for name, text in (("a.png", "Who are they?"), ("b.png", "What is this?"))
    ]
    questions.append({"messages": [{"role": "user", "content": "Nothing to see."}]})
    answers = ["Players of a game.", "A cat.", "No."]

    def with_answer(question: dict[str, Any], answer: str) -> dict[str, Any]:
        return {**question, "messages": [*question["messages"], {"role": "assistant", "content": answer}]}

    records = [with_answer(*pair) for pair in zip(questions, answers, strict=True)]
    judged = build_judged(
        write(tmp_path / "judged.jsonl", [{**one, "label": n > 0} for n, one in enumerate(records)]),
        tokenizer=tokenizer, seq_length=256, images=images,
    )  # fmt: skip
    others = [with_answer(question, answers[number - 1]) for number, question in enumerate(questions)]
    for found, expected in ((judged, records), (judged.companions[MISMATCHED], others)):
        data = build_texts(
            write(tmp_path / "plain.jsonl", expected), tokenizer=tokenizer, seq_length=256, images=images
        )
        ours, theirs = (batch_of(one, [0, 1, 2]) for one in (found, data))
        assert torch.equal(ours.tokens_BS, theirs.tokens_BS) and torch.equal(ours.labels_BS, theirs.labels_BS)
        assert ours.part(Images) is not None and theirs.part(Images) is not None
        assert torch.equal(ours.part(Images).places_K, theirs.part(Images).places_K)
        assert (
            torch.equal(ours.part(Images).patches_PF, theirs.part(Images).patches_PF)
            and ours.part(Images).documents[-1] == 1
        )
    assert answer_columns(judged).signs.tolist() == [-1.0, 1.0, 1.0]


def test_a_fingerprint_knows_the_images_but_not_their_folder(tmp_path: Path) -> None:
    records = minicpm_records()[:1]
    first = minicpm(tmp_path / "one", records=records).fingerprint()
    assert minicpm(tmp_path / "two", records=records).fingerprint() == first
    shutil.copy(tmp_path / "one" / "a.png", tmp_path / "one" / "same.png")
    other = [{**records[0], "image": "same.png"}]
    assert minicpm(tmp_path / "one", records=other).fingerprint() != first


def test_images_may_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    copy_images("minicpm-v-2", tmp_path / "images")
    file = write(tmp_path / "records" / "data.jsonl", minicpm_records())
    tokenizer, images = opened("minicpm-v-2", tmp_path, tmp_path / "images")
    dataset = build_texts(file, tokenizer=tokenizer, seq_length=LENGTH, images=images)
    assert equal(batch_of(dataset, [0]), batch_of(minicpm(tmp_path / "beside"), [0]))


@pytest.mark.parametrize(("limit", "kept"), [(59, True), (29, False), (27, False), (20, False)])
def test_truncation_drops_a_record_whose_image_it_would_cut(tmp_path: Path, limit: int, kept: bool) -> None:
    """The record's 59 tokens have features up to the 27th; an answer begins at the 44th."""
    records = minicpm_records()
    others = [{"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]
    dataset = minicpm(tmp_path, records=[records[0], *others], seq_length=limit)
    cut = limit < 27
    assert dataset.report.dropped_in_image == int(cut)
    assert dataset.report.dropped_prompt_only == int(not kept and not cut)
    assert len(dataset) == (2 if kept else 1)
    if cut:
        (warning,) = (one for one in dataset.report.warnings() if "image" in one)
        assert (
            f"data.seq_length {limit} would cut inside an image, first in {tmp_path / 'records.jsonl'} line 1"
            in warning
        )
        with pytest.raises(UserError, match=r"1 has an image that data\.seq_length 20 would cut"):
            minicpm(tmp_path, records=[records[0]], seq_length=limit)


def test_an_odd_label_behind_the_cut_is_gone(tmp_path: Path) -> None:
    record = minicpm_records()[1]
    whole = minicpm(tmp_path, records=[record])
    assert whole.extra(VisionColumns) is not None and whole.extra(VisionColumns).labels.tolist() == [[40, 2]]
    for limit, left in ((42, [[40, 2]]), (41, [])):
        cut = minicpm(tmp_path, records=[record], seq_length=limit)
        assert cut.extra(VisionColumns) is not None and cut.extra(VisionColumns).labels.tolist() == left
        batch = batch_of(cut, [0])
        assert batch.labels_BS[0, -1] == IGNORE_LABEL and cut.target_counts[0] == (batch.labels_BS >= 0).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "concatenate"}, "packing concatenate cuts documents anywhere, images too"),
        ({"overlong": "cut", "seq_length": 40}, "cannot be cut into several"),
        ({"overlong": "error", "seq_length": 40}, "has 59 tokens, more than data.seq_length 40"),
    ],
)
def test_options_that_would_cut_images_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        minicpm(tmp_path, **options)
    assert f"{tmp_path / 'records.jsonl'} line 1" in str(refused.value)


def test_a_preview_counts_features(tmp_path: Path) -> None:
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    copy_images("minicpm-v-2", tmp_path)
    file = write(tmp_path / "records.jsonl", minicpm_records())
    (document,) = first_documents([file], 1, tokenizer, data_format="auto", mask_prompt=True, images=images)
    (extras,) = document.extras
    text = preview(document.tokens, document.targets, tokenizer, colour=False, images=extras.spans)
    tile = "<image>⟨4 features⟩</image>"
    assert text == f"<用户>{tile}<slice>{tile}{tile}</slice>↵\nWho are they? <AI>⟦ They are two football players.</s>⟧"


def test_rows_weigh_as_many_targets_as_they_have(tmp_path: Path) -> None:
    dataset = minicpm(tmp_path)
    counted = [int((batch_of(dataset, [row]).labels_BS != IGNORE_LABEL).sum()) for row in range(len(dataset))]
    assert counted == dataset.target_counts.tolist()


@pytest.mark.parametrize("packing", [False, True])
def test_coordinates_of_tiles_do_not_depend_on_the_micro_batch(packing: bool, tmp_path: Path) -> None:
    """Dropout in towers draws by them: rows together or alone, whole or in context parts. Without the slot, rows that
    are alone would have those of the first; without a tile's number, tiles of an image would share one."""
    dataset = minicpm(tmp_path, packing=packing, records=[*minicpm_records()[:2]] * 2)
    rows = list(range(len(dataset)))

    def indices(rows: list[int], slots: list[int], **context: int) -> list[int]:
        images = rank_batch(dataset, rows, slots, RowShape(pad_token=7, **context)).part(Images)
        assert images is not None and images.tile_index_N is not None
        return images.tile_index_N.tolist()

    together = indices(rows, rows)
    assert [one for row in rows for one in indices([row], [row])] == together
    assert indices(rows, rows, context_size=2, context_rank=1) == together
    assert len(set(together)) == len(together) > len(rows)
