"""Evaluates a model on tasks of lm-evaluation-harness, on one device or several, with or without an adapter.

rankfold evaluate --model HF_DIR --tasks arc_easy,gsm8k --limit 100
rankfold evaluate --model HF_DIR --adapter RUN_DIR --tasks my_task --include-path my_tasks --out results.json
rankfold evaluate --nproc 4 --model DIR --tensor 2 --pipeline 2 --tasks hellaswag --download
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from engine.config.command_line import CommandLine, named_as
from engine.config.hub_flag import with_local_folders
from engine.errors import LostRankError, UserError
from rankfold.evaluating import options
from rankfold.evaluating.options import model_choice, task_choice


def build_parser() -> CommandLine:
    """Returns the parser with all options."""
    return options.build_parser(__doc__)


def main() -> None:
    arguments = build_parser().parse_args()
    with named_as(arguments.stands_for):
        _check(arguments)
        _evaluate(with_local_folders(arguments))


def check_ranks(words: list[str], world_size: int) -> None:
    """Refuses arguments that no number of ranks could use; the ranks check their number with the model.

    Raises:
        UserError: an option cannot be used.
    """
    arguments = build_parser().parse_args(words)
    with named_as(arguments.stands_for):
        _check(arguments)


def _check(arguments: argparse.Namespace) -> None:
    for check in (model_choice, task_choice):
        check(arguments)
    require_harness()


def _evaluate(arguments: argparse.Namespace) -> None:
    # imported after the options are known to be sound: torch and the harness take seconds to load
    from engine.distributed.failures import CommunicationError
    from engine.runtime.launch import start, stop
    from rankfold.evaluating.command import evaluate

    try:
        evaluate(arguments, start(3600.0))  # one rank may read a data set for long
    except CommunicationError as error:
        raise LostRankError(f"{error}: look at that rank's output, and start again.") from error
    stop()


def require_harness() -> None:
    """Refuses to evaluate without the package.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UserError(
            "lm-evaluation-harness is not installed, which has the tasks: pip install 'rankfold[evaluate]', or "
            "pip install 'lm-eval[hf]'."
        )
