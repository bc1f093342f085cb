"""The state that the ranks of one torchrun share on a machine: which of them prints, the file that tells torchrun why
one failed, and variables that are theirs alone.

torchrun gives each rank the path of that file, ATTEMPT/RANK/error.json, in a folder that it creates for this start of
its ranks. It prints the message of the rank that failed first at the very end of its own output.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from engine.files import platforms

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_START = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables that distinguish one start of the ranks from another, should their folders not."""
_RANKS = frozenset((
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
))  # fmt: skip
"""Variables that make a process a rank, beside those of _AGENT."""
_AGENT = "TORCHELASTIC_"


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a process that is not a rank: a library in it that looks for ranks finds none, joins
    no group, and writes nothing to this rank's error file."""
    return {key: value for key, value in environment.items() if key not in _RANKS and not key.startswith(_AGENT)}


def is_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def claim_once(what: str, environment: Mapping[str, str]) -> bool:
    """Returns whether this process is the first of its machine's ranks to claim `what`; without torchrun always true.

    The claim is an empty file beside the folders of the ranks. Where it cannot be created, or is not ours, every rank
    may go ahead: better a sentence per rank than none.

    Args:
        what: name of the action that only one rank should take.
        environment: the process's environment, as torchrun sets it.
    """
    if not is_rank(environment) or not _has_error_file(environment):
        return True
    name = re.sub(r"[^\w.-]", "_", "-".join(["said", what, *(environment.get(key, "") for key in _START)]))
    claim = Path(environment[_ERROR_FILE]).parent.parent / name
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        with suppress(OSError):
            return claim.lstat().st_uid != platforms.user_id()
    except OSError:
        pass
    return True


def leave_reason(sentence: str, trace: str | None, environment: Mapping[str, str]) -> None:
    """Writes why this rank ends to the file that torchrun reads; does nothing without torchrun.

    Args:
        sentence: one line.
        trace: a traceback, which torchrun shows instead of the sentence.
    """
    if not is_rank(environment) or not _has_error_file(environment):
        return
    facts = {"timestamp": str(int(time.time()))} | ({} if trace is None else {"py_callstack": trace.rstrip()})
    with suppress(OSError):  # torchrun then reports the status alone
        text = json.dumps({"message": {"message": sentence, "extraInfo": facts}})
        Path(environment[_ERROR_FILE]).write_text(text, encoding="utf-8")


def _has_error_file(environment: Mapping[str, str]) -> bool:
    return environment.get(_ERROR_FILE, os.devnull) != os.devnull
