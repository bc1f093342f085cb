"""Log-likelihoods under the model as a run starts, for objectives that compare with it.

They are computed once, before the first step, one number an answer, and kept in the run's folder: a run that is resumed
has moved on from the model it is compared with. A run that has not taken a step yet computes them anew, whatever is in
its folder, because the file may be of another model.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.config.run import RunConfig
from engine.config.run_files import REFERENCE
from engine.data.dataset import TokenDataset
from engine.data.loader import EvalLoader
from engine.distributed.collectives import all_reduce, barrier, broadcast_object
from engine.errors import UserError
from engine.layers.host_copies import sent
from engine.preferences.data.answer_columns import answer_columns, put_reference
from engine.preferences.objectives.likelihood import answers_of
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.build import Training
from engine.training.evaluate import group_size, groups
from engine.training.row_shape import shape_on_mesh


def load_references(
    config: RunConfig,
    training: Training,
    sets: dict[str, TokenDataset],
    log: Log,
    *,
    run_dir: Path,
    rank: int,
    resumed: Path | None,
) -> None:
    """Gives data sets the reference's log-likelihoods. Collective.

    Args:
        sets: the data sets, by their names.
        run_dir: where they are kept.
        rank: of this process.
        resumed: the checkpoint whose weights the model has now, in the folder of this run or of another one; None where
            the run has just started.

    Raises:
        UserError: the log-likelihoods are absent, belong to other data, or are not finite.
    """
    others = {
        f"{name}-{companion_name(part)}": companion
        for name, dataset in sets.items()
        for part, companion in dataset.companions.items()
    }
    for name, dataset in (sets | others).items():
        path = run_dir / f"{REFERENCE}{name}.safetensors"
        if resumed is None:
            put_reference(dataset, compute_references(config, training, dataset, log, name))
        else:
            found = _found(path, resumed)
            put_reference(dataset, _read(found, dataset))
            if found == path:
                continue
            barrier()  # all have read before anything is written
        if rank == 0:
            _write(path, dataset)


def companion_name(part: str) -> str:
    """Returns the name of a companion, in files and in the log, from that of the part that holds it."""
    return part.partition(":")[2].lower()


def compute_references(
    config: RunConfig, training: Training, dataset: TokenDataset, log: Log, name: str
) -> NDArray[np.float32]:
    """Returns float32 [documents], equal on all ranks: the log-likelihood of each answer under the current model.
    Collective.

    Args:
        name: of the data set, for the log.

    Raises:
        UserError: one is not finite.
    """
    mesh, stages = training.mesh, training.stages
    device = stages.step.device
    loader = EvalLoader(
        dataset,
        shape_on_mesh(config, device, mesh),
        num_workers=config.data.num_workers,
        pin_memory=device.type == "cuda",
    )
    found = torch.zeros(len(dataset.lengths), dtype=torch.float32, device=stages.step.device)
    read = told = 0
    with Progress(log, f"reference of the {name} data", len(dataset), "rows") as progress:
        for group in groups(loader, group_size(mesh)):
            for batch, logps in zip(group, stages.references(group) or (), strict=False):
                documents = sent(torch.tensor(answers_of(batch).documents, dtype=torch.int64), found.device)
                found[documents] = logps.float()
            read = min(read + sum(batch.num_rows for batch in group) * mesh.dp.size, len(dataset))  # without fillers
            progress.advance(read - told)
            told = read
    numbers: NDArray[np.float32] = all_reduce(all_reduce(found, mesh.dp), mesh.pp).cpu().numpy()
    if not np.isfinite(numbers).all():
        raise UserError(
            f"the model that the run starts from gives {int((~np.isfinite(numbers)).sum())} of {len(numbers)} answers "
            f"of the {name} data no finite likelihood, so that nothing can be compared with it: look at its weights, "
            "or set model.dtype to float32."
        )
    return numbers


def _found(path: Path, resumed: Path) -> Path:
    """Finds the file of this run, or of the run that is resumed. Collective."""
    other = resumed.parents[1] / path.name
    found = broadcast_object(next((str(one) for one in (path, other) if one.is_file()), None))
    if found is None:
        raise UserError(
            f"{path} is missing, which holds the data's log-likelihoods under the model that this run started from: "
            "put it back, or start a new run from the checkpoint's adapter with lora.init_from."
        )
    return Path(str(found))


def _write(path: Path, dataset: TokenDataset) -> None:
    """Writes a file that gets its name only when it is whole: a run may be killed at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    known = answer_columns(dataset).reference_logps
    assert known is not None
    logps = torch.from_numpy(known)
    save_file({"logps": logps}, part, metadata={"data": dataset.fingerprint()})
    os.replace(part, path)


def _read(path: Path, dataset: TokenDataset) -> NDArray[np.float32]:
    try:
        with safe_open(path, "pt") as file:
            metadata, logps = file.metadata() or {}, file.get_tensor("logps")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it and start the run anew.") from error
    if metadata.get("data") != dataset.fingerprint() or logps.shape != (len(dataset.lengths),):
        raise UserError(
            f"{path} belongs to other data than the run's: give the data that the run started with, or choose another "
            "checkpoint.dir."
        )
    numbers: NDArray[np.float32] = logps.numpy()
    return numbers
