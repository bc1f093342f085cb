"""The options of an export in few bits, and what is measured for it: inputs before, losses before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from engine.batch import Batch
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.weight_source import WeightSource
from engine.choices import STORED, ExportDType, QuantMethod
from engine.conversion.decoded_base import DecodedSource
from engine.conversion.live_rows import InputMoments, mean_loss
from engine.conversion.low_precision.kept_format import encoded_format, stored_format
from engine.conversion.low_precision.linears import LowPrecision, low_precision
from engine.conversion.low_precision.proof import prove_low
from engine.conversion.low_precision.scales import ScaleCoder
from engine.conversion.merged_model import MergedSource
from engine.conversion.proof import live_of
from engine.errors import UserError
from engine.telemetry.format import counted
from engine.telemetry.log import Log


class Rows(Protocol):
    """The rows of a run's data."""

    def training(self, count: int) -> list[Batch]:
        """Returns the first rows that the run trained on."""

    def validation(self, path: Path | None) -> list[Batch]:
        """Returns the rows of a file, or of the run's own validation data."""


ReadsRows = Callable[[str, ModelFolder, Log], Rows]
"""Opens the data of a run: its configuration as YAML, its model, the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LowOptions:
    """The options of an export in few bits.

    Args:
        dtype: how linears are stored.
        method: whose names the tensors have; None for compressed-tensors'.
        calibrate: rows of the run's data by which scales are chosen; 0 for the scales of the largest numbers.
        evaluates: whether losses are measured.
        evaluation: on this file; None for the run's own validation data.
        reads: opens the run's data.
    """

    dtype: ExportDType
    method: QuantMethod | None = None
    calibrate: int = 0
    evaluates: bool = False
    evaluation: Path | None = None
    reads: ReadsRows | None = None

    def require_no_rows(self, source: Path) -> None:
        """Raises UserError where rows are asked for of something that is no run."""
        if self.calibrate or self.evaluates:
            option = "--calibrate" if self.calibrate else "--evaluate"
            raise UserError(f"{option} reads the data of a run, and {source} is none: leave it out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LowExport:
    """The ingredients of an export in few bits.

    Args:
        low: how its linears are stored.
        source: the weights.
        evaluation: rows on which losses are measured; empty for no such figures.
        has_proof: a stock reader has to open the result.
    """

    low: LowPrecision
    source: WeightSource
    evaluation: Sequence[Batch]
    has_proof: bool

    @property
    def has_checks(self) -> bool:
        """Whether `check` does anything."""
        return self.has_proof or bool(self.evaluation)

    def check(self, folder: Path) -> str:
        """Tries the written folder, and measures it.

        Returns:
            One or two sentences.

        Raises:
            UserError: as of `prove_low`.
        """
        found = [prove_low(folder, self.source, self.low)] if self.has_proof else []
        if self.evaluation:
            written = open_source(folder, self.source.model.implementation)
            after, over = mean_loss(live_of(written), self.evaluation), counted(len(self.evaluation), "row")
            if self.low.is_trained:
                found.append(f"evaluation loss {after:.4f} over {over}")
            else:
                before = mean_loss(live_of(self.source), self.evaluation)
                change = f"{before:.4f} before rounding, {after:.4f} after ({after - before:+.4f})"
                found.append(f"evaluation loss {change}, over {over}")
        return "; ".join(found)


def low_export(
    source: WeightSource,
    options: LowOptions,
    run_config: str | None,
    log: Log,
    *,
    proof: bool,
    factors: torch.dtype | None = None,
) -> LowExport:
    """Prepares an export in few bits: reads rows, and runs the model over those of `options.calibrate`.

    Args:
        source: the weights, with what training changed.
        run_config: of the run, as YAML; None without one.
        proof: whether a stock reader has to open the result.
        factors: dtype of the factors that a merge-aware run computed with; None for an ordinary run.

    Raises:
        UserError: the model cannot be stored so, or rows cannot be read.
    """
    low = _chosen(source, options, factors)
    evaluation: list[Batch] = []
    if options.calibrate or options.evaluates:
        assert run_config is not None and options.reads is not None
        rows = options.reads(run_config, source.model, log)
        if options.evaluates:
            evaluation = rows.validation(options.evaluation)
        if options.calibrate:
            low = _calibrated(low, source, rows.training(options.calibrate), log)
    return LowExport(low=low, source=source, evaluation=evaluation, has_proof=proof)


def _chosen(source: WeightSource, options: LowOptions, factors: torch.dtype | None) -> LowPrecision:
    """Returns how linears are stored: with the base's own scales where it has the format, else with new ones."""
    if options.dtype == STORED:
        if options.method is not None:
            raise UserError("--quant-method is for new formats, and --dtype stored keeps the base's: leave it out.")
        return stored_format(source, factors)
    base = source.base if isinstance(source, MergedSource) else None
    kept = isinstance(base, DecodedSource) and base.base_dtype == options.dtype
    if kept and not options.calibrate and options.method is None:
        assert isinstance(source, MergedSource)
        return encoded_format(source, options.dtype, factors)
    low = low_precision(source, options.dtype, options.method)
    if factors is None:
        return low
    other = f"this merge-aware run computed with its base's codes, and {options.dtype} is rounded from the sum instead"
    return replace(low, notes=(*low.notes, f"{other}: the model is another one than was trained"))


def _calibrated(low: LowPrecision, source: WeightSource, batches: Sequence[Batch], log: Log) -> LowPrecision:
    """Returns `low` with scales that suit the inputs of these rows."""
    assert isinstance(low.coder, ScaleCoder), low.dtype
    moments = InputMoments(low.coder.kind.group or 1)  # of whole rows there are too many products
    loss = mean_loss(live_of(source), batches, moments.watch)
    tokens = sum(sum(batch.document_lengths) for batch in batches)
    log.info(
        f"calibrated on {counted(len(batches), 'row')} of {counted(tokens, 'token')}, on which the model's loss is "
        f"{loss:.4f}"
    )
    return replace(
        low,
        coder=replace(low.coder, moments=moments),
        identity={**low.identity, "calibrated": [len(batches), tokens, f"{loss:.9g}"]},
    )
