"""The page of the models that were run, made of the JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.models.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
JSON, PAGE = DOCS / "models.json", DOCS / "models.md"
EXACT, ROUNDING = 1e-5, 1e-4
"""Differences in float32: what is met nearly always, and what long sums and scans round to."""
_LONGEST, _LONGEST_REASON = 110, 150
_INTRODUCTION = (
    """\
Every type of causal language model that transformers has, and how a small model of it, run as
[transformers' own modules](training.md#models-from-transformers), compares with transformers: written by
`python -m tests.coverage`. A figure is the largest difference of a token's loss, or of an adapter's gradient relative
to its norm, in float32.
""".splitlines()
    + [""]
)
_COLUMNS = (
    """\
`PEFT`: against transformers with PEFT's adapters; *autograd* where PEFT refuses a module. `packed`: rows pack
documents, or each row is one. `stages`, `tensor`, `experts`, `ZeRO 3`, `context`: two pipeline stages, and two ranks of
tensors, of experts, with half of each weight, and of context (by a ring, or by Ulysses where a ring is refused),
against one process, with adapters on stacks of experts too. `export`: adapters that PEFT opens, and their merge that
transformers opens, against the losses they were trained with; *merged* where PEFT cannot take the adapter; a model
trained in full is written bit for bit as `save_pretrained` does. A dash is refused, or not the same, which a run
refuses at its start; nothing where it was not run, or where transformers has no expert plan.

The engine has layers of its own for the types in **bold** and takes them by default; for these, the table describes
`model.implementation: adopted`. The engine's own layers with states pack documents into rows.
""".splitlines()
    + [""]
)


def page(found: dict[str, Any]) -> str:
    """Returns the page of the results of all types."""
    right = {name: one for name, one in found.items() if trains(one)}
    rest = {name: one for name, one in found.items() if name not in right}
    columns = ("PEFT", "packed", "stages", "tensor", "experts", "ZeRO 3", "context", "export")
    return written(
        "Models",
        [*_INTRODUCTION, *(f"- {sentence}" for sentence in sentences(found)), "", *_COLUMNS],
        columns,
        {f"**{name}**" if name in FAMILIES else name: _cells(one) for name, one in sorted(right.items())},
        {
            "Layouts that are refused": _refusals(right),
            "Refused": [f"- {name}: {shortened(_reason(one), _LONGEST)}" for name, one in sorted(rest.items())],
        },
    )


def written(
    title: str,
    introduction: Sequence[str],
    columns: Sequence[str],
    rows: Mapping[str, Sequence[str]],
    sections: Mapping[str, Sequence[str]],
) -> str:
    """Returns a page with a table of types.

    Args:
        columns: behind the first one, which is the type.
        rows: type -> its cells.
        sections: heading -> lines, below the table.
    """
    lines = [f"# {title}", "", *introduction, f"| type | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    for heading, own in sections.items():
        lines += ["", f"## {heading}", *own]
    return "\n".join(lines) + "\n"


def known(file: Path) -> dict[str, Any]:
    """Returns the results in a JSON; empty where it is not there yet."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def keep(model_type: str, found: dict[str, Any], file: Path, make: Callable[[dict[str, Any]], str]) -> None:
    """Prints the results of a type, puts them into the JSON, and writes the page beside it.

    Args:
        make: returns the page of the results of all types.
    """
    print(model_type, json.dumps(found), flush=True)
    every = dict(sorted({**known(file), model_type: found}.items()))
    file.write_text(json.dumps(every, indent=1) + "\n")
    file.with_suffix(".md").write_text(make(every))


def _cells(one: dict[str, Any]) -> list[str]:
    layouts = [figure_text(one.get(key)) for key in ("stages", "tensor", "expert", "zero")]
    return [gradients(one), packing(one), *layouts, _context(one), _export(one)]


def counts(found: dict[str, Any]) -> dict[str, int]:
    """Returns how many types do what."""
    right = [one for one in found.values() if trains(one)]
    return {
        "types": len(found),
        "train": len(right),
        "exact": sum(worst(one) <= EXACT for one in right),
        "peft": sum("peft" in one for one in right),
        "packed": sum(one["packed"] for one in right),
        "stages": sum(is_right(one.get("stages")) for one in right),
        "zero": sum(is_right(one.get("zero")) for one in right),
        "context": sum(is_right(one.get("context")) for one in right),
        "export": sum(is_right(one.get("export")) for one in right),
        "export_peft": sum(is_right(one.get("export")) and "export_peft" not in one for one in right),
        "tensor": sum(is_right(one.get("tensor")) for one in right),
        "tensor_run": sum("tensor" in one for one in right),
        "expert": sum(is_right(one.get("expert")) for one in right),
        "expert_run": sum("expert" in one for one in right),
    }


def sentences(found: dict[str, Any]) -> list[str]:
    """Returns the counts in words."""
    of = counts(found)
    tensor = f"{of['tensor']} of the {of['tensor_run']} that were tried run on two tensor ranks."
    expert = f"{of['expert']} of the {of['expert_run']} that have an expert plan run on two expert ranks."
    return [
        f"{of['train']} of {of['types']} types train with adapters in one process, {of['exact']} of them within "
        f"{EXACT:g} and the rest within {ROUNDING:g}, where long scans round; {of['peft']} were compared with PEFT.",
        f"{of['packed']} pack documents into rows, {of['stages']} run in two pipeline stages.",
        f"{of['zero']} run under ZeRO 3, {of['context']} on two context ranks.",
        f"{of['export']} are exported as transformers reads them, and adapters of {of['export_peft']} as PEFT does.",
        *([tensor] if of["tensor_run"] else []),
        *([expert] if of["expert_run"] else []),
    ]


def trains(one: dict[str, Any]) -> bool:
    """Returns whether a type trains with gradients that are transformers'."""
    return "autograd" in one and worst(one) <= ROUNDING


def worst(one: dict[str, Any]) -> float:
    """Returns how far a type's losses or gradients are from PEFT's, or autograd's where PEFT refuses it."""
    return float(one.get("peft", one["autograd"]))


def is_right(figure: float | str | None) -> bool:
    """Returns whether a layout computes what one process does; a phrase is a refusal."""
    return isinstance(figure, float) and figure <= ROUNDING


def gradients(one: dict[str, Any]) -> str:
    """Returns the cell of the difference in one process."""
    return f"{one['peft']:.0e}" if "peft" in one else f"*autograd* {one['autograd']:.0e}"


def packing(one: dict[str, Any]) -> str:
    """Returns the cell of what a row holds."""
    return "yes" if one["packed"] else "alone"


def figure_text(figure: float | str | None) -> str:
    """Returns the cell of a layout; empty where it was not run."""
    return f"{figure:.0e}" if isinstance(figure, float) and is_right(figure) else "" if figure is None else "-"


def _context(one: dict[str, Any]) -> str:
    return figure_text(one.get("context")) + (" Ulysses" if one.get("context_method") == "ulysses" else "")


def _export(one: dict[str, Any]) -> str:
    figure = figure_text(one.get("export"))
    return f"*merged* {figure}" if "export_peft" in one and figure != "-" else figure


_LAYOUTS = {
    "stages": "two stages",
    "tensor": "tensor ranks",
    "expert": "expert ranks",
    "zero": "ZeRO 3",
    "context": "context ranks",
    "export": "export",
    "export_peft": "PEFT",
}


def _refusals(right: dict[str, Any]) -> list[str]:
    """Returns a line for each reason, with the types that it holds for."""
    lines = []
    for key, name in _LAYOUTS.items():
        reasons: dict[str, list[str]] = {}
        for model_type, one in sorted(right.items()):
            said = one.get(key)
            if said is None or (isinstance(said, float) and said <= ROUNDING):
                continue
            phrase = f"differs by {said:.0e}" if isinstance(said, float) else said.rstrip(".")
            phrase = phrase.replace(f" {model_type} ", " ").replace(f"'{model_type}'", "..")[:_LONGEST_REASON]
            reasons.setdefault(phrase, []).append(model_type)
        lines += [f"- {name}: {', '.join(types)}: {phrase}" for phrase, types in reasons.items()]
    return lines


def _reason(one: dict[str, Any]) -> str:
    return one.get("refused") or one.get("failed") or f"differs by {worst(one):.0e}"


def shortened(said: str, longest: int) -> str:
    """Returns a refusal without the words that all have."""
    text = said.split("cannot be adopted: ")[-1].strip().rstrip(".")
    return text if len(text) <= longest else f"{text[:longest]}.."
