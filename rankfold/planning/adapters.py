"""Predicts how many adapters fit beside one base on a GPU, and how fast they train together.

For rankfold serve, and for rankfold train with a list of runs: the base is there once, and each adapter has its
weights, masters, gradients and moments there. Prints for several ranks what an adapter takes and how many fit, and for
--adapters of --rank the peak and the time of a round, a step of each, beside the time that they would take one after
the other. All figures are predictions, on one GPU; nothing is measured.
"""

from __future__ import annotations

import argparse

from engine.choices import RECOMPUTE_LEVELS
from engine.config.hub_flag import add_download
from engine.config.model import DTYPES
from engine.config.paths import path_text
from engine.config.units import read_gib, read_length
from engine.errors import UserError
from rankfold.planning.memory import BASES, RESERVE

STANDS_FOR = {
    "model.path": "--model", "model.dtype": "--dtype", "model.base_dtype": "--base-dtype",
    "model.kernels": "--kernels", "data.seq_length": "--seq-length", "lora.rank": "--rank",
    "lora.targets": "--targets", "memory.recompute": "--recompute",
}  # fmt: skip
"""Option of a run -> the flag; see `engine.config.command_line`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add_download(parser, model="config")
    parser.add_argument(
        "--model",
        type=path_text,
        required=True,
        metavar="PATH",
        help="folder of a model, its name on the hub, or its config.json",
    )
    parser.add_argument("--adapters", type=int, default=64, metavar="N", help="adapters on the base (default 64)")
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="of each (default 16)")
    parser.add_argument(
        "--targets", metavar="NAME,..", help="modules with an adapter (default: all linears of a layer)"
    )
    parser.add_argument("--rows", type=int, default=8, metavar="ROWS", help="rows of an adapter's step (default 8)")
    parser.add_argument(
        "--seq-length", type=read_length, default=1024, metavar="TOKENS", help="length of a row (default 1024)"
    )
    parser.add_argument(
        "--tokens",
        type=read_length,
        default=4096,
        metavar="TOKENS",
        help="maximum number of tokens in a micro-batch, which rows of one adapter fill before those of others; as "
        "--tokens of rankfold serve, and joined_tokens of a list of runs (default 4096)",
    )
    parser.add_argument(
        "--gpu-memory", type=read_gib, default=80.0, metavar="GIB", help="memory of the GPU, as 80 or 80GB (default 80)"
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=RESERVE,
        metavar="PERCENT",
        help=f"share of it that stays free (default {RESERVE:g})",
    )
    parser.add_argument(
        "--machine", metavar="NAME", help="speeds to assume, as of rankfold plan memory (default: by --gpu-memory)"
    )
    parser.add_argument("--speeds", type=path_text, metavar="FILE", help="measured speeds, as of rankfold plan memory")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of training (default bfloat16)")
    parser.add_argument("--base-dtype", metavar="NAME", help=f"how the base is stored: {BASES} (default --dtype)")
    parser.add_argument("--kernels", default="auto", help="backend of the ops, as model.kernels (default auto)")
    parser.add_argument(
        "--recompute",
        default="selective",
        choices=RECOMPUTE_LEVELS,
        help="what backward recomputes (default selective, as of rankfold serve)",
    )
    parser.add_argument("--json", type=path_text, metavar="FILE", help="also write the answer to this file, as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Prints the answer.

    Raises:
        UserError: options that do not go together, or a model that cannot be read.
    """
    for name in ("adapters", "rank", "rows", "seq_length", "tokens"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: give at least 1.")
    if not 0 < arguments.gpu_memory < float("inf") or not 0 <= arguments.reserve < 100:
        raise UserError(
            f"--gpu-memory is {arguments.gpu_memory:g} and --reserve is {arguments.reserve:g}: give a memory above 0 "
            "GiB and a reserve from 0 to below 100 percent."
        )
    from rankfold.planning import answer_record
    from rankfold.planning.adapters_answer import answer, record, report

    found = answer(arguments)
    if arguments.json is not None:
        answer_record.write(arguments.json, record(found))
    print(report(found))
