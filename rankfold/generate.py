"""Generates text with a model, on one device or several, with or without an adapter.

rankfold generate --model HF_DIR --prompt "Once upon a time"
rankfold generate --model HF_DIR --adapter RUN_DIR --chat
rankfold generate --nproc 4 --model DIR --tensor 2 --pipeline 2 --prompts in.jsonl --out out.jsonl
"""

from __future__ import annotations

import argparse

from engine.config.command_line import CommandLine, named_as
from engine.config.hub_flag import with_local_folders
from engine.errors import LostRankError
from rankfold.generating import options
from rankfold.generating.options import check_prompts, limits, model_choice, sampling

_A_WEEK = 7 * 86400.0


def build_parser() -> CommandLine:
    """Returns the parser with all options."""
    return options.build_parser(__doc__)


def main() -> None:
    arguments = build_parser().parse_args()
    with named_as(arguments.stands_for):
        _check(arguments)
        _generate(with_local_folders(arguments))


def check_ranks(words: list[str], world_size: int) -> None:
    """Refuses arguments that no number of ranks could use; the ranks check their number with the model.

    Raises:
        UserError: an option cannot be used.
    """
    arguments = build_parser().parse_args(words)
    with named_as(arguments.stands_for):
        _check(arguments)


def _check(arguments: argparse.Namespace) -> None:
    check_prompts(arguments)
    for check in (model_choice, sampling, limits):
        check(arguments)


def _generate(arguments: argparse.Namespace) -> None:
    # imported after the options are known to be sound: torch and transformers take seconds to load
    from engine.distributed.failures import CommunicationError
    from engine.runtime.launch import start, stop
    from rankfold.generating.session import Session

    at_terminal = not arguments.prompt and arguments.prompts is None
    # at a terminal the other ranks wait for a person
    try:
        Session(arguments, start(_A_WEEK if at_terminal else 600.0)).run()
    except CommunicationError as error:
        raise LostRankError(f"{error}: look at that rank's output, and start again.") from error
    stop()
