"""The paths that name a token store: a folder with a manifest, or Megatron's pair of files."""

from __future__ import annotations

from pathlib import Path

MANIFEST = "manifest.json"
"""The file that makes a folder a store."""


def is_store(path: str | Path) -> bool:
    """Returns whether `path` is a token store, one of Megatron's two files, or their common prefix."""
    path = Path(path)
    return (path / MANIFEST).is_file() or pair_of(path) is not None


def pair_of(path: Path) -> tuple[Path, Path] | None:
    """Returns the `.bin` and the `.idx` that `path` names: one of them, or their common prefix; None where
    neither exists."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    if prefix == path:
        return pair if all(file.is_file() for file in pair) else None
    return pair if path.is_file() else None
