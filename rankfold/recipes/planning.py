"""Asks the planner for a recipe's layout. Everything that is predicted comes from `engine.planning`."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import yaml

from engine.config.load import from_yaml
from engine.config.memory import MemoryOptions
from engine.config.parallel import ParallelOptions
from engine.models.families import family_of
from engine.planning.rank_layout import Layout
from engine.planning.search import Candidate
from rankfold.planning import time_report
from rankfold.planning.memory import RESERVE
from rankfold.planning.memory_question import GIB, Answer, answer_for
from rankfold.planning.memory_report import memory_options
from rankfold.recipes.catalog import NODE, Plan, Recipe
from rankfold.recipes.run_file import sections

_WITH_CONTEXT = 16384
"""Tokens of a row from which layouts that cut rows over GPUs are tried."""


def planned(recipe: Recipe, *, seq_length: int | None = None) -> Plan | None:
    """Returns the planner's answer for a recipe; None where nothing fits.

    Args:
        seq_length: tokens of a row; None for the method's own.

    Raises:
        UserError: the options do not go together.
    """
    for encoding in recipe.model.encodings:
        answer = _ask(recipe, encoding, seq_length)
        if answer.found.fitting:
            return _plan(recipe, answer, encoding)
    return None


def _ask(recipe: Recipe, encoding: str | None, seq_length: int | None) -> Answer:
    options = sections(recipe, None, base_dtype=encoding, seq_length=seq_length)
    config = from_yaml(yaml.safe_dump(options))
    cuts_rows = config.data.seq_length >= _WITH_CONTEXT
    model = recipe.model
    family, text = family_of(model.config, model.implementation)  # type: ignore[arg-type]
    decoder = family.config_from_hf(text)
    mixture = decoder.num_experts > 0

    def tries(layout: Layout) -> bool:
        parallel = layout.parallel
        if (parallel.context > 1 and not cuts_rows) or parallel.tensor > (1 if mixture else NODE):
            return False
        if mixture and parallel.virtual not in (None, 1):
            return False
        return parallel.sequence is not False or not decoder.splits_tokens

    return answer_for(
        recipe.model.config,
        config,
        devices=recipe.count,
        gpu_memory=recipe.gpu.memory,
        reserve=RESERVE,
        machine=recipe.gpu.machine,
        tries=tries,
    )


def _plan(recipe: Recipe, answer: Answer, encoding: str | None) -> Plan:
    best = answer.found.fitting[0]
    found = time_report.range_of(best, answer.machine)
    speeds = [found.slow, found.likely, found.fast]
    slow, likely, fast = (_rounded(one.tokens_per_second / recipe.count) for one in speeds)
    slow_step, step, fast_step = (float(f"{one.step:.3g}") for one in speeds)
    return Plan(
        base_dtype=encoding,
        layout=best.label(),
        gib=round(best.peak / GIB, 1),
        step_seconds=(slow_step, step, fast_step),
        tokens=(slow, likely, fast),
        part=best.estimate.largest_part(),
        parallel=_changed(best.layout.parallel, ParallelOptions()),
        memory=_memory(best),
    )


def _rounded(count: float) -> int:
    return int(float(f"{count:.3g}"))


def _memory(best: Candidate) -> dict[str, Any]:
    return {"recompute": best.memory.recompute, **_changed(memory_options(best), MemoryOptions())}


def _changed(options: Any, defaults: Any) -> dict[str, Any]:
    values, plain = asdict(options), asdict(defaults)
    return {one.name: values[one.name] for one in fields(options) if values[one.name] != plain[one.name]}
