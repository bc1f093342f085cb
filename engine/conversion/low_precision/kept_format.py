"""How an export keeps the format that a run's base has: as the checkpoint stores it, or as the run encoded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.checkpoint.folder import CONFIG
from engine.checkpoint.weight_source import WeightSource
from engine.choices import STORED, ExportDType
from engine.conversion.decoded_base import DecodedSource
from engine.conversion.low_precision.kept import EncodedParts, KeptCoder, StoredParts, Updates
from engine.conversion.low_precision.linears import LowPrecision, check_family, linears_of
from engine.conversion.low_precision.spellings import (
    COMPRESSED_TENSORS,
    modelopt_config,
    quantization_config,
    spelling_in,
)
from engine.conversion.merged_model import MergedSource
from engine.errors import UserError
from engine.files.documents import read_json
from engine.kernels.formats import FORMATS, Format
from engine.quantization.shipped.config import KEY
from engine.quantization.shipped.spelling import Spelling
from engine.sentences import listed
from engine.telemetry.format import counted


def stored_format(source: WeightSource, factors: torch.dtype | None) -> LowPrecision:
    """Returns how to store a model's linears as its base has them.

    Args:
        source: the weights, with what training changed.
        factors: dtype of the factors that a merge-aware run computed with; None for an ordinary run.

    Raises:
        UserError: the base is not stored in few bits, or in a way that is only read.
    """
    check_family(source, STORED)
    base = source.base if isinstance(source, MergedSource) else source
    if base is None or base.encoding is None:
        what = "the model" if base is None else base.label
        raise UserError(
            f"--dtype stored keeps the base's format, and {what} is not stored in few bits: choose another."
        )
    found: dict[str, Spelling] = {}
    for name in base.tensor_names():
        if (spelling := base.spelling(name)) is not None:
            base.format(name)  # which refuses codes that no format has
            found[name] = spelling
    raw, outside, updates, trained = base.encoding.raw, base.outside_codes(), *_changes(source)
    config = read_json(base.model.hf_path / CONFIG)
    rounded = [name.removesuffix(".weight") for name in found if name in trained]
    return LowPrecision(
        dtype=STORED,
        method=base.encoding.method,
        spelling=found.get,
        coder=KeptCoder(base=StoredParts(base), updates=updates, trained=trained, factors=factors),
        config=lambda ignored: raw,
        notes=(f"trained in full, in numbers, and rounded to the base's format: {listed(rounded)}",) if rounded else (),
        identity={"dtype": STORED, "factors": str(factors)},
        keeps=True,
        is_trained=factors is not None and not rounded,
        beside={name: one for stored in (base.beside_codes(), *outside.values()) for name, one in stored.items()},
        outside=frozenset(outside),
        nested=KEY not in config and KEY in (config.get("text_config") or {}),
    )


def encoded_format(source: MergedSource, dtype: ExportDType, factors: torch.dtype | None) -> LowPrecision:
    """Returns how to store the linears of a run that encoded a base in 16 bits as it read it, in that same format.

    Args:
        source: the weights, of which `base` is a `DecodedSource`.
        dtype: the format.
        factors: as of `stored_format`.
    """
    check_family(source, dtype)
    decoded = source.base
    assert isinstance(decoded, DecodedSource), decoded
    updates, trained = _changes(source)

    def config(ignored: Sequence[str]) -> Mapping[str, Any]:
        return modelopt_config(ignored) if dtype == "nvfp4" else quantization_config(dtype, COMPRESSED_TENSORS, ignored)

    spelling = spelling_in(config(()))
    linears, left = linears_of(source), _unreadable(decoded, FORMATS[dtype])
    names = frozenset(name for name in decoded.encoded if name in linears and name not in left)
    numbers = decoded.encoded - names if factors is not None else frozenset()
    coder = KeptCoder(base=EncodedParts(decoded), updates=updates, trained=trained, factors=factors, decoded=numbers)
    return LowPrecision(
        dtype=dtype,
        method="modelopt" if dtype == "nvfp4" else COMPRESSED_TENSORS,
        spelling=lambda name: spelling if name in names else None,
        coder=coder,
        config=config,
        notes=(_left_sentence(left, "rounded as in training" if numbers else "left as they are"),) if left else (),
        identity={"dtype": dtype, "kept": True, "factors": str(factors)},
        keeps=True,
        is_trained=factors is not None,
        decoded=numbers,
    )


def _unreadable(decoded: DecodedSource, kind: Format) -> list[str]:
    """Returns the encoded weights that no reader takes as codes: those whose last group is not whole, and those in a
    matrix of the checkpoint of which a block of rows has rows of two linears."""
    names = decoded.model.names
    inside = {
        names.to_hf(name).name for name in decoded.encoded if kind.rows > 1 and names.to_hf(name).row_offset % kind.rows
    }
    group = kind.group if kind.rows == 1 and kind.group else 1
    return sorted(
        name for name in decoded.encoded if decoded.shape(name)[1] % group or names.to_hf(name).name in inside
    )


def _left_sentence(names: Sequence[str], how: str) -> str:
    return (
        f"{counted(len(names), 'linear')} {how} and stored as numbers, since readers know no blocks that end within a "
        f"row or have rows of two linears: {listed(name.removesuffix('.weight') for name in names)}"
    )


def _changes(source: WeightSource) -> tuple[Updates, frozenset[str]]:
    """Returns what adapters add, and the names of the weights that were trained in full."""
    if isinstance(source, MergedSource):
        return source.update, source.trained_in_full
    return lambda name: None, frozenset()
