"""Converts checkpoints: imports Hugging Face models, exports models and adapters, merges, reshards, inspects. Converts
configurations too: files, command lines and scripts of other trainers (TRL, PEFT, LLaMA-Factory, Axolotl, Megatron-LM,
accelerate, DeepSpeed).

rankfold convert import --source HF_DIR --out CKPT_DIR --tensor 2
rankfold convert reshard --source CKPT_DIR --out OTHER_DIR --tensor 4
rankfold convert export --source RUN_DIR --out ADAPTER_DIR --format peft
rankfold convert export --source RUN_DIR --out HF_DIR --format hf --merge
rankfold convert export --source CKPT_DIR --out HF_DIR --format hf
rankfold convert export --source RUN_DIR --out ADAPTER_DIR --format peft --push OWNER/NAME
rankfold convert merge --base HF_DIR --adapter ADAPTER_DIR --out MERGED_DIR
rankfold convert inspect DIR
rankfold convert config accelerate.yaml --flags "--lora_r 16 --max_steps 1024" --out run.yaml
rankfold convert config --flags "trl sft --model_name_or_path MODEL --use_peft" --out run.yaml

If a conversion is interrupted, the same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from engine.choices import (
    ADAPTER_FORMS,
    ADAPTER_READERS,
    ENCODED,
    EXPORT_DTYPES,
    IMPLEMENTATIONS,
    QUANT_METHODS,
)
from engine.config.command_line import CommandLine, named_as
from engine.config.hub_flag import add_download, with_local_folders
from engine.config.hub_push import add_push, check_push, push_of, upload
from engine.config.paths import path_text
from engine.config.units import read_gb, read_step
from engine.conversion.prefetch import start_reading
from engine.errors import UserError

if TYPE_CHECKING:
    from engine.conversion.commands import Options
    from engine.conversion.low_precision.export import LowOptions

_OWN_VALIDATION = "validation"
"""Stands for the run's own data.validation after --evaluate; a file of that name is ./validation."""
_LOW = ("quant_method", "calibrate", "evaluate")
_TENSOR = {"parallel.tensor": "--tensor"}
_MERGE = {"model.path": "--base", "model.base_dtype": "--base-dtype", "lora.init_from": "--adapter"}


def build_parser(command: str | None = None) -> CommandLine:
    """Builds the command line; needs no torch, so that --help is quick.

    Args:
        command: leaves out the options of `config` where it is another one, since they need all trainers' tables; None
            for a parser of all commands.
    """
    parser = CommandLine(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    importing = commands.add_parser(
        "import", help="partition a Hugging Face model for tensor parallelism", stands_for=_TENSOR
    )
    importing.add_argument("--source", required=True, type=Path, help="Hugging Face folder, or a partitioned base")
    importing.add_argument("--tensor", type=int, default=1, help="number of partitions (default 1)")
    importing.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        default="auto",
        help="layers to train the model with: the engine's (native), or transformers' (adopted); auto, the default, "
        "takes the engine's for families that it has",
    )
    _add_common(importing)
    add_download(importing, source="model")

    resharding = commands.add_parser(
        "reshard", help="repartition a base for another number of ranks", stands_for=_TENSOR
    )
    resharding.add_argument("--source", required=True, type=Path, help="a partitioned base")
    resharding.add_argument("--tensor", required=True, type=int, help="number of partitions")
    _add_common(resharding)
    add_download(resharding, source="model")

    exporting = commands.add_parser("export", help="write a PEFT adapter or a Hugging Face model")
    exporting.add_argument("--source", required=True, type=Path, help="folder of a run, of a checkpoint, or of a base")
    exporting.add_argument("--format", required=True, choices=("peft", "hf"), help="an adapter, or a whole model")
    exporting.add_argument("--merge", action="store_true", help="with hf: merge trained adapters into the weights")
    add_run_options(exporting)
    add_model_options(exporting)
    _add_common(exporting)
    add_download(exporting, source="model", base="model")
    add_push(exporting)

    merging = commands.add_parser("merge", help="merge a PEFT adapter into the weights of its base", stands_for=_MERGE)
    merging.add_argument("--base", required=True, type=Path, help="Hugging Face folder, or a partitioned base")
    merging.add_argument("--adapter", required=True, type=Path, help="folder of a PEFT LoRA adapter")
    merging.add_argument(
        "--base-dtype",
        choices=ENCODED,
        help="encoding of the base when the adapter was trained: merge into the weights as it rounds them",
    )
    add_model_options(merging)
    _add_common(merging)
    add_download(merging, base="model", adapter="adapter")
    add_push(merging)

    inspecting = commands.add_parser("inspect", help="show what a run, checkpoint, model or adapter holds")
    inspecting.add_argument("folder", type=Path, help="a run, a checkpoint, a model, or a PEFT adapter")
    inspecting.add_argument(
        "--step", type=read_step, help="checkpoint of a run: its step, or best (default: the newest)"
    )
    inspecting.add_argument("--verify", action="store_true", help="read every piece and check its checksum")
    add_download(inspecting, folder="either")

    configuring = commands.add_parser("config", help="turn another trainer's files and flags into a run file")
    if command in (None, "config"):
        from rankfold.migrating.command import add_arguments

        add_arguments(configuring)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, help="folder to create")
    add_work_options(parser)


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options on how a conversion works."""
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model, adapter or checkpoint")
    parser.add_argument("--verify", action="store_true", help="read everything back from the disk and compare")
    parser.add_argument("--threads", type=int, help="threads that read and write (default: two per core, at most 8)")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options on what is exported of a run."""
    parser.add_argument("--base", type=Path, help="folder of the run's base model, if it has moved")
    parser.add_argument(
        "--base-name",
        metavar="NAME",
        help="of an adapter: name of the base written into it, such as OWNER/NAME on the hub",
    )
    parser.add_argument(
        "--adapter-form",
        choices=ADAPTER_FORMS,
        help="for the experts of a mixture: the factors of each expert separately (default; read by PEFT and vLLM), "
        "stacked as target_parameters (PEFT), or shared factors once (SGLang, vLLM if an option says so)",
    )
    parser.add_argument(
        "--reader",
        choices=ADAPTER_READERS,
        help="program that will read the adapter; a form that it cannot read is refused",
    )
    parser.add_argument("--step", type=read_step, help="checkpoint of a run: its step, or best (default: the newest)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options on how a model is written."""
    parser.add_argument(
        "--max-shard-gb", type=read_gb, default=5.0, help="largest weight file, such as 5 or 5GB (default 5)"
    )
    parser.add_argument(
        "--fused",
        choices=("keep", "split", "qkv", "all"),
        default="keep",
        help="how to store query, key and value, and gate and up: as the base does (default), all separately, query, "
        "key and value as one qkv_proj, or both fused",
    )
    parser.add_argument(
        "--stored-base",
        action="store_true",
        help="merge into the stored weights even if the base was encoded in training (default: into the weights as "
        "encoding rounded them, which is the model that was trained)",
    )
    parser.add_argument("--no-proof", action="store_true", help="do not compare logits with stock transformers or PEFT")
    parser.add_argument(
        "--dtype",
        choices=EXPORT_DTYPES,
        help="of a whole model: store the layers' linears in few bits, or (stored) as the base has them; default: "
        "numbers of 16 or 32 bits, like the base's",
    )
    parser.add_argument(
        "--quant-method",
        choices=QUANT_METHODS,
        help="with --dtype fp8_block: name tensors as compressed-tensors does (default), or as DeepSeek and Qwen do "
        "(fp8)",
    )
    parser.add_argument(
        "--calibrate",
        type=int,
        metavar="N",
        help="with --dtype, of a run: choose scales by the linears' inputs on the first N rows of its training data "
        "(default: by the largest number of each block)",
    )
    parser.add_argument(
        "--evaluate",
        type=path_text,
        metavar="FILE",
        help="with --dtype, of a run: say the loss before and after rounding, on these records; validation stands for "
        "the run's own data.validation",
    )


def main() -> None:
    arguments = build_parser("".join(sys.argv[1:2])).parse_args()
    with named_as(arguments.stands_for):
        _carry_out(with_local_folders(arguments))


def _carry_out(arguments: argparse.Namespace) -> None:
    if arguments.command == "config":
        from rankfold.migrating.command import run

        run(arguments)
        return
    push = push_of(arguments) if "push" in arguments else None
    if push is not None:
        check_push(push)
    if arguments.command != "inspect":
        start_reading([arguments.base if arguments.command == "merge" else arguments.source])
    # Imported after the command line is known to be sound: torch takes seconds to load.
    if arguments.command == "inspect":
        from engine.conversion.inspection import run_inspect

        run_inspect(arguments.folder, step=arguments.step, verify=arguments.verify)
        return
    from engine.conversion import commands

    out, options = arguments.out, work_options(arguments)
    if arguments.command == "import":
        commands.run_import(
            arguments.source, out, tensor=arguments.tensor, options=options, implementation=arguments.implementation
        )
    elif arguments.command == "reshard":
        commands.run_reshard(arguments.source, out, tensor=arguments.tensor, options=options)
    elif arguments.command == "merge":
        commands.run_merge(arguments.base, arguments.adapter, out, base_dtype=arguments.base_dtype, options=options)
    else:
        commands.run_export(
            arguments.source,
            out,
            form=arguments.format,
            merge=arguments.merge,
            base=arguments.base,
            step=arguments.step,
            options=options,
            base_name=arguments.base_name,
            adapter_form=arguments.adapter_form,
            reader=arguments.reader,
            download=arguments.download,
            for_hub=push is not None,
        )
    if push is not None:
        upload(out, push)


def work_options(arguments: argparse.Namespace) -> Options:
    """Returns the options of a conversion.

    Raises:
        UserError: a value cannot be used.
    """
    from engine.conversion.commands import Options

    model = {}
    if "fused" in arguments:
        if not isfinite(arguments.max_shard_gb):
            raise UserError(
                f"--max-shard-gb is {arguments.max_shard_gb}, but a number above 0 is expected: use e.g. 5."
            )
        model = {
            "max_shard_bytes": int(arguments.max_shard_gb * 1e9),
            "fusing": arguments.fused,
            "proof": not arguments.no_proof,
            "stored_base": arguments.stored_base,
            "low": _low_options(arguments),
        }
    return Options(overwrite=arguments.overwrite, verify=arguments.verify, threads=arguments.threads, **model)


def _low_options(arguments: argparse.Namespace) -> LowOptions | None:
    """Returns the options of an export in few bits; None for one in numbers.

    Raises:
        UserError: options do not fit each other.
    """
    given = [f"--{name.replace('_', '-')}" for name in _LOW if getattr(arguments, name) is not None]
    if arguments.dtype is None:
        if given:
            raise UserError(f"{given[0]} is for an export in few bits: give --dtype too, or leave it out.")
        return None
    if arguments.dtype == "stored" and "--calibrate" in given:
        raise UserError(
            "--calibrate chooses scales, and --dtype stored keeps those of the base: leave one of them out."
        )
    if arguments.calibrate is not None and arguments.calibrate < 1:
        raise UserError(f"--calibrate is {arguments.calibrate}, but at least 1 row is expected: use for example 128.")
    from engine.conversion.low_precision.export import LowOptions
    from engine.training.run_rows import RunRows

    own = arguments.evaluate == _OWN_VALIDATION
    return LowOptions(
        dtype=arguments.dtype,
        method=arguments.quant_method,
        calibrate=arguments.calibrate or 0,
        evaluates=arguments.evaluate is not None,
        evaluation=None if own or arguments.evaluate is None else Path(arguments.evaluate),
        reads=RunRows.recorded,
    )
