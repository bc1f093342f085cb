"""Tensors stored in pieces that are cut in more than one dimension, against plain slicing and counting by torch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.manifest import manifest_from_json
from engine.checkpoint.manifest_records import Manifest, PieceRecord, TensorRecord
from engine.checkpoint.reshard import Box, box_spec, find_flaw, plan_copies
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.checkpoint.safetensors_file import SafetensorsWriter
from engine.distributed.sharding import NamedShard, Piece, ShardSpec, replicated_spec
from engine.errors import UserError
from engine.models.initialise import fill_normal
from tests.support.saved_training import save_training


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it: one box, cut again and again at a random place."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    parts = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 5))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        start, stop = part[dim]
        if stop - start < 2:
            parts.append(part)
            continue
        at = draw(st.integers(start + 1, stop - 1))
        parts += [(*part[:dim], half, *part[dim + 1 :]) for half in ((start, at), (at, stop))]
    boxes = []
    for part in parts:
        runs = [(dim, start, stop - start) for dim, (start, stop) in enumerate(part)]
        boxes.append(Box(*runs[0], tuple(runs[1:])))
    return shape, boxes


def _slices(box: Box, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box.ranges(shape))


@settings(max_examples=200, deadline=None)
@given(tilings(), st.data())
def test_copies_between_two_tilings_give_what_slicing_gives(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, stored = tiling
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1
    pieces = [whole[_slices(box, shape)] for box in stored]
    ranges = [sorted(data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))) for size in shape]
    runs = [(dim, start, stop + 1 - start) for dim, (start, stop) in enumerate(ranges)]
    wanted = Box(*runs[0], tuple(runs[1:]))
    spec = box_spec(shape, wanted)
    local = torch.zeros(spec.local_shape, dtype=whole.dtype)
    for copy in plan_copies(spec, stored):
        local[copy.local_slices] = pieces[copy.source][copy.source_slices]
    assert torch.equal(local, whole[_slices(wanted, shape)])


@settings(max_examples=200, deadline=None)
@given(tilings(), st.data())
def test_flaws_are_found(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """Boxes are taken out, doubled or moved; counting who covers each element says whether they still tile."""
    shape, boxes = tiling
    assert find_flaw(shape, boxes) is None
    index = data.draw(st.integers(0, len(boxes) - 1))
    change = data.draw(st.sampled_from(["out", "twice", "moved"]))
    changed = boxes[:index] + boxes[index + 1 :]
    if change != "out":
        box = boxes[index]
        top = shape[0] - box.length
        offset = box.offset if change == "twice" else data.draw(st.integers(0, top))
        changed += [Box(0, offset, box.length, box.others)] + ([box] if change == "twice" else [])
    count = torch.zeros(shape, dtype=torch.int64)
    for box in changed:
        count[_slices(box, shape)] += 1
    assert (find_flaw(shape, changed) is None) == bool((count == 1).all())


def _manifest(boxes: list[Box]) -> Manifest:
    pieces = tuple(
        PieceRecord(box=box, file="a.safetensors", key=f"{i}", checksum="00000000") for i, box in enumerate(boxes)
    )
    record = TensorRecord(shape=(4, 6), dtype="F32", pieces=pieces)
    return Manifest(kind="training", engine_version="0", tensors={"x": record}, files={"a.safetensors": 96})


GOOD = [Box(0, 0, 2), Box(0, 2, 1, ((1, 0, 4),)), Box(0, 2, 1, ((1, 4, 2),)), Box(0, 3, 1)]


def test_a_manifest_keeps_boxes() -> None:
    data = json.loads(json.dumps(_manifest(GOOD).to_json()))
    assert [piece.box for piece in manifest_from_json(data, Path("m")).tensors["x"].pieces] == GOOD


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        (GOOD[:1] + GOOD[2:], "4 elements in none of them"),
        (GOOD + [Box(0, 1, 1, ((1, 5, 1),))], "an overlap at"),
        (GOOD[:3] + [Box(0, 3, 1, ((1, 0, 7),))], "outside the tensor"),
        (GOOD[:3] + [Box(0, 3, 1, ((0, 3, 1),))], "names a dimension twice"),
    ],
)
def test_a_manifest_with_flaws_is_refused(boxes: list[Box], words: str) -> None:
    data = json.loads(json.dumps(_manifest(boxes).to_json()))
    with pytest.raises(UserError, match=words):
        manifest_from_json(data, Path("m"))


def test_others_that_are_no_numbers_are_refused() -> None:
    data = json.loads(json.dumps(_manifest(GOOD).to_json()))
    data["tensors"]["x"]["pieces"][1]["others"] = [[1, 0]]
    with pytest.raises(UserError, match="lists of three numbers"):
        manifest_from_json(data, Path("m"))


def test_several_parts_of_a_tensor_from_one_rank(tmp_path: Path) -> None:
    """Each part is a shard of its own under the same name; what was saved is read whole and in parts."""
    whole = torch.randn(4, 6)
    parts = [NamedShard("x", whole[_slices(box, (4, 6))].clone(), box_spec((4, 6), box)) for box in GOOD]
    path = save_training(
        tmp_path, step=1, tensors=parts, state={}, run_config="", base={}, lora={}, layout={}, rank=0,
    )  # fmt: skip
    checkpoint = TrainingCheckpoint(path)
    assert torch.equal(checkpoint.read_whole("x"), whole)
    assert torch.equal(checkpoint.read_rows("x", 1, 3), whole[1:3])
    assert torch.equal(checkpoint.read("x", replicated_spec((4, 6), rank=0, size=1)), whole)
    for part in parts:
        assert torch.equal(checkpoint.read("x", part.spec), part.tensor)


def test_parts_are_drawn_from_their_place_in_the_whole() -> None:
    whole = NamedShard("x", torch.zeros(4, 6), replicated_spec((4, 6), rank=0, size=1))
    fill_normal(whole, 1.0, 5)
    assert len(whole.tensor.unique()) == 24
    for rows, columns in itertools.product(((0, 2), (1, 4)), ((0, 6), (2, 5))):
        shape = (rows[1] - rows[0], columns[1] - columns[0])
        spec = ShardSpec(
            global_shape=(4, 6), local_shape=shape, dim=0, pieces=(Piece(rows[0], 0, shape[0]),),
            offsets=(0, columns[0]),
        )  # fmt: skip
        part = NamedShard("x", torch.zeros(shape), spec)
        fill_normal(part, 1.0, 5)
        assert torch.equal(part.tensor, whole.tensor[slice(*rows), slice(*columns)])


def test_a_writer_takes_strided_parts(tmp_path: Path) -> None:
    """A part may be columns of a wider memory."""
    wide = torch.randn(3, 8)
    with SafetensorsWriter(tmp_path / "a.safetensors", {"x": (torch.float32, (3, 2))}) as writer:
        writer.write("x", wide[:, 3:5])
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], wide[:, 3:5])
