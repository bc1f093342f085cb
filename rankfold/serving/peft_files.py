"""Adapters as PEFT opens them: a folder, or an archive of one."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.held_tensors import HeldTensors
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.run.training_state import MASTER
from engine.config.lora import LoraOptions
from engine.conversion.peft_write import export_peft
from engine.conversion.shared_factors import EachExpert
from engine.errors import UserError
from engine.files.durable import sync_folder, write_durably

_COMPLETE = "checkpoint_complete"
"""A file that clients look for: the folder is whole. It names the request that wrote the folder."""


def written_by(folder: Path) -> str | None:
    """Returns the request that wrote a folder; None where it is not there, or not whole."""
    file = folder / _COMPLETE
    return file.read_text("utf-8") if file.is_file() else None


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], lora: LoraOptions, model: ModelFolder, base: str, request: str
) -> int:
    """Writes a PEFT adapter in place of what was there, and returns the bytes of its files.

    Args:
        folder: to make.
        tensors: values of all trained parameters, by their names.
        lora: of the adapter.
        model: the base.
        base: its name.
        request: that asks for it.

    Raises:
        UserError: PEFT cannot express the adapter, or the disk does not take it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder / _COMPLETE).unlink(missing_ok=True)
    values = EachExpert(HeldTensors(tensors, "the model"), model.decoder)
    export_peft(values, asdict(lora), model, folder, overwrite=True, base_name=base)
    write_durably(folder / _COMPLETE, request)
    sync_folder(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the trained parameters of a file of saved weights, without their moments.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {name.removeprefix(MASTER): file.get_tensor(name) for name in names if name.startswith(MASTER)}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path.name} is damaged ({error}): save the weights again.") from None


def write_archive(archive: Path, folder: Path) -> None:
    """Writes the files of a folder into a tar archive durably, and deletes the folder."""
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, arcname=file.name)
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(archive)
    sync_folder(archive.parent)
    shutil.rmtree(folder)
