"""Safetensors files against the stock library, and manifests that must be refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c

from engine.checkpoint.folder import check_output
from engine.checkpoint.manifest import manifest_from_json, read_manifest
from engine.checkpoint.manifest import write_manifest as write
from engine.checkpoint.manifest_records import Manifest, PieceRecord, TensorRecord
from engine.checkpoint.pieces import PieceReader
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import SafetensorsReader, SafetensorsWriter
from engine.errors import UserError
from engine.files.staging import staged_folder

TENSORS = {
    "b.weight": torch.randn(3, 5).bfloat16(),
    "a.weight": torch.randn(7, 2),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "ids": torch.arange(5),
    "mask": torch.tensor([True, False, True]),
    "codes": torch.randn(4, 3).to(torch.float8_e4m3fn),
    "half": torch.randn(3).half(),
}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """float8 has no comparison of its own."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    declared = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(path, declared, {"format": "pt"}) as writer:
        # written in another order than declared
        return {name: writer.write(name, tensors[name]) for name in reversed(tensors)}


def test_writer_gives_the_stock_librarys_bytes(tmp_path: Path) -> None:
    write_file(tmp_path / "ours.safetensors", TENSORS)
    save_file(TENSORS, tmp_path / "stock.safetensors", {"format": "pt"})
    loaded = load_file(tmp_path / "ours.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert same_bytes(loaded[name], tensor), name
    plain = {name: TENSORS[name] for name in ("scalar", "a.weight", "half")}
    write_file(tmp_path / "ours.safetensors", plain)
    save_file(plain, tmp_path / "stock.safetensors", {"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "stock.safetensors").read_bytes()


def test_reader_opens_stock_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "stock.safetensors", {"format": "pt"})
    reader = SafetensorsReader(tmp_path / "stock.safetensors")
    assert reader.names() == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert (reader.dtype(name), reader.shape(name)) == (tensor.dtype, tuple(tensor.shape))
        assert same_bytes(reader.view(name), tensor), name


def test_strided_tensors_and_checksums(tmp_path: Path) -> None:
    whole = torch.randn(6, 8)
    digest = write_file(tmp_path / "x.safetensors", {"x": whole[:, 2:5]})["x"]
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], whole[:, 2:5])
    assert digest == f"{crc32c(whole[:, 2:5].contiguous().numpy().tobytes()):08x}"


def test_a_view_does_not_load_the_tensor(tmp_path: Path) -> None:
    """64 MB on the disk; looking at a slice of either dimension allocates the slice, not the tensor."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc to see this process's memory")

    def anonymous() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    path = tmp_path / "big.safetensors"
    with SafetensorsWriter(path, {"x": (torch.uint8, (4096, 16384))}) as writer:
        writer.write("x", torch.ones(4096, 16384, dtype=torch.uint8))
    before = anonymous()
    view = SafetensorsReader(path).view("x")
    parts = [view[:64].clone(), view[:, :256].clone()]
    assert anonymous() - before < 16e6
    assert [int(part.long().sum()) for part in parts] == [64 * 16384, 4096 * 256]


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, TENSORS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"x\.safetensors is damaged or truncated"):
        SafetensorsReader(path)


def record(**changes: Any) -> dict[str, Any]:
    """A valid manifest as JSON, with `changes` to its one tensor."""
    pieces = tuple(
        PieceRecord(box=Box(0, start, 4), file=f"{start}.safetensors", key="x", checksum="00000000") for start in (0, 4)
    )
    manifest = Manifest(
        kind="base",
        engine_version="1",
        tensors={"x": TensorRecord(shape=(8, 2), dtype="F32", pieces=pieces)},
        files={"0.safetensors": 40, "4.safetensors": 40},
    )
    data = json.loads(json.dumps(manifest.to_json()))
    data["tensors"]["x"].update(changes)
    return data


COLUMNS = {"dim": 1, "offset": 0, "length": 2, "file": "4.safetensors", "key": "x", "checksum": "00000000"}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    data = copy.deepcopy(record())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return data


def test_manifest_round_trip() -> None:
    data = record()
    assert manifest_from_json(data, Path("m")).to_json() == data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "not a manifest"),
        (changed("format", to="other"), "not a manifest"),
        (changed("version", to=1), "version 1"),
        (changed("version", to=True), "version true"),
        (changed("kind", to="thing"), "kind 'thing'"),
        (changed("checksum_algorithm", to="md5"), "md5"),
        (changed("tensors", "x", "pieces", 1, "offset", to=5), "outside"),
        (changed("tensors", "x", "pieces", 1, "offset", to=3), "an overlap at 3"),
        (changed("tensors", "x", "pieces", 0, "length", to=3), "a hole at [3, 4)"),
        (changed("tensors", "x", "pieces", 0, "length", to=0), "outside"),
        (changed("tensors", "x", "pieces", 0, "offset", to=-1), "-1"),
        (changed("tensors", "x", "pieces", 0, "dim", to=2), "outside"),
        (changed("tensors", "x", "pieces", 0, "dim", to=None), "all of it and a part of it"),
        (changed("tensors", "x", "pieces", 1, to=COLUMNS), "different dimensions"),
        (changed("tensors", "x", "pieces", 0, "file", to="../0.safetensors"), "not a plain file name"),
        (changed("tensors", "x", "pieces", 0, "file", to="/etc/passwd"), "not a plain file name"),
        (changed("tensors", "x", "pieces", 0, "file", to="other"), "does not list"),
        (changed("tensors", "x", "pieces", to=[]), "no pieces"),
        (changed("tensors", "x", "shape", to=[1 << 40, 1 << 20]), "impossible shape"),
        (changed("tensors", "x", "shape", to=[8.0, 2]), "8.0"),
        (changed("tensors", "x", "dtype", to="F99"), "F99"),
        (changed("tensors", "x", "encoding", to="nf4"), "nf4"),
        (changed("files", to={"../x": 1}), "not a plain file name"),
        (changed("files", to=None), "files is NoneType"),
    ],
)
def test_bad_manifests_are_refused(data: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        manifest_from_json(data, Path("folder") / "manifest.json")
    assert words in str(caught.value) and "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_are_checked_on_opening(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a complete checkpoint"):
        read_manifest(tmp_path)
    write(tmp_path, manifest_from_json(record(), Path("m")))
    with pytest.raises(UserError, match=r"0\.safetensors is missing"):
        read_manifest(tmp_path)
    (tmp_path / "0.safetensors").write_bytes(b"0" * 40)
    (tmp_path / "4.safetensors").write_bytes(b"0" * 39)
    with pytest.raises(UserError, match=r"4\.safetensors has 39 bytes, but manifest.json says 40"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_manifest(tmp_path)


def staged(out: Path, overwrite: bool = False, inputs: Iterable[Path] = (), num_bytes: int = 0):
    return staged_folder(out, check=partial(check_output, out, overwrite, inputs), num_bytes=num_bytes)


def test_an_output_folder_is_absent_or_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyError), staged(out) as staging:
        (staging / "half").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with staged(out) as staging:
        (staging / "config.json").write_text("1")
        assert not out.exists()
    with pytest.raises(UserError, match="add --overwrite"), staged(out):
        pass
    with staged(out, overwrite=True) as staging:
        (staging / "new").touch()
    assert [path.name for path in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_never_deletes_what_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "home" / "model").mkdir(parents=True)
    (tmp_path / "home" / "letter.txt").touch()
    with pytest.raises(UserError, match="holds no model"), staged(tmp_path / "home", overwrite=True):
        pass
    for out in (tmp_path / "home", tmp_path / "home" / "model", tmp_path / "home" / "model" / "sub"):
        inputs = [tmp_path / "home" / "model"]
        with pytest.raises(UserError, match="overlaps"), staged(out, overwrite=True, inputs=inputs):
            pass
    assert (tmp_path / "home" / "letter.txt").exists()


def test_too_little_disk_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="free"), staged(tmp_path / "out", num_bytes=1 << 60):
        pytest.fail("the work began")
    assert list(tmp_path.iterdir()) == []


class _ReadBetween(dict[str, TensorRecord]):
    """Records between the first and the second of which another thread reads."""

    reader: PieceReader | None = None

    def values(self) -> Any:
        for number, record in enumerate(list(super().values())):
            if number == 1 and (reader := self.reader) is not None:
                self.reader = None
                assert torch.equal(reader.stored_view("b", 0), torch.ones(2))
            yield record


def test_a_read_beside_the_first_one_of_a_reader(tmp_path: Path) -> None:
    """The fingerprint of a run's weights is read in the background."""
    write_file(tmp_path / "one.safetensors", {"a": torch.zeros(2), "b": torch.ones(2)})
    records = _ReadBetween()
    for name in ("a", "b"):
        piece = PieceRecord(box=Box(), file="one.safetensors", key=name, checksum="")
        records[name] = TensorRecord(shape=(2,), dtype="F32", pieces=[piece])
    size = (tmp_path / "one.safetensors").stat().st_size
    manifest = Manifest(kind="base", engine_version="1", tensors=records, files={"one.safetensors": size})
    reader = records.reader = PieceReader(tmp_path, manifest)
    assert torch.equal(reader.stored_view("a", 0), torch.zeros(2))
