"""A process with the device of device.cpp, which forks for each case: `Ranks` starts and asks it.

What it answers is a record of JSON on a line: the mistakes, the error if there was one, the operations, the seconds.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any, Self

_ROOT = Path(__file__).resolve().parents[2]
MISTAKES = "mistakes made on purpose"
"""What is asked for in place of a case."""
START_SECONDS, CASE_SECONDS = 240.0, 240.0
"""Most of which are the disk's on a busy machine."""


class Ranks:
    """Runs cases, each in a process of its own."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_cuda.serving"],
            cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self._started = False
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def run(self, name: str) -> dict[str, Any]:
        """Returns the record of a case."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{name}\n".encode())
        stdin.flush()
        limit = CASE_SECONDS if self._started else START_SECONDS
        self._started, deadline = True, time.monotonic() + limit
        while True:
            left = max(0.0, deadline - time.monotonic())
            line = stdout.readline() if select.select([stdout], [], [], left)[0] else b""
            self._errors.seek(0)
            assert line, f"no answer within {limit:g} s; standard error ends with\n{self._errors.read()[-4000:]}"
            record: dict[str, Any] = json.loads(line)
            if record["name"] == name:  # a late answer to an earlier question is nobody's
                return record


@cache
def _import_towers() -> None:
    """Imports what vision towers take from transformers, at the first case that has one."""
    for tower in ("clip", "siglip", "internvl", "idefics2", "qwen2_5_vl", "qwen3_vl"):
        importlib.import_module(f"transformers.models.{tower}.modeling_{tower}")
    gc.collect()
    gc.freeze()


def _serve() -> None:
    """Answers the names on standard input."""
    from tests.fake_cuda.library import import_torch

    import_torch()
    runs = importlib.import_module("tests.fake_cuda.rank_run")
    for module in ("triton", "torch._dynamo", "torch.nn.attention.varlen", "engine.kernels.triton.ops"):
        importlib.import_module(module)  # once here, rather than in each fork
    gc.collect()
    gc.freeze()  # a fork looks only at what it has made itself
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever is printed is no answer
    for line in sys.stdin:
        name = line.strip()
        if name in runs.CASES and "vision_config" in runs.CASES[name].model:
            _import_towers()
        number = os.fork()
        if number == 0:
            began = time.monotonic()
            try:
                record = runs.make_mistakes() if name == MISTAKES else runs.run_case(name)
            except BaseException:
                record = {"mistakes": {}, "error": traceback.format_exc()}
            record |= {"name": name, "seconds": time.monotonic() - began}
            os.write(answers, f"{json.dumps(record)}\n".encode())
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        if status:
            record = {"name": name, "mistakes": {}, "error": f"ended with status {status}"}
            os.write(answers, f"{json.dumps(record)}\n".encode())


if __name__ == "__main__":
    _serve()
