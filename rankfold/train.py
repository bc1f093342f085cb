"""Trains: LoRA adapters, selected parameters, or everything.

rankfold train --config run.yaml
rankfold train --nproc 2 --config run.yaml --parallel.tensor 2    # on two devices; torchrun ... -m rankfold train too
rankfold train --config run.yaml --profile 5,6    # a trace of steps 5 and 6, as --log.profile_steps
rankfold train --config run.yaml --download    # what is named as on the Hugging Face hub, as --hub.download true
rankfold train --config run.yaml --reward a.py:f --reward exact_match    # both, as --rollout.rewards
rankfold train --config sweep.yaml    # several runs over one base, where the file has a list `adapters`
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from engine.config.option_help import answer_help
from engine.errors import UserError
from engine.seams import resolve
from engine.telemetry.errors import EXIT_STOPPED
from engine.telemetry.interrupts import EXIT_INTERRUPTED
from rankfold.starting.options import start_help

_PROFILE = re.compile(r"^--profile(?=$|=)")
"""A short name of an option."""
_DOWNLOAD = "--download"
"""A flag in place of an option."""
_REWARD = "--reward"
"""An option that is given once for each function."""


def main() -> None:
    words = _as_options(sys.argv[1:])
    answer_help(words, start_help)
    # imported after the help, which needs no parser
    from engine.config.load import has_adapters, load_config
    from engine.runtime.command import given_command
    from engine.telemetry.trackers import check_trackers
    from engine.training.reports.run_metrics import tracker_choice

    if has_adapters(words):
        summary = resolve("engine.tenants.sweep:train_sweep")(words, given_command)
    else:
        config = load_config(words)
        check_trackers(tracker_choice(config.log))
        # imported after the configuration is known to be sound: torch takes seconds to load
        from engine.training.trainer import train

        summary = train(config, command=given_command)
    if summary.stopped is not None:
        sys.exit(EXIT_INTERRUPTED if summary.interrupted else EXIT_STOPPED)


def check_ranks(words: list[str], world_size: int) -> None:
    """Refuses what a number of ranks could not train.

    Raises:
        UserError: an option cannot be used, or the layout or the batch does not fit the ranks.
        SystemExit: after --print_config.
    """
    from engine.config.load import has_adapters, load_config
    from engine.config.rules import check_world

    words = _as_options(words)
    if has_adapters(words):
        for entry in resolve("engine.tenants.sweep_file:read_sweep")(words).entries:
            check_world(entry.config, world_size)
    else:
        check_world(load_config(words), world_size)


def _as_options(words: Sequence[str]) -> list[str]:
    """Returns the words with the full names of options in place of short ones."""
    named = [_PROFILE.sub("--log.profile_steps", word) for word in with_rewards(words)]
    return ["--hub.download=true" if word == _DOWNLOAD else word for word in named]


def with_rewards(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with all --reward combined into one --rollout.rewards."""
    others, rewards = [], []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != _REWARD:
            others.append(word)
            continue
        value = value if equals else next(words, "")
        if not value or value.startswith("--"):
            raise UserError("--reward has no value: write --reward FILE.py:NAME, or --reward exact_match.")
        rewards.append(value)
    return [*others, *(["--rollout.rewards", json.dumps(rewards)] if rewards else [])]
