"""The command line of `rankfold evaluate`; needs no torch, so that --help and refusals are quick."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine.choices import BASE_DTYPES
from engine.config.command_line import CommandLine, json_mapping
from engine.config.hub_flag import add_download
from engine.config.model import DTYPES, KERNELS
from engine.config.units import read_length, read_step
from engine.inference.options import ModelChoice
from rankfold.evaluating.choice import TaskChoice
from rankfold.starting.options import add_start_options

STANDS_FOR = {
    "model.path": "--model", "model.dtype": "--dtype", "model.base_dtype": "--base-dtype",
    "model.kernels": "--kernels", "data.tokenizer": "--tokenizer", "parallel.tensor": "--tensor",
    "parallel.pipeline": "--pipeline", "parallel.expert": "--expert", "lora.init_from": "--adapter",
    "--base": "--model", "data.chat_template": "--chat-template", "evaluation.tasks": "--tasks",
    "evaluation.limit": "--limit", "evaluation.include_path": "--include-path",
    "evaluation.num_fewshot": "--num-fewshot", "evaluation.allow_code": "--confirm-run-unsafe-code",
    "evaluation.apply_chat_template": "--apply-chat-template", "hub.download": "--download",
}  # fmt: skip
"""Option of a run, or of rankfold convert -> the flag; see `engine.config.command_line`."""


def build_parser(description: str | None) -> CommandLine:
    """Returns the parser with all options."""
    parser = CommandLine(description=description, stands_for=STANDS_FOR)
    add_model(parser)
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument(
        "--tasks",
        required=True,
        type=_names,
        metavar="NAME,...",
        help="tasks, groups or tags of lm-evaluation-harness, with * and ?, or paths of YAML files",
    )
    tasks.add_argument(
        "--include-path", type=Path, metavar="DIR", help="folder of tasks of your own, beside those of the harness"
    )
    tasks.add_argument(
        "--limit", type=float, metavar="N", help="number of documents of each task; below 1, their share"
    )
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question")
    tasks.add_argument("--apply-chat-template", action="store_true", help="write prompts as conversations")
    tasks.add_argument(
        "--chat-arguments",
        type=json_mapping,
        default={},
        metavar="JSON",
        help='variables for the chat template: {"enable_thinking": false}',
    )
    tasks.add_argument("--system", help="a system message in front of each prompt")
    tasks.add_argument(
        "--gen-kwargs",
        type=json_mapping,
        default={},
        metavar="JSON",
        help='generation settings that replace those of the tasks: {"max_gen_toks": 512}',
    )
    tasks.add_argument(
        "--seed", type=int, default=1234, help="seed of the choice of examples and of sampling (default 1234)"
    )
    tasks.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="allow tasks that run code written by the model on this machine",
    )
    passes = parser.add_argument_group("passes")
    passes.add_argument("--batch", type=int, default=16, help="completions generated at the same time (default 16)")
    passes.add_argument(
        "--prefill-tokens",
        type=read_length,
        default=8192,
        help="maximum number of tokens of prompts and scored texts that are computed together (default 8192)",
    )
    passes.add_argument(
        "--max-length",
        type=read_length,
        help="maximum number of tokens in a text, cut from the left (default: the context)",
    )
    results = parser.add_argument_group("results; a table is printed")
    results.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file for the results, as lm-evaluation-harness writes them"
    )
    results.add_argument(
        "--samples", type=Path, metavar="DIR", help="folder for samples_TASK.jsonl: every document with its answers"
    )
    return parser


def add_model(parser: CommandLine) -> None:
    """Adds the options about the model and its layout."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, help="Hugging Face folder, its name on the hub, or a partitioned base")
    model.add_argument(
        "--adapter",
        type=Path,
        help="folder of a PEFT adapter, a run or one of its checkpoints; applied beside the base, or, of a run trained "
        "merge-aware with this --base-dtype, merged into its codes",
    )
    model.add_argument("--step", type=read_step, help="checkpoint of a run: its step, or best (default: the newest)")
    model.add_argument("--tokenizer", type=Path, help="folder of the tokenizer (default: the model's)")
    model.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    model.add_argument("--base-dtype", choices=BASE_DTYPES, help="store the linears of the layers in fewer bits")
    model.add_argument(
        "--kernels", choices=KERNELS, default="auto", help="backend of the ops, as model.kernels (default auto)"
    )
    add_start_options(parser)
    add_download(parser, model="model", adapter="adapter", tokenizer="tokenizer")
    layout = parser.add_argument_group("layout, with --nproc or under torchrun")
    layout.add_argument("--tensor", type=int, help="ranks that share each layer (default: all that --pipeline leaves)")
    layout.add_argument("--pipeline", type=int, default=1, help="ranks that share the layers (default 1)")
    layout.add_argument(
        "--expert",
        type=int,
        default=1,
        help="ranks of --tensor over which whole experts are divided (default 1: every expert is split over them)",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def model_choice(arguments: argparse.Namespace) -> ModelChoice:
    """Returns the options about the model."""
    names: tuple[str, ...] = (
        "adapter", "step", "tokenizer", "tensor", "pipeline", "expert", "dtype", "base_dtype", "kernels",
    )  # fmt: skip
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    return ModelChoice(path=arguments.model, **given)


def task_choice(arguments: argparse.Namespace) -> TaskChoice:
    """Returns the options about the tasks."""
    return TaskChoice(
        tasks=arguments.tasks,
        include_path=arguments.include_path,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        apply_chat_template=arguments.apply_chat_template,
        system=arguments.system,
        gen_kwargs=arguments.gen_kwargs,
        seed=arguments.seed,
        allow_code=arguments.confirm_run_unsafe_code,
        download=arguments.download,
    )
