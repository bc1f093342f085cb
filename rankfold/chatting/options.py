"""The command line of `rankfold chat`; needs no torch, so that --help and refusals are quick."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from engine.config.command_line import CommandLine
from engine.config.hub import instead_of, local_folder
from engine.config.paths import path_text
from engine.config.run_files import CHECKPOINTS
from engine.config.units import read_length
from engine.errors import UserError
from engine.files.documents import read_json
from engine.inference.options import Sampling
from rankfold.generating.options import STANDS_FOR, add_conversation, add_model_options, add_sampling

_ADAPTER_CONFIG, _CONFIG = "adapter_config.json", "config.json"
_CHOSEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def build_parser(description: str | None) -> CommandLine:
    """Returns the parser with all options."""
    stands_for = {**STANDS_FOR, "--base": "--base", "--model": "MODEL_OR_RUN", "model.path": "MODEL_OR_RUN"}
    parser = CommandLine(description=description, stands_for=stands_for)
    model = parser.add_argument_group("model")
    model.add_argument(
        "place",
        type=Path,
        metavar="MODEL_OR_RUN",
        help="Hugging Face folder, its name on the hub, partitioned base, run, checkpoint of one, or PEFT adapter",
    )
    model.add_argument(
        "--base",
        type=Path,
        help="base of MODEL_OR_RUN where that is a run or an adapter (default: the one that it records)",
    )
    add_model_options(parser, model)
    talk = parser.add_argument_group("conversation")
    talk.add_argument(
        "--image",
        type=path_text,
        action="append",
        default=[],
        metavar="PATH",
        help="image that the first message is about, for a vision-language model; may be given several times",
    )
    add_conversation(talk)
    talk.add_argument("--no-history", dest="history", action="store_false", help="keep no history of messages on disk")
    talk.add_argument(
        "--prefill-tokens",
        type=read_length,
        default=4096,
        help=argparse.SUPPRESS,
    )
    add_sampling(parser, max_new_tokens=2048, temperature="0")
    parser.set_defaults(hub_names={"place": "model", "base": "model", "adapter": "adapter", "tokenizer": "tokenizer"})
    parser.set_defaults(chat=True, image_folder=None, batch=1, **dict.fromkeys(_CHOSEN))
    return parser


def settle(arguments: argparse.Namespace) -> None:
    """Finds out what MODEL_OR_RUN is, and sets `model` and `adapter`.

    Raises:
        UserError: it and the other options do not go together, or the base of an adapter is not known.
    """
    place: Path = arguments.place
    is_peft = (place / _ADAPTER_CONFIG).is_file() and not (place / _CONFIG).is_file()
    if not is_peft and not _is_run(place):
        if arguments.base is not None:
            raise UserError(f"--base is the base of a run or an adapter, but {place} is neither: leave it out.")
        arguments.model = place
        return
    if arguments.adapter is not None:
        raise UserError(f"{place} is an adapter, and --adapter names another one: give the base and --adapter.")
    arguments.model, arguments.adapter = arguments.base, place
    if is_peft and arguments.base is None:
        recorded = read_json(place / _ADAPTER_CONFIG).get("base_model_name_or_path")
        if isinstance(recorded, str):
            recorded = local_folder(recorded, download=getattr(arguments, "download", False))
        if not isinstance(recorded, str) or not Path(recorded).is_dir():
            advice = "give the folder of its base with --base"
            lacks = instead_of(recorded, advice) if isinstance(recorded, str) and recorded else f": {advice}"
            raise UserError(
                f"{place} is a PEFT adapter of {recorded or 'a base that it does not name'}, which is no folder here"
                f"{lacks}."
            )
        arguments.model = Path(recorded)


def _is_run(place: Path) -> bool:
    """Returns whether a folder is a run, or a checkpoint of one."""
    if (place / CHECKPOINTS).is_dir():
        return True
    manifest = place / "manifest.json"
    return manifest.is_file() and read_json(manifest).get("kind") == "training"


def chosen_sampling(arguments: argparse.Namespace) -> Sampling | None:
    """Returns how tokens are chosen; None where the command line leaves that to the model.

    Raises:
        UserError: a value out of its range, or options that do not go together.
    """
    given = {name: value for name in _CHOSEN if (value := getattr(arguments, name)) is not None}
    return Sampling(**given, seed=arguments.seed) if given else None


def recommended_sampling(folder: Path, seed: int) -> Sampling:
    """Returns how the model's generation_config.json says that tokens are chosen; greedily without one.

    Raises:
        UserError: it has a value out of its range.
    """
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    if config.get("do_sample") is not True:
        return Sampling(seed=seed)
    given = {name: config[name] for name in _CHOSEN if config.get(name) is not None}
    try:
        return Sampling(**{"temperature": 1.0, **given}, seed=seed)
    except TypeError:
        raise UserError(
            f"{path} has a setting of sampling that is no number: correct it, or give --temperature."
        ) from None


def sampling_line(sampling: Sampling) -> str:
    """Returns what differs from greedy choice, for the log."""
    found = [
        f"{field.name.replace('_', '-')} {value}"
        for field in fields(Sampling)
        if (value := getattr(sampling, field.name)) != field.default
    ]
    return ", ".join(found) or "the most likely token"
