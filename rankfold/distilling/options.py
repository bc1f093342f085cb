"""The command line of `rankfold distill`; needs no torch, so that --help and refusals are quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.config.command_line import CommandLine, json_mapping
from engine.config.data import FORMATS
from engine.config.paths import path_text
from engine.config.rollout import is_web_address
from engine.config.units import read_length
from engine.errors import UserError
from rankfold.evaluating.options import STANDS_FOR, add_model, model_choice

_OF_MODELS = ("model", "adapter", "step", "dtype", "base_dtype", "tensor")
"""Arguments that a server leaves no use for."""


def build_parser(description: str | None) -> CommandLine:
    """Returns the parser with all options."""
    names = STANDS_FOR | {
        "data.seq_length": "--seq-length", "data.format": "--format", "data.overlong": "--overlong",
        "rollout.server": "--server", "rollout.server_kind": "--server-kind",
        "rollout.server_timeout": "--server-timeout", "distillation.server_kind": "--server-kind",
    }  # fmt: skip
    parser = CommandLine(description=description, stands_for=names)
    parser.add_argument(
        "files", nargs="+", type=path_text, help=".jsonl, .json, .parquet or .csv files, or patterns with *"
    )
    add_model(parser)
    server = parser.add_argument_group("a server in place of --model")
    server.add_argument("--server", metavar="URL", help="address of a vLLM or SGLang server with one model")
    server.add_argument("--server-kind", choices=("vllm", "sglang"), default="vllm", help="its kind (default vllm)")
    server.add_argument(
        "--server-timeout", type=float, default=600.0, help="seconds of a call with all its attempts (default 600)"
    )
    server.add_argument("--slots", type=int, default=16, help="texts that are asked for at the same time (default 16)")
    records = parser.add_argument_group("records")
    records.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file to write")
    records.add_argument("--top-k", type=int, default=20, help="tokens at each target (default 20)")
    records.add_argument(
        "--seq-length", type=read_length, default=4096, help="maximum number of tokens of a text (default 4096)"
    )
    records.add_argument(
        "--overlong", choices=("truncate", "drop", "error"), default="truncate",
        help="what to do with longer texts (default truncate)",
    )  # fmt: skip
    records.add_argument("--format", default="auto", choices=FORMATS, help="format of the records (default: by fields)")
    records.add_argument("--no-mask-prompt", action="store_true", help="learn prompts too, not only answers")
    records.add_argument("--chat-template", type=path_text, metavar="T", help="name or file, as data.chat_template")
    records.add_argument(
        "--chat-arguments", type=json_mapping, default={}, metavar="JSON", help="variables for the chat template"
    )
    records.add_argument("--batch", type=int, default=4, help="texts that are computed together (default 4)")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Refuses options that cannot be used.

    Raises:
        UserError: says which.
    """
    for name in ("top_k", "batch", "slots"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: give a number of at least 1.")
    if arguments.server is None:
        model_choice(arguments)
        return
    given = next((name for name in _OF_MODELS if getattr(arguments, name) is not None), None)
    if given is not None:
        raise UserError(f"--server and --{given.replace('_', '-')} are given, but one teacher is asked: leave one out.")
    if not is_web_address(arguments.server) or "@" in arguments.server:
        raise UserError(
            f"--server is {arguments.server if '@' not in arguments.server else 'an address with an @'}, but the "
            "address of a server is expected: write for example http://10.0.0.7:8000, and export an API key as "
            "RANKFOLD_SERVER_KEY."
        )
    if arguments.tokenizer is None:
        raise UserError("--server is given without --tokenizer: give the folder of the tokenizer of the model.")
    if not arguments.server_timeout > 0:
        raise UserError(f"--server-timeout is {arguments.server_timeout}: give seconds above 0.")
