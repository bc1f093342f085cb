"""Plans a run before it is started, and certifies its layout.

rankfold plan schedule --pipeline 4 --virtual 2 --microbatches 8
rankfold plan memory --model MODEL --gpus 8 --gpu-memory 80 --seq-length 8192
rankfold plan adapters --model MODEL --gpu-memory 141 --adapters 64 --rank 16
rankfold plan certify --config run.yaml --against tensor=1
"""

from __future__ import annotations

import inspect

from engine.config.command_line import CommandLine, named_as
from engine.config.hub_flag import with_local_folders
from rankfold.certifying import command as certify
from rankfold.planning import adapters, memory, schedule

COMMANDS = {"schedule": schedule, "memory": memory, "adapters": adapters, "certify": certify}
"""Name -> its module, which has `add_arguments(parser)`, `run(arguments)` and STANDS_FOR. All are
imported for every command line, also for --help: they import torch inside `run` where they need it."""


def build_parser() -> CommandLine:
    """Returns the parser with all subcommands."""
    parser = CommandLine(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = inspect.cleandoc(module.__doc__ or "")
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            stands_for=module.STANDS_FOR,
        )
        module.add_arguments(command)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    reads_run = getattr(arguments, "config", None) is not None  # whose errors name the options in the file
    with named_as({} if reads_run else arguments.stands_for):
        COMMANDS[arguments.command].run(with_local_folders(arguments))
