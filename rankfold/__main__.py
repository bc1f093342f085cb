"""The command `rankfold`: the first word names a command, and the rest are its arguments.

rankfold train --config run.yaml
rankfold train --nproc 2 --config run.yaml --parallel.tensor 2

The top imports only the standard library, so that a missing dependency is reported in one sentence.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from engine.config.command_line import CommandLine

COMMANDS = {
    "quickstart": "the whole job on a small model in three minutes: train, export, check",
    "train": "train LoRA adapters, selected parameters, or everything",
    "export": "write what a run has trained as a PEFT adapter or a whole model, and upload it to the Hugging Face hub",
    "convert": "convert checkpoints, adapters, and configurations of other trainers",
    "generate": "generate text with a model",
    "chat": "talk with a model at the terminal",
    "evaluate": "evaluate a model on tasks of lm-evaluation-harness",
    "distill": "write records with a teacher's most likely tokens",
    "serve": "serve a model to clients that train and sample adapters with the Tinker SDK",
    "preprocess": "tokenise data once into a store",
    "plan": "predict memory and time, draw schedules, certify a layout",
    "recipe": "write a ready run file, by model, GPU and number of GPUs",
    "launch": "write the job file for a training on Slurm, Kubernetes, SkyPilot or Ray",
    "report": "write an HTML report of one or more runs",
    "benchmark": "compare speed and memory with transformers + PEFT and the machine's limits",
    "completion": "print a script for Tab completion in bash, zsh or fish",
}
"""Name -> its purpose. Each is a module of this package with `main()`."""

ON_RANKS = ("train", "generate", "chat", "evaluate", "distill")
"""The commands that --nproc starts on several devices. One with `check_ranks(words, world_size)` refuses there what
would otherwise be refused by its ranks."""

REQUIRED = (
    "torch", "transformers", "safetensors", "sentencepiece", "jinja2", "markupsafe", "numpy", "jsonargparse",
    "docstring_parser", "yaml", "einops", "PIL", "rich",
)  # fmt: skip
"""The packages that setup.py requires, by import name."""

_EXAMPLES = """
`rankfold COMMAND --help` explains a command. `python -m rankfold` is the same program. On several devices:
  rankfold train --nproc 2 --config run.yaml --parallel.tensor 2
"""


def _parser() -> CommandLine:
    import engine
    from engine.config.command_line import CommandLine

    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {does}" for name, does in COMMANDS.items())
    parser = CommandLine(
        prog="rankfold",
        description="Fine-tunes large language models with LoRA, on one device or many.",
        epilog=f"commands:\n{table}\n{_EXAMPLES}",
    )
    parser.add_argument(
        "--version", action="version", version=f"rankfold {engine.__version__}", help="print the version"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help="one of the commands below")
    for name in COMMANDS:
        commands.add_parser(name)
    return parser


def main() -> None:
    """Runs the command that the first word names; without one prints the help.

    Raises:
        UserError: there is no such command.
    """
    words = sys.argv[1:]
    _parser().parse_args(words[:1] or ["--help"])  # which ends here for --help and --version
    sys.argv = [f"rankfold {words[0]}", *words[1:]]
    _run_one(words[0])


def _run_one(command: str) -> None:
    """Runs a command with the words of `sys.argv`.

    Raises:
        UserError: a package that setup.py requires is missing, or the command's own refusals.
    """
    import engine
    from engine.errors import UserError

    try:
        if command in ON_RANKS:
            from rankfold.starting.command import start_where_asked

            start_where_asked(command, sys.argv[1:])
        import_module(f"rankfold.{command}").main()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in REQUIRED:
            raise
        raise UserError(engine.not_installed(package)) from None


def run(command: str | None = None) -> NoReturn:
    """Runs a command line and ends the process: one sentence for a mistake, no traceback; see `run_command`.

    Args:
        command: of the scripts in tools/, each of which is one module of this package; None takes the first word.

    Raises:
        SystemExit: always.
    """
    try:
        from engine.telemetry.errors import run_command
    except ImportError as error:
        if error.name != "torch":
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run_command(main if command is None else partial(_run_one, command))


if __name__ == "__main__":
    run()
