"""How a command ends: one sentence for a user's error, a traceback for a defect.

Under torchrun every rank meets the same user error. The sentence is printed once on each node: the first rank to
create a small file in the temporary folder prints, the others wait a moment, because torchrun ends all ranks as soon
as one of them fails. This module does not import torch, so that a refusal is quick.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from engine.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 75
"""A scheduler stopped the run, which has saved and can go on: "temporary failure, try again" in sysexits.h. Not 0,
which schedulers take for the end of the work."""
_WAIT_SECONDS = 2.0
_STALE_SECONDS = 3600.0


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main` and end the process.

    A `UserError` becomes `error: <sentence>` on stderr, once per node, and status 2; Ctrl-C becomes one line and
    status 130; a reader that closed the pipe (`| head`) ends the command quietly. Other exceptions keep their
    traceback: they are defects.

    Args:
        main: the command; returns None when all went well.

    Raises:
        SystemExit: always, when `main` returned or failed as described.
    """
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        _print_once("user", f"error: {' '.join(str(error).split())}")
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        _print_once("interrupt", "interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout once more at exit; a closed pipe would then print an error of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(0)


def claim_once(what: str, environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of its node's ranks to claim `what`; without torchrun always true.

    Args:
        what: name of the thing that only one rank should do; may differ between uses in one run.
        environment: the process's environment, as torchrun sets it.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return True
    # The launcher's process id tells apart runs that share the default run id and port one after the other.
    parts = [environment.get(name, "") for name in _RUN_KEYS]
    key = re.sub(r"[^\w.-]", "_", "-".join([what, str(os.getppid()), *parts]))
    folder = Path(tempfile.gettempdir())
    _remove_stale(folder)
    try:
        os.close(os.open(folder / f"{_PREFIX}{key}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        # A temporary folder that cannot be written: better a sentence per rank than none.
        return True
    return True


_PREFIX = "engine-once-"
_RUN_KEYS = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


def _print_once(what: str, line: str) -> None:
    if claim_once(what, os.environ):
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(_WAIT_SECONDS)


def _remove_stale(folder: Path) -> None:
    """Remove claims of runs that ended long ago."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except OSError:
            # Another rank was quicker, or the file is another user's.
            continue
