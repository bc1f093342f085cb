"""The process under test: loads the engine once, and forks a child for each command it is asked to run.

Started by tests/faults/file_faults.py with the library preloaded. Reads a request a line, answers with a line.
"""

from __future__ import annotations

import json
import mmap
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

ARMED = 0
"""Offset in the shared block."""


def main() -> None:
    with open(os.environ["FILE_FAULTS_BLOCK"], "r+b") as file:
        block = mmap.mmap(file.fileno(), 0)
    _load()
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _run(request, block)
        print(json.dumps(_wait(child, request["limit"])), file=answers, flush=True)


def _load() -> None:
    """What the commands import, and nothing that starts a thread."""
    import numpy  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401 - the first tensor on the meta device imports it, for two seconds
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import engine.conversion.commands
    import engine.data.build_store
    import engine.training.generation
    import engine.training.trainer  # noqa: F401


def _run(request: dict[str, Any], block: mmap.mmap) -> NoReturn:
    """Never returns: the child is the command."""
    status = 70
    try:
        os.setsid()
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)
        os.chdir(request["folder"])
        sys.argv = [request["script"], *request["arguments"]]
        sys.path.insert(0, os.path.dirname(request["script"]))
        block[ARMED : ARMED + 4] = (1).to_bytes(4, sys.byteorder)
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for thread in threading.enumerate():  # as the interpreter does at its end
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    os._exit(status)


def _wait(child: int, limit: float) -> dict[str, int]:
    deadline = time.monotonic() + limit
    pause = 0.001
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return {"status": os.waitstatus_to_exitcode(status)}
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"status": 1000}
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


if __name__ == "__main__":
    main()
