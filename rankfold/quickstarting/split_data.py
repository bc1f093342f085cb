"""Splits your own records: most to train on, a few held out for the evaluation.

    python -m rankfold.quickstarting.split_data --data FILE.jsonl --out FOLDER

Every tenth record, at most 200 of them, goes to FOLDER/validation.jsonl, the others to FOLDER/train.jsonl. Lines are
copied as they are; their fields are looked at later, by the trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.config.command_line import CommandLine

EVERY, MOST = 10, 200


def main() -> None:
    parser = CommandLine(description="Split records into a training and a validation part.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    lines = [line for line in arguments.data.read_bytes().splitlines() if line.strip()]
    if len(lines) < 2:
        sys.exit(
            f"error: {arguments.data} has {len(lines)} records: give at least 2, one to train on and one to hold out."
        )
    every = max(min(EVERY, len(lines)), len(lines) // MOST)
    held_out = range(every - 1, len(lines), every)[:MOST]
    parts = {
        "validation": [lines[index] for index in held_out],
        "train": [line for index, line in enumerate(lines) if index not in held_out],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (arguments.out / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in part))
    print(f"records: {len(parts['train'])} to train on, {len(parts['validation'])} held out")


if __name__ == "__main__":
    main()
