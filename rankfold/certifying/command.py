"""Trains a few steps under two layouts and reports whether they compute the same.

Compares a run's own layout with others: the loss, each gradient after its reduction and before clipping, and each
trained parameter, put together from all ranks' pieces under their logical names; and copies of one tensor on several
ranks with each other. Reports how far they deviate, and which tensor is the first beyond the limit, in the order of the
forward pass at the first step at which there is one. Ends with status 0 when all is within the limit, else 1.

The command starts the ranks itself: on GPUs where there is one for each, else on the CPU. The run starts from the
base, whatever checkpoints there are; its learning rate is constant, at most 2e-4, and Adam's eps is raised, so that
rounding does not grow from step to step. Factors of fresh adapters that start at zero are drawn, because the gradient
of the other factor would vanish. CUDA graphs are switched off. Each rank's gradients and fp32 masters are in the
temporary folder until the command ends. bfloat16 hides small faults in its rounding: --dtype float32 shows them.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.hub_flag import add_download
from engine.errors import UserError
from engine.files.durable import write_named
from engine.telemetry.output import say

if TYPE_CHECKING:
    from engine.config.run import RunConfig
    from rankfold.certifying.report import Certificate

FINE, COARSE = 5e-5, 0.2
"""Limits where everything is float32, and where anything is rounded more coarsely. Measured in correct layouts, on 2 to
4 ranks, over 5 steps of models of 5 and 32 layers: up to 1.2e-5 and up to 0.11, most in the gradients of queries and
keys, which are small differences of large numbers. For comparison: one product in TF32 rounds by 2^-11 = 5e-4, and a
gradient that lacked the sum over two ranks was off by 0.8."""

STANDS_FOR: dict[str, str] = {}
"""The command's errors name the configuration that it reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifyOptions:
    """The options of this command; see `add_arguments`.

    Raises:
        UserError: a number out of its range, or a file that cannot be written.
    """

    config: Path
    against: tuple[str, ...] = ()
    data: int = 1
    steps: int = 5
    limit: float | None = None
    dtype: str | None = None
    json: Path | None = None
    download: bool = False

    def __post_init__(self) -> None:
        for name, value in (("data", self.data), ("steps", self.steps)):
            if value < 1:
                raise UserError(f"--{name} is {value}: give at least 1.")
        if self.limit is not None and not (math.isfinite(self.limit) and self.limit > 0):
            raise UserError(f"--limit is {self.limit:g}: give a number above 0, such as 5e-5.")
        if self.json is not None and (self.json.is_dir() or not self.json.absolute().parent.is_dir()):
            raise UserError(f"--json {self.json} cannot be written: give the path of a file in a folder that exists.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="run file, as for rankfold train")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="KEY=VALUE,..",
        help="the other layout: its differences from the run's, a key being section.option, an option of "
        "parallel, or data for the number of data-parallel copies; may be given several times (default: one process)",
    )
    parser.add_argument(
        "--data", type=int, default=1, metavar="N", help="data-parallel copies of the model (default 1)"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps (default 5)")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="RATIO",
        help=f"largest relative deviation (default {FINE:g}, or {COARSE:g} where a dtype is coarser than float32)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="precision to compute in, instead of model.dtype"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write every deviation to")
    add_download(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints the certificate.

    Raises:
        UserError: a layout that does not fit, or a run that cannot work.
        SystemExit: with status 1, when a layout deviates.
    """
    given = {item.name: getattr(arguments, item.name) for item in fields(CertifyOptions)}
    options = CertifyOptions(**{**given, "against": tuple(arguments.against)})
    certificate = certify(options)
    print(certificate.text(), flush=True)
    if options.json is not None:
        _write(options.json, json.dumps(certificate.record(), indent=2) + "\n")
    if not certificate.certified:
        raise SystemExit(1)


def certify(options: CertifyOptions, worker: Path | None = None) -> Certificate:
    """Runs the layouts one after the other and compares them.

    Args:
        options: of the command.
        worker: the script that each rank runs, instead of worker.py.

    Raises:
        UserError: a layout that does not fit, or a run that cannot work.
        RuntimeError: ranks failed.
    """
    # torch takes seconds to load; --help does not need it
    from engine.runtime.launch import world_size_from_environment
    from rankfold.certifying.compare import Recorded, compare
    from rankfold.certifying.layouts import check_comparable, one_process, other_layout, own_layout
    from rankfold.certifying.ranks import WORKER, choose_device, run_layout
    from rankfold.certifying.report import Certificate

    if world_size_from_environment() > 1:
        raise UserError("certify runs under torchrun, but it starts its ranks itself: start it with python alone.")
    more = {"dtype": options.dtype, "download": options.download}
    own = own_layout(options.config, options.data, **more)
    others = [other_layout(options.config, options.data, text, **more) for text in options.against]
    others = others or [one_process(own)]
    trained = check_comparable(own, others)
    layouts = [own, *others]
    device = choose_device(max(layout.num_ranks for layout in layouts))
    limit = options.limit or max(_limit(layout.config) for layout in layouts)
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        recorded = []
        for place, layout in enumerate(layouts):
            own_folder = Path(folder, str(place))
            own_folder.mkdir()
            recording = run_layout(
                layout, own_folder, steps=options.steps, device=device, say=say, worker=worker or WORKER
            )
            recorded.append(Recorded(layout, recording))
        proof = recorded[0].recording.proof()
        comparisons = compare(recorded[0], recorded[1:], trained, steps=options.steps, limit=limit)
    return Certificate(
        layout=own,
        steps=options.steps,
        limit=limit,
        device=device,
        trained=trained,
        comparisons=comparisons,
        proof=proof,
    )


def _write(path: Path, text: str) -> None:
    try:
        with write_named(path) as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror}): give another path.") from None


def _limit(config: RunConfig) -> float:
    is_fine = config.model.dtype == "float32" and config.memory.activation_dtype is None
    return FINE if is_fine else COARSE
