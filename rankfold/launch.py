"""Writes the job file with which a scheduler runs a training: Slurm, Kubernetes, SkyPilot or Ray.

rankfold launch slurm --config run.yaml --nodes 2 --gpus-per-node 8 --parallel.tensor 8
rankfold launch jobset --config run.yaml --nodes 2 --plan --image IMAGE --mount pvc:data=/data --run-dir /data/run
rankfold launch skypilot --config run.yaml --accelerator H100 --spot --image IMAGE --mount s3://mine=/data

The run file is checked, and so is the layout, before anything is written; --SECTION.OPTION VALUE are options of the
run, which win over its file. Nothing is submitted unless --submit is given.
"""

from __future__ import annotations

import sys

from engine.config.command_line import CommandLine
from rankfold.launching import options
from rankfold.launching.command import launch


def build_parser() -> CommandLine:
    """Returns the parser of the options that are not a run's."""
    return options.build_parser(__doc__)


def main() -> None:
    launch(sys.argv[1:], __doc__)
