"""A frozen base in fewer bytes: which weights a run encodes, whether it can, and how they are filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from engine.checkpoint.loading import load_encoded, load_stored
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.weight_source import WeightSource
from engine.choices import ENCODED, STORED
from engine.config.run import RunConfig
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.layers.context import TrainingPlan
from engine.layers.encoded_storage import (
    EncodedEntry,
    encoded_entries,
    fill_encoded,
    merged_names,
    rounding_names,
)
from engine.layers.module import AdaptedModule, ShardedModule, shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import meta_model
from engine.models.initialise import initialise_weights
from engine.ops.encoded_weight import BaseEncoding, Formats
from engine.ops.scaled_products import require_some_scaled
from engine.sentences import listed
from engine.telemetry.format import counted, format_bytes
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress

FP8_CAPABILITY = {"fp8": (8, 9), "fp8_row": (9, 0)}
"""The oldest GPU that multiplies with one scale per matrix, and with one per row."""


def base_encoding(config: RunConfig, device: torch.device, formats: Formats | None = None) -> BaseEncoding | None:
    """Returns how `model.base_dtype` stores weights that do not train; None where they keep model.dtype.

    Args:
        device: of the weights; "meta" where nothing is computed.
        formats: in which the checkpoint has its weights; needed where they stay as they are stored.

    Raises:
        UserError: the GPU has no products for it.
    """
    name = config.model.base_dtype
    if name is None:
        return None
    if name != STORED:
        base = named_encoding(name, config.model.kernels, device)
    else:
        assert formats is not None, "drawn weights are given the formats of a checkpoint only to measure it"
        base = _by_backend(formats, config.model.kernels, device)
    return replace(base, rounds_inputs=config.model.base_products == "codes")


def named_encoding(name: str, kernels: str, device: torch.device) -> BaseEncoding:
    """Returns an encoding by its name, with the backend `kernels` as a user asks for it.

    Raises:
        UserError: the GPU has no products for it.
    """
    if device.type == "cuda" and name in FP8_CAPABILITY:
        found, needed = torch.cuda.get_device_capability(device), FP8_CAPABILITY[name]
        if found < needed:
            raise UserError(
                f"model.base_dtype is {name}, which needs a GPU of compute capability {needed[0]}.{needed[1]}, but "
                f"this one has {found[0]}.{found[1]}: set model.base_dtype to int8 or nf4."
            )
    return _by_backend(lambda weight_name: name, kernels, device)


def _by_backend(formats: Formats, kernels: str, device: torch.device) -> BaseEncoding:
    from engine.ops.quantized_backends import choose_quantized

    backend = choose_quantized(kernels, device)
    return BaseEncoding(formats=formats, arithmetic=backend.arithmetic, operands=backend.operands)


def check_base(
    config: RunConfig,
    decoder: DecoderConfig,
    plan: TrainingPlan,
    weights: WeightSource | None = None,
    formats: Formats | None = None,
) -> tuple[str, ...]:
    """Checks that `model.base_dtype` can be used in this model.

    Args:
        weights: of the checkpoint; needed where they stay as they are stored, but for drawn ones.
        formats: that drawn weights are given where such a checkpoint is measured; None otherwise.

    Returns:
        The names of the encodings that the whole model's frozen weights have.

    Raises:
        UserError: every linear of the layers trains, none is stored in few bits, or ranks would cut through numbers
            that share a scale.
    """
    if weights is not None:
        if config.model.base_dtype == STORED:
            _require_formats(weights)
        formats = weights.format
    base = base_encoding(config, torch.device("meta"), formats)
    if base is None:
        return ()
    if plan.merge_aware and decoder.made_by is not None:
        raise UserError(
            f"lora.merge_aware is true, but the layers of this {decoder.family} model are transformers' own modules, "
            "of which no merged checkpoint is written in few bits: set lora.merge_aware to false."
        )
    parallel = config.parallel
    model = meta_model(
        decoder, tensor_size=parallel.tensor, shards_experts=parallel.shards_experts, plan=plan, base=base
    )
    if base.rounds_inputs:
        require_some_scaled(config.model.base_dtype, rounding_names(model))
    if found := {entry.encoding.name for entry in encoded_entries(model)}:
        merged = merged_names(model)
        if config.model.base_dtype == STORED and merged and weights is not None:
            _require_own_blocks(merged, weights)
        if plan.merge_aware and not merged:
            raise UserError(
                f"lora.merge_aware is true and model.base_dtype is {config.model.base_dtype}, but no linear that is to "
                "have an adapter is stored encoded: change lora.targets, or set lora.merge_aware to false."
            )
        return tuple(sorted(found))
    if config.model.base_dtype == STORED and not config.trainable:
        raise UserError(
            f"model.base_dtype is stored, but {config.model.path} has no linear of the layers whose weights are all in "
            "the same format: set model.base_dtype to null, which decodes them."
        )
    raise UserError(
        f"model.base_dtype is {config.model.base_dtype} and trainable is {list(config.trainable)}, which trains "
        "every linear of the layers, so that nothing frozen is left to encode: set model.base_dtype to null, or "
        "train less."
    )


def has_formats(weights: WeightSource) -> bool:
    """Returns whether a checkpoint has a weight in few bits that may stay as it is stored."""
    return any(weights.format(name) is not None for name in weights.tensor_names())


def _require_formats(weights: WeightSource) -> None:
    """Refuses a checkpoint that has no weight in a format.

    Raises:
        UserError: it has none, or they were decoded when it was partitioned.
    """
    others = f"set model.base_dtype to null, or to one of {', '.join(ENCODED)} to encode weights while they are read."
    if weights.model.manifest is not None:
        raise UserError(
            f"model.base_dtype is stored and {weights.label} is partitioned, where all weights are numbers: give the "
            f"Hugging Face folder that it was made from, or {others}"
        )
    if not has_formats(weights):
        raise UserError(f"model.base_dtype is stored, but {weights.label} has no weights in few bits: {others}")


def _require_own_blocks(merged: Iterable[str], weights: WeightSource) -> None:
    """Refuses adapters that are to be merged into weights of which some numbers share a scale with another linear's.

    Raises:
        UserError: a block of rows of a stored matrix has rows of two linears.
    """
    stored = {name: weights.model.names.to_hf(name) for name in weights.tensor_names()}
    kinds = {name: weights.format(name) for name in stored}
    shared = {
        stored[name].name
        for name, kind in kinds.items()
        if kind is not None and kind.rows > 1 and stored[name].row_offset % kind.rows
    }
    for name in merged:
        if stored[name].name in shared:
            raise UserError(
                f"lora.merge_aware is true and {_module(name)} lies in {stored[name].name}, which has one scale for "
                "blocks of rows of which one has rows of two linears, so that neither can be rounded by itself: set "
                "lora.merge_aware to false."
            )


def fill_base(
    config: RunConfig,
    model: ModelFolder,
    source: TensorReader | None,
    parts: Iterable[Decoder],
    weights: WeightPlacement,
    log: Log,
    *,
    checkpoint: WeightSource | None = None,
) -> None:
    """Encodes the frozen weights of this rank's parts of the model as they are read (or drawn), one at a time; or reads
    them as they are stored.

    Collective over the tensor-parallel ranks.

    Args:
        config: of the run.
        model, source: the model, and the reader of its weights; None as source draws them.
        parts: of the model on this rank.
        weights: placement of encoded weights between computations.
        log: says how many bytes they take.
        checkpoint: has the model's weights, as far as they are not trained; None where they are drawn.

    Raises:
        UserError: a weight is absent, damaged or not finite.
    """
    parts = list(parts)
    entries = [entry for part in parts for entry in encoded_entries(part)]
    stored = checkpoint if config.model.base_dtype == STORED else None
    if stored is not None and (kept := _decoded_names(parts, stored)):
        log.info(kept_sentence(stored.dtype(kept[0]), kept))
    if not entries:
        return
    if source is None:
        std = float(model.hf_config.get("initializer_range", 0.02))

        def draw(entry: EncodedEntry) -> Tensor:
            weight = torch.empty(entry.spec.local_shape, dtype=torch.float32, device=entry.memory.device)
            initialise_weights([NamedShard(entry.name, weight, entry.spec)], config.train.seed, std)
            return weight

        fill_encoded(entries, draw, holding=weights.materialize)
    elif stored is not None:
        total = sum(entry.num_bytes for entry in entries)
        with Progress(log, "reading weights in few bits", total, "bytes") as progress:
            load_stored(entries, stored, holding=weights.materialize, progress=progress.advance)
    else:
        total = sum(prod(entry.spec.local_shape) * source.dtype(entry.name).itemsize for entry in entries)
        with Progress(log, f"encoding weights as {config.model.base_dtype}", total, "bytes") as progress:
            load_encoded(entries, source, holding=weights.materialize, progress=progress.advance)
    log.info(base_sentence(config, entries, weights))
    if config.lora.merge_aware:
        log.info(merge_sentence(config, parts))
    if config.model.base_products == "codes":
        log.info(products_sentence(parts))
    shapes = [
        entry.spec.local_shape
        for part in parts
        for entry in shard_entries(part)
        if entry.sink is None and model.names.is_stack(entry.name)
    ]
    if shapes:
        log.info(stacks_sentence(config, shapes))


def _decoded_names(parts: Iterable[Decoder], stored: WeightSource) -> list[str]:
    """Returns the frozen weights that the checkpoint has in a format and the model in numbers."""
    plain = (entry for part in parts for entry in shard_entries(part) if entry.sink is None)
    return [entry.name for entry in plain if entry.name in stored and stored.in_few_bits(entry.name)]


def kept_sentence(dtype: torch.dtype, names: Sequence[str]) -> str:
    """Returns the line on weights that are stored in few bits and that the model has in numbers, rounded to `dtype`."""
    return (
        f"decoded to {str(dtype).removeprefix('torch.')}: {counted(len(names), 'weight')} that the checkpoint has in "
        f"few bits, not of the layers' linears or beside weights that are stored otherwise: {listed(names)}"
    )


def stacks_sentence(config: RunConfig, shapes: Sequence[tuple[int, ...]]) -> str:
    """Returns the line on stacks of experts' weights, of these shapes, which no encoding is applied to."""
    size = sum(map(prod, shapes)) * (4 if config.model.dtype == "float32" else 2)
    return (
        f"experts: {counted(len(shapes), 'stack')} of their weights, {format_bytes(size)}, stay {config.model.dtype}, "
        f"since model.base_dtype {config.model.base_dtype} encodes linears"
    )


def merge_sentence(config: RunConfig, parts: Sequence[Decoder]) -> str:
    """Returns the log line on the linears of this rank that compute with merged weights, and on other adapters."""
    merged = [name for part in parts for name in merged_names(part)]
    owners = [one for part in parts for one in part.modules() if isinstance(one, ShardedModule)]
    beside = [name for one in owners if not _merges(one) for name, *_ in one.entries if name.endswith(".lora_B")]
    rest = (
        f"; adapters beside weights in {config.model.dtype}: {listed(map(_module, beside), most=3)}" if beside else ""
    )
    return (
        f"merge-aware training: {counted(len(merged), 'linear')} of this rank multiply with base and adapter merged "
        f"and rounded, as a merged checkpoint in the base's format has them{rest}"
    )


def products_sentence(parts: Sequence[Decoder]) -> str:
    """Returns the log line on the linears of this rank whose products are of codes, and on those that are decoded."""
    rounding = {name for part in parts for name in rounding_names(part)}
    decoded = [_module(one.name) for part in parts for one in encoded_entries(part) if one.name not in rounding]
    rest = f"; decoded: {counted(len(decoded), 'weight')}, {listed(decoded, most=3)}" if decoded else ""
    return (
        f"products with codes: inputs of {counted(len(rounding), 'weight')} of this rank are rounded in groups, to the "
        f"format of the weight{rest}"
    )


def _merges(module: ShardedModule) -> bool:
    low_rank = module.operands.low_rank if isinstance(module, AdaptedModule) else None
    return low_rank is not None and low_rank.is_merged


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def base_sentence(config: RunConfig, entries: list[EncodedEntry], weights: WeightPlacement) -> str:
    """Returns the log line on a run's encoded weights: their bytes, and the number of ranks these are spread over."""
    numbers = sum(prod(entry.spec.local_shape) for entry in entries)
    encoded = sum(entry.num_bytes for entry in entries)
    plain = numbers * (4 if config.model.dtype == "float32" else 2)
    sizes = {entry.spec.data: weights.num_ranks(entry.spec) for entry in entries}
    spread = "" if set(sizes.values()) == {1} else f", over {counted(max(sizes.values()), 'rank')}"
    if len(set(sizes.values())) > 1:  # experts are on other ranks than the rest
        spread = f", experts over {counted(sizes['edp'], 'rank')} and the rest over {counted(sizes['dp_cp'], 'rank')}"
    kinds = Counter(entry.encoding.name for entry in entries)
    name = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) if len(kinds) > 1 else next(iter(kinds))
    if config.model.base_dtype == STORED:
        name = f"as the checkpoint has them ({name})"
    return (
        f"frozen base: {len(entries)} weights of the layers are {name}, {format_bytes(encoded)}"
        f"{spread} ({8 * encoded / numbers:.2f} bits a number) instead of {format_bytes(plain)}; the rest is "
        f"{config.model.dtype}"
    )
