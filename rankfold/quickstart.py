"""Runs the whole job on a small model: text to base model to LoRA adapter to the proof that PEFT reads it the same.

rankfold quickstart
rankfold quickstart --out DIR
rankfold quickstart --model HF_DIR --data FILE.jsonl -- --optim.lr 1e-4

Without a model it makes a small one of its own from the language reference that ships with Python: nothing is
downloaded, and it takes about three minutes on two cores. Training runs on two ranks. The last step opens the exported
adapter with PEFT and the merged model with transformers, compares their logits with the engine's, and prints one table.
Run it again and it continues where it stopped; finished steps are skipped. Options after -- go to the LoRA training.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from engine.config.command_line import CommandLine
from engine.errors import UserError
from engine.files import platforms
from engine.telemetry.interrupts import EXIT_INTERRUPTED
from rankfold.quickstarting.plan import ENGINE, Plan
from rankfold.quickstarting.steps import Runner, StepFailed, fingerprint
from rankfold.quickstarting.summary import print_summary

DEFAULT_OUT = Path("rankfold-quickstart")


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    _check_packages(options)
    out = (options.out or DEFAULT_OUT).resolve()
    if options.fresh and out.exists():
        if not (out / "stamps").is_dir():
            raise UserError(
                f"--fresh would remove {out}, which no quickstart has made: give another --out, or remove it yourself."
            )
        shutil.rmtree(out)
    plan = Plan(options, out)
    steps = plan.steps()
    # Another engine, Python or library may give other results, so then everything runs again.
    salt = [fingerprint(sorted(ENGINE.rglob("*.py"))), sys.version, *map(version, ("torch", "transformers", "peft"))]
    started = time.monotonic()
    runner = Runner(out, len(steps), " ".join(salt))
    # A plain kill ends the step's processes as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for step in steps:
            runner.run(step)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues from here", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    print_summary(plan, runner.done, time.monotonic() - started)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options, checked, with `lora_options`, the words behind `--`.

    Raises:
        UserError: an option that does not exist, or a combination that cannot work.
    """
    place = words.index("--") if "--" in words else len(words)
    options = build_parser().parse_args(words[:place])
    options.lora_options = tuple(words[place + 1 :])
    _check(options)
    return options


def build_parser() -> CommandLine:
    """Returns the parser of the words before `--`."""
    parser = CommandLine(description=__doc__)
    parser.add_argument("--out", type=Path, help=f"folder for everything that is made (default: {DEFAULT_OUT})")
    parser.add_argument("--model", type=Path, metavar="HF_DIR", help="a Hugging Face model of your own (with --data)")
    parser.add_argument("--data", type=Path, metavar="FILE.jsonl", help="records of your own (with --model)")
    parser.add_argument("--fresh", action="store_true", help="remove the folder and start over")
    parser.add_argument("--pretrain-steps", type=int, metavar="N", help="steps of the small model's pretraining")
    return parser


def _check(options: argparse.Namespace) -> None:
    if (options.model is None) != (options.data is None):
        given, missing = ("--model", "--data") if options.data is None else ("--data", "--model")
        raise UserError(f"{given} was given without {missing}, but your own run needs both: add {missing}.")
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            raise UserError(f"--model {options.model} has no config.json: give the folder of a Hugging Face model.")
        if not options.data.is_file() or options.data.suffix != ".jsonl":
            raise UserError(f"--data {options.data} is not a .jsonl file: give a file with one JSON record a line.")
        if options.pretrain_steps is not None:
            raise UserError(
                "--pretrain-steps is for the small model of the quickstart, and --model replaces it: leave one out."
            )
    if options.pretrain_steps is not None and options.pretrain_steps < 1:
        given = options.pretrain_steps
        raise UserError(f"--pretrain-steps is {given}, but 1 or more is expected: use for example 600.")


def _check_packages(options: argparse.Namespace) -> None:
    """Refuses what the last step would lack before the first one starts.

    Raises:
        UserError: PEFT, or Python's own documentation, is not installed, or this is Windows.
    """
    platforms.require_posix("the quickstart, which trains on two ranks,")
    if find_spec("peft") is None:
        raise UserError(
            "the quickstart opens the adapter with PEFT, which is not installed: run `pip install peft`, or install "
            "the wheel with its extra, as in 'rankfold-VERSION.whl[train]'."
        )
    if options.model is None and (find_spec("pydoc_data") is None or find_spec("pydoc_data.topics") is None):
        raise UserError(
            "this Python lacks the module pydoc_data.topics, whose text the quickstart trains on: install the complete "
            "standard library (on Debian and Ubuntu: libpython3-stdlib), or give --model and --data."
        )
