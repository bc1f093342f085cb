"""Runs every causal type of transformers, or those named, and writes docs/models.json and docs/models.md.

    python -m tests.coverage [TYPE ...] [--columns one|tensor|expert|zero|context|export] [--again]

A type that the JSON has is left as it is unless it is named or `--again` is given. Each runs in processes of its own,
with limits of time and memory: `one` what a process by itself shows, the others what two ranks do.
"""

from __future__ import annotations

import argparse
import sys

import torch
import transformers

from engine.adopted.structure import known_types
from tests.coverage.apart import run_apart
from tests.coverage.checks import one_process
from tests.coverage.export_checks import exported
from tests.coverage.page import JSON, keep, known, page
from tests.coverage.rank_checks import ON_RANKS

ONE, EXPORT = "one", "export"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage")
    parser.add_argument("types", nargs="*")
    parser.add_argument("--columns", choices=(ONE, EXPORT, *ON_RANKS), default=ONE)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    one_process("llama")  # imports what each child would import by itself
    for model_type in asked.types or sorted(known_types()):
        before, column = known(JSON).get(model_type, {}), asked.columns
        has = bool(before) if column == ONE else column in before
        if has and not (asked.types or asked.again):
            continue
        if column == ONE:
            others = (EXPORT, *ON_RANKS)
            kept = {key: value for key, value in before.items() if key.partition("_")[0] in others}
            found = run_apart(one_process, model_type) | kept
        elif "autograd" not in before:
            continue
        else:
            ran = (
                run_apart(exported, model_type)
                if column == EXPORT
                else run_apart(ON_RANKS[column], model_type, ranks=2)
            )
            figures = ran if column in ran else {column: ran["failed"]}
            found = {key: value for key, value in before.items() if key.partition("_")[0] != column}
            found |= {key: value for key, value in figures.items() if value is not None}
        keep(model_type, found, JSON, page)


if __name__ == "__main__":
    sys.exit(main())
