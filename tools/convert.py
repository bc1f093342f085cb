"""Converts checkpoints: import a Hugging Face model, export a model or an adapter, look into either.

python tools/convert.py import --source HF_DIR --out CKPT_DIR --tensor 2
python tools/convert.py export --source RUN_DIR --out ADAPTER_DIR --format peft
python tools/convert.py export --source RUN_DIR --out HF_DIR --format hf --merge
python tools/convert.py export --source CKPT_DIR --out HF_DIR --format hf
python tools/convert.py inspect DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.telemetry.errors import run_command


def build_parser() -> argparse.ArgumentParser:
    """The command line; needs no torch, so that --help is quick."""
    parser = argparse.ArgumentParser(
        prog="convert.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    importing = commands.add_parser("import", help="partition a Hugging Face model for tensor parallelism")
    importing.add_argument("--source", required=True, type=Path, help="Hugging Face folder, or a partitioned base")
    importing.add_argument("--out", required=True, type=Path, help="folder to make")
    importing.add_argument("--tensor", type=int, default=1, help="number of partitions (default 1)")
    importing.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")

    exporting = commands.add_parser("export", help="give back a PEFT adapter or a Hugging Face model")
    exporting.add_argument("--source", required=True, type=Path, help="folder of a run, of a checkpoint, or of a base")
    exporting.add_argument("--out", required=True, type=Path, help="folder to make")
    exporting.add_argument("--format", required=True, choices=("peft", "hf"), help="an adapter, or a whole model")
    exporting.add_argument("--merge", action="store_true", help="with hf: put trained adapters into the weights")
    exporting.add_argument("--base", type=Path, help="the base of a run, where it has moved")
    exporting.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    exporting.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="with hf: largest weight file, in GB (default 5)"
    )
    exporting.add_argument("--overwrite", action="store_true", help="replace an existing model or adapter")

    inspecting = commands.add_parser("inspect", help="say what a folder holds")
    inspecting.add_argument("folder", type=Path, help="a run, a checkpoint, or a model")
    inspecting.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    inspecting.add_argument("--verify", action="store_true", help="read every piece and check its checksum")
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    # Imported after the command line is known to be sound: torch takes seconds to load.
    from engine.checkpoint import commands

    if arguments.command == "import":
        commands.run_import(arguments.source, arguments.out, tensor=arguments.tensor, overwrite=arguments.overwrite)
    elif arguments.command == "export":
        commands.run_export(
            arguments.source,
            arguments.out,
            form=arguments.format,
            merge=arguments.merge,
            base=arguments.base,
            step=arguments.step,
            max_shard_bytes=int(arguments.max_shard_gb * 1e9),
            overwrite=arguments.overwrite,
        )
    else:
        commands.run_inspect(arguments.folder, step=arguments.step, verify=arguments.verify)


if __name__ == "__main__":
    run_command(main)
