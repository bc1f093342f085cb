"""The command line of `rankfold generate`; needs no torch, so that --help and refusals are quick."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from engine.choices import BASE_DTYPES, DECODE_GRAPHS
from engine.config.command_line import CommandLine, json_mapping
from engine.config.hub_flag import add_download
from engine.config.model import DTYPES, KERNELS
from engine.config.paths import path_text
from engine.config.units import read_length, read_step
from engine.errors import UserError
from engine.inference.options import Limits, ModelChoice, Sampling
from rankfold.starting.options import add_start_options

_Record = TypeVar("_Record", ModelChoice, Sampling, Limits)

STANDS_FOR = {
    "model.path": "--model", "model.dtype": "--dtype", "model.base_dtype": "--base-dtype",
    "model.kernels": "--kernels", "data.tokenizer": "--tokenizer", "parallel.tensor": "--tensor",
    "parallel.pipeline": "--pipeline", "parallel.expert": "--expert", "lora.init_from": "--adapter",
    "--base": "--model", "data.chat_template": "--chat-template", "data.image_folder": "--image-folder",
}  # fmt: skip
"""Option of a run, or of rankfold convert -> the flag; see `engine.config.command_line`."""


def build_parser(description: str | None) -> CommandLine:
    """Returns the parser with all options."""
    parser = CommandLine(description=description, stands_for=STANDS_FOR)
    parser.set_defaults(history=True)
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, help="Hugging Face folder, its name on the hub, or a partitioned base")
    add_model_options(parser, model)
    _add_prompts(parser)
    add_sampling(parser, max_new_tokens=128)
    return parser


def add_model_options(parser: argparse.ArgumentParser, model: argparse._ArgumentGroup) -> None:
    """Adds the options about the model except its own place, the layout, and the report."""
    model.add_argument(
        "--adapter",
        type=Path,
        help="folder of a PEFT adapter, a run or one of its checkpoints; applied beside the base, or, of a run trained "
        "merge-aware with this --base-dtype, merged into its codes",
    )
    model.add_argument("--step", type=read_step, help="checkpoint of a run: its step, or best (default: the newest)")
    model.add_argument("--tokenizer", type=Path, help="folder or file of the tokenizer (default: the model's)")
    model.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    model.add_argument("--base-dtype", choices=BASE_DTYPES, help="store the linears of the layers in fewer bits")
    model.add_argument(
        "--kernels", choices=KERNELS, default="auto", help="backend of the ops, as model.kernels (default auto)"
    )
    model.add_argument(
        "--cuda-graph",
        choices=DECODE_GRAPHS,
        default="auto",
        help="replay the passes that decode, on a GPU as CUDA graphs: auto, where that is possible (default), or none",
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
    parser.add_argument(
        "--report", action="store_true", help="print memory, bandwidth and speed of every rank at the end"
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts; without any, they are read at the terminal")
    prompts.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    prompts.add_argument(
        "--image",
        type=path_text,
        action="append",
        default=[],
        metavar="PATH",
        help="image that the prompts are about, for a vision-language model; may be given several times. Images "
        "are placed before the text, or where it has <image>",
    )
    prompts.add_argument(
        "--image-folder",
        type=path_text,
        metavar="DIR",
        help="folder that paths of images are relative to (default: that of the --prompts file; for --image the "
        "current one)",
    )
    prompts.add_argument(
        "--prompts",
        type=Path,
        help='JSONL file of {"prompt": ...}, {"messages": [...]} or {"conversations": [...]}; images are named as in '
        "records of training",
    )
    prompts.add_argument("--out", type=Path, help="JSONL file for the answers to --prompts (default: stdout)")
    prompts.add_argument(
        "--compare-base",
        action="store_true",
        help="answer each prompt without the adapter too, with the same model in memory",
    )
    prompts.add_argument("--ids", action="store_true", help="write the token ids of the answers too")
    prompts.add_argument(
        "--chat", action="store_true", help="send each text as a user's message through the chat template"
    )
    add_conversation(prompts)
    prompts.add_argument("--batch", type=int, default=8, help="prompts processed at the same time (default 8)")
    prompts.add_argument(
        "--prefill-tokens",
        type=read_length,
        default=4096,
        help="maximum number of prompt tokens that are prefilled together (default 4096)",
    )


def add_conversation(group: argparse._ArgumentGroup) -> None:
    """Adds the options about how conversations are written."""
    group.add_argument(
        "--chat-template", type=path_text, metavar="T", help="name or file, as for --data.chat_template in training"
    )
    group.add_argument(
        "--chat-arguments",
        type=json_mapping,
        default={},
        metavar="JSON",
        help='variables for the chat template: {"enable_thinking": false}',
    )
    group.add_argument("--system", help="a system message in front of each conversation")


def add_sampling(parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: str = "0 (default)") -> None:
    """Adds the options about how tokens are chosen, and when answers end.

    Args:
        max_new_tokens: the default.
        temperature: how the help names greedy choice.
    """
    choice = parser.add_argument_group("sampling and stopping")
    choice.add_argument(
        "--max-new-tokens",
        type=read_length,
        default=max_new_tokens,
        help=f"maximum number of tokens in an answer (default {max_new_tokens})",
    )
    choice.add_argument(
        "--temperature", type=float, default=0.0, help=f"{temperature} takes the most likely token; above 0 samples"
    )
    choice.add_argument("--top-k", type=int, help="sample from the k most likely tokens")
    choice.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens whose probabilities add up to this"
    )
    choice.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="sample from tokens at least this fraction as likely as the most likely one",
    )
    choice.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="applied to tokens of the prompt and the answer so far (default 1: none)",
    )
    choice.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers on every layout")
    choice.add_argument(
        "--stop", action="append", default=[], help="text that ends an answer; may be given several times"
    )
    choice.add_argument(
        "--stop-token",
        action="append",
        type=int,
        default=[],
        help="token id that ends an answer; may be given several times",
    )
    choice.add_argument("--ignore-eos", action="store_true", help="continue past the model's end tokens")


def model_choice(arguments: argparse.Namespace) -> ModelChoice:
    """Returns the options about the model."""
    return _taken(ModelChoice, arguments, path=arguments.model)


def sampling(arguments: argparse.Namespace) -> Sampling:
    """Returns the options of sampling."""
    return _taken(Sampling, arguments)


def limits(arguments: argparse.Namespace) -> Limits:
    """Returns the options about when answers end; the model's end tokens are not known yet."""
    ends = {"stop_ids": frozenset(arguments.stop_token), "stop_texts": tuple(arguments.stop)}
    return _taken(Limits, arguments, slots=arguments.batch, **ends)


def _taken(kind: type[_Record], arguments: argparse.Namespace, **others: Any) -> _Record:
    """Returns a record whose fields are arguments of the same names, except `others`."""
    names = {field.name for field in fields(kind)} - set(others)  # type: ignore[arg-type]
    return kind(**others, **{name: getattr(arguments, name) for name in names})


def check_prompts(arguments: argparse.Namespace) -> None:
    """Refuses options about prompts that do not go together.

    Raises:
        UserError: they do not.
    """
    if arguments.prompt and arguments.prompts:
        raise UserError("--prompt and --prompts were both given: put all texts into the file, or leave it out.")
    if arguments.image and arguments.prompts:
        raise UserError(
            "--image and --prompts were both given: name images in the records of the file, or leave --image out."
        )
    if arguments.compare_base and arguments.adapter is None:
        raise UserError("--compare-base compares an adapter with its base: give the adapter with --adapter.")
    if arguments.compare_base and not (arguments.prompt or arguments.prompts):
        raise UserError("--compare-base is for prompts that are known: give them with --prompt or --prompts.")
    if arguments.out is not None and arguments.prompts is None:
        raise UserError("--out is for the answers to a file of prompts: give the file with --prompts.")
    if arguments.system is not None and not (arguments.chat or arguments.prompts):
        raise UserError("--system is part of a conversation: add --chat.")
