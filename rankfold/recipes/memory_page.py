"""docs/memory-by-model.md, and the table of docs/gpu-first-day.md: the stored plans. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from rankfold.recipes.catalog import GPUS, PLACES, TITLES, Model, Plan, Recipe, models

_HEAD = """# Memory by model

Predicted GiB on the fullest GPU, and the layout, of every stored [recipe](recipes.md): LoRA of rank 16 in bfloat16,
a row or pair at a time on each GPU, two for models of less than five billion parameters. Nothing here was measured on
a GPU; on a CPU predictions are within 5% of measured peaks. Ten percent of each GPU's memory is left free.
`rankfold recipe show qwen3-8b --gpu h100 --gpus 4` prints a run file with its predicted speed, and plans what is not in
these tables; [planning](planning.md) says how.

A cell has the GiB, `nf4` where the base has to be stored in 4 bits, `stored` where it has to stay in the few bits of
[its checkpoint](low-precision.md), and the layout: `dp` copies that each read their own rows, `tp` tensor ranks, `pp`
pipeline stages, `ep` ranks over which experts are divided, `z2` where gradients and optimizer are sharded over the
copies, `z3` where weights are too, and `r` where whole layers or attention are recomputed in backward. A dash does not
fit, nothing is not planned.

This page is written by `python -m rankfold.recipes.update --write`.
"""


def text(plans: Mapping[str, Plan]) -> str:
    """Returns the page of these plans."""
    parts = [_HEAD, "## Supervised fine-tuning\n\nRows of 4,096 tokens, packed.\n"]
    for model in models().values():
        parts.append(f"### {model.name}\n\n{_facts(model)}\n\n{_by_gpu(model, plans)}\n")
    for method in PLACES:
        trained = [model for model in models().values() if method in model.methods]
        about = {
            "dpo": "Answers of up to 2,048 tokens with their prompts.",
            "grpo": "Prompts and completions of up to 1,024 tokens each, 64 sampled at a time on each copy by the "
            "engine itself.",
        }[method]
        places = PLACES[method]
        rows = [_row("model", *(f"{count} x {GPUS[gpu].title}" for gpu, count in places)), _rule(len(places))]
        rows += [
            _row(
                model.name,
                *(
                    _cell(plans, Recipe(model=model, gpu=GPUS[gpu], count=count, method=method), planned=True)
                    for gpu, count in places
                ),
            )
            for model in trained
        ]
        title = TITLES[method]
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n{about}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


FIRST_RUNS = ("qwen3-0.6b", "qwen3-8b")
"""The models of docs/gpu-first-day.md."""
BEGIN, END = "<!-- predicted -->\n", "<!-- end of predicted -->"


def first_day(page: str, plans: Mapping[str, Plan]) -> str:
    """Returns the page of the first day with the table of these plans."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    head = ("one GPU", *(f"{name}, {unit}" for name in FIRST_RUNS for unit in ("GiB", "tokens/s")))
    rows = [_row(*head), "|---|" + "---:|" * (len(head) - 1)]
    for gpu in GPUS.values():
        cells = []
        for name in FIRST_RUNS:
            plan = plans.get(Recipe(model=models()[name], gpu=gpu, count=1).name)
            cells += ["-", "-"] if plan is None else [f"{plan.gib:.1f}", speed(plan)]
        rows.append(_row(gpu.title, *cells))
    return before + BEGIN + "\n".join(rows) + "\n" + END + after


def speed(plan: Plan) -> str:
    """Returns the tokens a second of each GPU as "16,400 (14,600 to 18,700)"."""
    slow, likely, fast = plan.tokens
    return f"{likely:,} ({slow:,} to {fast:,})"


def _facts(model: Model) -> str:
    found = [f"`{model.hub}`, {model.parameters / 1e9:.3g} billion parameters"]
    if model.sees_images:
        found.append("with its vision tower, frozen, and an image in each row")
    if model.implementation == "native":
        found.append("its language model alone")
    if model.targets:
        found.append("adapters on attention alone")
    return "; ".join(found) + "."


def _by_gpu(model: Model, plans: Mapping[str, Plan]) -> str:
    counts = sorted({count for gpu in GPUS.values() for count in model.counts(gpu)})
    rows = [_row("", *(f"{count} GPU{'s' if count > 1 else ''}" for count in counts)), _rule(len(counts))]
    for gpu in GPUS.values():
        if model.counts(gpu):
            cells = [
                _cell(plans, Recipe(model=model, gpu=gpu, count=count), planned=count in model.counts(gpu))
                for count in counts
            ]
            rows.append(_row(gpu.title, *cells))
    return "\n".join(rows)


def _cell(plans: Mapping[str, Plan], recipe: Recipe, *, planned: bool) -> str:
    plan = plans.get(recipe.name)
    if plan is None:
        return "-" if planned else ""
    words = [f"{plan.gib:.1f}", *([plan.base_dtype] if plan.base_dtype else []), *_layout(plan, recipe.count)]
    return " ".join(words)


def _layout(plan: Plan, count: int) -> list[str]:
    sizes = {name: int(plan.parallel.get(option, 1)) for name, option in _SIZES.items()}
    copies = count // (sizes["tp"] * sizes["pp"] * int(plan.parallel.get("context", 1)))
    words = [f"{name}{size}" for name, size in {**sizes, "dp": copies}.items() if size > 1]
    shard = {"gradients": "z2", "parameters": "z3"}.get(plan.parallel.get("shard", "none"))
    deep = plan.memory.get("recompute") in ("full", "attention")
    return [*words, *([shard] if shard else []), *(["r"] if deep else [])]


_SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(count: int) -> str:
    return "|---|" + "---|" * count
