"""The small files that travel with a model: nothing from outside its folder does, however it is linked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.checkpoint.folder import find_companions
from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.errors import UserError
from tests.unit.checkpoint_models import tiny_llama
from tests.unit.test_checkpoint_source import assert_same_tensors, load_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


def test_links_to_outside_are_left_out_and_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:*:20228")
    (tmp_path / "hf-other").mkdir()
    (tmp_path / "hf-other" / "secret.txt").write_text("beside, with a name that begins alike")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    (model / "LICENSE").symlink_to(model / "notes.txt")  # a link to a link
    (model / "README.md").symlink_to("../hf-other/secret.txt")
    (model / "gone.txt").symlink_to(tmp_path / "nowhere")
    (model / "circle.txt").symlink_to(model / "circle.txt")
    (model / "whole.json").symlink_to(tmp_path)
    os.mkfifo(model / "pipe.json")
    (model / "device.txt").symlink_to("/dev/zero")
    report = import_checkpoint(open_source(model), tmp_path / "out", tensor=1)
    assert {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"} == {
        "config.json", "generation_config.json", "manifest.json", "tokenizer.json",
    }  # fmt: skip
    assert [note.partition(" is not copied: ")[0] for note in report.notes] == [
        "LICENSE", "README.md", "device.txt", "notes.txt", "pipe.json",
    ]  # fmt: skip
    assert "outside the model's folder" in report.notes[0] and "not a regular file" in report.notes[-1]
    exported = export_hf(open_source(model), tmp_path / "back")
    assert set(report.notes) <= set(exported.notes) and not (tmp_path / "back" / "notes.txt").exists()


def test_a_config_from_outside_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.move(model / "config.json", tmp_path / "config.json")
    (model / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config\.json is not taken: it is a link to .* put the file itself there"):
        import_checkpoint(open_source(model), tmp_path / "out", tensor=1)


def test_links_inside_the_folder_are_files(model: Path, tmp_path: Path) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "text").write_text("inside")
    (model / "notes.txt").symlink_to("sub/text")
    (tmp_path / "name").symlink_to(model)  # the folder itself may be given by a link
    import_checkpoint(open_source(tmp_path / "name"), tmp_path / "out", tensor=1)
    copied = tmp_path / "out" / "notes.txt"
    assert copied.read_text() == "inside" and not copied.is_symlink()


def test_large_and_sparse_files_are_left_out(model: Path) -> None:
    os.truncate(model / "tokenizer.json", 8 << 30)
    found = find_companions(model)
    assert "tokenizer.json" not in [file.name for file in found.files] and found.num_bytes < 10_000
    assert found.left_out == (
        "tokenizer.json is not copied: it has 8.59 GB, too much for a file beside the weights",
    )  # fmt: skip


def test_a_snapshot_of_a_hugging_face_cache(model: Path, tmp_path: Path) -> None:
    """Each of its files is a link to a blob of the same repository; those of other repositories are not its own."""
    repository = tmp_path / "hub" / "models--one--llama"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    other = tmp_path / "hub" / "models--two--secret" / "blobs"
    other.mkdir(parents=True)
    (other / "00").write_text("not yours")
    (snapshot / "notes.txt").symlink_to("../../../models--two--secret/blobs/00")
    report = import_checkpoint(open_source(snapshot), tmp_path / "out", tensor=2)
    assert len(report.notes) == 1 and "notes.txt is not copied" in report.notes[0]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    export_hf(open_source(tmp_path / "out"), tmp_path / "back")
    assert_same_tensors(load_folder(model), load_folder(tmp_path / "back"))
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
