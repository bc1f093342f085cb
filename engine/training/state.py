"""A run's training state: the tensors and records that are saved, and how they are loaded again.

A checkpoint holds the trained tensors (fp32 masters and moments of adapters and trained parameters, and of these a
reference that moves) and the run's progress; the frozen base is referred to by path and fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from engine.checkpoint.heads import SCORE
from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.run.commit import TrainingContents, owned
from engine.checkpoint.run.training_state import REFERENCE, TrainingCheckpoint, expect_base
from engine.checkpoint.tokenizer_files import TrainedTokenizer
from engine.checkpoint.verification import checked_together
from engine.checkpoint.weight_source import SHARED, TIED_HEAD
from engine.config.hub import recorded
from engine.config.load import to_yaml
from engine.config.run import RunConfig
from engine.config.snapshots import records
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.sentences import as_written
from engine.training.build import Training
from engine.training.evaluations import BestLoss
from engine.training.start_model import ModelPlan, ModelSource
from engine.training.step_source import NOTHING, SourceState


def state_tensors(training: Training) -> list[NamedShard]:
    """Returns the tensors that this rank saves: masters and moments, in the memory that training changes."""
    return once(training, training.optimizer.state_shards())


def once(training: Training, shards: Sequence[NamedShard]) -> list[NamedShard]:
    """Returns those of this rank's parts of trained tensors, or of their moments, that no other rank has to save."""
    # where nothing is sharded, other data-parallel copies hold the same numbers; the first copy writes
    is_sharded = training.optimizer.flat.is_sharded
    writes = {data: is_sharded or training.mesh.axis(data).rank == 0 for data in ("dp_cp", "edp")}
    return owned([shard for shard in shards if writes[shard.spec.data]])


def state_contents(
    config: RunConfig,
    training: Training,
    *,
    step: int,
    consumed: int,
    fingerprint: str | None,
    data: str,
    tokenizer: TrainedTokenizer,
    best: BestLoss,
    source: SourceState = NOTHING,
) -> TrainingContents:
    """Returns the contents of a checkpoint apart from tensors; all but the step is for the rank that writes it.

    Args:
        step: steps taken.
        consumed: samples consumed: the data cursor.
        fingerprint: of the base's weights as they were read, not as they are stored; None without a base.
        data: fingerprint of the training data.
        tokenizer: of the training data.
        best: outcome of the evaluations so far.
        source: of the steps' source.
    """
    if not training.mesh.is_writer:
        return TrainingContents(step=step, state={}, run_config="", base={}, lora={}, layout={})
    optimizer, grid = training.optimizer, training.mesh.grid
    state = {
        "step": step,
        "consumed": consumed,
        "seed": config.train.seed,
        "data": data,
        "updates": float(optimizer.step_count),
        "skipped": float(optimizer.skipped),
        "best": best.state(),
        "tokenizer": tokenizer.record(),
        **source.values,
    }
    if (scale := optimizer.loss_scale) is not None:
        state |= {"loss_scale": float(scale.value), "good_steps": float(scale.good_steps)}
    base = {
        "path": recorded(Path(config.model.path).resolve()),
        "fingerprint": fingerprint,
        "sums": training.source.sums(),
        "dtype": config.model.base_dtype,
        "products": config.model.base_products,
        "encodings": list(training.plan.encodings),
        "implementation": training.source.model.implementation,
    }
    if training.source.model.decoder.scores:
        base["head"] = SCORE
    return TrainingContents(
        step=step,
        state=state,
        run_config=to_yaml(records(config)),
        base=base,
        lora=asdict(config.lora) if config.lora.rank > 0 else {},
        layout={"tensor": grid.tp, "context": grid.cp, "data": grid.dp, "pipeline": grid.pp, "expert": grid.ep},
        beside=source.files,
    )


def check_state(
    path: Path,
    config: RunConfig,
    source: ModelSource,
    plan: ModelPlan,
    say: Callable[[str], None] | None = None,
    *,
    looks_at_files: bool = True,
) -> TrainingCheckpoint:
    """Opens a checkpoint to resume from; reads no tensor of it.

    Args:
        looks_at_files: whether this rank checks that all files of the checkpoint exist; one rank has to.
        say: gets a line where the base cannot be compared in full with the checkpoint's.

    Raises:
        UserError: the checkpoint is damaged, or belongs to another base or to other parameters that train.
    """
    checkpoint = TrainingCheckpoint(path, looks_at_files=looks_at_files)
    checkpoint.refuse_leftover()
    _check_recorded(checkpoint)
    _check_best(checkpoint)
    if checkpoint.lora:
        # missing in checkpoints from before these options
        added = {"rank_pattern": None, "alpha_pattern": None, "dora": False, "bias": False}
        saved, now = {**added, **checkpoint.lora}, asdict(config.lora)
        _check_same("lora", saved, now, path, _SAME_LORA)
        names = checkpoint.trained().tensor_names()
        if (source.head_is_copy or source.model.decoder.tied_embeddings) and {SHARED, TIED_HEAD} & set(names):
            from engine.checkpoint.untied import trained_apart

            _check_same("lora", {_TYING: not trained_apart(checkpoint.lora, names)}, now, path, (_TYING,))
    _check_trained(checkpoint, plan)
    if config.objective.reference_sync_steps is not None and not _has_reference(checkpoint):
        raise UserError(
            f"{path} is of a run whose reference did not move, and has none: remove objective.reference_sync_steps, or "
            "start a new run from its adapter with lora.init_from."
        )
    fingerprint = source.fingerprint()
    if checkpoint.base["fingerprint"] != fingerprint:
        raise UserError(
            f"{path} was trained on a base with fingerprint {checkpoint.base['fingerprint']}, but model.path "
            f"{config.model.path} has {fingerprint}: give the base it was trained on ({checkpoint.base['path']})."
        )
    expect_base(checkpoint, source.weights, say)
    # checkpoints from before these choices have none
    base = {
        "base_dtype": checkpoint.base.get("dtype"),
        "base_products": checkpoint.base.get("products", "decoded"),
    }
    _check_same("model", base, asdict(config.model), path, tuple(base))
    return checkpoint


def load_state(path: Path, config: RunConfig, training: Training) -> dict[str, Any]:
    """Loads a checkpoint written at any layout into this one.

    Returns:
        The state: step, consumed, data, ...

    Raises:
        UserError: as `check_state`.
    """
    checkpoint = check_state(path, config, training.source, training.plan, looks_at_files=False)  # it has been done
    optimizer = training.optimizer
    with checked_together([checkpoint.checks], training.mesh.world):
        for name, tensor, spec in optimizer.state_shards():
            checkpoint.read(name, spec, out=tensor)
    optimizer.flat.publish()
    state = checkpoint.state
    optimizer.step_count.fill_(state["updates"])
    optimizer.skipped.fill_(state["skipped"])
    training.stages.step.fill_(state["step"])
    if optimizer.loss_scale is not None and "loss_scale" in state:  # else it ran in another dtype
        optimizer.loss_scale.value.fill_(state["loss_scale"])
        optimizer.loss_scale.good_steps.fill_(state["good_steps"])
    return state


_TYING = "ensure_weight_tying"
_SAME_LORA = ("rank", "alpha", "rank_pattern", "alpha_pattern", "rslora", "dora", "bias")
_RECORDED: dict[str, dict[str, tuple[type, ...]]] = {
    "state": {"step": (int,), "consumed": (int,), "updates": (int, float), "skipped": (int, float), "data": (str,)},
    "base": {"path": (str,), "fingerprint": (str, type(None))},
    "lora": {"rank": (int,), "alpha": (int, float), "rslora": (bool,)},
}
"""The fields of a checkpoint's records that are read, and their types."""
_OF_FLOAT16: dict[str, tuple[type, ...]] = {"loss_scale": (int, float), "good_steps": (int, float)}
"""The further state of a run in float16, and its types."""


def _check_recorded(checkpoint: TrainingCheckpoint) -> None:
    """Raises UserError unless the records are of the kinds that were saved; without adapters "lora" is empty."""
    records = {"state": checkpoint.state, "base": checkpoint.base, "lora": checkpoint.lora}
    for section, kinds in _RECORDED.items():
        kinds = kinds | (_OF_FLOAT16 if section == "state" and _OF_FLOAT16.keys() & records[section].keys() else {})
        for key, kind in kinds.items() if records[section] or section != "lora" else ():
            value = records[section].get(key)
            if not isinstance(value, kind) or (isinstance(value, int | float) and not 0 <= value < 2**62):
                raise UserError(
                    f"{checkpoint.folder / MANIFEST} is damaged: training.{section}.{key} is {as_written(value)}; use "
                    "another checkpoint."
                )


def _check_trained(checkpoint: TrainingCheckpoint, plan: ModelPlan) -> None:
    """Raises UserError unless the checkpoint has exactly the parameters that this run trains."""
    now, saved = set(plan.trained), set(checkpoint.trained().tensor_names())
    if differing := sorted(now ^ saved):
        does, does_not = ("this run", checkpoint.folder) if differing[0] in now else (checkpoint.folder, "this run")
        raise UserError(
            f"{does} trains {differing[0]}, which {does_not} does not: set lora.targets, lora.exclude, lora.layers, "
            "lora.fused and trainable as they were, or start afresh with checkpoint.resume none and another directory."
        )


def _has_reference(checkpoint: TrainingCheckpoint) -> bool:
    return any(name.startswith(REFERENCE) for name in checkpoint.tensor_names())


def _check_best(checkpoint: TrainingCheckpoint) -> None:
    """Raises UserError unless the outcome of evaluations is of the kinds that were saved; older checkpoints have
    none."""
    best = checkpoint.state.get("best", {})
    kinds = {field.name: int if field.type == "int" else float for field in fields(BestLoss)}
    for key, value in best.items() if isinstance(best, dict) else ((None, best),):
        if key not in kinds or not isinstance(value, kinds[key]) or not abs(value) < 2**62:
            raise UserError(
                f"{checkpoint.folder / MANIFEST} is damaged: training.state.best has {key} {as_written(value)}; use "
                "another checkpoint."
            )


def _check_same(section: str, saved: dict[str, Any], now: dict[str, Any], path: Path, keys: tuple[str, ...]) -> None:
    for key in keys:
        if saved[key] != now[key]:
            before, given = (one if isinstance(one, str) else as_written(one) for one in (saved[key], now[key]))
            raise UserError(
                f"{path} was trained with {section}.{key} {before}, but this run has {given}: "
                f"set {section}.{key} to {before}, or start afresh with checkpoint.resume none and another "
                "directory."
            )
