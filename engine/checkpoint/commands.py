"""What the conversion command line does: finds out what a folder is, converts it, and says what was written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.checkpoint.convert import ConversionReport, export_hf, import_checkpoint
from engine.checkpoint.manifest import MANIFEST, read_manifest
from engine.checkpoint.merge import MergedSource, adapted_modules, fully_trained
from engine.checkpoint.peft_write import export_peft
from engine.checkpoint.pieces import PieceReader
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.safetensors_file import dtype_name
from engine.checkpoint.source import ModelFolder, WeightSource, open_model, open_source
from engine.checkpoint.training_state import CHECKPOINTS, TrainingCheckpoint, list_checkpoints, open_run
from engine.errors import UserError
from engine.telemetry.format import format_bytes, format_count
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress

_MAX_FILES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A training checkpoint with the base it belongs to; `weights` is None where it started from random values."""

    checkpoint: TrainingCheckpoint
    model: ModelFolder
    weights: WeightSource | None

    @property
    def scale(self) -> float:
        """Factor on B A; 0 without adapters."""
        lora = self.checkpoint.lora
        if not lora:
            return 0.0
        return float(lora["alpha"]) / (lora["rank"] ** 0.5 if lora["rslora"] else lora["rank"])


def run_import(source: Path, out: Path, *, tensor: int, overwrite: bool) -> None:
    """Partitions a model. See `import_checkpoint`."""
    log = Log()
    weights = open_source(source)
    with Progress(log, f"importing {source}", weights.total_bytes(), "bytes") as progress:
        report = import_checkpoint(weights, out, tensor=tensor, overwrite=overwrite, progress=progress.advance)
    if outside := weights.outside_names():
        log.info(f"{len(outside)} tensors outside the language model are kept as they are")
    _say(log, report)


def run_export(
    source: Path,
    out: Path,
    *,
    form: Literal["peft", "hf"],
    merge: bool,
    base: Path | None,
    step: int | None,
    max_shard_bytes: int,
    overwrite: bool,
) -> None:
    """Writes a PEFT adapter or a Hugging Face model from a run, a checkpoint or a base.

    Raises:
        UserError: the options do not fit what `source` is.
    """
    log = Log()
    if max_shard_bytes <= 0:
        raise UserError(f"--max-shard-gb gives {max_shard_bytes} bytes: expected more than 0, use for example 5.")
    if not _is_training(source):
        _export_base(source, out, form, merge or base is not None or step is not None, max_shard_bytes, overwrite, log)
        return
    trained = open_trained(open_run(source, step=step), base)
    values = trained.checkpoint.trained()
    if form == "peft":
        if merge:
            raise UserError("--format peft writes the adapter by itself, and --merge asks for a whole model: use one.")
        report = export_peft(
            values, trained.checkpoint.lora, trained.model, out, overwrite=overwrite, inputs=[trained.checkpoint.folder]
        )
    else:
        if adapted_modules(values.tensor_names()) and not merge:
            raise UserError(
                f"{source} has adapters, and --format hf writes a whole model: add --merge to put them into its "
                "weights, or use --format peft."
            )
        merged = MergedSource(trained.model, trained.weights, values, scale=trained.scale)
        with Progress(log, f"exporting {trained.checkpoint.folder}", merged.total_bytes(), "bytes") as progress:
            report = export_hf(
                merged,
                out,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
                inputs=(trained.checkpoint.folder,),
                progress=progress.advance,
            )
    _say(log, report)


def _export_base(
    source: Path, out: Path, form: str, has_run_options: bool, max_shard_bytes: int, overwrite: bool, log: Log
) -> None:
    if form == "peft":
        raise UserError(f"{source} is a base model without adapters: give a run, or use --format hf.")
    if has_run_options:
        raise UserError(f"{source} is a base model, and --merge, --base and --step are for runs: leave them out.")
    weights = open_source(source)
    with Progress(log, f"exporting {source}", weights.total_bytes(), "bytes") as progress:
        report = export_hf(
            weights, out, max_shard_bytes=max_shard_bytes, overwrite=overwrite, progress=progress.advance
        )
    _say(log, report)


def _is_training(folder: Path) -> bool:
    """Whether a folder is a run or one of its checkpoints, rather than a model."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: expected a run, a checkpoint or a model, mend the path.")
    if (folder / MANIFEST).is_file():
        return read_manifest(folder).kind == "training"
    return (folder / CHECKPOINTS).is_dir()


def open_trained(checkpoint: TrainingCheckpoint, base: Path | None = None) -> TrainedModel:
    """Finds the base of a training checkpoint, at its recorded path or at `base`.

    Raises:
        UserError: it is not there, or is another model.
    """
    recorded, fingerprint = str(checkpoint.base.get("path")), checkpoint.base.get("fingerprint")
    folder = base if base is not None else Path(recorded)
    if base is None and not folder.is_dir():
        raise UserError(
            f"the base of {checkpoint.folder} was at {recorded}, which is gone: give its folder with --base."
        )
    if fingerprint is None:
        return TrainedModel(checkpoint, open_model(folder), None)
    weights = open_source(folder)
    if (found := weights.fingerprint()) != fingerprint:
        raise UserError(
            f"{folder} has fingerprint {found}, but {checkpoint.folder} was trained on {fingerprint} ({recorded}): "
            "give that model with --base."
        )
    return TrainedModel(checkpoint, weights.model, weights)


def _say(log: Log, report: ConversionReport) -> None:
    for note in report.notes:
        log.info(f"note: {note}")
    files = "1 file" if len(report.files) == 1 else f"{len(report.files)} files"
    size = format_bytes(report.num_bytes)
    print(f"wrote {report.out}: {report.num_tensors} tensors, {size} in {files}, read back and compared")


def run_inspect(folder: Path, *, step: int | None, verify: bool) -> None:
    """Prints what a run, checkpoint or model holds; with `verify`, reads all of it."""
    rows: list[tuple[str, str]]
    pieces: PieceReader | None
    if _is_training(folder):
        checkpoint = open_run(folder, step=step)
        rows, pieces = _training_rows(folder, checkpoint), checkpoint
    else:
        weights = open_source(folder)
        rows = _model_rows(weights)
        model = weights.model
        pieces = None if model.manifest is None else PieceReader(folder, model.manifest, always_verify=True)
    for key, value in rows:
        print(f"{key:<14} {value}")
    if verify:
        _verify(folder, pieces)


def _verify(folder: Path, pieces: PieceReader | None) -> None:
    if pieces is None:
        raise UserError(f"{folder} is a Hugging Face model, which has no checksums: leave --verify out.")
    with Progress(Log(), "checking", sum(pieces.manifest.files.values()), "bytes") as progress:
        for num_bytes in pieces.verify_all():
            progress.advance(num_bytes)
    print(f"{'checksums':<14} all match")


def _model_rows(weights: WeightSource) -> list[tuple[str, str]]:
    model, decoder = weights.model, weights.model.decoder
    heads = f"{decoder.num_heads} heads ({decoder.num_kv_heads} key/value) of {decoder.head_dim}"
    rows = [
        ("kind", "partitioned base checkpoint" if model.manifest else "Hugging Face model"),
        (
            "model",
            f"{decoder.family}: {decoder.num_layers} layers, hidden {decoder.hidden}, MLP {decoder.intermediate}, "
            f"{heads}, vocabulary {decoder.vocab_size}, {'tied' if decoder.tied_embeddings else 'untied'} head",
        ),
        *_tensor_rows(weights),
        ("fingerprint", weights.fingerprint()),
    ]
    if model.manifest is not None:
        rows += _file_rows(model.manifest.layout, model.manifest.files)
        rows.append(("written by", f"engine {model.manifest.engine_version}"))
    if outside := weights.outside_names():
        rows.append(("outside", f"{len(outside)} tensors that are not the language model's"))
    rows.append(("other files", ", ".join(path.name for path in model.auxiliary_files()) or "none"))
    return rows


def _training_rows(folder: Path, checkpoint: TrainingCheckpoint) -> list[tuple[str, str]]:
    manifest, values = checkpoint.manifest, checkpoint.trained()
    names, lora = values.tensor_names(), checkpoint.lora
    state = ", ".join(f"{key} {value}" for key, value in checkpoint.state.items())
    rows = [("kind", "training checkpoint"), ("checkpoint", str(checkpoint.folder)), ("state", state)]
    if len(steps := list_checkpoints(folder)) > 1:
        rows.append(("steps kept", ", ".join(str(step) for step in sorted(steps))))
    rows.append(("base", f"{checkpoint.base.get('path')} (fingerprint {checkpoint.base.get('fingerprint')})"))
    if lora:
        rows.append(("lora", f"rank {lora['rank']}, alpha {lora['alpha']:g}, {len(adapted_modules(names))} modules"))
    if full := fully_trained(names):
        rows.append(("in full", f"{len(full)} tensors trained in full"))
    rows += _tensor_rows(values, "trained")
    rows += _file_rows(manifest.layout, manifest.files)
    rows.append(("written by", f"engine {manifest.engine_version}"))
    return rows


def _tensor_rows(tensors: TensorReader, title: str = "tensors") -> list[tuple[str, str]]:
    names = tensors.tensor_names()
    count = sum(math.prod(tensors.shape(name)) for name in names)
    dtypes = ", ".join(sorted({dtype_name(tensors.dtype(name)) for name in names}))
    size = format_bytes(tensors.total_bytes())
    return [(title, f"{len(names)}, {format_count(count)} parameters, {size}, {dtypes}")]


def _file_rows(layout: dict[str, int], files: dict[str, int]) -> list[tuple[str, str]]:
    rows = [("layout", ", ".join(f"{axis} {size}" for axis, size in layout.items()) or "not recorded")]
    rows.append(("files", f"{len(files)}, {format_bytes(sum(files.values()))}"))
    shown = sorted(files.items())
    rows += [("", f"{name} {format_bytes(size)}") for name, size in shown[:_MAX_FILES_SHOWN]]
    if len(shown) > _MAX_FILES_SHOWN:
        rows.append(("", f"and {len(shown) - _MAX_FILES_SHOWN} more"))
    return rows
