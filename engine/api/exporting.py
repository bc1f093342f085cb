"""Exports what a run has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from engine.api.configuration import AnyPath
from engine.api.interrupts import briefly_interrupted
from engine.choices import ExportDType
from engine.config.command_line import named_as
from engine.conversion.commands import Options, run_export
from engine.conversion.low_precision.export import LowOptions


@briefly_interrupted
def export(
    run: AnyPath,
    out: AnyPath,
    *,
    format: Literal["peft", "hf"] = "peft",
    step: int | Literal["best"] | None = None,
    base: AnyPath | None = None,
    base_name: str | None = None,
    overwrite: bool = False,
    dtype: ExportDType | None = None,
) -> Path:
    """Writes a run's trained parameters as a PEFT adapter or as a whole Hugging Face model.

    Stock PEFT or transformers opens the result, and their logits are compared with the engine's, before it takes its
    name. Call it on one rank.

    Args:
        run: folder of a run or of one of its checkpoints.
        out: folder to make.
        format: "peft" for the adapter by itself, "hf" for the whole model with adapters added into its weights.
        step: checkpoint of the run, or "best" for that of the best evaluation; None takes the newest.
        base: the base of the run, where it has moved.
        base_name: the adapter's name of its base, such as its name on the Hugging Face hub.
        overwrite: replace an adapter or a model at `out`.
        dtype: of a whole model: how to store the layers' linears, such as "nvfp4", or "stored" as the base has them;
            None for numbers like the base's, or for the format that a merge-aware run computed in.

    Returns:
        `out`.

    Raises:
        UserError: there is no such run or checkpoint, it does not hold the adapter or model, or `out` exists.
    """
    with named_as(
        {
            "--dtype": "dtype",
            "--base": "base",
            "--base-name": "base_name",
            "--step": "step",
            "--overwrite": "overwrite=True",
        }
    ):
        run_export(
            Path(run),
            Path(out),
            form=format,
            merge=format == "hf",
            base=None if base is None else Path(base),
            step=step,
            options=Options(overwrite=overwrite, low=None if dtype is None else LowOptions(dtype=dtype)),
            base_name=base_name,
        )
    return Path(out)
