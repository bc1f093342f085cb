"""The conversion command line: merging, resharding, fused matrices, and a conversion that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.end_to_end.test_convert import ROOT, make_run, refuse, succeed
from tests.support.warm_python import warm_python
from tests.unit.checkpoint_models import tiny_llama
from tests.unit.test_checkpoint_merge import stock_adapter

_KILLED = """
import os, signal, sys
from pathlib import Path
from engine.conversion.import_export import Work, import_checkpoint
from engine.checkpoint.model_weights import open_source
from tests.unit.checkpoint_models import total_bytes

done = 0

def progress(amount):
    global done
    done += amount
    if done > total_bytes(source) // 2:
        os.kill(os.getpid(), signal.SIGKILL)

source = open_source(Path(sys.argv[1]))
import_checkpoint(source, Path(sys.argv[2]), tensor=2, work=Work(progress=progress))
"""


def test_killed_and_gone_on_with(tmp_path: Path, stories_dir: Path) -> None:
    command = [str(warm_python()), "-c", _KILLED, str(stories_dir), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    importing = ("import", "--source", stories_dir, "--tensor", 2)
    output = succeed(*importing, "--out", tmp_path / "out")
    assert " of them by an earlier call and compared" in output
    assert "earlier call" not in succeed(*importing, "--out", tmp_path / "fresh")
    for path in (tmp_path / "fresh").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_resharding(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    succeed("import", "--source", tmp_path / "hf", "--out", tmp_path / "tp1")
    succeed("reshard", "--source", tmp_path / "tp1", "--out", tmp_path / "tp4", "--tensor", 4)
    output = succeed("reshard", "--source", tmp_path / "tp4", "--out", tmp_path / "tp2", "--tensor", 2, "--verify")
    assert "in 2 files" in output and "read back and compared" in output
    succeed("import", "--source", tmp_path / "hf", "--out", tmp_path / "straight", "--tensor", 2)
    for path in (tmp_path / "straight").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "tp2" / path.name).read_bytes()
    again = ("reshard", "--out", tmp_path / "out", "--tensor", 2, "--source")
    assert "use import for a Hugging Face model" in refuse(*again, tmp_path / "hf")
    run = make_run(tmp_path / "run", tmp_path / "hf")
    assert "is not a partitioned base" in refuse(*again, run)


@pytest.mark.parametrize("fused", ["keep", "all"])
def test_a_merge_gives_pefts_logits(tmp_path: Path, fused: str, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_llama(tmp_path / "hf", dtype=torch.bfloat16)
    stock_adapter(tmp_path / "hf", tmp_path / "adapter")
    succeed("import", "--source", tmp_path / "hf", "--out", tmp_path / "tp2", "--tensor", 2)
    merging = ("merge", "--base", tmp_path / "tp2", "--adapter", tmp_path / "adapter", "--fused", fused)
    succeed(*merging, "--out", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "merge_report.json").read_text())
    assert len(report["tensors"]) == 14
    if fused == "all":
        names = load_file(tmp_path / "out" / "model.safetensors")
        assert "model.layers.1.self_attn.qkv_proj.weight" in names
        again = ("export", "--source", tmp_path / "out", "--out", tmp_path / "split", "--format", "hf")
        succeed(*again, "--fused", "split")
    folder = tmp_path / ("out" if fused == "keep" else "split")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = adapted(tokens).logits
        assert (merged(tokens).logits - expected).abs().max() < 0.03 * expected.abs().max()
        with adapted.disable_adapter():
            assert (adapted(tokens).logits - expected).abs().max() > 0.3 * expected.abs().max()


def test_refusals(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    stock_adapter(tmp_path / "hf", tmp_path / "adapter")
    merging = ("merge", "--base", tmp_path / "hf", "--adapter", tmp_path / "adapter", "--out", tmp_path / "out")
    assert "--threads is 0" in refuse(*merging, "--threads", 0)
    assert "--max-shard-gb" in refuse(*merging, "--max-shard-gb", 0)
    assert "overlaps" in refuse(*merging[:-1], tmp_path / "adapter" / "inside")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors is missing" in refuse(*merging)
    assert not list(tmp_path.glob(".out*"))
