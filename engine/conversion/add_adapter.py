"""Adds an adapter into a weight a few rows at a time, and measures the cost of rounding the sum.

W + s * B A is computed in fp32 (fp64 where W is) and rounded once to W's dtype. The part of the sum that rounding takes
away is measured as it happens: an adapter whose update is small beside the weights can lose a large share in 16 bits,
and nothing else would show that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content, block_tensor
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.folder import MERGE_REPORT
from engine.checkpoint.rows import Rows
from engine.checkpoint.safetensors_file import raw_bytes
from engine.conversion.lora_scales import Scale
from engine.files.durable import write_durably
from engine.kernels.native.merge import can_merge, merge_rows
from engine.telemetry.format import counted

_BLOCK_BYTES = 1 << 20
"""Bytes of the weight in a block: few enough that the fp32 blocks beside it still fit a processor's cache."""

ROUNDING = "rounding"
"""Key of a tensor's `Rounding` among the facts of its content."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank update of a weight: s * B A, or its transpose.

    Args:
        a: fp32 [r, in].
        b: fp32 [out, r].
        scale: s.
        transposed: the weight is [in, out], as an embedding's is.
        magnitude: fp32 [out], the length that each row of the sum is given (DoRA); None where it keeps its own.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False
    magnitude: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is s * B A and no more."""
        return not self.transposed and self.magnitude is None

    def added_to(self, rows: Tensor, first: int) -> Tensor:
        """Returns `rows` [n, columns], rows `first` and on of the weight, with the update added in place."""
        last = first + rows.shape[0]
        left, right = (self.a[:, first:last].T, self.b.T) if self.transposed else (self.b[first:last], self.a)
        rows.addmm_(left.to(rows.dtype), right.to(rows.dtype), alpha=self.scale)
        if self.magnitude is not None:
            lengths = torch.linalg.vector_norm(rows, dim=1).clamp(min=torch.finfo(torch.float32).tiny)
            rows.mul_((self.magnitude[first:last].to(rows.dtype) / lengths)[:, None])
        return rows

    def norm(self) -> float | None:
        """Returns the Frobenius norm of the update, from the factors alone; None where the rows' lengths change too."""
        if self.magnitude is not None:
            return None
        a, b = self.a.double(), self.b.double()
        return abs(self.scale) * math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))


@dataclass(frozen=True, slots=True)
class StackedLowRank:
    """A low-rank update of each expert's matrix in a stack: s * B_e A_e.

    Args:
        a: fp32 [r, experts, in].
        b: fp32 [out, experts, r].
        scale: s.
    """

    a: Tensor
    b: Tensor
    scale: float

    def added_to(self, rows: Tensor, first: int) -> Tensor:
        """Returns `rows` [n, out, in], experts `first` and on of the stack, with the update added in place."""
        last = first + rows.shape[0]
        b, a = self.b[:, first:last].transpose(0, 1), self.a[:, first:last].transpose(0, 1)
        return rows.baddbmm_(b.to(rows.dtype), a.to(rows.dtype), alpha=self.scale)

    def norm(self) -> float:
        """Returns the Frobenius norm of the update, from the factors alone."""
        a, b = self.a.double().transpose(0, 1), self.b.double().transpose(0, 1)
        return abs(self.scale) * math.sqrt(max(0.0, float(((b.mT @ b) * (a @ a.mT)).sum())))


@dataclass(frozen=True, slots=True)
class Shift:
    """An update of a bias: fp32 [out], added unchanged."""

    added: Tensor

    def added_to(self, rows: Tensor, first: int) -> Tensor:
        """Returns `rows` [n], elements `first` and on of the bias, with the update added in place."""
        return rows.add_(self.added[first : first + rows.shape[0]].to(rows.dtype))

    def norm(self) -> float:
        """Returns the norm of the update."""
        return float(self.added.double().norm())


@dataclass(slots=True)
class Rounding:
    """The rounding error of one merged tensor, summed up block by block.

    `max_error` is the largest absolute difference of a stored value from the exact sum; `relative_error` the norm of
    all differences over that of the exact sums; `error_of_update` the same over the norm of the update, so that 1
    means that the update was lost altogether. Where the sum goes back into a base in few bits, `update_kept` is the
    part of the update that is left: the stored change along it, 1 for all of it.
    """

    max_error: float = 0.0
    squared_error: float = 0.0
    squared_value: float = 0.0
    squared_change: float = 0.0
    change_along: float = 0.0
    has_change: bool = False

    def add(self, exact: Tensor, rounded: Tensor, scratch: Tensor) -> None:
        """Measures and adds a block; `scratch` has the shape and dtype of `exact`."""
        error = scratch.copy_(rounded).sub_(exact).view(-1)
        values = exact.view(-1)
        low, high = torch.aminmax(error)
        self.count(max(-float(low), float(high)), float(torch.dot(error, error)), float(torch.dot(values, values)))

    def count(self, max_error: float, squared_error: float, squared_value: float) -> None:
        """Adds the figures of a block."""
        self.max_error = max(self.max_error, max_error)
        self.squared_error += squared_error
        self.squared_value += squared_value

    def add_change(self, wanted: Tensor, stored: Tensor) -> None:
        """Adds a block of the update, and of what is stored of it."""
        self.has_change = True
        self.squared_change += float(torch.dot(wanted.flatten(), wanted.flatten()))
        self.change_along += float(torch.dot(wanted.flatten(), stored.flatten()))

    def to_json(self, update_norm: float | None) -> dict[str, float]:
        error, value = math.sqrt(self.squared_error), math.sqrt(self.squared_value)
        found = {"max_error": self.max_error, "relative_error": error / value if value else 0.0}
        if update_norm is not None:
            found |= {"update_norm": update_norm, "error_of_update": error / update_norm if update_norm else 0.0}
        if self.has_change and self.squared_change:
            found["update_kept"] = self.change_along / self.squared_change
        return found


class UpdatedRows(Rows):
    """Rows of a weight with an update added, not rounded.

    Args:
        rows: the weight before the update.
        update: added to it; None for nothing.
    """

    def __init__(self, rows: Rows, update: LowRank | StackedLowRank | Shift | None) -> None:
        self._rows, self._update = rows, update

    def blocks(self, scratch: Scratch, dtype: torch.dtype, block_bytes: int) -> Iterator[Tensor]:
        first = 0
        for rows in self._rows.blocks(scratch, dtype, block_bytes):
            count = rows.shape[0]
            yield rows if self._update is None else self._update.added_to(rows, first)
            first += count


class MergedRows(Content):
    """The content of a trained tensor: rows of the weight with the update added, rounded once.

    Args:
        name: logical name, for the report.
        rows: the weight before the update: the base's, or the values trained in full.
        stored: dtype of the rows that `rows` reads.
        dtype: of the result.
        update: added to it; None where all of it was trained.
    """

    def __init__(
        self,
        name: str,
        rows: Rows,
        stored: torch.dtype,
        dtype: torch.dtype,
        update: LowRank | StackedLowRank | Shift | None,
    ) -> None:
        self._name, self._rows, self._stored, self._dtype, self._update = name, rows, stored, dtype, update
        self._exact_dtype = torch.float64 if torch.float64 in (stored, dtype) else torch.float32
        self._rounding = Rounding()

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        update = self._update
        if isinstance(update, LowRank) and update.is_plain and self._stored == self._dtype and can_merge(self._dtype):
            stored = self._rows.stored_blocks(scratch, _BLOCK_BYTES)
            if stored is not None:
                yield from self._by_kernel(stored, update, scratch)
                return
        yield from self._by_torch(scratch)

    def _by_kernel(self, stored: Iterator[Tensor], update: LowRank, scratch: Scratch) -> Iterator[memoryview]:
        first, b = 0, update.b * update.scale
        for rows in stored:
            rounded = block_tensor(scratch, "rounded", self._dtype, tuple(rows.shape))
            last = first + rows.shape[0]
            self._rounding.count(*merge_rows(rows, b[first:last], update.a, rounded))
            first = last
            yield raw_bytes(rounded)

    def _by_torch(self, scratch: Scratch) -> Iterator[memoryview]:
        for exact in UpdatedRows(self._rows, self._update).blocks(scratch, self._exact_dtype, _BLOCK_BYTES):
            shape = tuple(exact.shape)
            rounded = block_tensor(scratch, "rounded", self._dtype, shape).copy_(exact)
            self._rounding.add(exact, rounded, block_tensor(scratch, "error", self._exact_dtype, shape))
            yield raw_bytes(rounded)

    def facts(self) -> dict[str, Any]:
        norm = None if self._update is None else self._update.norm()
        return {f"{ROUNDING}/{self._name}": self._rounding.to_json(norm)}


def write_rounding(folder: Path, facts: Sequence[Mapping[str, Any]], scale: Scale) -> dict[str, dict[str, float]]:
    """Writes merge_report.json: logical name -> `Rounding`'s values, which it returns."""
    prefix = ROUNDING + "/"
    found = {key.removeprefix(prefix): value for each in facts for key, value in each.items() if key.startswith(prefix)}
    report = {"scale": scale, "tensors": {name: found[name] for name in sorted(found)}}
    write_durably(folder / MERGE_REPORT, json.dumps(report, indent=2) + "\n")
    return report["tensors"]


def kept_summary(rounding: Mapping[str, Mapping[str, float]]) -> str | None:
    """Returns one sentence about how much of an update a base's own format keeps; None where nothing was measured."""
    kept = {name: each["update_kept"] for name, each in rounding.items() if "update_kept" in each}
    if not kept:
        return None
    least = min(kept, key=lambda each: kept[each])
    lost = sorted(each["error_of_update"] for each in rounding.values() if "error_of_update" in each)
    error = f", with an error of {lost[len(lost) // 2]:.0%} of its norm" if lost else ""
    middle = sorted(kept.values())[len(kept) // 2]
    return (
        f"rounding keeps {middle:.0%} of the update in the median linear{error}, and least in {least}, "
        f"{kept[least]:.0%}: {MERGE_REPORT}"
    )


def summary(rounding: Mapping[str, Mapping[str, float]], done: str = "merged") -> str:
    """Returns one sentence about tensors that were merged, or only rounded."""
    name, worst = max(rounding.items(), key=lambda each: each[1]["max_error"])
    merged = f"{counted(len(rounding), 'tensor')} {done}"
    text = f"{merged}; rounding changed values by at most {worst['max_error']:.2e} ({name})"
    if worst["max_error"] == 0.0:
        return f"{merged} exactly: {MERGE_REPORT}"
    relative = max(each["relative_error"] for each in rounding.values())
    text += f", by at most {relative:.1e} of a tensor's norm"
    lost = {name: each["error_of_update"] for name, each in rounding.items() if "error_of_update" in each}
    if lost:
        most = max(lost, key=lambda each: lost[each])
        text += f" and {lost[most]:.1e} of its update's ({most})"
    return f"{text}: {MERGE_REPORT}"
