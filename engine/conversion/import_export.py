"""Converts between Hugging Face folders and partitioned base checkpoints, both ways, byte for byte.

Neither direction holds a model in memory, and each writes beside its destination and renames at the end. A conversion
that was killed resumes from the files it had written. An output is opened again before it takes its name; reading
all of its bytes back is up to `verify`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint.copying.contents import Concatenated, Content, content_checksum
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.copying.exchange import whole_checksum
from engine.checkpoint.copying.file_writers import Piece, PlannedFile
from engine.checkpoint.copying.resumable import Written, resumable_folder
from engine.checkpoint.copying.streaming import Progress, Streaming, compare_files, write_files
from engine.checkpoint.folder import CONFIG
from engine.checkpoint.hf_tensors import INDEX, SINGLE, HfTensors
from engine.checkpoint.manifest import ENGINE_VERSION, write_manifest
from engine.checkpoint.manifest_records import Manifest, PieceRecord, TensorRecord
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.model_weights import OUTSIDE, open_source
from engine.checkpoint.pieces import plan_pieces
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import dtype_name
from engine.checkpoint.tokenizer_files import BASES_OWN, TrainedTokenizer
from engine.checkpoint.weight_source import WeightSource
from engine.choices import STORED
from engine.conversion.add_adapter import write_rounding
from engine.conversion.low_precision.linears import LowPrecision, unstacked
from engine.conversion.model_card import CARD
from engine.conversion.stacked_content import Member, StackedContent
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError
from engine.files.durable import write_durably
from engine.models.describe import parameter_specs
from engine.models.families import family_of
from engine.models.names import FUSED, QKV, NameMap
from engine.quantization.shipped.config import KEY
from engine.seams import resolve
from engine.sentences import listed

Proof = Callable[[Path], str]
"""Verifies the staged folder before the final rename; returns the sentence to report, or raises UserError."""

Fusing = Literal["keep", "split", "qkv", "all"]
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """The result of a conversion.

    Args:
        out: the folder.
        files: its weight files.
        num_tensors, num_bytes: of the weights.
        seconds: spent writing them, until they were on the disk.
        kept_bytes: of them, those that a killed conversion had written and this one only compared.
        verified: whether all bytes were read back.
        notes: sentences that the user should read.
        rounding: of a merge, logical name -> rounding error of the sum; see `engine.conversion.add_adapter.Rounding`.
    """

    out: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    seconds: float = 0.0
    kept_bytes: int = 0
    verified: bool = False
    notes: tuple[str, ...] = field(default=())
    rounding: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The settings of a conversion, whatever it writes.

    Args:
        overwrite: replace an existing model at the destination.
        verify: read everything back from the disk and compare.
        threads: None for two per processor, at most 8.
        planned: called with the bytes of all tensors that will be written.
        progress: called with bytes as they are written, and again as they are read back.
    """

    overwrite: bool = False
    verify: bool = False
    threads: int | None = None
    planned: Progress | None = None
    progress: Progress | None = None


PLAIN_WORK = Work()


def import_checkpoint(
    source: WeightSource,
    out: Path,
    *,
    tensor: int,
    work: Work = PLAIN_WORK,
) -> ConversionReport:
    """Writes a base checkpoint partitioned for `tensor` tensor-parallel ranks, one file each.

    A tensor that ranks replicate is stored once, by its owner. Any other layout can read the result too.

    Args:
        source: the weights, at any layout.
        out: folder to make.
        tensor: number of partitions.
        work: the settings.

    Raises:
        UserError: the model does not fit `tensor` ranks, or `out` cannot be used.
    """
    files, parts = _planned_partitions(source, _specs_per_rank(source, tensor))
    names = [file.name for file in files]
    plan = {"import": tensor, "files": names}
    companions = source.model.companions()
    total = sum(file.num_bytes for file in files) + companions.num_bytes
    inputs = [source.model.path]
    with _written(out, files, plan, inputs, total, work) as (staging, streamed):
        _refuse_not_finite(source, streamed, trained=())
        companions.copy_to(staging)
        _write_changed_config(staging, source.changed_config)
        manifest = Manifest(
            kind="base",
            engine_version=ENGINE_VERSION,
            model=_model_record(source),
            layout={"tensor": tensor},
            tensors=_records(source, parts, streamed.written),
            files={name: (staging / name).stat().st_size for name in names},
            fingerprint=source.fingerprint(),
        )
        write_manifest(staging, manifest)
        written = open_source(staging)
        assert written.tensor_names() == source.tensor_names()
        assert written.computed_fingerprint() == source.fingerprint(), "the import reads back as another model"
        if work.verify:
            compare_files(staging, files, streamed.written, threads=work.threads, progress=work.progress)
    report = _report(out, files, streamed, work, num_tensors=len(manifest.tensors))
    return replace(report, notes=(*source.notes, *companions.left_out))


@contextmanager
def _written(
    out: Path, files: Sequence[PlannedFile], plan: Mapping[str, Any], inputs: Sequence[Path], num_bytes: int, work: Work
) -> Iterator[tuple[Path, Streaming]]:
    """Writes files into a folder beside `out`, which takes that name after the block; arguments are those of
    `resumable_folder`."""
    with resumable_folder(out, plan=plan, overwrite=work.overwrite, inputs=inputs, num_bytes=num_bytes) as found:
        staging, journal = found
        if work.planned is not None:
            work.planned(sum(file.num_bytes for file in files))
        yield staging, write_files(staging, files, journal, scan=True, threads=work.threads, progress=work.progress)


def _write_changed_config(folder: Path, config: Mapping[str, Any] | None) -> None:
    if config is not None:
        write_durably(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _report(
    out: Path, files: Sequence[PlannedFile], streamed: Streaming, work: Work, *, num_tensors: int
) -> ConversionReport:
    return ConversionReport(
        out=out,
        files=tuple(file.name for file in files),
        num_tensors=num_tensors,
        num_bytes=sum(file.num_bytes for file in files),
        seconds=streamed.seconds,
        kept_bytes=streamed.kept_bytes,
        verified=work.verify,
    )


def _specs_per_rank(source: WeightSource, tensor: int) -> list[dict[str, ShardSpec]]:
    if tensor < 1:
        raise UserError(f"--tensor is {tensor}, but at least 1 partition is expected: use for example 2.")
    decoder = source.model.decoder
    return [parameter_specs(decoder, tensor_rank=rank, tensor_size=tensor) for rank in range(tensor)]


Part = tuple[str, Box, Piece]
"""A stored part of a tensor: its file, and the box that it is."""


def _planned_partitions(
    source: WeightSource, specs: list[dict[str, ShardSpec]]
) -> tuple[list[PlannedFile], dict[str, list[Part]]]:
    """Plans a file for each rank, and returns the parts of each tensor too; tensors outside the language model go into
    rank 0's.

    Tensors are written in the source's order, all ranks' parts of one together: those made from the same stored tensor
    are then made from one read of it.
    """
    files = [f"tensor_{rank:02d}_of_{len(specs):02d}.safetensors" for rank in range(len(specs))]
    parts: dict[str, list[Part]] = {}
    for order, name in enumerate(source.tensor_names()):
        planned = [(file, one) for file, own in zip(files, specs, strict=True) for one in plan_pieces(name, own[name])]
        contents = source.contents(name, [one.box for _, one in planned])
        shape, dtype = source.shape(name), source.dtype(name)
        parts[name] = [
            (file, one.box, Piece(key=one.key, dtype=dtype, shape=one.box.shape(shape), content=content, order=order))
            for (file, one), content in zip(planned, contents, strict=True)
        ]
    for name in source.outside_names():
        parts[OUTSIDE + name] = [(files[0], Box(), _outside_piece(source, name, OUTSIDE))]
    pieces: dict[str, list[Piece]] = {file: [] for file in files}
    for file, _, piece in (part for own in parts.values() for part in own):
        pieces[file].append(piece)
    return [PlannedFile(name=file, pieces=tuple(own)) for file, own in pieces.items()], parts


def _outside_piece(source: WeightSource, name: str, prefix: str = "") -> Piece:
    shape, dtype = source.outside_shape(name)
    return Piece(key=prefix + name, dtype=dtype, shape=shape, content=source.outside_content(name))


def _records(
    source: WeightSource, parts: Mapping[str, list[Part]], written: Mapping[tuple[str, str], Written]
) -> dict[str, TensorRecord]:
    records, known = {}, source.sums() or {}
    for name, own in parts.items():
        pieces = [
            PieceRecord(box=box, file=file, key=piece.key, checksum=written[file, piece.key].checksum)
            for file, box, piece in own
        ]
        shape, dtype, whole = own[0][2].shape, own[0][2].dtype, None
        if name in source:  # else it is whole, and outside the language model
            shape = source.shape(name)
            sums = [(box, record.checksum, piece.content) for record, (_, box, piece) in zip(pieces, own, strict=True)]
            whole = known.get(name) or whole_checksum(shape, dtype, sums)
            if whole is None:  # an earlier call has written most of it
                whole = content_checksum(source.content(name, Box()), Scratch())
        in_order = tuple(sorted(pieces, key=lambda piece, shape=shape: piece.box.ranges(shape)))
        records[name] = TensorRecord(shape=shape, dtype=dtype_name(dtype), pieces=in_order, checksum=whole)
    return records


def _model_record(source: WeightSource) -> dict[str, object]:
    model = source.model
    return {
        "hf_config": model.hf_config,
        "decoder": model.decoder.to_dict(),
        "origin": str(model.hf_path.resolve()),
        "body": model.names.body,
        "head": model.names.head,
        "vision": dict(model.names.vision),
        "fused": list(model.names.fused),
        "stacked": model.names.is_stacked,
        "has_tied_head": source.has_tied_head,
        "implementation": model.implementation,
        **model.names.record(),
    }


def export_hf(
    source: WeightSource,
    out: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    inputs: tuple[Path, ...] = (),
    fusing: Fusing = "keep",
    work: Work = PLAIN_WORK,
    proof: Proof | None = None,
    tokenizer: TrainedTokenizer = BASES_OWN,
    card: str | None = None,
    low: LowPrecision | None = None,
) -> ConversionReport:
    """Writes a Hugging Face folder: the tensors under their family's names, config and tokenizer files beside them.

    Args:
        source: the weights; a `MergedSource` gives a merged or trained model.
        out: folder to make.
        max_shard_bytes: start a new file before one grows past this.
        inputs: further folders that are read at the same time.
        fusing: query, key and value, and gate and up, as the base has them ("keep"), apart ("split"), query, key and
            value as one matrix ("qkv"), or both ("all").
        work: the settings.
        proof: tries the folder before it takes its name.
        tokenizer: of the training.
        card: text of README.md, in place of the base's.
        low: how to store linears in few bits; None to store all tensors as the base does.

    Raises:
        UserError: `out` cannot be used, a value is not finite, or a changed matrix is all zero.
    """
    names = hf_names(source.model, fusing)
    config = source.changed_config
    if names.pieces:
        parts, pieces = resolve(names.pieces)(source, names)
    elif low is None:
        parts = _hf_parts(source, names)
        pieces = [
            replace(_assembled(source, names, hf_name, members), order=order)
            for order, (hf_name, members) in enumerate(parts.items())
        ]
    else:
        parts, pieces, config = _in_few_bits(source, names, low, fusing)
    outside = [name for name in source.outside_names() if low is None or name not in low.outside]
    first = 1 + max((piece.order for piece in pieces), default=0)
    pieces += [replace(_outside_piece(source, name), order=first + place) for place, name in enumerate(outside)]
    files = _planned_shards(pieces, max_shard_bytes, in_order=bool(names.pieces))
    plan = {"export": [[file.name, [piece.key for piece in file.pieces]] for file in files], **source.identity()}
    if low is not None:
        plan["low_precision"] = dict(low.identity)
    companions = tokenizer.companions(source.model.companions(), with_model=True)
    total = sum(file.num_bytes for file in files)
    inputs = (source.model.path, *inputs)
    room = total + companions.num_bytes
    with _written(out, files, plan, inputs, room, work) as (staging, streamed):
        # of a base in few bits they say that it is so no longer
        own = source.notes if low is None else [note for note in source.notes if KEY not in note]
        notes = [*own, *companions.left_out, *_refuse_bad_values(source, parts, streamed)]
        notes += [] if low is None else low.notes
        if len(files) > 1:
            _write_index(staging / INDEX, files, total)
        companions.copy_to(staging)
        tokenizer.write_template(staging)
        if card is not None:
            write_durably(staging / CARD, card)
        _write_changed_config(staging, config)
        _check_names(staging, source, files)
        if work.verify:
            compare_files(staging, files, streamed.written, threads=work.threads, progress=work.progress)
        facts = [written.facts for written in streamed.written.values()]
        rounding = source.write_report(staging, facts)
        if low is not None and not rounding:
            rounding = write_rounding(staging, facts, 0.0)
        if low is not None and low.is_trained:  # the rounded weights are what was trained
            rounding = {}
        if proof is not None:
            notes.append(proof(staging))
    report = _report(out, files, streamed, work, num_tensors=len(streamed.written))
    return replace(report, notes=tuple(notes), rounding=rounding)


def hf_names(model: ModelFolder, fusing: Fusing) -> NameMap:
    """Returns where an export places tensors.

    Raises:
        UserError: the family knows only one way.
    """
    stored = model.names
    if fusing == "keep":
        return stored
    if stored.pieces:
        raise UserError(
            f"--fused {fusing} is for the engine's own families, and this {model.decoder.family} model has "
            "transformers' modules: leave --fused out."
        )
    family = family_of(model.hf_config, model.implementation)[0]
    if family.fused and fusing != "all":
        raise UserError(
            f"--fused {fusing} is not how a {model.decoder.family} model is stored, which has "
            f"{' and '.join(name.rpartition('.')[2] for name in family.fused)}: leave --fused out."
        )
    plain = replace(family.names, body=stored.body, head=stored.head, vision=stored.vision)
    return plain.fuse({"split": (), "qkv": (QKV,), "all": tuple(FUSED)}[fusing])


def _hf_parts(source: WeightSource, names: NameMap) -> dict[str, list[str]]:
    """Returns Hugging Face name -> the logical tensors that make it up, in the order of their rows."""
    located = [(names.to_hf(name), name) for name in source.tensor_names()]
    parts: dict[str, list[tuple[int, str]]] = {}
    for location, name in located:
        parts.setdefault(location.name, []).append((location.row_offset, name))
    if source.has_tied_head:
        parts[f"{names.head}.weight"] = [(0, "embed_tokens.weight")]
    return {hf_name: [name for _, name in sorted(members)] for hf_name, members in parts.items()}


def _planned_shards(pieces: list[Piece], max_shard_bytes: int, *, in_order: bool) -> list[PlannedFile]:
    """Plans the files; `in_order` keeps the pieces' own order, else the files are written side by side."""
    shards: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        if shards[-1] and filled + piece.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += piece.num_bytes
    files = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE]
    metadata = {"format": "pt"}
    if not in_order:
        shards = _side_by_side(shards)
    return [
        PlannedFile(name=file, pieces=tuple(shard), metadata=metadata)
        for file, shard in zip(files, shards, strict=True)
    ]


def _side_by_side(shards: list[list[Piece]]) -> list[list[Piece]]:
    """Returns the pieces with orders by which all files grow together; those of one order keep a common one."""
    orders: dict[int, int] = {}
    for index, shard in enumerate(shards):
        for place, piece in enumerate(shard):
            orders.setdefault(piece.order, place * len(shards) + index)
    return [[replace(piece, order=orders[piece.order]) for piece in shard] for shard in shards]


def _in_few_bits(
    source: WeightSource, names: NameMap, low: LowPrecision, fusing: Fusing
) -> tuple[dict[str, list[str]], list[Piece], dict[str, Any]]:
    """Returns stored name -> logical tensors, the tensors to write, and config.json, where linears are rounded.

    Raises:
        UserError: the family has no place for such tensors, or `fusing` changes the base's own.
    """
    if low.dtype != STORED:
        names = unstacked(source.model, names)
    elif fusing != "keep":
        raise UserError(f"--fused {fusing} changes matrices whose scales --dtype stored keeps: leave one of them out.")
    parts: dict[str, list[str]] = {}
    pieces: list[Piece] = []
    ignored = {names.head}
    for order, (hf_name, members) in enumerate(_hf_parts(source, names).items()):
        if low.rounds(members):
            own = low.pieces(source, names, hf_name, members, order)
        else:
            own = [replace(_assembled(source, names, hf_name, members), order=order)]
        if not low.holds(members) and hf_name.endswith(".weight") and len(own[0].shape) > 1:
            modules = (member.rpartition(".")[0] for member in members)
            ignored.update(alias for module in modules for alias in names.aliases(module))
        parts[own[0].key] = members
        pieces.extend(own)
    pieces.extend(low.beside_pieces(len(parts)))
    ignored.update(
        name.removesuffix(".weight")
        for name in source.outside_names()
        if name.endswith(".weight") and len(source.outside_shape(name)[0]) > 1
    )
    config = source.changed_config or source.model.hf_config
    return parts, pieces, low.full_config(config, sorted(ignored))


def _assembled(source: WeightSource, names: NameMap, hf_name: str, members: list[str]) -> Piece:
    contents: list[Content] = [source.content(name, Box()) for name in members]
    shape, dtype = source.shape(members[0]), source.dtype(members[0])
    places = [place for name in members if (place := names.to_hf(name).expert) is not None]
    if places:
        shapes = map(source.shape, members)
        stacked = StackedContent([Member(*one) for one in zip(places, shapes, contents, strict=True)], dtype)
        return Piece(key=hf_name, dtype=dtype, shape=stacked.shape, content=stacked)
    if len(members) > 1:
        shape = (sum(source.shape(name)[0] for name in members), *shape[1:])
    content = contents[0] if len(contents) == 1 else Concatenated(contents)
    return Piece(key=hf_name, dtype=dtype, shape=shape, content=content)


def _refuse_bad_values(source: WeightSource, parts: dict[str, list[str]], streamed: Streaming) -> list[str]:
    """Refuses values that no model has; reports the base's own zeros.

    An unchanged matrix of zeros is accepted: some bases have biases or whole matrices of them.
    """
    changed, zeros = set(source.changed_names()), []
    trained = {key for key, names in parts.items() if any(name in changed for name in names)}
    _refuse_not_finite(source, streamed, trained)
    for (_, key), written in streamed.written.items():
        matrix = any(len(source.shape(name)) > 1 for name in parts.get(key, ()))
        if matrix and written.facts.get("zero", False):
            if key in trained:
                raise UserError(
                    f"{key} is all zero after training, so nothing was exported: use an earlier step (--step)."
                )
            zeros.append(key)
    return [f"all zero, as in {source.label}: {listed(sorted(zeros))}"] if zeros else []


def _refuse_not_finite(source: WeightSource, streamed: Streaming, trained: Collection[str]) -> None:
    """Refuses tensors with infinite values or NaN; `trained` has the keys of those that training changed."""
    bad = sorted(key for (_, key), written in streamed.written.items() if not written.facts.get("finite", True))
    if changed := [key for key in bad if key in trained]:
        raise UserError(
            f"{changed[0]} is not finite after training, so nothing was exported: use an earlier step (--step)."
        )
    if bad:
        raise UserError(
            f"{source.label} has values that are not finite in {listed(bad)}, so nothing was written: use another copy "
            "of the model."
        )


def _write_index(path: Path, files: Sequence[PlannedFile], total: int) -> None:
    weight_map = {piece.key: file.name for file in files for piece in file.pieces}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_durably(path, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_names(folder: Path, source: WeightSource, files: Sequence[PlannedFile]) -> None:
    """Opens the result as a reader would, and checks that no name is missing or unexpected and that shapes fit the
    config.
    """
    found, meant = set(HfTensors(folder).names()), {piece.key for file in files for piece in file.pieces}
    assert found == meant, found ^ meant
    assert set(open_source(folder, source.model.implementation).tensor_names()) == set(source.tensor_names())
