"""The command line of `rankfold generate`; needs no torch, so that --help and refusals are quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.choices import BASE_DTYPES
from engine.config.command_line import CommandLine, json_mapping
from engine.config.model import DTYPES, KERNELS
from engine.config.paths import path_text
from engine.config.units import read_length, read_step
from engine.errors import UserError
from engine.inference.options import Limits, ModelChoice, Sampling

STANDS_FOR = {
    "model.path": "--model", "model.dtype": "--dtype", "model.base_dtype": "--base-dtype",
    "model.kernels": "--kernels", "data.tokenizer": "--tokenizer", "parallel.tensor": "--tensor",
    "parallel.pipeline": "--pipeline", "lora.init_from": "--adapter", "--base": "--model",
    "data.chat_template": "--chat-template",
}  # fmt: skip
"""Option of a run, or of rankfold convert -> the flag; see `engine.config.command_line`."""


def build_parser(description: str | None) -> CommandLine:
    """Returns the parser with all options."""
    parser = CommandLine(description=description, stands_for=STANDS_FOR)
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, help="Hugging Face folder, or a partitioned base")
    model.add_argument(
        "--adapter", type=Path, help="folder of a PEFT adapter, of a run or of its checkpoint; it is not merged"
    )
    model.add_argument("--step", type=read_step, help="checkpoint of a run: its step, or best (default: the newest)")
    model.add_argument("--tokenizer", type=Path, help="folder or file of the tokenizer (default: the model's)")
    model.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    model.add_argument("--base-dtype", choices=BASE_DTYPES, help="store the linears of the layers in fewer bits")
    model.add_argument("--kernels", choices=KERNELS, default="auto", help="of the ops")
    layout = parser.add_argument_group("layout, under torchrun")
    layout.add_argument("--tensor", type=int, help="ranks that share each layer (default: all remaining)")
    layout.add_argument("--pipeline", type=int, default=1, help="ranks that hold the layers one after the other")
    _add_prompts(parser)
    _add_choice(parser)
    parser.add_argument("--report", action="store_true", help="memory, bandwidth and speed of every rank, at the end")
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts; without any, they are read at the terminal")
    prompts.add_argument("--prompt", action="append", help="a text; may be given several times")
    prompts.add_argument("--prompts", type=Path, help='JSONL file of {"prompt": ...} or {"messages": [...]}')
    prompts.add_argument("--out", type=Path, help="JSONL file for the answers to --prompts (default: stdout)")
    prompts.add_argument("--ids", action="store_true", help="token ids in the answers too")
    prompts.add_argument("--chat", action="store_true", help="a text is a user's message, in the chat template")
    prompts.add_argument(
        "--chat-template", type=path_text, metavar="T", help="name or file, as of --data.chat_template in training"
    )
    prompts.add_argument(
        "--chat-arguments", type=json_mapping, default={}, metavar="JSON", help='for it: {"enable_thinking": false}'
    )
    prompts.add_argument("--system", help="a system message in front of each conversation")
    prompts.add_argument("--batch", type=int, default=8, help="prompts at a time (default 8)")
    prompts.add_argument(
        "--prefill-tokens",
        type=read_length,
        default=4096,
        help="maximum tokens of prompts that are prefilled together (default 4096)",
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_argument_group("choice of tokens")
    choice.add_argument("--max-new-tokens", type=read_length, default=128, help="for each prompt (default 128)")
    choice.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the most likely token")
    choice.add_argument("--top-k", type=int, help="only the k most likely tokens")
    choice.add_argument("--top-p", type=float, default=1.0, help="only the most likely ones that together reach this")
    choice.add_argument("--min-p", type=float, default=0.0, help="only those at least this many times the most likely")
    choice.add_argument("--repetition-penalty", type=float, default=1.0, help="on tokens that the row has (default 1)")
    choice.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers on every layout")
    choice.add_argument("--stop", action="append", default=[], help="a text that ends an answer; several times")
    choice.add_argument(
        "--stop-token", action="append", type=int, default=[], help="a token id that ends an answer; several times"
    )
    choice.add_argument("--ignore-eos", action="store_true", help="the model's end tokens do not end an answer")


def model_choice(arguments: argparse.Namespace) -> ModelChoice:
    """Returns the options about the model."""
    return ModelChoice(
        path=arguments.model,
        adapter=arguments.adapter,
        step=arguments.step,
        tokenizer=arguments.tokenizer,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        dtype=arguments.dtype,
        base_dtype=arguments.base_dtype,
        kernels=arguments.kernels,
    )


def sampling(arguments: argparse.Namespace) -> Sampling:
    """Returns the options about how tokens are chosen."""
    return Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
    )


def limits(arguments: argparse.Namespace) -> Limits:
    """Returns the options about when answers end; the model's end tokens are not known yet."""
    return Limits(
        max_new_tokens=arguments.max_new_tokens,
        stop_ids=frozenset(arguments.stop_token),
        stop_texts=tuple(arguments.stop),
        slots=arguments.batch,
        prefill_tokens=arguments.prefill_tokens,
    )


def check_prompts(arguments: argparse.Namespace) -> None:
    """Refuses options about prompts that do not go together.

    Raises:
        UserError: they do not.
    """
    if arguments.prompt and arguments.prompts:
        raise UserError("--prompt and --prompts were both given: put all texts into the file, or leave it out.")
    if arguments.out is not None and arguments.prompts is None:
        raise UserError("--out is for the answers to a file of prompts: give the file with --prompts.")
    if arguments.system is not None and not (arguments.chat or arguments.prompts):
        raise UserError("--system is part of a conversation: add --chat.")
