"""Between Hugging Face folders and partitioned base checkpoints, tensor by tensor, both ways.

Neither direction holds a model in memory, and each writes beside its destination and renames at the end. What is
written is opened again and compared before it takes its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile

import torch
from torch import Tensor

from engine.checkpoint.folder import CONFIG, staged_folder
from engine.checkpoint.hf_tensors import INDEX, SINGLE, HfTensors
from engine.checkpoint.manifest import ENGINE_VERSION, Manifest, PieceRecord, write_manifest
from engine.checkpoint.pieces import (
    PieceReader,
    PlannedPiece,
    WrittenTensor,
    join_records,
    plan_pieces,
    written_tensor,
)
from engine.checkpoint.reshard import Box, box_spec
from engine.checkpoint.safetensors_file import SafetensorsWriter, checksum, num_bytes
from engine.checkpoint.source import OUTSIDE, ModelFolder, WeightSource, open_source
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError
from engine.models.describe import parameter_specs
from engine.models.names import NameMap, part_rows

Progress = Callable[[int], None]
Declared = dict[str, tuple[torch.dtype, tuple[int, ...]]]
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """What a conversion wrote.

    Args:
        out: the folder.
        files: its weight files.
        num_tensors, num_bytes: of the weights.
        notes: sentences that the user should read.
    """

    out: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = field(default=())


def _ignore(num_bytes: int) -> None:
    return None


def import_checkpoint(
    source: WeightSource, out: Path, *, tensor: int, overwrite: bool = False, progress: Progress | None = None
) -> ConversionReport:
    """Writes a base checkpoint partitioned for `tensor` tensor-parallel ranks, one file each.

    A tensor that ranks replicate is stored once, by its owner. Any other layout can read the result too.

    Args:
        source: the weights, at any layout.
        out: folder to make.
        tensor: number of partitions.
        overwrite: replace an existing checkpoint at `out`.
        progress: called with the bytes of each tensor written.

    Raises:
        UserError: the model does not fit `tensor` ranks, or `out` cannot be used.
    """
    specs = _specs_per_rank(source, tensor)
    with staged_folder(out, overwrite=overwrite, inputs=[source.model.path], num_bytes=source.total_bytes()) as staging:
        files = [f"tensor_{rank:02d}_of_{tensor:02d}.safetensors" for rank in range(tensor)]
        written = _write_partitions(source, [staging / file for file in files], specs, progress or _ignore)
        for path in source.model.auxiliary_files():
            copyfile(path, staging / path.name)
        manifest = Manifest(
            kind="base",
            engine_version=ENGINE_VERSION,
            model=_model_record(source),
            layout={"tensor": tensor},
            tensors=join_records(written),
            files={file: (staging / file).stat().st_size for file in files},
            fingerprint=source.fingerprint(),
        )
        write_manifest(staging, manifest)
        _verify_import(staging, source)
    return ConversionReport(
        out=out, files=tuple(files), num_tensors=len(manifest.tensors), num_bytes=sum(manifest.files.values())
    )


def _specs_per_rank(source: WeightSource, tensor: int) -> list[dict[str, ShardSpec]]:
    if tensor < 1:
        raise UserError(f"--tensor is {tensor}, but at least 1 partition is expected: use for example 2.")
    decoder = source.model.decoder
    return [parameter_specs(decoder, tensor_rank=rank, tensor_size=tensor) for rank in range(tensor)]


def _write_partitions(
    source: WeightSource, paths: list[Path], specs: list[dict[str, ShardSpec]], report: Progress
) -> list[WrittenTensor]:
    """Writes every rank's file in one pass over the source; what is outside the language model goes to rank 0's.

    Ranks that own nothing (more ranks than rows) still get a file, so that the layout shows in the folder.
    """
    outside = source.outside_names()
    with ExitStack() as stack:
        writers = []
        for rank, path in enumerate(paths):
            plan = [piece for name, spec in specs[rank].items() for piece in plan_pieces(name, spec)]
            declared = _declare(source, plan, [] if rank else outside)
            writers.append(stack.enter_context(SafetensorsWriter(path, declared)))
        written = [
            _write_pieces(source, name, rank_specs[name], writer, report)
            for name in source.tensor_names()
            for writer, rank_specs in zip(writers, specs, strict=True)
            if rank_specs[name].owner
        ]
        return written + [_write_outside(source, name, writers[0], report) for name in outside]


def _declare(source: WeightSource, plan: list[PlannedPiece], outside: list[str]) -> Declared:
    declared = {piece.key: (source.dtype(piece.name), piece.box.shape(source.shape(piece.name))) for piece in plan}
    for name in outside:
        tensor = source.read_outside(name)
        declared[OUTSIDE + name] = (tensor.dtype, tuple(tensor.shape))
    return declared


def _write_pieces(
    source: WeightSource, name: str, spec: ShardSpec, writer: SafetensorsWriter, report: Progress
) -> WrittenTensor:
    records = []
    for piece in plan_pieces(name, spec):
        tensor = source.read(name, box_spec(spec.global_shape, piece.box))
        digest = writer.write(piece.key, tensor)
        records.append(PieceRecord(box=piece.box, file=writer.path.name, key=piece.key, checksum=digest))
        report(tensor.nbytes)
    return written_tensor(name, spec, source.dtype(name), records)


def _write_outside(source: WeightSource, name: str, writer: SafetensorsWriter, report: Progress) -> WrittenTensor:
    tensor = source.read_outside(name)
    digest = writer.write(OUTSIDE + name, tensor)
    report(tensor.nbytes)
    record = PieceRecord(box=Box(), file=writer.path.name, key=OUTSIDE + name, checksum=digest)
    return written_tensor(OUTSIDE + name, box_spec(tuple(tensor.shape), Box()), tensor.dtype, [record])


def _model_record(source: WeightSource) -> dict[str, object]:
    model = source.model
    return {
        "hf_config": model.hf_config,
        "decoder": model.decoder.to_dict(),
        "origin": str(model.hf_path.resolve()),
        "body": model.names.body,
        "head": model.names.head,
        "fused": list(stored_names(model).fused),
        "has_tied_head": source.has_tied_head,
    }


def _verify_import(folder: Path, source: WeightSource) -> None:
    """Reads every piece back against its checksum, and the identity of the whole."""
    for _ in PieceReader(folder, always_verify=True).verify_all():
        pass
    written = open_source(folder)
    assert written.tensor_names() == source.tensor_names()
    assert written.computed_fingerprint() == source.fingerprint(), "the import reads back as another model"


def export_hf(
    source: WeightSource,
    out: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    inputs: tuple[Path, ...] = (),
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes a Hugging Face folder: the tensors under their family's names, config and tokenizer files beside them.

    Args:
        source: the weights; a `MergedSource` gives a merged or trained model.
        out: folder to make.
        max_shard_bytes: start a new file before one grows past this.
        overwrite: replace an existing model at `out`.
        inputs: further folders that are read meanwhile.
        progress: called with the bytes of each tensor written.

    Raises:
        UserError: `out` cannot be used, or a trained value is not finite.
    """
    parts = _hf_parts(source)
    shards = _split_into_shards(source, parts, max_shard_bytes)
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    )
    checksums: dict[str, str] = {}
    total = sum(num_bytes(dtype, shape) for shard in shards for dtype, shape in shard.values())
    inputs = (source.model.path, *inputs)
    with staged_folder(out, overwrite=overwrite, inputs=inputs, num_bytes=total) as staging:
        for file, declared in zip(files, shards, strict=True):
            with SafetensorsWriter(staging / file, declared, {"format": "pt"}) as writer:
                for name in declared:
                    tensor = _assemble(source, name, parts)
                    checksums[name] = writer.write(name, tensor)
                    (progress or _ignore)(tensor.nbytes)
        if len(shards) > 1:
            _write_index(staging / INDEX, files, shards, total)
        _copy_auxiliary(source, staging)
        _verify_export(staging, source, checksums)
    return ConversionReport(
        out=out, files=tuple(files), num_tensors=len(checksums), num_bytes=total, notes=tuple(source.notes)
    )


def stored_names(model: ModelFolder) -> NameMap:
    """Where tensors lie in the Hugging Face folder: for a partitioned base, in the one that it was made from."""
    if model.manifest is None:
        return model.names
    return replace(model.names, rows=part_rows(model.decoder)).fuse(model.manifest.model.get("fused", ()))


def _hf_parts(source: WeightSource) -> dict[str, list[str]]:
    """Hugging Face name -> the logical tensors that make it up, in the order of their rows."""
    names = stored_names(source.model)
    located = [(names.to_hf(name), name) for name in source.tensor_names()]
    parts: dict[str, list[tuple[int, str]]] = {}
    for location, name in located:
        parts.setdefault(location.name, []).append((location.row_offset, name))
    if source.has_tied_head:
        parts[f"{names.head}.weight"] = [(0, "embed_tokens.weight")]
    return {hf_name: [name for _, name in sorted(members)] for hf_name, members in parts.items()}


def _split_into_shards(source: WeightSource, parts: dict[str, list[str]], max_shard_bytes: int) -> list[Declared]:
    declared = {}
    for hf_name, members in parts.items():
        shape = source.shape(members[0])
        rows = sum(source.shape(name)[0] for name in members)
        declared[hf_name] = (source.dtype(members[0]), (rows, *shape[1:]))
    for name in source.outside_names():
        tensor = source.read_outside(name)
        declared[name] = (tensor.dtype, tuple(tensor.shape))
    shards: list[Declared] = [{}]
    filled = 0
    for name, (dtype, shape) in declared.items():
        size = num_bytes(dtype, shape)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += size
    return shards


def _assemble(source: WeightSource, hf_name: str, parts: dict[str, list[str]]) -> Tensor:
    if hf_name not in parts:
        return source.read_outside(hf_name)
    members = [source.read_whole(name) for name in parts[hf_name]]
    return members[0] if len(members) == 1 else torch.cat(members)


def _write_index(path: Path, files: list[str], shards: list[Declared], total: int) -> None:
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_auxiliary(source: WeightSource, folder: Path) -> None:
    for path in source.model.auxiliary_files():
        copyfile(path, folder / path.name)
    if source.changed_config is not None:
        text = json.dumps(source.changed_config, indent=2, sort_keys=True)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _verify_export(folder: Path, source: WeightSource, checksums: dict[str, str]) -> None:
    """Opens the result as a user would: no missing or unexpected names, the bytes that were meant, finite values."""
    tensors = HfTensors(folder)
    assert set(tensors.names()) == set(checksums), set(tensors.names()) ^ set(checksums)
    for name, digest in checksums.items():
        if checksum(tensors.view(name)) != digest:
            raise UserError(
                f"{name} reads back from {folder.parent} with other bytes than were written: the disk is faulty, "
                "give a folder on another one."
            )
    written = open_source(folder)
    assert set(written.tensor_names()) == set(source.tensor_names())
    for name in source.changed_names():
        if not torch.isfinite(written.read_whole(name)).all():
            raise UserError(
                f"{name} is not finite after training, so nothing was exported: use an earlier step (--step)."
            )
