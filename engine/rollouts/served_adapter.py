"""Adapters as a server of completions reads them: gathered from the ranks as they are now, and written by rank 0.

Nothing is merged, and nothing goes through a checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from engine.checkpoint.folder import ADAPTER_CONFIG
from engine.checkpoint.held_tensors import HeldTensors
from engine.choices import AdapterReader
from engine.config.run import RunConfig
from engine.conversion.peft_read import ADAPTER_WEIGHTS
from engine.conversion.peft_write import export_peft, form_for
from engine.conversion.shared_factors import EachExpert
from engine.errors import UserError
from engine.training.build import Training
from engine.training.gathering import gather_whole

FILES = {ADAPTER_CONFIG: "served_adapter.json", ADAPTER_WEIGHTS: "served_adapter.safetensors"}
"""A written adapter's files, and their names in a checkpoint."""
_NOT_READ = {
    "modules_to_save": "modules in full",
    "rank_pattern": "adapters of several ranks",
    "alpha_pattern": "adapters of several scales",
}
_ADVICE = (
    "train adapters of one rank and alpha alone, on linears that the server adapts, or remove rollout.server, so that "
    "the engine samples"
)


def gather_trained(training: Training) -> HeldTensors:
    """Returns the current fp32 masters of all trained parameters in host memory; nothing on ranks other than 0.
    Collective.
    """
    shards = training.optimizer.flat.master_shards()
    return HeldTensors(gather_whole(training, shards), "the run")


def write_adapter(
    trained: HeldTensors, config: RunConfig, training: Training, folder: Path, reader: AdapterReader
) -> None:
    """Writes a PEFT folder as a server reads it.

    Args:
        trained: all trained parameters.
        folder: to create.
        reader: the program that will read it.

    Raises:
        UserError: the server would not compute with the trained adapter, or the disk cannot store it.
    """
    model = training.source.model
    values, lora = EachExpert(trained, model.decoder), asdict(config.lora)
    form, reason = form_for(values, lora, model, reader)
    if reason is not None:
        raise UserError(f"{reason}: {_ADVICE}.")
    export_peft(values, lora, model, folder, overwrite=True, form=form, reader=reader)
    written = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    for key, what in _NOT_READ.items():
        if written.get(key):
            raise UserError(f"the run trains {what} ({key}), which a server of completions does not load: {_ADVICE}.")
