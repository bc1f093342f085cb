"""Checkpoints of many ranks, whose pieces are columns in a file of their own: against lists, slices and counts."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.manifest import MANIFEST, check_file, read_manifest, sign
from engine.checkpoint.piece_columns import COLUMNS, RankPart, TensorPart, join_parts
from engine.checkpoint.pieces import PieceReader
from engine.checkpoint.reshard import Box, BoxColumns, box_spec
from engine.checkpoint.run import commit
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.checkpoint.verification import checked_together
from engine.distributed.boxes import part_shards
from engine.distributed.mesh import Axis
from engine.distributed.sharding import NamedShard, ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from tests.support.saved_training import save_training

RANKS = 4
SHAPES = {"a": (7, 5), "b": (16, 3), "c": (11,)}
STATES = ("master", "exp_avg")


def _whole(state: str, name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * len(state)


def _shards(rank: int) -> list[NamedShard]:
    """Every tensor cut evenly, wherever that falls in a row; "b" in columns too; and one that rank 0 has whole."""
    shards = []
    for state in STATES:
        for name, shape in SHAPES.items():
            whole = _whole(state, name)
            spec, part, parts = replicated_spec(shape, rank=0, size=1), rank, RANKS
            if name == "c":
                whole = whole.reshape(1, -1)[0]
            if name == "b":  # two halves of rows, each cut over two ranks
                spec, part, parts = split_spec(shape, 0, rank=rank // 2, size=2, what="rows"), rank % 2, 2
                whole = whole.chunk(2)[rank // 2]
            size = whole.numel()
            start, stop = part * size // parts, (part + 1) * size // parts
            shards += part_shards(
                f"{state}/{name}", spec, start, stop, whole.reshape(-1)[start:stop].clone(), first=-start
            )
    if rank == 0:
        shards.append(NamedShard("master/d", torch.ones(2, 2), replicated_spec((2, 2), rank=0, size=1)))
    return shards


def _save(run_dir: Path) -> Path:
    def save(rank: int) -> None:
        save_training(
            run_dir, step=1, tensors=_shards(rank), state={"step": 1}, rank=rank, ranks=RANKS, run_config="",
            base={}, lora={}, layout={},
        )  # fmt: skip

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return run_dir / "checkpoints" / "step_00000001"


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The same checkpoint with its pieces listed, and in columns."""
    listed = _save(tmp_path / "listed")
    monkeypatch.setattr(commit, "MAX_LISTED_PIECES", 3)
    return listed, _save(tmp_path / "columns")


def test_columns_say_what_a_list_says(both: tuple[Path, Path]) -> None:
    listed, columns = (read_manifest(folder) for folder in both)
    assert columns.columns is not None and listed.columns is None and not (both[0] / COLUMNS).exists()
    assert columns.tensors.keys() == listed.tensors.keys() and columns.files == listed.files
    for name, record in listed.tensors.items():
        found = columns.tensors[name]
        assert (found.shape, found.dtype, list(found.pieces)) == (record.shape, record.dtype, list(record.pieces))
    states = [columns.tensors[f"{state}/a"].rows for state in STATES]
    assert states[0][0] == states[1][0] and states[0][1] != states[1][1], "states share where their pieces are"


def test_columns_are_read_in_whole_and_in_part(both: tuple[Path, Path]) -> None:
    for folder in both:
        checkpoint = TrainingCheckpoint(folder)
        with checked_together([checkpoint.checks], Axis("world")):
            for state in STATES:
                for name in SHAPES:
                    whole = _whole(state, name)
                    assert torch.equal(checkpoint.read_whole(f"{state}/{name}"), whole), name
                    assert torch.equal(checkpoint.read_rows(f"{state}/{name}", 2, 5), whole[2:5]), name
        assert sum(checkpoint.verify_all()) == 4 * (4 + 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values()))


def _edit(folder: Path, change: str) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    record = data["tensors"]["master/a"]
    if change == "row":
        record["pieces"][0] += 1
    elif change == "beyond":
        record["pieces"][1] = 1 << 20
    elif change == "fewer":
        record["pieces"][2] -= 1
    elif change == "shape":
        record["shape"] = [8, 5]
    elif change == "elsewhere":
        data["columns"]["file"] = "../pieces.bin"
    elif change == "size":
        data["columns"]["rows"] += 1
    elif change == "name":
        data["tensors"]["master/a@0,0"] = record
    elif change == "huge":
        data["columns"]["dims"] = 1 << 40
    elif change == "list":
        record["pieces"] = [{}]
    else:
        raise AssertionError(change)
    del data["digest"]
    (folder / MANIFEST).write_bytes(sign(json.dumps(data)))


@pytest.mark.parametrize(
    "change", ["row", "beyond", "fewer", "shape", "elsewhere", "size", "name", "huge", "list", "flip", "gone", "link"]
)
def test_columns_that_do_not_add_up_are_refused(both: tuple[Path, Path], tmp_path: Path, change: str) -> None:
    path = both[1] / COLUMNS
    if change == "flip":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif change == "gone":
        path.unlink()
    elif change == "link":
        shutil.move(path, tmp_path / "outside")
        path.symlink_to(tmp_path / "outside")
    else:
        _edit(both[1], change)
    with pytest.raises(UserError) as caught:
        read_manifest(both[1])
    assert str(both[1]) in str(caught.value) and len(str(caught.value)) < 1000


def test_a_manifest_that_nobody_could_read_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoint.manifest._MAX_BYTES", 1000)
    with pytest.raises(UserError, match="no more than 1000 can be read"):
        save_training(
            tmp_path, step=1, tensors=_shards(0)[-1:], state={"text": "x" * 1000}, run_config="", base={}, lora={},
            layout={},
        )  # fmt: skip
    assert not any((tmp_path / "checkpoints").glob("step_*"))


def test_boxes_in_columns_plan_the_copies_of_a_list() -> None:
    shape, boxes = (4, 6), [Box(0, 0, 2), Box(0, 2, 1, ((1, 0, 4),)), Box(0, 2, 1, ((1, 4, 2),)), Box(0, 3, 1)]
    columns = BoxColumns.of(shape, boxes)
    assert list(columns) == boxes and columns.num_elements().tolist() == [12, 4, 2, 6]
    assert columns.touching(((2, 3), (3, 6))) == [1, 2]
    assert box_spec(shape, columns[0]) == box_spec(shape, boxes[0])
    assert BoxColumns.of((), [Box()])[0] == Box()


def _part(rank: int, ranks: int, tensors: int, rows: int) -> RankPart:
    """One of `ranks` equal parts of tensors [rows * ranks, 8]."""
    ranges = np.array([[[rank * rows, (rank + 1) * rows], [0, 8]]] * tensors, dtype=np.int32)
    parts = tuple(TensorPart(f"t{place}", (rows * ranks, 8), "F32", 1) for place in range(tensors))
    return RankPart(file=f"rank_{rank:05d}", tensors=parts, ranges=ranges, sums=np.full(tensors, rank, dtype=np.uint32))


def test_joining_does_not_grow_faster_than_the_pieces() -> None:
    """Sorting anew for each rank would compare about 2000 * 2000 / 2 pieces of each tensor."""
    parts = [RankPart.from_bytes(_part(rank, 2000, 8, 3).to_bytes()) for rank in reversed(range(2000))]
    looked: list[int] = []
    lexsort = np.lexsort

    def counted(keys: tuple[np.ndarray, ...]) -> np.ndarray:
        looked.append(len(keys[0]))
        return lexsort(keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "lexsort", counted)
        records = join_parts(parts)
    assert looked == [16000]
    for record in records.values():
        assert [piece.box.offset for piece in record.pieces[:3]] == [0, 3, 6] and len(record.pieces) == 2000
        assert record.pieces[1999].checksum == f"{1999:08x}" and record.pieces[7].file == "rank_00007"


def test_a_reader_takes_the_keys_of_a_file_from_columns(both: tuple[Path, Path]) -> None:
    """A tensor that the manifest does not know, in place of one that it does, is noticed in either form."""
    for folder in both:
        path = folder / "rank_00003.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"master/a@5,1"', b'"master/z@5,1"'))
        with pytest.raises(UserError, match="lacks master/a@5,1|has master/z@5,1"):
            PieceReader(folder).read_whole("master/a")


def test_a_rank_looks_at_the_files_it_reads(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 looks at all of them, N ranks at N files each would be N * N on a shared disk."""
    looked: list[str] = []

    def counted(folder: Path, name: str, size: int) -> None:
        if name != COLUMNS:  # which belongs to the manifest
            looked.append(name)
        check_file(folder, name, size)

    monkeypatch.setattr("engine.checkpoint.manifest.check_file", counted)
    monkeypatch.setattr("engine.checkpoint.pieces.check_file", counted)
    TrainingCheckpoint(both[1], looks_at_files=False).read_rows("master/b", 0, 1)
    assert looked == ["rank_00000.safetensors"]
    first = TrainingCheckpoint(both[1])
    assert len(looked) == 1 + RANKS and sorted(looked[1:]) == sorted(first.manifest.files)
    (both[1] / "rank_00002.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="has 3 bytes, but manifest.json says"):
        TrainingCheckpoint(both[1], looks_at_files=False).read_whole("master/b")


def test_spec_of_a_box_in_columns() -> None:
    spec = box_spec((4, 6), BoxColumns.of((4, 6), [Box(1, 2, 3)])[0])
    assert isinstance(spec, ShardSpec) and spec.local_shape == (4, 3)
