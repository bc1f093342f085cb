"""Trains: LoRA adapters, selected parameters, or everything.

rankfold train --config run.yaml
torchrun --nproc-per-node 2 -m rankfold train --config run.yaml --parallel.tensor 2
rankfold train --config run.yaml --profile 5,6    # a trace of steps 5 and 6, as --log.profile_steps
"""

from __future__ import annotations

import re
import sys

from engine.config.load import load_config
from engine.telemetry.errors import EXIT_STOPPED

_PROFILE = re.compile(r"^--profile(?=$|=)")
"""A short name of an option."""


def main() -> None:
    config = load_config([_PROFILE.sub("--log.profile_steps", word) for word in sys.argv[1:]])
    # imported after the configuration is known to be sound: torch takes seconds to load
    from engine.training.trainer import train

    if train(config).stopped is not None:
        sys.exit(EXIT_STOPPED)
