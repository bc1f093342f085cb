"""Holds out part of a data set for evaluation: rows drawn by a seed, the same on every layout and at every start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.data.data_report import DatasetReport
from engine.data.dataset import TokenDataset
from engine.data.order import permutation
from engine.errors import UserError
from engine.telemetry.format import counted

_DRAW = 2**64 - 1
"""Used in place of an epoch's number, so that the held-out rows are independent of the order of training."""


def hold_out(dataset: TokenDataset, share: float, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """Returns the rows to train on and the rows to evaluate, each row in one of them and in its old order.

    Args:
        dataset: all rows.
        share: of the rows that are held out, rounded, and at least one.
        seed: which ones.

    Raises:
        UserError: no row would be left to train on.
    """
    held, order = held_out_rows(len(dataset), share, seed)
    return _rows(dataset, np.sort(order[held:])), _rows(dataset, np.sort(order[:held]))


def held_out_rows(count: int, share: float, seed: int, *, unit: str = "row") -> tuple[int, NDArray[np.int64]]:
    """Returns how many rows are held out, and all rows in an order in which those come first.

    Args:
        count: of all rows.
        share, seed: as of `hold_out`.
        unit: name of a row.

    Raises:
        UserError: no row would be left to train on.
    """
    held = max(1, round(share * count))
    if held >= count:
        raise UserError(
            f"data.validation_split {share:g} holds {held} of {counted(count, unit)} out, which leaves none to train "
            "on: lower it, or give data.validation a file."
        )
    return held, permutation(seed, _DRAW, count)


def _rows(dataset: TokenDataset, rows: NDArray[np.int64]) -> TokenDataset:
    """Returns a data set with some rows of another, on the same documents."""
    packs = dataset.rows.chosen(rows)
    part = TokenDataset(
        replace(dataset.columns, identity=dataset.fingerprint()),
        packs,
        seq_length=dataset.seq_length,
        packing=dataset.packing,
        companions={name: _rows(companion, rows) for name, companion in dataset.companions.items()},
        report=DatasetReport(unit=dataset.report.unit, documents=len(packs.documents) // dataset.group),
    )
    part.read_with(dataset.family)
    return part
