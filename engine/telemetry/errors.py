"""Ends commands that fail: one sentence for a user's error, a traceback for a defect, and an exit status for each.

Under torchrun every rank meets the same user error. The sentence is printed once on each machine: the first rank that
claims it prints, and the others wait a moment, because torchrun ends all ranks as soon as one of them fails. torchrun's
own report follows, which ends with the sentence. This module does not import torch, so that a refusal is quick.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from engine.errors import LostRankError, UserError
from engine.files.refusals import sentence_of
from engine.printable import printable
from engine.telemetry.ending import end, end_at_once, has_joined
from engine.telemetry.format import format_bytes
from engine.telemetry.interrupts import EXIT_INTERRUPTED, end_at_the_next, leave_in_order, was_interrupted
from engine.telemetry.output import give_up, has_reader, outliving_the_reader, print_any_name, say
from engine.telemetry.torchrun import claim_once, is_rank, leave_reason

EXIT_DEFECT = 1
EXIT_USER_ERROR = 2
EXIT_UNREAD = 141
"""Exit status where the reader of the results has gone, as a shell reports it for a program that SIGPIPE ended."""
EXIT_STOPPED = 75
"""Exit status where a scheduler stopped the run, which has saved and can resume: EX_TEMPFAIL of sysexits.h. Not 0,
which schedulers take for success. torchrun turns it, like any status of its ranks, into 1."""
EXIT_LOST_RANK = 69
"""Exit status where another rank is gone, so that the same command may succeed: EX_UNAVAILABLE of sysexits.h."""
_WAIT_SECONDS = 2.0
"""Seconds for torchrun to notice that the failing or lost rank has ended: it reports the first such rank as the
cause.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a command ends after an exception.

    Args:
        status: of the process.
        line: printed on stderr, by one rank per machine.
        trace: printed on stderr, by each rank that has one.
        reason: for torchrun's report, where it differs from `line`.
        is_after_another: another rank is the cause, and should be seen to end first.
    """

    status: int
    line: str | None = None
    trace: str | None = None
    reason: str | None = None
    is_after_another: bool = False


_INTERRUPTED = Ending(status=EXIT_INTERRUPTED, line="interrupted")


def ending_of(error: BaseException) -> Ending:
    """Returns how a command ends after `error`."""
    match error:
        case KeyboardInterrupt():
            return _INTERRUPTED
        case _ if was_interrupted():  # an exception that a library makes of it, or another rank that has ended sooner
            return _INTERRUPTED
        case UserError():
            line = f"error: {one_line(str(error))}"
            is_lost = isinstance(error, LostRankError)
            return Ending(status=EXIT_LOST_RANK if is_lost else EXIT_USER_ERROR, line=line, is_after_another=is_lost)
        case OSError() if (sentence := sentence_of(error)) is not None:
            return Ending(status=EXIT_USER_ERROR, line=f"error: {one_line(sentence)}")
        case MemoryError() | RuntimeError() if (sentence := _memory_sentence(error)) is not None:
            return Ending(status=EXIT_USER_ERROR, line=f"error: {sentence}")
        case SystemExit(code=None):
            return Ending(status=0)
        case SystemExit(code=int(status)):
            stopped = "stopped by a signal, and saved: the same command resumes from there"
            return Ending(status=status, reason=stopped if status in (EXIT_STOPPED, EXIT_INTERRUPTED) else None)
        case SystemExit(code=words):
            return Ending(status=EXIT_DEFECT, line=str(words))
        case BrokenPipeError() if not has_reader(sys.stdout):
            return Ending(status=EXIT_UNREAD, reason="the reader of standard output has gone")
        case _:
            import traceback

            trace = "".join(traceback.format_exception(error))
            return Ending(status=EXIT_DEFECT, trace=trace, reason=one_line(f"{type(error).__name__}: {error}"))


_ALLOCATION = re.compile(
    r"tried to allocate (\d+) bytes|Unable to allocate ([\d.]+ \w+)|Tried to allocate ([\d.]+ \w+)"
)
"""The messages of torch on a CPU, numpy and torch on a GPU."""


def _memory_sentence(error: BaseException) -> str | None:
    """Returns the sentence about missing memory, with the remedies; None where memory is not the reason."""
    found = _ALLOCATION.search(str(error))
    if found is None and not isinstance(error, MemoryError):
        return None
    size = "" if found is None else f" for {format_bytes(int(found[1])) if found[1] else found[2] or found[3]} more"
    return (
        f"there is not enough memory{size}: use a smaller train.micro_batch_size, data.seq_length or lora.rank, or "
        "find settings that fit with `rankfold plan memory`."
    )


_LONGEST = 2000
"""Characters of a sentence, at most: the input that it quotes may be of any length."""


def one_line(text: str) -> str:
    """Returns a sentence on one line, printable, and short enough to be read, whatever it quotes."""
    text = printable(" ".join(text.split()), keep="")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def run_command(main: Callable[[], None]) -> NoReturn:
    """Runs a command line's `main` and ends the process.

    A `UserError` becomes `error: <sentence>` on stderr, once per machine, and status 2, or 69 where another
    rank is lost; Ctrl-C becomes one line and status 130, and a second one ends the process wherever it is. A reader
    that leaves before it has all results (`| head`) ends the command quietly with status 141; unread stderr is ignored,
    and so is --help that is not read to its end. Other exceptions keep their traceback: they are defects. A process
    that has joined others ends at once in each of these cases, see `engine.telemetry.ending`.

    Args:
        main: the command; returns None when all went well.

    Raises:
        SystemExit: always, when `main` returned or failed as described, in a process on its own.
    """
    leave_in_order(lambda: _tell(_INTERRUPTED))
    with outliving_the_reader():
        try:
            print_any_name(sys.stdout)
            main()
            sys.stdout.flush()
            end_at_the_next()
        except BaseException as error:  # any exception: do not wait for other ranks
            ending = Ending(status=EXIT_DEFECT)
            try:
                ending = ending_of(error)
                end_at_the_next()
                _tell(ending)
            finally:
                if has_joined():
                    end_at_once(ending.status)
            if ending.trace is not None:
                raise  # the interpreter prints it
            if not has_reader(sys.stdout):
                give_up(sys.stdout)  # the interpreter flushes it once more, and would complain
            raise SystemExit(ending.status) from None
        end(0)


def _tell(ending: Ending) -> None:
    if ending.trace is not None and has_joined():
        print(ending.trace, file=sys.stderr, end="", flush=True)
    # a lost rank is silent where the one that is the cause has spoken
    claimed = EXIT_USER_ERROR if ending.is_after_another else ending.status
    speaks = ending.line is None or claim_once(str(claimed), os.environ)
    if ending.line is not None and speaks:
        say(ending.line)
    if is_rank(os.environ) and (ending.is_after_another or not speaks):
        time.sleep(_WAIT_SECONDS)
    reason = ending.reason or ending.line
    if speaks and reason is not None:
        leave_reason(reason, ending.trace, os.environ)
