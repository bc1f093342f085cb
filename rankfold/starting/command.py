"""`--nproc` of a command: what is wrong is refused here, in one sentence, before any rank starts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from engine.config.option_help import help_topic
from engine.files import platforms
from rankfold.starting.options import NPROC, take_start_options


def start_where_asked(command: str, words: Sequence[str]) -> None:
    """Starts the ranks of a command with --nproc, and ends this process as they end; returns without --nproc.

    Args:
        command: a module of `rankfold`.
        words: its arguments.

    Raises:
        SystemExit: after the ranks.
        UserError: the options cannot be used.
    """
    options, others = take_start_options(command, words)
    if options is None or help_topic(others) is not None:
        return
    platforms.require_posix(f"{NPROC} {options.nproc}")
    check = import_module(f"rankfold.{command}").check_ranks
    if options.nproc.isdecimal():
        check(others, int(options.nproc) * options.nnodes)
    # imported after the options are known to be sound: torch takes seconds to load
    from rankfold.starting.ranks import ranks_of_this_machine, start_ranks

    nproc = ranks_of_this_machine(options.nproc)
    if not options.nproc.isdecimal():
        check(others, nproc * options.nnodes)
    start_ranks(options, nproc, [command, *others])
