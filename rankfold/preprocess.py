"""Tokenises data once, on all cores, into a store that training maps into memory instead of reading.

rankfold preprocess --tokenizer MODEL_DIR --out STORE data/*.jsonl
rankfold preprocess --tokenizer MODEL_DIR --out STORE --on-error skip-and-report records.parquet
rankfold preprocess --tokenizer MODEL_DIR --show 3 records.jsonl

Then train with --data.train STORE. If it is interrupted, the same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.command_line import CommandLine, json_mapping, named_as
from engine.config.data import FORMATS
from engine.config.hub import DATA_PREFIX, looks_like_hub_name
from engine.config.hub_flag import add_download, with_local_folders
from engine.config.paths import path_text
from engine.seams import resolve
from engine.telemetry.processors import available_processors

if TYPE_CHECKING:
    from engine.data.sources import RecordSource
    from engine.data.tokenizer import ChatOptions, Tokenizer
    from engine.vision.data.family import VisionFamily


def build_parser() -> CommandLine:
    """Builds the command line; needs no torch, so that --help is quick."""
    parser = CommandLine(
        description=__doc__,
        stands_for={
            "data.tokenizer": "--tokenizer",
            "data.format": "--format",
            "model.path": "--tokenizer",
            "data.chat_template": "--chat-template",
        },
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=path_text,
        help=".jsonl, .json, .parquet, .csv or .txt files, or patterns with *; with --show also hub:OWNER/NAME",
    )
    parser.add_argument(
        "--tokenizer", required=True, type=Path, help="folder, name on the hub, or sentencepiece .model file"
    )
    add_download(parser, tokenizer="tokenizer")
    parser.add_argument("--out", type=Path, help="the store's folder")
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print the first N records as the model will see them, and write nothing",
    )
    parser.add_argument(
        "--format", default="auto", choices=FORMATS, help="format of the records (default: recognised by their fields)"
    )
    parser.add_argument(
        "--image-folder", type=path_text, metavar="DIR", help="with --show: folder of the images, as data.image_folder"
    )
    parser.add_argument("--no-mask-prompt", action="store_true", help="train on prompts too, not only on answers")
    parser.add_argument(
        "--chat-template", type=path_text, metavar="T", help="name or file, as for --data.chat_template"
    )
    parser.add_argument(
        "--chat-arguments",
        type=json_mapping,
        default={},
        metavar="JSON",
        help='variables for the chat template: {"enable_thinking": false}',
    )
    parser.add_argument(
        "--stop-at-end", action="store_true", help="do not train on the line break after the token that ends an answer"
    )
    parser.add_argument(
        "--workers", type=int, default=available_processors(), help="number of processes (default: one per core)"
    )
    parser.add_argument(
        "--on-error",
        default="stop",
        choices=("stop", "skip-and-report"),
        help="reaction to a record that cannot be used: stop, or leave it out and list it in skipped.jsonl",
    )
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    with named_as(arguments.stands_for):
        _preprocess(with_local_folders(arguments))


def _preprocess(arguments: argparse.Namespace) -> None:
    from engine.data.build_store import Request, preprocess
    from engine.data.formats import ComparedAnswers
    from engine.data.record_files import expand_paths
    from engine.data.tokenizer import ChatOptions, load_tokenizer
    from engine.errors import UserError
    from engine.kernels.checksum import slow_checksums
    from engine.telemetry.format import counted, format_count, format_duration
    from engine.telemetry.log import Log
    from engine.telemetry.progress import Progress

    if arguments.workers < 1:
        raise UserError(f"--workers is {arguments.workers}: give a number of at least 1.")
    if arguments.show < 0:
        raise UserError(f"--show is {arguments.show}: give the number of records to print.")
    if (arguments.out is None) == (arguments.show == 0):
        raise UserError("give --out, the folder of a store, or --show 3, which prints records and writes nothing.")
    for text in [] if arguments.show else arguments.files:
        if text.startswith(DATA_PREFIX) or looks_like_hub_name(text):
            raise UserError(
                f"{text} is no file, but looks like a data set on the Hugging Face hub, and a store is made of files: "
                f"give {DATA_PREFIX}{text.removeprefix(DATA_PREFIX)} as data.train of a run, which tokenises it, or "
                "save it as a JSONL file. --show prints its first records."
            )
    chat = ChatOptions(
        template=arguments.chat_template,
        arguments=arguments.chat_arguments,
        learn_after_end=not arguments.stop_at_end,
    )
    if arguments.show:
        try:
            _show(arguments, _shown_sources(arguments), chat)
        except ComparedAnswers as error:
            raise UserError(
                f"{str(error).partition(', but objective')[0]}, and is not shown here: a run with its objective.name "
                f"prints it, with --data.show {arguments.show}."
            ) from None
        return
    files = expand_paths(arguments.files)
    request = Request(
        files=tuple(files),
        tokenizer=arguments.tokenizer,
        data_format=arguments.format,
        mask_prompt=not arguments.no_mask_prompt,
        chat=chat,
        skip_bad_records=arguments.on_error == "skip-and-report",
        workers=arguments.workers,
    )
    log, started = Log(0), time.monotonic()
    total = sum(file.stat().st_size for file in files)
    if chat.template is not None:
        for warning in load_tokenizer(arguments.tokenizer, chat).chat_warnings(training=True):
            log.warning(warning)
    if (slow := slow_checksums()) is not None:
        log.info(f"note: {slow}")
    with Progress(log, "tokenising", total, "bytes") as progress:
        summary = preprocess(request, arguments.out, progress=progress.advance)
    seconds = time.monotonic() - started
    if summary.resumed:
        log.info(f"{summary.resumed} of {counted(summary.units, 'piece')} already there from an interrupted call")
    log.info(
        f"{arguments.out}: {counted(summary.records, 'record')}, {counted(summary.documents, 'document')}, "
        f"{counted(summary.tokens, 'token')} ({summary.target_tokens:,} trained on) in {format_duration(seconds)}, "
        f"{format_count(summary.tokens / seconds)} tokens/s on {counted(arguments.workers, 'process')}"
    )
    if summary.skipped:
        log.warning(
            f"{counted(summary.skipped, 'record')} left out: {arguments.out / 'skipped.jsonl'} says which and why"
        )


def _shown_sources(arguments: argparse.Namespace) -> list[Path | RecordSource]:
    """Returns the files, and the records of names on the hub."""
    from engine.data.record_files import expand_paths

    found: list[Path | RecordSource] = []
    for text in arguments.files:
        if text.startswith(DATA_PREFIX):
            name = resolve("engine.hub.data_sets:find_data")(text, download=arguments.download)
            found.append(resolve("engine.hub.data_sets:HubRecords")(name))
        else:
            found += expand_paths([text])
    return found


def _show(arguments: argparse.Namespace, files: list[Path | RecordSource], chat: ChatOptions) -> None:
    """Prints the first records."""
    from engine.data.preview import first_documents, preview
    from engine.data.tokenizer import load_tokenizer
    from engine.telemetry.format import counted
    from engine.vision.data.reader import ImageReader

    tokenizer = load_tokenizer(arguments.tokenizer, chat)
    for warning in tokenizer.chat_warnings(training=True):
        print(f"warning: {warning}", file=sys.stderr)
    family = _image_family(arguments.tokenizer, tokenizer)
    images = None if family is None else ImageReader(family, arguments.image_folder)
    settings = {
        "data_format": arguments.format,
        "mask_prompt": not arguments.no_mask_prompt,
        "images": images,
    }
    colour = sys.stdout.isatty()
    for document in first_documents(files, arguments.show, tokenizer, **settings):
        trained = int(document.targets.sum())
        print(f"{document.place}: {counted(len(document.tokens), 'token')}, {trained:,} trained on")
        spans = [span for extra in document.extras for span in extra.spans]
        print(preview(document.tokens, document.targets, tokenizer, colour=colour, images=spans))
        print()


def _image_family(folder: Path, tokenizer: Tokenizer) -> VisionFamily | None:
    """Returns what reads the images of the model in a folder, as training does; None where its records are text."""
    from engine.errors import UserError
    from engine.files.documents import read_json
    from engine.models.families import ADOPTED_IMAGE_FAMILY, ADOPTED_IMAGES, family_of
    from engine.seams import resolve
    from engine.vision.data.families import read_vision_family

    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json", "copy it again")
    try:
        is_adopted = family_of(config)[0].is_adopted and resolve(ADOPTED_IMAGES)(config)
    except UserError:  # a tokenizer of a model that is not trained here
        is_adopted = False
    if not is_adopted:
        return read_vision_family(folder, tokenizer)
    family: VisionFamily = resolve(ADOPTED_IMAGE_FAMILY)(config, folder, tokenizer)
    return family
