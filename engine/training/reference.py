"""Log-likelihoods under the model as a run starts, for objectives that compare with it.

They are computed once, before the first step, one number an answer, and kept in the run's folder: a run that is resumed
has moved on from the model it is compared with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.loader import EvalLoader
from engine.distributed.collectives import all_reduce, broadcast_object
from engine.errors import UserError
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.build import Training
from engine.training.data import RunData, loader_options


def know_references(
    config: RunConfig, training: Training, data: RunData, log: Log, *, run_dir: Path, rank: int, started: bool
) -> None:
    """Gives the data sets the reference's log-likelihoods where `objective.reference` is initial. Collective.

    Args:
        run_dir: where they are kept.
        rank: of this process.
        started: whether the model has been trained by this run already, so that they must be there.

    Raises:
        UserError: they are not there, or belong to other data.
    """
    if not (config.objective.has_reference and config.objective.reference == "initial"):
        return
    sets = {"train": data.train.dataset}
    if data.validation is not None:
        sets["validation"] = data.validation.dataset
    for name, dataset in sets.items():
        path = run_dir / f"reference-{name}.safetensors"
        if not broadcast_object(path.is_file()):
            if started:
                raise UserError(
                    f"{path} is missing, which holds what the model this run started from says of the data: put it "
                    "back, or start a new run from the checkpoint's adapter with lora.init_from."
                )
            with Progress(log, f"reference of the {name} data", len(dataset), "rows") as progress:
                dataset.reference_logps = _computed(config, training, dataset, progress)
            if rank == 0:
                run_dir.mkdir(parents=True, exist_ok=True)
                logps = torch.from_numpy(dataset.reference_logps)
                save_file({"logps": logps}, path, metadata={"data": dataset.fingerprint()})
        else:
            dataset.reference_logps = _read(path, dataset)


def _computed(config: RunConfig, training: Training, dataset: TokenDataset, progress: Progress) -> np.ndarray:
    """float32 [documents], equal on all ranks."""
    mesh, stages = training.mesh, training.stages
    options = loader_options(config, data_rank=mesh.dp.rank, data_size=mesh.dp.size, context_rank=mesh.cp.rank)
    found = torch.zeros(len(dataset.offsets) - 1, dtype=torch.float32, device=stages.step.device)
    for batch in EvalLoader(dataset, **options):
        references = stages.references([batch])
        assert batch.answers is not None
        if references is not None and batch.answers.documents:
            documents = torch.tensor(batch.answers.documents, device=found.device)
            found[documents] = references[0].float()
        progress.advance(batch.num_rows * mesh.dp.size)
    return all_reduce(all_reduce(found, mesh.dp), mesh.pp).cpu().numpy()


def _read(path: Path, dataset: TokenDataset) -> np.ndarray:
    try:
        with safe_open(path, "pt") as file:
            metadata, logps = file.metadata() or {}, file.get_tensor("logps")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it and start the run anew.") from error
    if metadata.get("data") != dataset.fingerprint() or logps.shape != (len(dataset.offsets) - 1,):
        raise UserError(
            f"{path} belongs to other data than the run's: give the data that the run started with, or choose another "
            "checkpoint.dir."
        )
    return logps.numpy()
