"""What a rank by itself does in a long step, evaluation or save counts as progress, so that no hang is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.run.commit import collect, leave_record, write_part
from engine.distributed.operations import OperationLog
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard, replicated_spec
from tests.distributed.guarded_runs import build_run
from tests.distributed.sharded_runs import Layout


class _Passed:
    def query(self) -> bool:
        return True


def test_each_micro_batch_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of each, on the host when launched and on the device when passed; and an evaluation's."""
    log = OperationLog()
    monkeypatch.setattr("engine.training.stage.LOG", log)
    run = build_run(Layout(case="adapters", grid=RankGrid(), accumulation=3))
    batches, targets = run.batches(1)
    assert len(batches) == 3
    run.step(batches, targets, 1e-3)
    assert log.total == 6
    log.follow(_Passed)
    run.step(batches, targets, 1e-3)
    assert log.total == 12 and log.look() is None and log.total == 18
    run.stages.figures(batches)
    assert log.look() is None and log.total == 18 + 2 * 3


def test_each_written_tensor_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank that writes, and on rank 0, which waits for the parts of all."""
    log = OperationLog()
    monkeypatch.setattr("engine.checkpoint.run.commit.LOG", log)
    for rank in (0, 1):
        shards = [
            NamedShard(f"weight_{rank}_{number}", torch.zeros(4, 2), replicated_spec((4, 2), rank=0, size=1))
            for number in range(3)
        ]
        leave_record(tmp_path, rank, write_part(tmp_path, rank, shards))
    assert log.total == 6
    collect(tmp_path, [0, 1], deadline=0.0)
    assert log.total == 8
