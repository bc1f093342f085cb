"""Talks with a model at the terminal: a base, a run, a checkpoint or an adapter, on one device or several.

rankfold chat my-model
rankfold chat runs/mine --step best --system "Answer in one sentence."
rankfold chat my-model --adapter my-adapter --temperature 0.7
rankfold chat my-model --nproc 2

Lines of a file or a pipe are answered one after the other. /help lists the commands of the conversation.
"""

from __future__ import annotations

import argparse

from engine.config.command_line import CommandLine, named_as
from engine.config.hub_flag import with_local_folders
from engine.errors import LostRankError, UserError
from rankfold.chatting import options
from rankfold.chatting.options import chosen_sampling, recommended_sampling, sampling_line, settle
from rankfold.generating.options import limits, model_choice

_A_WEEK = 7 * 86400.0
"""Seconds for which the other ranks wait for a person."""


def build_parser() -> CommandLine:
    """Returns the parser with all options."""
    return options.build_parser(__doc__)


def main() -> None:
    arguments = build_parser().parse_args()
    with named_as(arguments.stands_for):
        _check(arguments)
        _chat(with_local_folders(arguments))


def check_ranks(words: list[str], world_size: int) -> None:
    """Refuses arguments that no number of ranks could use; the ranks check their number with the model.

    Raises:
        UserError: an option cannot be used.
    """
    arguments = build_parser().parse_args(words)
    with named_as(arguments.stands_for):
        _check(arguments)


def _check(arguments: argparse.Namespace) -> None:
    settled = argparse.Namespace(**vars(arguments))  # a name on the hub may still become a folder
    settle(settled)
    chosen_sampling(settled)
    model_choice(settled)
    limits(settled)


def _chat(arguments: argparse.Namespace) -> None:
    settle(arguments)
    sampling = chosen_sampling(arguments)
    # imported after the options are known to be sound: torch and transformers take seconds to load
    from engine.distributed.failures import CommunicationError
    from engine.runtime.launch import start, stop
    from engine.telemetry.log import Log
    from rankfold.chatting.talk import check_images, talk
    from rankfold.generating.opened import Opened

    try:
        launch = start(_A_WEEK)
        log = Log(launch.rank)
        check_images(arguments)
        opened = Opened(arguments, launch, log, image="--image" if arguments.image else None, chat=True)
        if opened.reader is None and not opened.tokenizer.has_chat_template:
            raise UserError(
                f"the tokenizer of {arguments.place} has no chat template: give the one that the model was trained "
                "with as --chat-template, or continue plain text with rankfold generate."
            )
        if sampling is None:
            sampling = recommended_sampling(opened.model.folder, arguments.seed)
            if not sampling.greedy:
                log.info(f"generation_config.json of the model: {sampling_line(sampling)}")
        talk(arguments, launch, opened, sampling)
        if arguments.report:
            opened.report()
    except CommunicationError as error:
        raise LostRankError(f"{error}: look at that rank's output, and start again.") from error
    stop()
