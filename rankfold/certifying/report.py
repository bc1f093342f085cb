"""The report on a comparison of layouts: a table, a verdict each, and everything for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.models.run_proof import RunProof
from engine.telemetry.format import format_columns
from rankfold.certifying.certificate import (
    DRAWN_STD,
    GRADIENT,
    LOSS,
    NORM,
    PARAMETER,
    certificate_config,
    draws_factors,
)
from rankfold.certifying.compare import Comparison, Copies, Deviation, Replicas
from rankfold.certifying.layouts import Layout

_SHOWN = 3
"""Maximum number of worst tensors in the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The certificate: the result of the comparisons.

    Args:
        layout: the run's.
        steps: number of steps taken.
        limit: of relative deviations.
        device: "cuda" or "cpu".
        trained: the trained parameters, in forward order.
        comparisons: one for each other layout.
        proof: that the run's layout computes the model, where the model's kind has a proof.
    """

    layout: Layout
    steps: int
    limit: float
    device: str
    trained: Mapping[str, tuple[int, ...]]
    comparisons: Sequence[Comparison]
    proof: RunProof | None = None

    @property
    def certified(self) -> bool:
        return all(comparison.certified for comparison in self.comparisons)

    def text(self) -> str:
        """Returns the text for a terminal."""
        rows = [("against", "quantity", "deviation", "step")]
        for comparison in self.comparisons:
            rows += _rows(comparison)
        for replicas in self._replicas():
            rows.append((f"within {replicas.layout.label}", "copies on several ranks", _copies(replicas), ""))
        proof = "" if self.proof is None else self.proof.table()
        blocks = ("\n".join(self._head()), proof, _table(rows), "\n".join(self._notes()), "\n".join(self.verdicts()))
        return "\n\n".join(filter(None, blocks))

    def verdicts(self) -> list[str]:
        """Returns one sentence for each comparison."""
        return [_verdict(self.layout, comparison) for comparison in self.comparisons]

    def record(self) -> dict[str, Any]:
        """Returns the record for programs; deviations that are not finite are text."""
        return {
            "certified": self.certified,
            "steps": self.steps,
            "limit": self.limit,
            "device": self.device,
            "dtype": self.layout.config.model.dtype,
            "layout": self.layout.sizes(),
            "proof": None if self.proof is None else self.proof.record(),
            "comparisons": [
                {
                    "against": comparison.layout.sizes(),
                    "certified": comparison.certified,
                    "verdict": verdict,
                    "first": _plain(comparison.first) if comparison.first else None,
                    "figures": [_plain(item) for item in comparison.figures],
                    "tensors": [_plain(item) for item in comparison.tensors],
                    "zero_gradients": self._zero(comparison),
                }
                for comparison, verdict in zip(self.comparisons, self.verdicts(), strict=True)
            ],
            "copies": [
                {
                    "layout": replicas.layout.label,
                    "looked_at": replicas.looked_at,
                    "differing": [item._asdict() | {"relative": _number(item.relative)} for item in replicas.differing],
                }
                for replicas in self._replicas()
            ],
        }

    def _head(self) -> Iterator[str]:
        config = self.layout.config
        sizes = f"{self.steps} step{'s' if self.steps > 1 else ''}, {len(self.trained)} trained tensors"
        yield f"{self.layout.label}: {sizes}, {config.model.dtype}, limit {self.limit:g}"
        ranks = "one GPU each (NCCL)" if self.device == "cuda" else "the CPU (Gloo)"
        optim = certificate_config(config, sum(map(math.prod, self.trained.values()))).optim
        rate = f"learning rate {optim.lr:g} from the first step on, Adam's eps {optim.eps:.1e}"
        yield f"ranks on {ranks}; {rate}"
        if draws_factors(config):
            yield f"factors of adapters that start at zero were drawn (normal, standard deviation {DRAWN_STD:g})"

    def _notes(self) -> Iterator[str]:
        for comparison in self.comparisons:
            if zero := self._zero(comparison):
                yield (
                    f"against {comparison.layout.label}: {len(zero)} gradients were zero in every step and prove "
                    f"nothing: {', '.join(zero[:_SHOWN])}{', ..' if len(zero) > _SHOWN else ''}"
                )

    def _zero(self, comparison: Comparison) -> list[str]:
        return [name for name in self.trained if name not in comparison.nonzero]

    def _replicas(self) -> list[Replicas]:
        own = self.comparisons[0].replicas[0]
        return [own, *(comparison.replicas[1] for comparison in self.comparisons)]


def _rows(comparison: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """Yields the rows of the table: figures, and the worst tensors of each kind."""
    label = comparison.layout.label
    shown = [
        *comparison.worst_of(PARAMETER, at_start=True)[:1],
        *comparison.worst_of(LOSS),
        *comparison.worst_of(NORM),
        *_worst(comparison, GRADIENT),
        *_worst(comparison, PARAMETER),
    ]
    for item in shown:
        mark = " !" if comparison.beyond(item) else ""
        step = str(item.step) if item.step else "before 1"
        yield label, f"{item.kind} {item.name}".rstrip(), f"{_size(item.relative)}{mark}", step


def _worst(comparison: Comparison, kind: str) -> list[Deviation]:
    """Returns the tensors to show: some of those that deviate at all, or one that does not."""
    tensors = comparison.worst_of(kind)
    return [item for item in tensors[:_SHOWN] if item.relative] or tensors[:1]


def _copies(replicas: Replicas) -> str:
    """Returns the cell of the table."""
    if not replicas.looked_at:
        return "none"
    if not replicas.differing:
        return f"{replicas.looked_at} equal"
    return f"{len(replicas.differing)} of {replicas.looked_at} differ !"


def _verdict(own: Layout, comparison: Comparison) -> str:
    pair = f"{own.label} {{}} what {comparison.layout.label} does"
    if comparison.certified:
        copies = sum(replicas.looked_at for replicas in comparison.replicas)
        loss, gradient, parameter = (comparison.worst_of(kind)[0] for kind in (LOSS, GRADIENT, PARAMETER))
        parts = [
            f"loss {_within(loss.relative)}",
            f"gradients {_within(gradient.relative)}" + (f" (worst {gradient.name})" if gradient.relative else ""),
            f"parameters {_within(parameter.relative)}",
            *([f"{copies} copies on several ranks equal"] if copies else []),
        ]
        return f"certified: {pair.format('computes')}: {', '.join(parts)}"
    return f"not certified: {pair.format('does not compute')}: {'; '.join(_reasons(comparison))}"


def _reasons(comparison: Comparison) -> Iterator[str]:
    """Yields the reasons against: the first tensor, or else the first figure, and copies that differ."""
    first = comparison.first
    if first is not None:
        alike = [item for item in comparison.tensors if (item.kind, item.step) == (first.kind, first.step)]
        number = sum(map(comparison.beyond, alike))
        others = f", the first of {number} tensors of {len(alike)}" if number > 1 else f", alone of {len(alike)}"
        yield _deviates(f"the {first.kind} of {first.name}", first, comparison.limit) + others
    else:
        for item in comparison.figures:
            if comparison.beyond(item):
                yield _deviates(f"the {item.kind}", item, comparison.limit)
                break
    for replicas in comparison.replicas:
        if replicas.differing:
            yield _differ(replicas.layout, replicas.differing)


def _deviates(what: str, item: Deviation, limit: float) -> str:
    size = f"deviates by {_size(item.relative)}" if math.isfinite(item.relative) else "cannot be compared"
    note = f" ({item.note})" if item.note else ""
    return f"{what} {size} {_at(item.step)}{note}, the limit being {limit:g}"


def _differ(layout: Layout, differing: Sequence[Copies]) -> str:
    first = differing[0]
    ranks = f"ranks {first.ranks[0]} and {first.ranks[1]} of {layout.label}"
    return (
        f"{ranks} hold different copies of the {first.kind} of {first.name} {_at(first.step)}, apart by "
        f"{_size(first.relative)}" + (f", the first of {len(differing)} such pairs" if len(differing) > 1 else "")
    )


def _at(step: int) -> str:
    return f"at step {step}" if step else "before the first step"


def _size(relative: float) -> str:
    """Returns a deviation such as 3.1e-07."""
    if not math.isfinite(relative):
        return "not finite"
    return f"{relative:.1e}" if relative else "0"


def _within(relative: float) -> str:
    """Returns a bound such as "within 4e-07": one digit, rounded up, so that it is true."""
    if relative == 0:
        return "equal"
    unit = 10.0 ** math.floor(math.log10(relative))
    return f"within {math.ceil(relative / unit) * unit:.0e}"


def _plain(item: Deviation) -> dict[str, Any]:
    return item._asdict() | {"relative": _number(item.relative)}


def _number(relative: float) -> float | str:
    """Returns a number for JSON, with infinity and NaN as text."""
    return relative if math.isfinite(relative) else str(relative)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns aligned columns: words left, the last two right."""
    lines = [line.rstrip() for line in format_columns(rows, names=len(rows[0]) - 2)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
