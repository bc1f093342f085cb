"""Training checkpoints: the state from which a run resumes, at any layout.

Trained values, optimizer state, the step and the data cursor; the frozen base is recorded by path and fingerprint and
never copied. Tensor names are opaque here but for two prefixes that exports read: `master/<logical name>` (fp32
values of everything trained) and `adapter/<logical name>`.

`step_folders` knows their folders, `saver` writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint.leftover import refuse_leftover
from engine.checkpoint.manifest import MANIFEST, read_manifest
from engine.checkpoint.pieces import PieceReader
from engine.checkpoint.reader import Renamed
from engine.checkpoint.run.commit import RUN_CONFIG
from engine.checkpoint.run.step_folders import best_step, list_checkpoints
from engine.checkpoint.weight_source import WeightSource
from engine.config.run_files import CHECKPOINTS
from engine.errors import UserError
from engine.kernels.checksum import checksum_of
from engine.sentences import listed

MASTER, ADAPTER, MOMENTS = "master/", "adapter/", ("optim.exp_avg/", "optim.exp_avg_sq/")
REFERENCE = "reference/"
_MAX_CONFIG_BYTES, _MAX_BESIDE_BYTES = 16 << 20, 8 << 30


class TrainingCheckpoint(PieceReader):
    """A training checkpoint, opened; tensors are read by shard at any layout, each piece checked by its checksum.

    Args:
        folder: the checkpoint's.
        looks_at_files: see `read_manifest`.

    Raises:
        UserError: the folder is not a complete, undamaged training checkpoint.
    """

    def __init__(self, folder: str | Path, *, looks_at_files: bool = True) -> None:
        folder = Path(folder)
        manifest = read_manifest(folder, looks_at_files=looks_at_files)
        if manifest.kind != "training":
            raise UserError(
                f"{folder} is a base checkpoint without training state: give a run or one of its checkpoints."
            )
        for key in ("state", "base", "lora"):
            if not isinstance(manifest.training.get(key), dict):
                raise UserError(f"{folder / MANIFEST} is damaged: training.{key} is missing; use another checkpoint.")
        checksum = manifest.training.get("run_config_checksum")
        self.run_config = _read_checked(folder / RUN_CONFIG, checksum, _MAX_CONFIG_BYTES).decode("utf-8")
        """The resolved YAML of the run."""
        super().__init__(folder, manifest)

    def refuse_leftover(self) -> None:
        """Raises UserError where a tensor is neither a trained value nor a moment of one, nor the reference's."""
        stored, trained = self.tensor_names(), self.trained().tensor_names()
        used = {prefix + name for prefix in (MASTER, ADAPTER, *MOMENTS, REFERENCE) for name in trained}
        refuse_leftover(str(self.folder), stored, used, because="no run reads: use another copy of the checkpoint.")

    @property
    def state(self) -> dict[str, Any]:
        """The state that the trainer saved."""
        return self.manifest.training["state"]

    @property
    def base(self) -> dict[str, Any]:
        """Path and fingerprint of the model it was trained on."""
        return self.manifest.training["base"]

    @property
    def lora(self) -> dict[str, Any]:
        """Adapter settings; empty without adapters."""
        return self.manifest.training["lora"]

    def beside(self, name: str) -> bytes:
        """Returns a small file that the trainer saved beside its state.

        Raises:
            UserError: it is missing or damaged.
        """
        sums = self.manifest.training.get("beside")
        checksum = sums.get(name) if isinstance(sums, dict) else None
        return _read_checked(self.folder / name, checksum, _MAX_BESIDE_BYTES)

    def trained(self) -> Renamed:
        """Returns the trained values by logical name: the fp32 masters where there are any, else the adapters."""
        prefixes = (ADAPTER, MASTER)  # masters win
        names = [(prefix, name) for prefix in prefixes for name in self.tensor_names() if name.startswith(prefix)]
        return Renamed(self, {name.removeprefix(prefix): name for prefix, name in names})


def _read_checked(path: Path, checksum: object, limit: int) -> bytes:
    if not path.is_file():
        raise UserError(f"{path} is missing: copy the checkpoint again, with all of its files.")
    try:
        with open(path, "rb") as file:
            data = file.read(limit)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): use another copy of the checkpoint.") from error
    if checksum_of(data) != checksum:
        raise UserError(f"{path} is damaged: it is not what was written; use another copy of the checkpoint.")
    return data


def expect_base(
    checkpoint: TrainingCheckpoint, weights: WeightSource | None, say: Callable[[str], None] | None = None
) -> None:
    """Has every read of a base's tensors compared with the checksums they had when the checkpoint was trained.

    Args:
        say: called with a line where that is not possible: checkpoints and partitioned bases from before there were
            checksums of whole tensors have none.

    Raises:
        UserError: the base is known to be another one, or the checkpoint is damaged.
    """
    if weights is None:
        return
    sums = checkpoint.base.get("sums")
    if sums is None or (weights.sums() is None and weights.model.manifest is not None):
        if say is not None:
            old = checkpoint.folder if sums is None else weights.label
            say(
                f"note: {old} has no checksums of the base's whole tensors, so that only the first and last row of "
                f"each tensor of {weights.label} were compared with what {checkpoint.folder} was trained on"
            )
        return
    if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
        raise UserError(
            f"{checkpoint.folder / MANIFEST} is damaged: training.base.sums is no list of sums; use another checkpoint."
        )
    weights.expect(sums, str(checkpoint.folder))


def open_run(path: str | Path, *, step: int | Literal["best"] | None = None) -> TrainingCheckpoint:
    """Opens a run's newest complete checkpoint, that of `step`, or the checkpoint folder that `path` itself is.

    Args:
        step: "best" is the one with the best evaluation, of a run with checkpoint.keep_best.

    Raises:
        UserError: there is no such checkpoint.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        if step is not None:
            raise UserError(f"{folder} is one checkpoint, and --step {step} chooses among a run's: leave --step out.")
        return TrainingCheckpoint(folder)
    steps = list_checkpoints(folder)
    if not steps:
        raise UserError(
            f"{folder} has no complete checkpoint under {CHECKPOINTS}/: give a run's folder, or one of its checkpoints."
        )
    if step == "best":
        step = best_step(folder)
        if step is None:
            raise UserError(
                f"{folder} has no best checkpoint: give --step a number, or train with checkpoint.keep_best true."
            )
    if step is not None and step not in steps:
        raise UserError(f"{folder} has no checkpoint of step {step}: choose --step from {listed(sorted(steps))}.")
    return TrainingCheckpoint(steps[max(steps) if step is None else step])
