"""The learning rate of each trained parameter, by the patterns of `optim.lr_pattern`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from engine.checkpoint.model_folder import ModelFolder
from engine.config.matching import matches_trainable
from engine.config.optim import OptimOptions
from engine.errors import UserError
from engine.models.names import FUSED, fused_parts, part_rows
from engine.sentences import listed
from engine.telemetry.format import format_parameters


def patterns_of(options: OptimOptions, model: ModelFolder, trained: Collection[str]) -> dict[str, str]:
    """Returns trained parameter -> the first pattern of a learning rate that matches it; those that none matches are
    left out.

    Args:
        options: of the run.
        model: of the run.
        trained: names of all trained parameters of the whole model.

    Raises:
        UserError: a pattern matches no trained parameter.
    """
    patterns = tuple(options.lr_pattern or ())
    found: dict[str, str] = {}
    seen: set[str] = set()
    # of an adapter over several modules, which this checkpoint may have apart
    fused = replace(model.names, rows=part_rows(model.decoder)).fuse(FUSED)
    for name in trained:
        module, _, leaf = name.rpartition(".")
        names = fused if len(fused_parts(module)) > 1 else model.names
        # the leaf alone too: lora_B means those of a vision model as well, whose names match from their beginning
        aliases = [f"{names.module_to_hf(module)}.{leaf}", leaf]
        if module == "embed_tokens" and model.decoder.tied_embeddings:
            aliases.append(f"lm_head.{leaf}")
        matching = [pattern for pattern in patterns if matches_trainable(name, (pattern,), aliases)]
        seen.update(matching)
        if matching:
            found[name] = matching[0]
    for pattern in patterns:
        if pattern not in seen:
            shown = listed(dict.fromkeys(name.rpartition(".")[0] for name in trained), most=4)
            raise UserError(
                f"optim.lr_pattern has {pattern!r}, but nothing that trains has this name: write one of {shown}, or "
                "remove it."
            )
    return found


def lr_factors(options: OptimOptions, model: ModelFolder, trained: Collection[str]) -> dict[str, float]:
    """Returns trained parameter -> its learning rate as a multiple of `optim.lr`, where a pattern gives it one.

    Raises:
        UserError: as for `patterns_of`.
    """
    rates = options.lr_pattern or {}
    return {name: rates[pattern] / options.lr for name, pattern in patterns_of(options, model, trained).items()}


def rates_line(options: OptimOptions, model: ModelFolder, trained: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns the log line on a run's learning rates; None where it has only one.

    Args:
        trained: name -> global shape.
    """
    if not options.lr_pattern:
        return None
    found = patterns_of(options, model, trained)
    sizes = dict.fromkeys(options.lr_pattern, 0)
    for name, pattern in found.items():
        sizes[pattern] += prod(trained[name])
    parts = [
        f"{options.lr_pattern[pattern]:g} for {pattern} ({format_parameters(size)} parameters)"
        for pattern, size in sizes.items()
    ]
    left = sum(prod(shape) for name, shape in trained.items() if name not in found)
    if left:
        parts.append(f"{options.lr:g} for all else ({format_parameters(left)})")
    return f"learning rates: {', '.join(parts)}; all follow one schedule"
