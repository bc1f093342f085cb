"""Expands ~ to a home directory in the paths of a run's and every tool's options.

A shell expands ~ at the beginning of a word only, neither in --option=~/x nor in a file of options.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from engine.errors import UserError

PATH_OPTIONS = (
    "model.path",
    "lora.init_from",
    "rollout.rewards",
    "rollout.tools",
    "rollout.environment",
    "rollout.agent",
    "rollout.adapter_dir",
    "distillation.teachers",
    "data.train",
    "data.validation",
    "data.mix",
    "data.tokenizer",
    "data.chat_template",
    "data.image_folder",
    "train.sample_images",
    "evaluation.include_path",
    "checkpoint.dir",
    "checkpoint.resume",
)
"""Options of a run that are paths, or lists of entries that begin with one."""


def at_home(option: str, path: str) -> str:
    """Returns `path` with a leading ~ or ~user replaced by that home.

    Raises:
        UserError: `option` names the home of an unknown user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(f"{option} {_flaw(path)}")
    return expanded


def path_text(text: str) -> str:
    """Parses a tool's option that is a path and stays text.

    Raises:
        argparse.ArgumentTypeError: it is empty, or names the home of an unknown user.
    """
    if not text:
        raise argparse.ArgumentTypeError("is empty, but a path is expected: was a variable of the shell not set?")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise argparse.ArgumentTypeError(_flaw(text))
    return expanded


def path(text: str) -> Path:
    """Parses a path like `path_text`, and returns a Path."""
    return Path(path_text(text))


def _flaw(path: str) -> str:
    user = path.partition("/")[0]
    return f"is {path}, but there is no home {user}: give a whole path, or ./{path} for a name that begins with ~."
