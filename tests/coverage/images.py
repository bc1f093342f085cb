"""Runs every type of transformers that sees images, or those named, and writes docs/models_images.json and its page.

    python -m tests.coverage.images [TYPE ...]

Each runs in processes of its own, with limits of time and memory.
"""

from __future__ import annotations

import argparse
import sys

import torch
import transformers

from engine.adopted.structure import image_types
from tests.coverage.apart import run_apart
from tests.coverage.image_checks import images_in_one_process, images_on_spread_weights
from tests.coverage.image_page import JSON, page
from tests.coverage.page import keep


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage.images")
    parser.add_argument("types", nargs="*")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    images_in_one_process("llava")  # imports what each child would import by itself
    for model_type in asked.types or sorted(image_types()):
        found = run_apart(images_in_one_process, model_type)
        if "autograd" in found:
            ran = run_apart(images_on_spread_weights, model_type, ranks=2)
            found["spread"] = ran.get("spread") or ran["failed"]
        keep(model_type, found, JSON, page)


if __name__ == "__main__":
    sys.exit(main())
