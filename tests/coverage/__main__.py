"""Runs every causal type of transformers, or those named, and writes docs/models.json and docs/models.md.

    python -m tests.coverage [TYPE ...] [--columns one|tensor] [--again]

A type that the JSON has is left as it is unless it is named or `--again` is given. Each runs in a process of its own,
with limits of time and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from typing import Any

import torch
import transformers

from engine.adopted.structure import known_types
from tests.coverage.checks import as_json, one_process, two_tensor_ranks
from tests.coverage.page import JSON, PAGE, page
from tests.support.spawning import RankFailure, spawn

_SECONDS, _BYTES = 150, 7 << 30
ONE, TENSOR = "one", "tensor"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage")
    parser.add_argument("types", nargs="*")
    parser.add_argument("--columns", choices=(ONE, TENSOR), default=ONE)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if asked.columns == ONE:
        one_process("llama")  # imports what each child would import by itself
    for model_type in asked.types or sorted(known_types()):
        known = _known().get(model_type, {})
        if asked.columns == ONE:
            if known and not (asked.types or asked.again):
                continue
            found = run_apart(model_type)
        else:
            if "autograd" not in known or ("tensor" in known and not (asked.types or asked.again)):
                continue
            found = known | _on_two_ranks(model_type)
        print(model_type, json.dumps(found), flush=True)
        every = {**_known(), model_type: found}
        JSON.write_text(json.dumps(dict(sorted(every.items())), indent=1) + "\n")
        PAGE.write_text(page(every))


def _known() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(JSON.read_text()) if JSON.is_file() else {}
    return found


def _on_two_ranks(model_type: str) -> dict[str, Any]:
    try:
        return dict(spawn(two_tensor_ranks, world=2, args=(model_type,), timeout=_SECONDS)[0])
    except RankFailure as error:
        return {"tensor": str(error).strip().splitlines()[-1][:160]}


def run_apart(model_type: str) -> dict[str, Any]:
    """Runs what one process shows, in a child of this one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1))
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            try:
                out.write(as_json(one_process(model_type)))
            except BaseException as error:
                out.write(as_json({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as out:
        said = out.read()
    os.waitpid(child, 0)
    return dict(json.loads(said)) if said else {"failed": f"more than {_SECONDS} s or {_BYTES >> 30} GiB"}


if __name__ == "__main__":
    sys.exit(main())
