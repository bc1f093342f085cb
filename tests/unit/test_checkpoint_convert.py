"""Conversions: every byte where plain slicing puts it, bounded memory, and going on after a stop."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.checkpoint.copying import resumable
from engine.checkpoint.copying.contents import row_blocks, rows_of
from engine.checkpoint.copying.direct_io import BLOCK_BYTES, Scratch
from engine.checkpoint.copying.resumable import resumable_folder
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.reshard import Box
from engine.conversion.import_export import Work, export_hf, import_checkpoint
from engine.errors import UserError
from engine.files.refusals import FileError
from tests.unit.checkpoint_models import tiny_llama, total_bytes
from tests.unit.test_checkpoint_source import assert_same_tensors, load_folder

ROOT = Path(__file__).resolve().parents[2]
MATRIX = "layers.1.mlp.up_proj.weight"  # [24, 16]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf, and tp1, tp2 and tp3 made from it."""
    folder = tmp_path_factory.mktemp("stored")
    tiny_llama(folder / "hf")
    for size in (1, 2, 4):
        import_checkpoint(open_source(folder / "hf"), folder / f"tp{size}", tensor=size)
    return folder


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_contents_are_what_slicing_gives(stored: Path, data: st.DataObject) -> None:
    source = open_source(stored / data.draw(st.sampled_from(["hf", "tp1", "tp2", "tp4"])))
    name = data.draw(st.sampled_from([MATRIX, "layers.0.mlp.down_proj.weight", "norm.weight", "embed_tokens.weight"]))
    shape, runs = source.shape(name), []
    for dim, size in enumerate(shape):
        start = data.draw(st.integers(0, size - 1))
        runs.append((dim, start, data.draw(st.integers(1, size - start))))
    partial = [run for run in runs if run[2] < shape[run[0]]]
    box = Box(*partial[0], tuple(partial[1:])) if partial else Box()
    found = b"".join(bytes(block) for block in source.content(name, box).blocks(Scratch()))
    slices = tuple(slice(start, start + length) for _, start, length in runs)
    assert found == source.read_whole(name)[slices].contiguous().numpy().tobytes()


def test_rows_of_a_box() -> None:
    whole = torch.arange(60).view(10, 6)
    box = Box(1, 2, 3, ((0, 1, 8),))
    for start, stop in row_blocks((8, 3), 8, block_bytes=50):
        (r0, r1), (c0, c1) = rows_of(box, (10, 6), start, stop).ranges((10, 6))
        assert torch.equal(whole[r0:r1, c0:c1], whole[1:9, 2:5][start:stop])


class Stop(Exception):
    """Not a user's error: what a kill looks like from inside."""


def stopping(after: int, error: Exception):
    seen = 0

    def progress(amount: int) -> None:
        nonlocal seen
        seen += amount
        if seen > after:
            raise error

    return progress


@pytest.mark.parametrize("error", [Stop(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_stopped_conversion_goes_on(tmp_path: Path, error: Exception) -> None:
    tiny_llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    out, partial = tmp_path / "tp2", tmp_path / ".tp2.partial"
    work = Work(threads=1, progress=stopping(total_bytes(source) // 2, error))
    with pytest.raises((Stop, FileError), match="No space left.*resumes from there|^$"):
        import_checkpoint(source, out, tensor=2, work=work)
    assert not out.exists()
    # one tensor that the journal has is damaged meanwhile: what it says is not believed
    line = json.loads((partial / resumable.JOURNAL).read_text().splitlines()[0])
    path = partial / line["file"]
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    place = json.loads(data[8 : 8 + header])[line["key"]]["data_offsets"][0]
    data[8 + header + place] ^= 1
    path.write_bytes(data)
    report = import_checkpoint(source, out, tensor=2)
    damaged = load_file(out / line["file"])[line["key"]].nbytes
    assert 0 < report.kept_bytes <= total_bytes(source) // 2 + damaged
    import_checkpoint(source, tmp_path / "fresh", tensor=2)
    for path in (tmp_path / "fresh").iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "fresh").iterdir()}
    assert not partial.exists()


def test_another_plan_starts_anew(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    with pytest.raises(Stop):
        import_checkpoint(source, tmp_path / "out", tensor=2, work=Work(threads=1, progress=stopping(5000, Stop())))
    assert import_checkpoint(source, tmp_path / "out", tensor=4).kept_bytes == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    with pytest.raises(Stop):
        export_hf(source, tmp_path / "back", work=Work(threads=1, progress=stopping(5000, Stop())))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.norm.weight"] += 1  # the source changes in between
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert export_hf(open_source(tmp_path / "hf"), tmp_path / "back").kept_bytes == 0
    assert_same_tensors(tensors, load_folder(tmp_path / "back"))


def test_what_another_version_left_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    with monkeypatch.context() as older, pytest.raises(Stop):
        older.setattr(resumable, "ENGINE_VERSION", "0.0.1")
        export_hf(source, tmp_path / "out", work=Work(threads=1, progress=stopping(5000, Stop())))
    assert (tmp_path / ".out.partial" / resumable.JOURNAL).read_text()
    assert export_hf(source, tmp_path / "out").kept_bytes == 0
    assert_same_tensors(load_file(tmp_path / "hf" / "model.safetensors"), load_folder(tmp_path / "out"))


def test_two_conversions_do_not_share_a_folder(tmp_path: Path) -> None:
    def enter(name: str, num_bytes: int = 0):
        return resumable_folder(tmp_path / name, plan={}, overwrite=False, inputs=[], num_bytes=num_bytes)

    with (
        enter("out"),
        pytest.raises(UserError, match=rf"out is being written by process {os.getpid()} on .* since"),
        enter("out"),
    ):
        pass
    with pytest.raises(UserError, match="MB free"), enter("o", 1 << 60):
        pass
    assert not list(tmp_path.glob(".o.partial"))


def test_verify_reads_back_what_lies_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert export_hf(source, tmp_path / "sound", work=Work(verify=True)).verified
    from engine.conversion import import_export as convert

    def damage(folder: Path, *arguments: object, **options: object) -> None:
        path = next(folder.glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-3] ^= 8
        path.write_bytes(data)
        compare(folder, *arguments, **options)

    compare = convert.compare_files
    monkeypatch.setattr(convert, "compare_files", damage)
    with pytest.raises(UserError, match="reads back from .* with other bytes"):
        export_hf(source, tmp_path / "out", work=Work(verify=True))
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_a_system_without_advice_or_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS is."""
    tiny_llama(tmp_path / "hf")
    for name in ("posix_fadvise", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    assert export_hf(open_source(tmp_path / "hf"), tmp_path / "out", work=Work(verify=True)).verified
    assert_same_tensors(load_folder(tmp_path / "hf"), load_folder(tmp_path / "out"))


def test_fused_matrices_come_in_and_go_out(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", kv_heads=2)
    plain = load_folder(tmp_path / "hf")
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    export_hf(open_source(tmp_path / "tp2"), tmp_path / "all", fusing="all")
    fused = load_folder(tmp_path / "all")
    layout = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
    for layer in ("model.layers.0", "model.layers.1"):
        for whole, parts in layout.items():
            parent = whole.rpartition(".")[0]
            stacked = torch.cat([plain.pop(f"{layer}.{parent}.{part}.weight") for part in parts])
            assert torch.equal(fused.pop(f"{layer}.{whole}.weight"), stacked)
    assert_same_tensors(plain, fused)
    import_checkpoint(open_source(tmp_path / "all"), tmp_path / "tp4", tensor=4)
    export_hf(open_source(tmp_path / "tp4"), tmp_path / "kept")
    assert_same_tensors(load_folder(tmp_path / "all"), load_folder(tmp_path / "kept"))
    export_hf(open_source(tmp_path / "tp4"), tmp_path / "split", fusing="split")
    assert_same_tensors(load_folder(tmp_path / "hf"), load_folder(tmp_path / "split"))
    export_hf(open_source(tmp_path / "hf"), tmp_path / "qkv", fusing="qkv")
    names = load_folder(tmp_path / "qkv").keys()
    assert "model.layers.0.self_attn.qkv_proj.weight" in names and "model.layers.0.mlp.gate_proj.weight" in names


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_no_model_has_are_refused(tmp_path: Path, value: float) -> None:
    tiny_llama(tmp_path / "hf", dtype=torch.bfloat16)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(tensors, path, {"format": "pt"})
    notes = export_hf(open_source(tmp_path / "hf"), tmp_path / "zeros").notes
    assert notes == (f"all zero, as in {tmp_path / 'hf'}: model.layers.0.mlp.up_proj.weight",)
    tensors["model.layers.1.mlp.down_proj.weight"][7, 3] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"not finite in model\.layers\.1\.mlp\.down_proj\.weight"):
        export_hf(open_source(tmp_path / "hf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


_MEASURE = """
import re, sys, threading, time
from pathlib import Path
from engine.conversion.import_export import Work, export_hf, import_checkpoint
from engine.checkpoint.model_weights import open_source

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)

folder = Path(sys.argv[1])
source = open_source(folder / "hf")
before = peak = anonymous()
threading.Thread(target=watch, daemon=True).start()
import_checkpoint(source, folder / "tp2", tensor=2, work=Work(threads=2))
export_hf(open_source(folder / "tp2"), folder / "back", work=Work(threads=2, verify=True))
print(peak - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A 200 MB model whose largest tensor is 100 MB goes there and back in a few blocks for each of two threads."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to see a process's memory")
    tiny_llama(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    rows = 100_000_000 // (4 * 16)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.rand(rows, 16)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    del tensors
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 3 * BLOCK_BYTES + 8e6
