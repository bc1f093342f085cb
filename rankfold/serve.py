"""Serves a model to clients that train and sample adapters on it, by the protocol of the Tinker SDK.

rankfold serve --model HF_DIR --port 8000
rankfold serve --model HF_DIR --tensor 2 --pipeline 2    # on four devices of this machine
torchrun --nnodes 2 --nproc-per-node 8 ... -m rankfold serve --model HF_DIR --tensor 8    # on two machines

Clients need the address and a key: TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=KEY python recipe.py. The keys
are those in RANKFOLD_SERVE_KEYS, separated by commas, or one that is printed at the start. Everything acknowledged is
kept in the folder --state: a server that ended, for whatever reason, resumes from there. http://127.0.0.1:8000/ is a
page that shows clients, queues, tokens and memory, and /metrics has them for Prometheus. Both ask for
RANKFOLD_SERVE_WATCH_KEY, or for the key that is printed at the start.
"""

from __future__ import annotations

import argparse
import math
import os
from importlib.util import find_spec
from pathlib import Path

from engine.choices import BASE_DTYPES
from engine.config.command_line import CommandLine, named_as
from engine.config.hub_flag import add_download, with_local_folders
from engine.config.lora import LoraOptions
from engine.config.model import DTYPES, KERNELS, ModelOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_expert_layout, check_layout
from engine.config.run import RunConfig
from engine.config.units import read_gib, read_length
from engine.errors import UserError
from engine.files import platforms

_KEYS, _WATCH_KEY = "RANKFOLD_SERVE_KEYS", "RANKFOLD_SERVE_WATCH_KEY"
STANDS_FOR = {
    "model.path": "--model", "model.dtype": "--dtype", "model.base_dtype": "--base-dtype",
    "model.kernels": "--kernels", "parallel.tensor": "--tensor", "parallel.pipeline": "--pipeline",
    "parallel.context": "--context", "parallel.expert": "--expert",
}  # fmt: skip
"""Option of a run -> the flag; see `engine.config.command_line`."""


def build_parser() -> CommandLine:
    """Returns the parser with all options."""
    parser = CommandLine(description=__doc__, stands_for=STANDS_FOR)
    _add_model(parser.add_argument_group("model"))
    add_download(parser, model="model")
    _add_server(parser.add_argument_group("server"))
    _add_limits(parser.add_argument_group("limits of each key"))
    layout = parser.add_argument_group("layout; the server starts as many ranks on this machine, unless torchrun does")
    layout.add_argument("--tensor", type=int, default=1, metavar="N", help="ranks that share each layer (default 1)")
    layout.add_argument("--pipeline", type=int, default=1, metavar="N", help="ranks that share the layers (default 1)")
    layout.add_argument(
        "--context", type=int, default=1, metavar="N", help="ranks that share each row of tokens (default 1)"
    )
    layout.add_argument(
        "--data",
        type=int,
        metavar="N",
        help="copies of the model, which share the rows (default 1; under torchrun all ranks left)",
    )
    layout.add_argument(
        "--expert",
        type=int,
        default=1,
        metavar="N",
        help="ranks over which the experts of a mixture are divided (default 1)",
    )
    return parser


def _add_model(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face folder, its name on the hub, or a partitioned base",
    )
    model.add_argument("--name", help="a name of the base that clients may give in place of DIR (default: none)")
    model.add_argument("--dtype", choices=DTYPES, help="precision of weights and arithmetic (default float32)")
    model.add_argument("--base-dtype", choices=BASE_DTYPES, help="store the linears of the layers in fewer bits")
    model.add_argument("--kernels", choices=KERNELS, default="auto", help="backend of the ops (default auto)")
    model.add_argument(
        "--tokens",
        type=read_length,
        default=4096,
        metavar="N",
        help="maximum number of tokens in a micro-batch, which rows of several clients share (default 4096)",
    )
    model.add_argument(
        "--slots", type=int, default=16, metavar="N", help="completions that are sampled at the same time (default 16)"
    )
    model.add_argument(
        "--resident",
        type=read_gib,
        metavar="GIB",
        help="device memory for adapters and their optimizers, as 8 or 8GiB; the others wait in files and come back "
        "unchanged (default: a quarter of the memory that the base leaves free)",
    )


def _add_server(server: argparse._ArgumentGroup) -> None:
    server.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine alone). There is no TLS here: put a proxy in front "
        "before others reach it",
    )
    server.add_argument(
        "--state", type=Path, default=Path("served"), metavar="DIR", help="the server's folder (default served)"
    )
    server.add_argument(
        "--session-hours",
        type=float,
        default=24.0,
        metavar="HOURS",
        help="hours without a request after which a session ends and its models are unloaded (default 24)",
    )


def _add_limits(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument("--models", type=int, default=16, metavar="N", help="models at the same time (default 16)")
    limits.add_argument(
        "--key-tokens",
        type=read_length,
        default=64 << 20,
        metavar="N",
        help="tokens in requests that wait to be executed (default 64M)",
    )
    limits.add_argument(
        "--key-disk",
        type=read_gib,
        metavar="GIB",
        help="disk space for models and saved weights, as 100GiB (default: no limit)",
    )


def main() -> None:
    arguments = build_parser().parse_args()
    platforms.require_posix("rankfold serve")
    with named_as(STANDS_FOR):
        _serve(arguments)


def _layout(arguments: argparse.Namespace) -> tuple[ParallelOptions, int]:
    """Returns the layout, and its number of ranks.

    Raises:
        UserError: there can be no such layout, or torchrun has started another number of ranks.
    """
    parallel = ParallelOptions(
        tensor=arguments.tensor, pipeline=arguments.pipeline, context=arguments.context, expert=arguments.expert
    )
    if arguments.data is not None and arguments.data < 1:
        raise UserError(f"--data is {arguments.data}, but 1 or more is expected: change it.")
    ranks = parallel.model_parallel_size * (arguments.data or 1)
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started:
        if arguments.data is not None and ranks != started:
            raise UserError(
                f"the layout has {ranks} ranks, but torchrun has started {started}: leave --data out, or change "
                "--nproc-per-node."
            )
        ranks = started
    config = RunConfig(model=ModelOptions(path=str(arguments.model)), lora=LoraOptions(rank=1), parallel=parallel)
    check_layout(config, ranks)
    check_expert_layout(config, ranks)
    return parallel, ranks


def _serve(arguments: argparse.Namespace) -> None:
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise UserError(f"rankfold serve needs {package}, which is not installed: pip install 'rankfold[serve]'.")
    for name, low, high in (("port", 1, 65535), ("slots", 1, 1024), ("models", 1, 4096)):
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise UserError(f"--{name} is {value}, but {low} to {high} is expected: change it.")
    for name in ("resident", "key_disk"):
        size = getattr(arguments, name)
        if size is not None and not 0 <= size < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {size:g}, but a size of 0 or more is expected: change it.")
    if arguments.key_tokens < 1:
        raise UserError(f"--key-tokens is {arguments.key_tokens}, but 1 or more is expected: change it.")
    if not 0.05 <= arguments.session_hours < math.inf:
        raise UserError(
            f"--session-hours is {arguments.session_hours:g}, but 0.05 or more is expected, as clients are heard "
            "every ten seconds: change it."
        )
    from engine.runtime.secrets import secret, take_secret
    from rankfold.serving.exchange import ServedModel
    from rankfold.serving.folder import ServerFolder
    from rankfold.serving.server import Address, run_server
    from rankfold.serving.service import Limits

    given = str(arguments.model)
    arguments = with_local_folders(arguments)
    take_secret(_KEYS)
    take_secret(_WATCH_KEY)
    parallel, ranks = _layout(arguments)
    names = list(dict.fromkeys(one for one in (arguments.name, given, str(arguments.model)) if one is not None))
    model = ServedModel(
        path=arguments.model,
        name=names[0],
        dtype=arguments.dtype or "float32",
        base_dtype=arguments.base_dtype,
        kernels=arguments.kernels,
        tokens=arguments.tokens,
        slots=arguments.slots,
        resident=arguments.resident,
        parallel=parallel,
        ranks=ranks,
    )
    if os.environ.get("RANK", "0") != "0":
        from rankfold.serving.rank_process import follow

        return follow(model, ServerFolder(arguments.state, makes=False))
    run_server(
        model,
        arguments.state,
        Address(host=arguments.host, port=arguments.port),
        names,
        secret(_KEYS),
        Limits(
            models=arguments.models,
            tokens=arguments.key_tokens,
            disk_bytes=math.inf if arguments.key_disk is None else arguments.key_disk * 2**30,
            session_seconds=3600 * arguments.session_hours,
        ),
        watch_key=secret(_WATCH_KEY),
    )
