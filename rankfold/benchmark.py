"""Measures the engine against its peers and against the limit of the machine, in one run.

    rankfold benchmark step
    rankfold benchmark step --hidden 1024 --layers 8 --json step.json --markdown step.md
    rankfold benchmark kernels --only norm,swiglu
    rankfold benchmark lora-tax
    rankfold benchmark memory
    rankfold benchmark convert --gb 8
    rankfold benchmark generate
    rankfold benchmark rollouts
    rankfold benchmark turns
    rankfold benchmark prefixes
    rankfold benchmark tower
    rankfold benchmark tenants
    rankfold benchmark loader
    rankfold benchmark merge-aware --model MODEL --data TEXT
    rankfold benchmark start

`rankfold benchmark SECTION --help` explains a section and its options.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from importlib import import_module
from pathlib import Path

from engine.config.command_line import CommandLine
from engine.errors import UserError
from engine.files.durable import write_named
from rankfold.benchmarking.options import add_options, read_options
from rankfold.benchmarking.sections import SECTIONS


def build_parser() -> CommandLine:
    """Returns the parser with all subcommands."""
    parser = CommandLine(description=__doc__)
    sections = parser.add_subparsers(dest="section", required=True, metavar="SECTION")
    for name, kind in SECTIONS.items():
        text = inspect.cleandoc(kind.__doc__ or "")
        section = sections.add_parser(name, help=text.partition("\n")[0], description=text)
        add_options(section, kind)
        section.add_argument("--json", type=Path, metavar="FILE", help="write every sample and setting here")
        section.add_argument("--markdown", type=Path, metavar="FILE", help="write what is printed here")
    return parser


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_named(path) as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}; give a path in a folder you may write to.") from None


def main() -> None:
    arguments = build_parser().parse_args()
    options = read_options(arguments, SECTIONS[arguments.section])
    # imported after the options are known to be sound: torch and transformers take seconds to load
    module = arguments.section.replace("-", "_")
    result = import_module(f"rankfold.benchmarking.{module}").run(options)
    command = shlex.join(["rankfold", "benchmark", *sys.argv[1:]])
    print(result.text())
    _write(arguments.json, result.json(command))
    _write(arguments.markdown, result.markdown(command))
