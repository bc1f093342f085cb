"""Writes what a run has trained, as a PEFT adapter or as a whole model, and uploads it to the Hugging Face hub.

rankfold export RUN_DIR --out ADAPTER_DIR
rankfold export RUN_DIR --merged --out HF_DIR
rankfold export RUN_DIR --push OWNER/NAME --private
rankfold export RUN_DIR --step best --merged --out HF_DIR --push OWNER/NAME --revision v2
rankfold export ADAPTER_DIR --push OWNER/NAME
rankfold export ADAPTER_DIR --merged --base HF_DIR --out MERGED_DIR
rankfold export RUN_DIR --merged --dtype nvfp4 --out HF_DIR

If an upload is interrupted, the same command continues it. `rankfold convert export` and `rankfold convert merge` have
the same options.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from engine.choices import ENCODED
from engine.config.command_line import CommandLine, named_as
from engine.config.hub import instead_of, local_folder
from engine.config.hub_flag import add_download, with_local_folders
from engine.config.hub_push import Push, add_push, check_push, push_of, upload
from engine.conversion.prefetch import start_reading
from engine.errors import UserError
from rankfold.convert import add_model_options, add_run_options, add_work_options, work_options

_ADAPTER_CONFIG, _CONFIG = "adapter_config.json", "config.json"
_OF_RUNS = ("base_name", "adapter_form", "reader", "step")


def build_parser() -> CommandLine:
    """Builds the command line; needs no torch, so that --help is quick."""
    parser = CommandLine(description=__doc__, stands_for={"model.path": "--base", "model.base_dtype": "--base-dtype"})
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="folder of a run or a checkpoint; folder or name on the hub of a PEFT adapter or a model",
    )
    parser.add_argument("--out", type=Path, help="folder to create; an adapter that is only uploaded needs none")
    parser.add_argument(
        "--merged",
        action="store_true",
        help="a whole model, with adapters merged into its weights (default: an adapter)",
    )
    add_run_options(parser)
    parser.add_argument(
        "--base-dtype",
        choices=ENCODED,
        help="with --merged, of a PEFT adapter: encoding of the base when it was trained",
    )
    add_model_options(parser)
    add_work_options(parser)
    add_download(parser, base="model", source="either")
    add_push(parser)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    push = push_of(arguments)
    with named_as(arguments.stands_for):
        arguments = with_local_folders(arguments)
        _check(arguments, push)
        if push is not None:
            check_push(push)
        _carry_out(arguments, push)


def _check(arguments: argparse.Namespace, push: Push | None) -> None:
    """Refuses options that do not fit each other or the folder.

    Raises:
        UserError: they do not.
    """
    source, out = arguments.source, arguments.out
    if not source.is_dir():
        advice = instead_of(source, "give that of a run, a checkpoint, a PEFT adapter or a model")
        raise UserError(f"{source} is not a folder{advice}.")
    if _is_adapter(source):
        if given := [name for name in _OF_RUNS if getattr(arguments, name) is not None]:
            raise UserError(
                f"--{given[0].replace('_', '-')} is for runs, and {source} is a PEFT adapter: leave it out."
            )
        if not arguments.merged and (out is not None or push is None):
            raise UserError(
                f"{source} is a PEFT adapter already: upload it with --push OWNER/NAME, or merge it with --merged."
            )
    elif _is_model(source):
        if arguments.merged or out is not None or push is None:
            advice = "upload it with --push OWNER/NAME"
            if arguments.dtype is not None:
                advice = f"rankfold convert export --source {source} --format hf --dtype {arguments.dtype} stores it so"
            raise UserError(f"{source} is a model that transformers opens already: {advice}.")
    elif arguments.base_dtype is not None:
        raise UserError(f"--base-dtype is for a PEFT adapter, and {source} is none: leave it out.")
    if arguments.dtype is not None and not arguments.merged:
        raise UserError(f"--dtype {arguments.dtype} is for a whole model: add --merged, or leave it out.")
    if out is None and (push is None or arguments.merged):
        why = "a whole model is written to a folder before it is uploaded" if push else "nothing would be written"
        raise UserError(f"without --out {why}: give a folder to create.")


def _is_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER_CONFIG).is_file()


def _is_model(folder: Path) -> bool:
    return (folder / _CONFIG).is_file() and not (folder / "manifest.json").is_file()


def _carry_out(arguments: argparse.Namespace, push: Push | None) -> None:
    source, out = arguments.source, arguments.out
    if out is not None:
        _write(arguments, out, push)
        if push is not None:
            upload(out, push)
        return
    assert push is not None
    if _is_adapter(source) or _is_model(source):
        upload(source, push, stays=False)
        return
    with tempfile.TemporaryDirectory(prefix="rankfold-export-") as folder:
        _write(arguments, Path(folder) / "adapter", push)
        upload(Path(folder) / "adapter", push, stays=False)


def _write(arguments: argparse.Namespace, out: Path, push: Push | None) -> None:
    # imported after the options are known to be sound: torch takes seconds to load
    from engine.conversion import commands

    options, source = work_options(arguments), arguments.source
    if _is_adapter(source):
        base = arguments.base if arguments.base is not None else _recorded_base(source, download=arguments.download)
        commands.run_merge(base, source, out, base_dtype=arguments.base_dtype, options=options)
        return
    start_reading([source])
    commands.run_export(
        source,
        out,
        form="hf" if arguments.merged else "peft",
        merge=arguments.merged and commands.is_training(source),
        base=arguments.base,
        step=arguments.step,
        options=options,
        base_name=arguments.base_name,
        adapter_form=arguments.adapter_form,
        reader=arguments.reader,
        download=arguments.download,
        for_hub=push is not None,
    )


def _recorded_base(adapter: Path, *, download: bool) -> Path:
    """Returns the folder of the base that an adapter names.

    Raises:
        UserError: it is not there.
    """
    from engine.files.documents import read_json

    config = read_json(adapter / _ADAPTER_CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise UserError(f"{adapter / _ADAPTER_CONFIG} does not say to which base it belongs: give it with --base.")
    full = f"{name}@{revision}" if isinstance(revision, str) and not Path(name).exists() else name
    found = local_folder(Path(full), download=download)
    if not found.is_dir():
        raise UserError(
            f"the base of {adapter} is {full}, which is not here{instead_of(full, 'give its folder with --base')}."
        )
    return found
