"""The page of the models that see images, made of the JSON beside it."""

from __future__ import annotations

from typing import Any

from tests.coverage.page import (
    DOCS,
    EXACT,
    ROUNDING,
    figure_text,
    gradients,
    is_right,
    packing,
    shortened,
    worst,
    written,
)

JSON, PAGE = DOCS / "models_images.json", DOCS / "models_images.md"
_LONGEST = 220
_INTRODUCTION = (
    """\
Every type of model of images and text that transformers has, and how a small model of it, trained on documents with an
image as [transformers' own modules](training.md#models-from-transformers), compares with transformers: written by
`python -m tests.coverage.images`. Adapters are on all linears, of the language model, of the tower and of what is
between them. A figure is the largest difference of a token's loss, or of an adapter's gradient relative to its norm, in
float32.
""".splitlines()
    + [""]
)
_COLUMNS = (
    """\
`gradients`: against transformers with PEFT's adapters; *autograd* where PEFT refuses a module. `packed`: rows pack
documents, or each row is one. `2 stages`: what the start of a run finds of two halves of the layers. `parameters
spread`: two ranks with a part of each weight (ZeRO 3). A dash is refused, or not the same, which a run refuses at its
start.
""".splitlines()
    + [""]
)


def page(found: dict[str, Any]) -> str:
    """Returns the page of the results of all types."""
    right = {name: one for name, one in found.items() if trains(one)}
    rest = {name: one for name, one in found.items() if name not in right}
    staged = {name: one["stages"] for name, one in right.items() if isinstance(one["stages"], str)}
    return written(
        "Models that see images",
        [*_INTRODUCTION, *(f"- {sentence}" for sentence in sentences(found)), "", *_COLUMNS],
        ("gradients", "packed", "2 stages", "parameters spread"),
        {
            name: [gradients(one), packing(one), figure_text(one["stages"]), figure_text(one["spread"])]
            for name, one in sorted(right.items())
        },
        {
            "Refused in two stages": [
                f"- {name}: {shortened(said.partition('whole one')[2] or said, _LONGEST)}"
                for name, said in sorted(staged.items())
            ],
            "Refused": [f"- {name}: {shortened(str(reason(one)), _LONGEST)}" for name, one in sorted(rest.items())],
        },
    )


def counts(found: dict[str, Any]) -> dict[str, int]:
    """Returns how many types do what."""
    right = [one for one in found.values() if trains(one)]
    return {
        "types": len(found),
        "train": len(right),
        "exact": sum(worst(one) <= EXACT for one in right),
        "peft": sum("peft" in one for one in right),
        "packed": sum(one["packed"] for one in right),
        "stages": sum(is_right(one["stages"]) for one in right),
        "spread": sum(is_right(one["spread"]) for one in right),
    }


def sentences(found: dict[str, Any]) -> list[str]:
    """Returns the counts in words."""
    of = counts(found)
    return [
        f"{of['train']} of {of['types']} types train on documents with images in one process, {of['exact']} of them "
        f"within {EXACT:g} and the rest within {ROUNDING:g}; {of['peft']} were compared with PEFT.",
        f"{of['packed']} pack documents with images into rows, {of['stages']} run in two pipeline stages, "
        f"{of['spread']} with parameters spread over two ranks.",
    ]


def trains(one: dict[str, Any]) -> bool:
    """Returns whether a type trains with gradients that are transformers', also of its tower."""
    return "autograd" in one and worst(one) <= ROUNDING and one["tower"] > 0


def reason(one: dict[str, Any]) -> str | None:
    """Returns why a type does not train on images; None where nothing says so."""
    if (said := one.get("refused") or one.get("failed")) is not None:
        return str(said)
    return f"differs by {worst(one):.0e}" if worst(one) > ROUNDING else None
