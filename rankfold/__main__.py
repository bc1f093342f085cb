"""The command `rankfold`: one word says what to do, the rest is that command's.

rankfold train --config run.yaml
torchrun --nproc-per-node 2 -m rankfold train --config run.yaml --parallel.tensor 2
"""

from __future__ import annotations

import sys
from importlib import import_module

from engine.config.command_line import CommandLine
from engine.telemetry.errors import run_command

COMMANDS = {
    "train": "train LoRA adapters, selected parameters, or everything",
    "convert": "convert checkpoints, adapters, and configurations of other trainers",
    "generate": "continue texts with a model",
    "preprocess": "tokenise data once into a store",
    "plan": "predict memory and time, draw schedules, certify a layout",
    "report": "write an HTML page about runs",
    "benchmark": "measure the engine against its peers and the machine",
}
"""Name -> what it does. Each is a module of this package with `main()`."""


def _parser() -> CommandLine:
    parser = CommandLine(prog="rankfold", description="Trains large language models and what belongs to it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, does in COMMANDS.items():
        commands.add_parser(name, help=does)
    return parser


def main() -> None:
    """Runs the command that the first word names.

    Raises:
        UserError: there is no such command.
    """
    words = sys.argv[1:]
    _parser().parse_args(words[:1])  # --help, or a refusal
    sys.argv = [f"rankfold {words[0]}", *words[1:]]
    import_module(f"rankfold.{words[0]}").main()


def run() -> None:
    """The console script `rankfold`."""
    run_command(main)


if __name__ == "__main__":
    run()
