"""A recipe as a run file, and the commands that take it from there. Nothing here imports torch."""

from __future__ import annotations

import shlex
from math import lcm
from typing import Any

import yaml

from rankfold.recipes.catalog import NODE, TITLES, Plan, Recipe

DATA = {"sft": "train.jsonl", "dpo": "pairs.jsonl", "grpo": "prompts.jsonl"}
"""Method -> the file of records that a run file names where none was given."""
LENGTHS = {"sft": 4096, "dpo": 2048, "grpo": 2048}
"""Method -> tokens of a row."""
_ROWS = 16
"""Rows of a step, or pairs of answers, where not more GPUs each take one."""
_COMPLETION, _GENERATIONS, _PROMPTS = 1024, 8, 8


def sections(
    recipe: Recipe, plan: Plan | None, *, data: str | None = None, base_dtype: str | None = None,
    seq_length: int | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Returns the options of a run file.

    Args:
        plan: the layout; None leaves it out, for the planner.
        data: the file of records.
        base_dtype: as model.base_dtype, where there is no plan.
        seq_length: tokens of a row; None for the method's own.
    """
    model, method = recipe.model, recipe.method
    encoding = plan.base_dtype if plan is not None else base_dtype
    length = seq_length or LENGTHS[method]
    adapters: dict[str, Any] = {"rank": 16, "alpha": 32}
    if model.targets:
        adapters["targets"] = list(model.targets)
    found: dict[str, dict[str, Any]] = {
        "model": {"path": model.path, "dtype": "bfloat16"},
        "lora": adapters,
        "data": {"train": data or DATA[method], "seq_length": length},
        "optim": {"lr": 2e-4, "schedule": "cosine", "warmup_ratio": 0.03, "clip_grad_norm": 1.0},
        "train": {
            "micro_batch_size": model.rows,
            "global_batch_size": _at_least(_ROWS, model.rows * recipe.count),
        },
        "checkpoint": {"dir": f"runs/{recipe.name}", "every": 100, "keep": 2},
    }
    if encoding is not None:
        found["model"]["base_dtype"] = encoding
    if model.implementation != "auto":
        found["model"]["implementation"] = model.implementation
    match method:
        case "sft":
            found["data"]["packing"] = True
        case "dpo":
            found["objective"] = {"name": "dpo", "beta": 0.1}
            found["optim"]["lr"] = 5e-6
        case "grpo":
            found["objective"] = {"name": "grpo"}
            found["rollout"] = {
                "rewards": ["numeric_answer"],
                "num_generations": _GENERATIONS,
                "max_completion_length": min(_COMPLETION, length // 2),
                "slots": 64,
            }
            found["data"]["packing"] = True
            found["optim"] |= {"lr": 1e-5, "schedule": "constant"}
            shared = lcm(_GENERATIONS, model.rows * recipe.count)
            found["train"]["global_batch_size"] = _at_least(_GENERATIONS * _PROMPTS, shared)
            found["checkpoint"]["every"] = 20
    if plan is not None:
        found |= {name: options for name, options in (("parallel", plan.parallel), ("memory", plan.memory)) if options}
    order = ("model", "parallel", "memory", "lora", "objective", "rollout", "data", "optim", "train", "checkpoint")
    return {name: found[name] for name in order if name in found}


def _at_least(rows: int, divisor: int) -> int:
    """Returns the smallest multiple of `divisor` that is not below `rows`."""
    return -(-rows // divisor) * divisor


def text_of(recipe: Recipe, plan: Plan, *, data: str | None = None, seq_length: int | None = None) -> str:
    """Returns the run file."""
    body = yaml.safe_dump(sections(recipe, plan, data=data, seq_length=seq_length), sort_keys=False)
    lines, length, context = about(recipe, plan), seq_length or LENGTHS[recipe.method], recipe.model.context
    if length > context:
        lines.append(
            f"data.seq_length is {length}, but the model's context is {context} tokens: no text may be longer."
        )
    return "".join(f"# {line}\n" for line in lines) + body


def about(recipe: Recipe, plan: Plan) -> list[str]:
    """Returns what a run file says of itself."""
    slow, likely, fast = plan.tokens
    gpu, model = recipe.gpu, recipe.model
    lines = [
        f"{recipe.name}: {TITLES[recipe.method]} with LoRA on {recipe.count} x {gpu.title}",
        f"Predicted, not measured: {plan.layout}; {plan.gib:.1f} of {gpu.memory:g} GiB on the fullest GPU,",
        f"{likely:,} tokens/s on each GPU ({slow:,} to {fast:,}). Written by rankfold recipe.",
    ]
    if model.implementation == "native":
        lines.append("The language model is trained on text; the checkpoint's other parts are left out.")
    if recipe.method == "grpo":
        lines.append("rollout.rewards compares the last number of a completion with the column answer: use your own.")
    return lines


def next_commands(recipe: Recipe, path: str, *, downloads: bool = True) -> list[tuple[str, str]]:
    """Returns what to do with a run file: (what a command is for, the command).

    Args:
        path: of the run file.
        downloads: whether the model is to be taken from the hub.
    """
    gpu, config = recipe.gpu, shlex.quote(path)
    download = " --download" if downloads else ""
    start = f"rankfold train --nproc {min(recipe.count, NODE)}"
    if recipe.nodes > 1:
        start += f" --nnodes {recipe.nodes} --rdzv-endpoint HOST:29400"
    per_node = f"--nodes {recipe.nodes} --gpus-per-node {min(recipe.count, NODE)}"
    where = "on every node" if recipe.nodes > 1 else "on this machine"
    return [
        (
            "what it takes, part by part",
            f"rankfold plan memory --config {config} --gpus {recipe.count} --gpu-memory {gpu.memory:g} "
            f"--machine {gpu.machine}{download}",
        ),
        (f"train {where}", f"{start} --config {config}{download}"),
        ("or a script for Slurm", f"rankfold launch slurm --config {config} {per_node}{download}"),
    ]
