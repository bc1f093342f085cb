"""A training checkpoint written at once, for what reads one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.checkpoint.run.commit import TrainingContents, owned
from engine.checkpoint.run.saver import SaveGroup, save_now
from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.distributed.sharding import NamedShard


def save_training(
    run_dir: Path,
    *,
    step: int,
    tensors: Iterable[NamedShard],
    state: dict[str, Any],
    run_config: str,
    base: dict[str, Any],
    lora: dict[str, Any],
    layout: dict[str, int],
    rank: int = 0,
    ranks: int = 1,
    number: int = 1,
) -> Path:
    """Saves a checkpoint, once and now; every rank calls this, at about the same time.

    Args:
        run_dir: the run's folder.
        tensors: this rank's tensors; those it does not own are skipped.
        step, state, run_config, base, lora, layout: see `TrainingContents`; a checkpoint of the same step is replaced.
        rank, ranks: this process, and how many there are.
        number: counts the saves of this step.

    Returns:
        The checkpoint's folder. On rank 0 it is whole and durable, another rank's part of it is.

    Raises:
        UserError: the disk does not take it.
    """
    shards = owned(tensors)
    group = SaveGroup(
        run_dir=run_dir,
        rank=rank,
        writers=tuple(range(ranks)),
        num_bytes=sum(shard.tensor.nbytes for shard in shards),
    )
    contents = TrainingContents(step=step, state=state, run_config=run_config, base=base, lora=lora, layout=layout)
    save_now(group, number, shards, contents)
    return checkpoint_folder(run_dir, step)
