"""A data set in memory as files that several processes map: the same arrays, once in a machine's memory.

The files are for the processes of one run on one machine, in a folder that only they can write; they have no checksums
and no version. What is kept on purpose is a token store (`engine.data.store`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.columns import Columns
from engine.data.data_report import DatasetReport
from engine.data.dataset import TokenDataset
from engine.data.packing import Packs
from engine.seams import resolve

_FACTS, _COMPANION, _EXTRA = "facts.json", "companion-", "extra-"
_COLUMNS = ("tokens", "targets", "starts", "lengths", "target_counts")
"""Arrays of `Columns`, each in the file of its name."""


def save_dataset(dataset: TokenDataset, folder: Path) -> None:
    """Writes the arrays of a data set that is in memory.

    Args:
        folder: exists and is empty.

    Raises:
        OSError: the disk does not take it.
    """
    assert dataset.targets is not None, "a token store is mapped already"
    arrays: dict[str, NDArray[Any]] = {
        **{name: getattr(dataset.columns, name) for name in _COLUMNS},
        "row_offsets": dataset.rows.offsets,
        "row_documents": dataset.rows.documents,
    }
    if dataset.rows.reused is not None:
        arrays["row_reused"] = dataset.rows.reused
    for number, extra in enumerate(dataset.extras):
        arrays |= {f"{_EXTRA}{number}-{name}": array for name, array in extra.arrays().items()}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    facts = {
        "seq_length": dataset.seq_length,
        "packing": dataset.packing,
        "group": dataset.group,
        "max_token": dataset.max_token,
        "report": asdict(dataset.report),
        "extras": [f"{type(extra).__module__}:{type(extra).__qualname__}" for extra in dataset.extras],
        "companions": list(dataset.companions),
    }
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
    for number, companion in enumerate(dataset.companions.values()):
        (own := folder / f"{_COMPANION}{number}").mkdir()
        save_dataset(companion, own)


def map_dataset(folder: Path) -> TokenDataset:
    """Returns the data set that `save_dataset` wrote; it stays valid when the files are deleted.

    Raises:
        OSError: a file cannot be read.
    """
    arrays = {path.stem: np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)) for path in folder.glob("*.npy")}
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    extras = []
    for number, kind in enumerate(facts["extras"]):
        prefix = f"{_EXTRA}{number}-"
        named = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        extras.append(resolve(kind)(**named))
    columns = Columns(
        **{name: arrays[name] for name in _COLUMNS},
        max_token=facts["max_token"],
        group=facts["group"],
        extras=tuple(extras),
    )
    return TokenDataset(
        columns,
        Packs(offsets=arrays["row_offsets"], documents=arrays["row_documents"], reused=arrays.get("row_reused")),
        seq_length=facts["seq_length"],
        packing=facts["packing"],
        companions={
            name: map_dataset(folder / f"{_COMPANION}{number}") for number, name in enumerate(facts["companions"])
        },
        report=DatasetReport(**facts["report"]),
    )
