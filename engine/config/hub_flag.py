"""The flag `--download` of the tools, and the names on the Hugging Face hub among their arguments."""

from __future__ import annotations

import argparse

from engine.config.hub import Need, local_folder


def add_download(parser: argparse.ArgumentParser, **needs: Need) -> None:
    """Adds the flag.

    Args:
        needs: argument that may be a name on the hub -> the part of the repository that is used.
    """
    parser.add_argument(
        "--download",
        action="store_true",
        help="download models and files that are named as on the Hugging Face hub (OWNER/NAME, or OWNER/NAME@REVISION) "
        "and are not in its cache; without it nothing is downloaded",
    )
    parser.set_defaults(hub_names=needs)


def with_local_folders(arguments: argparse.Namespace) -> argparse.Namespace:
    """Returns parsed arguments with folders in place of names.

    Raises:
        UserError: as `local_folder`.
    """
    found = argparse.Namespace(**vars(arguments))
    for name, need in getattr(arguments, "hub_names", {}).items():
        setattr(found, name, local_folder(getattr(arguments, name), download=arguments.download, need=need))
    return found
