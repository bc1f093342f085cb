"""Writes records with a teacher's most likely tokens, which runs of objective.name distillation learn from.

rankfold distill --model TEACHER_DIR --out taught.jsonl --top-k 20 train.jsonl
rankfold distill --nproc 4 --model TEACHER_DIR --tensor 4 --out taught.jsonl train.jsonl
rankfold distill --server http://10.0.0.7:8000 --tokenizer MODEL_DIR --out taught.jsonl train.jsonl
"""

from __future__ import annotations

import argparse

from engine.config.command_line import CommandLine, named_as
from engine.config.hub_flag import with_local_folders
from engine.errors import LostRankError
from rankfold.distilling import options


def build_parser() -> CommandLine:
    """Returns the parser with all options."""
    return options.build_parser(__doc__)


def main() -> None:
    arguments = build_parser().parse_args()
    with named_as(arguments.stands_for):
        options.check(arguments)
        _distill(with_local_folders(arguments))


def check_ranks(words: list[str], world_size: int) -> None:
    """Refuses arguments that no number of ranks could use; the ranks check their number with the model.

    Raises:
        UserError: an option cannot be used.
    """
    arguments = build_parser().parse_args(words)
    with named_as(arguments.stands_for):
        options.check(arguments)


def _distill(arguments: argparse.Namespace) -> None:
    # imported after the options are known to be sound: torch takes seconds to load
    from engine.distributed.failures import CommunicationError
    from engine.runtime.launch import start, stop
    from rankfold.distilling.command import distill

    try:
        distill(arguments, start(600.0))
    except CommunicationError as error:
        raise LostRankError(f"{error}: look at that rank's output, and start again.") from error
    stop()
