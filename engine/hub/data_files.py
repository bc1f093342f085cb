"""Which files of a data set's repository are a split, as the `datasets` library decides it.

The library resolves subsets, splits and patterns of a data set's card against files of this machine. So it gets a
skeleton of the repository: every listed file, empty, and the card itself. Nothing is asked of the hub, and the answer
is the same offline as online.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.durable import write_durably
from engine.files.refusals import writing
from engine.hub.cache import CachedRepo
from engine.hub.data_names import DataName
from engine.hub.listing import Listing, RemoteFile

CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files from which the library reads subsets and splits."""
_PLAIN = (".jsonl", ".json", ".parquet", ".csv")


def note_listing(cached: CachedRepo, listing: Listing) -> None:
    """Keeps a listing in the cache, for offline use."""
    path = _note(cached, listing.commit)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    files = {file.path: [file.size, file.digest] for file in listing.files.values()}
    write_durably(path, json.dumps(files))


def noted_listing(cached: CachedRepo, commit: str) -> Listing | None:
    """Returns the listing of a commit that was kept; None where there is none."""
    try:
        found = json.loads(_note(cached, commit).read_text(encoding="utf-8"))
        files = {path: RemoteFile(path, size, digest) for path, (size, digest) in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return Listing(cached.repo, commit, files, "dataset")


def _note(cached: CachedRepo, commit: str) -> Path:
    return cached.folder / "rankfold" / f"{commit}.json"


def require_library() -> None:
    """Raises UserError where the `datasets` library is not installed."""
    if find_spec("datasets") is None:
        raise UserError(
            "data sets on the hub need datasets, which is not installed: pip install 'rankfold[hub]', or save the "
            "split as a JSONL file."
        )


@contextmanager
def opened_split(listing: Listing, cached: CachedRepo, name: DataName) -> Iterator[tuple[Any, list[str]]]:
    """Opens a split with the library.

    Args:
        listing: of the data set's repository, whose cards are in the cache.

    Yields:
        The library's builder, and the paths of the split's files in the repository, in order.

    Raises:
        UserError: there is no such subset or split, or the card names files that the repository lacks.
    """
    with tempfile.TemporaryDirectory(prefix="rankfold-hub-") as folder:
        root = Path(folder).resolve() / "data"
        for path in listing.files:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        for card in CARDS:
            if card in listing.files:
                shutil.copyfile(cached.snapshot_of(listing.commit) / card, root / card)
        builder = _builder(root, Path(folder) / "cache", name)
        splits = builder.config.data_files or {}
        if name.split not in splits:
            raise UserError(
                f"{name.repo} has no split {name.split}{'' if name.subset is None else f' in {name.subset}'}, but "
                f"{', '.join(map(str, splits))}: write for example ?split={next(iter(splits), 'train')}."
            )
        paths = []
        for path in map(str, splits[name.split]):
            inside = Path(path).resolve().relative_to(root).as_posix() if Path(path).is_relative_to(root) else None
            if inside not in listing.files:
                raise UserError(f"the card of {name.repo.repo} names {path!r}, which is no file of it: it is not read.")
            paths.append(str(inside))
        yield builder, paths


def is_plain(builder: Any, paths: list[str]) -> bool:
    """Returns whether the files are JSON, Parquet or CSV as they are read without the library."""
    config = builder.config
    usual = getattr(config, "field", None) is None and getattr(config, "sep", ",") == ","
    return usual and all(path.lower().endswith(_PLAIN) for path in paths)


def _builder(root: Path, cache: Path, name: DataName) -> Any:
    from datasets import disable_progress_bars, load_dataset_builder
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    try:
        return load_dataset_builder(str(root), name=name.subset, cache_dir=str(cache))
    except (ValueError, OSError, DatasetsError, TypeError, KeyError) as error:
        said = " ".join(str(error).replace(f"{root}", name.repo.repo).split())[:400].rstrip(".")
        raise UserError(
            f"{name.repo.repo}{'' if name.subset is None else f', subset {name.subset},'} cannot be opened "
            f"({said}): correct the name, as in {name.repo.repo}?subset=NAME&split=train."
        ) from error
