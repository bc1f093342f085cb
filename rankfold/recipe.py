"""Writes ready run files, by model, GPU and number of GPUs.

rankfold recipe list
rankfold recipe qwen3-8b --gpu h100 --gpus 4
rankfold recipe qwen3-8b --gpu h100 --gpus 4 --method dpo --data pairs.jsonl --out run.yaml

Layouts, memory and speed are the planner's, stored for the usual numbers of GPUs and predicted anew for others. A model
alone is shown, or written where --out is given.
"""

from __future__ import annotations

import sys

from engine.config.command_line import CommandLine
from rankfold.recipes import command


def build_parser() -> CommandLine:
    """Returns the parser, for pages and completion."""
    return command.build_parser(__doc__)


def main() -> None:
    command.recipe(sys.argv[1:], __doc__)
