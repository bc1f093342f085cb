"""Plans recipes anew: `python -m rankfold.recipes.update [--write] [MODEL ...]`.

Without --write it prints what would change, and ends with status 1 if anything does. With it, `planned.json`,
docs/memory-by-model.md and docs/gpu-first-day.md have what the planner says now. Where models are named, only they are
planned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from engine.config.command_line import CommandLine
from engine.telemetry.errors import run_command
from engine.telemetry.output import say
from rankfold.recipes import catalog, memory_page
from rankfold.recipes.catalog import MODELS_FILE, PLANS_FILE, Model, Plan, Recipe

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, FIRST_DAY = _DOCS / "memory-by-model.md", _DOCS / "gpu-first-day.md"


def plan_all(recipes: Iterable[Recipe]) -> dict[str, Plan]:
    """Returns the plans of those recipes that fit."""
    # imported where it is asked: the planner needs torch
    from rankfold.recipes.planning import planned

    found = {}
    for recipe in recipes:
        plan = planned(recipe)
        say(f"{recipe.name}: {'does not fit' if plan is None else plan.layout}")
        if plan is not None:
            found[recipe.name] = plan
    return found


def parameters_of(model: Model) -> int:
    """Returns the number of a model's parameters, as the engine builds it."""
    from engine.models.describe import num_parameters
    from engine.models.families import family_of

    family, text = family_of(model.config, model.implementation)  # type: ignore[arg-type]
    return num_parameters(family.config_from_hf(text))


def plans_text(plans: dict[str, Plan]) -> str:
    """Returns planned.json: a line for each plan, in the order of the recipes."""
    rows = [
        f"{json.dumps(one.name)}: {json.dumps(asdict(plans[one.name]))}"
        for one in catalog.recipes()
        if one.name in plans
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def models_text(models: Iterable[Model]) -> str:
    """Returns models.json: a line for each model, without the fields that are as usual."""
    usual = Model(name="", hub="", parameters=0, config={})
    rows = []
    for model in models:
        fields = {name: value for name, value in asdict(model).items() if value != getattr(usual, name)}
        rows.append(json.dumps(fields))
    return "[\n" + ",\n".join(rows) + "\n]\n"


def update(names: list[str], *, writes: bool) -> bool:
    """Plans recipes and compares them with what is stored; returns whether all of it was the same.

    Args:
        names: of the models; none for all.
        writes: whether to store the difference.
    """
    chosen = {catalog.model_named(name).name for name in names} or set(catalog.models())
    models = [
        replace(one, parameters=parameters_of(one)) if one.name in chosen else one for one in catalog.models().values()
    ]
    kept = {
        one.name: catalog.plans()[one.name]
        for one in catalog.recipes()
        if one.model.name not in chosen and one.name in catalog.plans()
    }
    plans = kept | plan_all(one for one in catalog.recipes() if one.model.name in chosen)
    files = {
        MODELS_FILE: models_text(models),
        PLANS_FILE: plans_text(plans),
        PAGE: memory_page.text(plans),
        FIRST_DAY: memory_page.first_day(FIRST_DAY.read_text(encoding="utf-8"), plans),
    }
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        if writes:
            path.write_text(files[path], encoding="utf-8")
        say(f"{path.name} {'is written' if writes else 'is not what the planner says now'}")
    return not changed


def main() -> None:
    parser = CommandLine(description=__doc__, prog="python -m rankfold.recipes.update")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models to plan (default: all)")
    parser.add_argument("--write", action="store_true", help="write the files")
    arguments = parser.parse_args()
    if not update(arguments.models, writes=arguments.write) and not arguments.write:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
