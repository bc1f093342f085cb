"""The conversion command line as a user meets it, on real weights and on small models."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import MASTER
from engine.distributed.sharding import NamedShard, replicated_spec
from engine.models.describe import parameter_specs
from engine.telemetry.errors import run_command
from rankfold.convert import main
from tests.support.saved_training import save_training
from tests.support.warm_python import warm_python
from tests.unit.checkpoint_models import expected_slice, hf_name, tiny_llama

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


def convert(*arguments: object) -> Ended:
    """Runs the command in this process, which saves loading torch each time."""
    before, stdout, stderr = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["convert.py", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as end:
            run_command(main)
    finally:
        sys.argv = before
    return Ended(int(end.value.code or 0), stdout.getvalue(), stderr.getvalue())


def convert_apart(*arguments: object) -> Ended:
    """Runs the command as a user does, in a process of its own."""
    command = [str(warm_python()), str(ROOT / "tools" / "convert.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)
    return Ended(done.returncode, done.stdout, done.stderr)


def succeed(*arguments: object, run: Callable[..., Ended] = convert) -> str:
    done = run(*arguments)
    assert done.status == 0, done.stderr
    return done.stdout


def refuse(*arguments: object, run: Callable[..., Ended] = convert) -> str:
    """The one sentence on stderr with which the command ends."""
    done = run(*arguments)
    assert done.status == 2, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


@pytest.mark.parametrize("size", [2, 4])
def test_real_weights_there_and_back(tmp_path: Path, stories_dir: Path, size: int) -> None:
    importing = ("import", "--source", stories_dir, "--out", tmp_path / "parts", "--tensor", size)
    output = succeed(*importing, "--verify", run=convert_apart)
    assert f"in {size} files, " in output and "read back and compared" in output
    original = load_file(stories_dir / "model.safetensors")
    matrices = {name: tensor.numel() for name, tensor in original.items() if tensor.dim() == 2}
    for path in (tmp_path / "parts").glob("*.safetensors"):
        largest = {name: tensor.numel() for name, tensor in load_file(path).items() if tensor.dim() == 2}
        assert largest and all(numel * size == matrices[hf_name(name)] for name, numel in largest.items())
    output = succeed("export", "--source", tmp_path / "parts", "--out", tmp_path / "back", "--format", "hf", "--verify")
    assert "read back and compared" in output
    for path in stories_dir.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    assert {path.name for path in (tmp_path / "back").iterdir()} == {path.name for path in stories_dir.iterdir()}
    if size == 2:  # written at two, read at one and four
        source = open_source(tmp_path / "parts")
        for wanted in (1, 4):
            for rank in range(wanted):
                specs = parameter_specs(source.model.decoder, tensor_rank=rank, tensor_size=wanted)
                for name, spec in specs.items():
                    expected = expected_slice(name, original[hf_name(name)], rank, wanted, kv_heads=4)
                    assert torch.equal(source.read(name, spec), expected), (name, rank, wanted)


def test_a_model_without_tokenizer_or_generation_config(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    succeed("import", "--source", tmp_path / "hf", "--out", tmp_path / "parts", "--tensor", 2)
    succeed("export", "--source", tmp_path / "parts", "--out", tmp_path / "back", "--format", "hf")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"config.json", "model.safetensors"}


def make_run(folder: Path, base: Path, steps: tuple[int, ...] = (1,)) -> Path:
    """A run that trained adapters on the attention's query and output; B grows with the step."""
    torch.manual_seed(0)
    source = open_source(base)
    tensors = {}
    for layer in (0, 1):
        for module, wide, tall in (("q_proj", 16, 32), ("o_proj", 32, 16)):
            tensors[f"layers.{layer}.attention.{module}.lora_A"] = torch.randn(2, wide)
            tensors[f"layers.{layer}.attention.{module}.lora_B"] = torch.randn(tall, 2)
    for step in steps:
        shards = [
            NamedShard(MASTER + name, tensor * step, replicated_spec(tuple(tensor.shape), rank=0, size=1))
            for name, tensor in tensors.items()
        ]
        save_training(
            folder, step=step, tensors=shards, state={"step": step}, run_config="", rank=0, layout={"tensor": 1},
            base={"path": str(base), "fingerprint": source.fingerprint()},
            lora={"rank": 2, "alpha": 4.0, "dropout": 0.0, "rslora": False, "fused": "none"},
        )  # fmt: skip
    return folder


def test_a_run_becomes_an_adapter_and_a_merged_model(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    succeed("import", "--source", tmp_path / "hf", "--out", tmp_path / "parts", "--tensor", 2)
    run = make_run(tmp_path / "run", tmp_path / "parts", (1, 3))
    with warnings.catch_warnings(action="error", category=FutureWarning):  # which a user can do nothing about
        succeed("export", "--source", run, "--out", tmp_path / "adapter", "--format", "peft")
        succeed("export", "--source", run, "--out", tmp_path / "merged", "--format", "hf", "--merge")
    first = ("--out", tmp_path / "first", "--format", "peft", "--step", 1)
    succeed("export", "--source", run, *first)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)
        with adapted.disable_adapter():
            assert (adapted(tokens).logits - merged(tokens).logits).abs().max() > 0.1
    newest = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    oldest = load_file(tmp_path / "first" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, 3 * oldest[name]) for name, tensor in newest.items())
    text = succeed("inspect", run, "--verify")
    for words in ("training checkpoint", "step 3", "rank 2, alpha 4, 4 modules", str(tmp_path / "parts"), "all match"):
        assert words in text
    text = succeed("inspect", tmp_path / "parts")
    for words in ("partitioned base", "2 layers, hidden 16", "untied head", "tensor 2", "tensor_01_of_02.safetensors"):
        assert words in text


def test_a_base_that_moved(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    tiny_llama(tmp_path / "other", seed=1)
    run = make_run(tmp_path / "run", tmp_path / "hf")
    shutil.move(tmp_path / "hf", tmp_path / "moved")
    export = ("export", "--source", run, "--out", tmp_path / "merged", "--format", "hf", "--merge")
    assert "is gone: give its folder with --base" in refuse(*export)
    assert "has fingerprint" in refuse(*export, "--base", tmp_path / "other")
    assert not (tmp_path / "merged").exists()
    succeed(*export, "--base", tmp_path / "moved")


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    run = make_run(tmp_path / "run", tmp_path / "hf")
    out = ("--out", tmp_path / "out")
    assert "add --merge" in refuse("export", "--source", run, *out, "--format", "hf", run=convert_apart)
    assert "without adapters" in refuse("export", "--source", tmp_path / "hf", *out, "--format", "peft")
    assert "not a folder" in refuse("import", "--source", tmp_path / "nothing", *out)
    assert "--tensor 3" in refuse("import", "--source", tmp_path / "hf", *out, "--tensor", 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").touch()
    assert "add --overwrite" in refuse("import", "--source", tmp_path / "hf", *out)
    assert "will not delete it" in refuse("import", "--source", tmp_path / "hf", *out, "--overwrite")
    data = (tmp_path / "hf" / "model.safetensors").read_bytes()
    (tmp_path / "hf" / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors is damaged or truncated" in refuse("inspect", tmp_path / "hf")


def test_help_is_quick() -> None:
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(ROOT / "tools" / "convert.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert "inspect" in subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of the processor, because a test that runs beside others waits for it
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 2.0
    tools = str(ROOT / "tools")
    loads = f"import runpy, sys; sys.path.insert(0, {tools!r}); sys.argv = ['convert.py', 'export', '--help']\n"
    loads += f"try: runpy.run_path({str(ROOT / 'tools' / 'convert.py')!r}, run_name='__main__')\n"
    loads += "except SystemExit: sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads], cwd=ROOT, capture_output=True, check=False).returncode == 0
