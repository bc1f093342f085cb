"""The output of `inspect`: one row for each fact about a run, a checkpoint, a model or a PEFT adapter."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch

from engine.checkpoint.folder import ADAPTER_CONFIG, CONFIG
from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.pieces import PieceReader
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.run.step_folders import best_step, list_checkpoints
from engine.checkpoint.run.training_state import TrainingCheckpoint, open_run
from engine.checkpoint.safetensors_file import dtype_name, num_bytes
from engine.checkpoint.weight_source import WeightSource
from engine.config.resume_rules import flat_options
from engine.conversion.commands import is_training
from engine.conversion.expert_stacks import is_stack
from engine.conversion.merged_model import adapted_modules, fully_trained
from engine.conversion.peft_config import PeftSettings, read_settings
from engine.conversion.peft_read import adapter_file, stored_adapter
from engine.errors import UserError
from engine.files.documents import read_json
from engine.printable import printable
from engine.telemetry.format import counted, format_bytes, format_count
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.telemetry.terminal import is_terminal, wrapped

_MAX_FILES_SHOWN = 8
_MAX_EXCEPTIONS_SHOWN = 4


def run_inspect(folder: Path, *, step: int | Literal["best"] | None, verify: bool) -> None:
    """Prints the contents of a run, checkpoint, model or adapter; with `verify`, reads all of it."""
    rows: list[tuple[str, str]]
    pieces: PieceReader | None
    if is_training(folder):
        checkpoint = open_run(folder, step=step)
        rows, pieces = _training_rows(folder, checkpoint), checkpoint
    elif is_adapter(folder):
        rows, pieces = adapter_rows(folder), None
    else:
        weights = open_source(folder)
        rows = _model_rows(weights)
        model = weights.model
        pieces = None if model.manifest is None else PieceReader(folder, model.manifest)
    for key, value in rows:
        row = printable(f"{key:<14} {value}")
        print(wrapped(row, sys.stdout, indent=15) if is_terminal(sys.stdout) else row)
    if verify:
        _verify(folder, pieces)


def _verify(folder: Path, pieces: PieceReader | None) -> None:
    if pieces is None:
        kind = "a PEFT adapter" if is_adapter(folder) else "a Hugging Face model"
        raise UserError(f"{folder} is {kind}, which has no checksums: leave --verify out.")
    with Progress(Log(), "checking", sum(pieces.manifest.files.values()), "bytes") as progress:
        for num_bytes in pieces.verify_all():
            progress.advance(num_bytes)
    print(f"{'checksums':<14} all match")


def _model_rows(weights: WeightSource) -> list[tuple[str, str]]:
    model, decoder = weights.model, weights.model.decoder
    family = model.family if model.family == decoder.family else f"{model.family} with {decoder.family}"
    heads = f"{decoder.num_heads} heads ({decoder.num_kv_heads} key/value) of {decoder.head_dim}"
    mlp = f"MLP {decoder.intermediate}, " if decoder.intermediate else ""  # transformers' modules have their own
    head = "score head" if decoder.scores else f"{'tied' if decoder.tied_embeddings else 'untied'} head"
    rows = [
        ("kind", "partitioned base checkpoint" if model.manifest else "Hugging Face model"),
        (
            "model",
            f"{family}: {decoder.num_layers} layers, hidden {decoder.hidden}, {mlp}"
            f"{heads}, vocabulary {decoder.vocab_size}, {head}",
        ),
        *_tensor_rows(weights),
        ("fingerprint", weights.fingerprint()),
    ]
    if model.implementation == "adopted":
        rows.insert(2, ("layers", "adopted: transformers' own modules"))
    if (note := weights.encoding_note(decodes=False)) is not None:
        rows.append(("encoding", note.removeprefix("note: ")))
    if model.manifest is not None:
        rows += _file_rows(model.manifest.layout, model.manifest.files)
        rows.append(("written by", f"engine {model.manifest.engine_version}"))
    if outside := weights.outside_names():
        rows.append(("outside", f"{counted(len(outside), 'tensor')} not of the language model"))
    rows.append(("other files", ", ".join(file.name for file in model.companions().files) or "none"))
    return rows


def _training_rows(folder: Path, checkpoint: TrainingCheckpoint) -> list[tuple[str, str]]:
    manifest, values = checkpoint.manifest, checkpoint.trained()
    names, lora = values.tensor_names(), checkpoint.lora
    state = ", ".join(
        f"{key} {_number(value)}" for key, value in checkpoint.state.items() if not isinstance(value, dict)
    )
    rows = [("kind", "training checkpoint"), ("checkpoint", str(checkpoint.folder)), ("state", state)]
    if (best := best_step(folder)) is not None:
        rows.append(("best step", f"{best}, with {_judge(checkpoint)}"))
    if len(steps := list_checkpoints(folder)) > 1:
        rows.append(("steps kept", ", ".join(str(step) for step in sorted(steps))))
    fingerprint = checkpoint.base.get("fingerprint")
    weights = "random initial weights" if fingerprint is None else f"fingerprint {fingerprint}"
    rows.append(("base", f"{checkpoint.base.get('path')} ({weights})"))
    if lora:
        rows.append(
            ("lora", f"rank {lora['rank']}, alpha {lora['alpha']:g}, {counted(len(adapted_modules(names)), 'module')}")
        )
    if full := fully_trained(names):
        rows.append(("in full", counted(len(full), "tensor")))
    rows += _tensor_rows(values, "trained")
    rows += _file_rows(manifest.layout, manifest.files)
    rows.append(("written by", f"engine {manifest.engine_version}"))
    return rows


def _judge(checkpoint: TrainingCheckpoint) -> str:
    best = flat_options(checkpoint.run_config).get("checkpoint.best", "loss")
    return "the lowest evaluation loss" if best == "loss" else f"the best {best}"


def is_adapter(folder: Path) -> bool:
    """Returns whether a folder is a PEFT adapter and nothing else."""
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).is_file() for name in (CONFIG, MANIFEST))


def adapter_rows(folder: Path) -> list[tuple[str, str]]:
    """Returns the facts of a PEFT adapter's configuration and tensors; the base is not read.

    Raises:
        UserError: it is not a LoRA adapter, uses unsupported features, or is damaged.
    """
    settings = read_settings(folder, with_saved_modules=True)
    config = read_json(folder / ADAPTER_CONFIG)
    file = adapter_file(folder)
    ranks, tensors, in_full = stored_adapter(file)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    base_text = (str(base) + (f" (revision {revision})" if revision else "")) if base else "not recorded"
    targets = config.get("target_modules")
    names = ", ".join(sorted(map(str, targets))) if isinstance(targets, list) else str(targets or "not recorded")
    rows = [
        ("kind", "PEFT LoRA adapter"),
        ("base", base_text),
        ("lora", f"rank {settings.rank}, alpha {settings.alpha:g}, {counted(len(ranks), 'module')}"),
        ("targets", names),
    ]
    if stacks := sum(map(is_stack, tensors)) // 2:
        rows.append(("experts", f"{counted(stacks, 'stack')} of the factors of all experts of a layer"))
    others = [name for name, rank in ranks.items() if _exception(settings, name, rank)]
    rows += [("", _exception(settings, name, ranks[name])) for name in others[:_MAX_EXCEPTIONS_SHOWN]]
    if len(others) > _MAX_EXCEPTIONS_SHOWN:
        rows.append(("", f"and {len(others) - _MAX_EXCEPTIONS_SHOWN} more with a rank or a scale of their own"))
    options = {"rank-stabilised scale": settings.rslora, "DoRA": settings.dora, "biases on B": settings.bias}
    if used := [name for name, on in options.items() if on]:
        rows.append(("options", ", ".join(used)))
    if in_full:
        rows.append(("in full", counted(len(in_full), "tensor")))
    rows.append(_size_row("trained", [(file.shape(name), file.dtype(name)) for name in tensors]))
    return rows


def _exception(settings: PeftSettings, module: str, rank: int) -> str:
    """Describes an adapter whose rank or scale is not the default's; empty for others."""
    scale = settings.scale_of(module)
    if rank == settings.rank and math.isclose(scale, settings.scale):
        return ""
    return f"{module}: rank {rank}, scale {scale:g}"


def _number(value: object) -> object:
    """Formats a counter, which a device keeps as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tensor_rows(tensors: TensorReader, title: str = "weights") -> list[tuple[str, str]]:
    return [_size_row(title, [(tensors.shape(name), tensors.dtype(name)) for name in tensors.tensor_names()])]


def _size_row(title: str, tensors: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> tuple[str, str]:
    """Returns the row with the number of tensors and their size.

    Args:
        tensors: the shape and the dtype of each.
    """
    tensors = list(tensors)
    count = sum(math.prod(shape) for shape, _ in tensors)
    size = format_bytes(sum(num_bytes(dtype, shape) for shape, dtype in tensors))
    dtypes = ", ".join(sorted({dtype_name(dtype) for _, dtype in tensors}))
    return title, f"{counted(len(tensors), 'tensor')}, {format_count(count)} parameters, {size}, {dtypes}"


def _file_rows(layout: dict[str, int], files: dict[str, int]) -> list[tuple[str, str]]:
    rows = [("layout", ", ".join(f"{axis} {size}" for axis, size in layout.items()) or "not recorded")]
    rows.append(("files", f"{len(files)}, {format_bytes(sum(files.values()))}"))
    shown = sorted(files.items())
    rows += [("", f"{name} {format_bytes(size)}") for name, size in shown[:_MAX_FILES_SHOWN]]
    if len(shown) > _MAX_FILES_SHOWN:
        rows.append(("", f"and {len(shown) - _MAX_FILES_SHOWN} more"))
    return rows
