"""The options of a start on several devices: `rankfold train --nproc 8`, taken out of a command's own words.

They have the names of torchrun's options, and their meaning. This module does not import torch, so that a refusal is
quick.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config.command_line import CommandLine
from engine.errors import UserError
from engine.telemetry.torchrun import is_rank

NPROC = "--nproc"
DEVICES = ("gpu", "auto")
GRACE_SECONDS = 300
_LARGEST = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """How the ranks of this machine start, and where they meet those of others.

    Args:
        nproc: ranks on this machine: a number, "gpu" for one per GPU, or "auto" for one per GPU, or per core without
            any.
        nnodes: machines.
        node_rank: this machine's number; the machine with number 0 hosts the rendezvous. None finds out by its name.
        endpoint: HOST:PORT at which the machines meet; None with one machine.
        job: name of the rendezvous, the same on all machines and another for each job that shares an endpoint.
        address: under which others reach this machine; None takes its name.
        max_restarts: times that failed ranks start again.
        grace: seconds that ranks have for a save after a signal, before they are killed.
    """

    nproc: str
    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str | None = None
    job: str = "none"
    address: str | None = None
    max_restarts: int = 0
    grace: int = GRACE_SECONDS


def add_start_options(parser: argparse.ArgumentParser) -> None:
    """Adds the group of these options to a command's parser, for its help: parsing takes them out before."""
    start = parser.add_argument_group(
        "start on several devices", "the options of torchrun, under the same names; leave them out under torchrun"
    )
    start.add_argument(
        NPROC,
        metavar="N",
        help="start N ranks on this machine; gpu: one for each GPU; auto: the same, or one for each core without GPUs",
    )
    start.add_argument(
        "--nnodes", type=int, default=1, metavar="N", help="number of machines; run this command on each"
    )
    start.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="address and port at which they meet, on one of them"
    )
    start.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help="this machine's number, from 0; machine 0 is HOST (default: found by HOST's address)",
    )
    start.add_argument(
        "--rdzv-id",
        default="none",
        metavar="NAME",
        help="name of the job, another for each job that meets at the same endpoint (default none)",
    )
    start.add_argument(
        "--local-addr",
        metavar="HOST",
        help="address at which the other machines reach this one (default: its full name)",
    )
    start.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="how many times failed ranks are restarted (default 0)"
    )
    start.add_argument(
        "--shutdown-timeout",
        type=int,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help=f"time for the save after Ctrl-C or a signal, before ranks are killed (default {GRACE_SECONDS})",
    )


def _parser(command: str) -> CommandLine:
    parser = CommandLine(prog=f"rankfold {command}", add_help=False)
    add_start_options(parser)
    return parser


def start_help() -> str:
    """Returns the paragraph about these options for a help that is no parser's."""
    text = _parser("train").format_help()
    return text[text.index("start on several devices") :]


def take_start_options(
    command: str, words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[StartOptions | None, list[str]]:
    """Takes the options of a start out of a command's words.

    Args:
        command: name of the command, for messages.
        words: its arguments.
        environment: of this process.

    Returns:
        The options, None where --nproc is not given, and the other words in their order.

    Raises:
        UserError: a value cannot be used, an option is given without --nproc, or torchrun has started this process.
    """
    parser = _parser(command)
    flags = set(parser._option_string_actions)
    own: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in flags:
            others.append(word)
            continue
        own.append(word)
        if not equals and (value := next(rest, None)) is not None:
            own.append(value)
    if not own:
        return None, others
    given = parser.parse_args(own)
    if given.nproc is None:
        name = own[0].partition("=")[0]
        raise UserError(f"{name} belongs to {NPROC}, which is not given: add {NPROC} N, the ranks on this machine.")
    if is_rank(environment):
        raise UserError(
            f"{NPROC} is given, but torchrun has started this process already: leave out one of the two launchers."
        )
    options = StartOptions(
        nproc=given.nproc,
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        endpoint=given.rdzv_endpoint,
        job=given.rdzv_id,
        address=given.local_addr,
        max_restarts=given.max_restarts,
        grace=given.shutdown_timeout,
    )
    _check(options)
    return options, others


def _check(options: StartOptions) -> None:
    if options.nproc not in DEVICES and not (options.nproc.isdecimal() and 1 <= int(options.nproc) <= _LARGEST):
        raise UserError(f"{NPROC} is {options.nproc!r}, but a number from 1, gpu or auto is expected: change it.")
    for name, value, least in (
        ("--nnodes", options.nnodes, 1),
        ("--max-restarts", options.max_restarts, 0),
        ("--shutdown-timeout", options.grace, 1),
    ):
        if not least <= value <= 10**6:
            raise UserError(f"{name} is {value}, but {least} to {10**6} is expected: change it.")
    if options.nnodes > 1 and options.endpoint is None:
        raise UserError(
            f"--nnodes is {options.nnodes}, but --rdzv-endpoint is not given: add --rdzv-endpoint HOST:PORT, the first "
            "machine and a free port of it, the same on all machines."
        )
    if options.endpoint is not None and not _is_endpoint(options.endpoint):
        raise UserError(
            f"--rdzv-endpoint is {options.endpoint!r}, but HOST:PORT is expected, such as node0:29400: change it."
        )
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes:
        raise UserError(
            f"--node-rank is {options.node_rank}, but with --nnodes {options.nnodes} a number from 0 to "
            f"{options.nnodes - 1} is expected: change it."
        )


def _is_endpoint(text: str) -> bool:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})", text)
    return found is not None and 0 < int(found[2]) < 65536
