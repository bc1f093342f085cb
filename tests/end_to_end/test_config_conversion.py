"""The reference's accelerate file and flags, at the size of a small model: converted by the tool, and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.migrating.test_conversion import ACCELERATE, FLAGS
from tests.support.commands import losses, run_tool


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_converted_job_runs(stories_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    """ZeRO-3 on two ranks with a fused adapter, packed end to end; its clipping is the file's."""
    source = tmp_path / "accelerate.yaml"
    source.write_text(yaml.safe_dump({**ACCELERATE, "num_processes": 2}), encoding="utf-8")
    corpus = (data_dir / "corpus" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    for name, part in (("train.txt", corpus[:8000]), ("valid.txt", corpus[8000:9000])):
        (tmp_path / name).write_text(part, encoding="utf-8")
    small = (
        ("--max_seq_len 8192", "--max_seq_len 64"),
        ("--max_steps 1024", "--max_steps 4"),
        ("--logging_steps 24", ""),
    )
    flags = FLAGS
    for published, here in small:
        flags = flags.replace(published, here)
    out = tmp_path / "run.yaml"
    result = run_tool(
        "convert", "config", source, "--flags", flags, "--out", out, "--set", f"model.path={stories_dir}",
        "--set", f"data.train={tmp_path / 'train.txt'}", "--set", f"data.validation={tmp_path / 'valid.txt'}",
        "--set", "model.dtype=float32", "--set", f"checkpoint.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert "rankfold train --nproc 2" in result.stdout and "not known" not in result.stdout.replace("0 not known", "")
    run_tool("pretrain_lora", "--config", out, ranks=2)
    found = losses(tmp_path / "run")
    assert sorted(found) == [1, 2, 3, 4] and found[4] < found[1]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert (saved["optim"]["clip_grad_norm"], saved["parallel"]["shard"]) == (0.3, "parameters")
