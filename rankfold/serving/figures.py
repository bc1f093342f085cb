"""What a server counts while it runs, and the text in which Prometheus reads it. Needs no torch.

A family has a name, a kind and samples whose labels come from fixed sets, but for those of models: of these the live
ones alone have samples, and no more than `MOST_MODELS`. No label holds a key, or what is made of one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

MOST_MODELS = 200
"""Live models with figures of their own; of more, those that were used last."""
_KEPT = 10 * MOST_MODELS
"""Models whose tokens are remembered between two looks."""
Work = Literal["trained", "scored", "sampled"]
"""What tokens were: rows with a gradient, rows without one, or drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What the processes of the model hold.

    Args:
        resident: adapters that can be trained at once.
        resting: adapters that wait in host memory or on disk.
        host_bytes: resident memory of each rank's process.
        device_bytes: memory that each rank's arrays have on its device; empty without one.
        device_total: memory of each rank's device; empty without one.
    """

    resident: int
    resting: int = 0
    host_bytes: tuple[int, ...] = ()
    device_bytes: tuple[int, ...] = ()
    device_total: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A figure.

    Args:
        name: without the server's prefix.
        kind: of the figure.
        help: what it is.
        samples: labels -> value.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]


class Figures:
    """What is counted since the start. Threads may call it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.started = time.time()
        self.usage: Usage | None = None
        self._commands: Counter[tuple[str, str]] = Counter()
        self._busy: Counter[str] = Counter()
        self._tokens: Counter[Work] = Counter()
        self._of_models: dict[str, Counter[Work]] = {}
        """Tokens of models, the one that was used last behind the others."""
        self._executing: tuple[str, int, float] | None = None
        self._seen: dict[str, float] = {}

    def seen(self, owner: str) -> None:
        """Notes that a client sent a request."""
        with self._lock:
            self._seen[owner] = time.monotonic()

    def begin(self, kind: str, count: int) -> None:
        """Notes that commands are being executed."""
        with self._lock:
            self._executing = kind, count, time.monotonic()

    def end(self) -> None:
        """Notes that they were."""
        with self._lock:
            if self._executing is not None:
                kind, _, since = self._executing
                self._busy[kind] += time.monotonic() - since  # type: ignore[assignment]
                self._executing = None

    def note(self, kind: str, *, good: bool, model: str, work: Work, tokens: int) -> None:
        """Counts a command.

        Args:
            kind: of it.
            good: whether it was executed.
            model: that it used; "" for the base.
            work, tokens: what it computed.
        """
        with self._lock:
            self._commands[kind, "done" if good else "failed"] += 1
            if tokens:
                self._tokens[work] += tokens
                own = self._of_models.pop(model, None) or Counter()
                own[work] += tokens
                self._of_models[model] = own
                if len(self._of_models) > _KEPT:
                    del self._of_models[next(iter(self._of_models))]

    def num_executing(self, kind: str) -> int:
        """Returns how many commands of a kind are being executed."""
        executing = self._executing
        return executing[1] if executing is not None and executing[0] == kind else 0

    def families(self, live: Mapping[str, str], base: str) -> list[Family]:
        """Returns what was counted.

        Args:
            live: each live model -> the rank of its adapter; the figures of others are dropped.
            base: name of the base.
        """
        with self._lock:
            # a sample of weights whose model is gone counts for all alone
            self._of_models = {name: own for name, own in self._of_models.items() if name in live or not name}
            commands, busy, tokens = dict(self._commands), dict(self._busy), dict(self._tokens)
            models = {name: dict(own) for name, own in self._of_models.items()}
            executing, now = self._executing, time.monotonic()
            clients = sum(now - one < _CLIENT_SECONDS for one in self._seen.values())
            usage = self.usage
        if executing is not None:
            busy[executing[0]] = busy.get(executing[0], 0.0) + now - executing[2]  # type: ignore[assignment]
        shown = [name for name in models if name][-MOST_MODELS:]
        silent = [name for name in live if name not in models][: MOST_MODELS - len(shown)]
        by_model = [({"model": name or base, "work": work}, count) for name in ["", *shown] if name in models
                    for work, count in models[name].items()]  # fmt: skip
        found = [
            _one("start_time_seconds", "gauge", "When the server started, in seconds since 1970.", self.started),
            _one("clients", "gauge", "Keys of which a request came in the last two minutes.", clients),
            _family("commands_total", "counter", "Commands that ended, by kind and outcome.",
                    (({"kind": kind, "outcome": outcome}, count) for (kind, outcome), count in commands.items())),
            _family("busy_seconds_total", "counter", "Seconds in which commands of a kind were executed.",
                    (({"kind": kind}, seconds) for kind, seconds in busy.items())),
            _family("tokens_total", "counter", "Tokens that were trained on, scored or sampled.",
                    (({"work": work}, count) for work, count in tokens.items())),
            _family("model_tokens_total", "counter", "The same of each live model, and of the base.", by_model),
            _family("model_rank", "gauge", "Rank of each live model's adapter.",
                    (({"model": name}, float(live[name])) for name in [*shown, *silent])),
        ]  # fmt: skip
        return found + ([] if usage is None else _of_usage(usage))


_CLIENT_SECONDS = 120.0


def _of_usage(usage: Usage) -> list[Family]:
    def by_rank(values: Iterable[int]) -> list[tuple[dict[str, str], float]]:
        return [({"rank": str(rank)}, value) for rank, value in enumerate(values)]

    return [
        _family("adapters", "gauge", "Adapters of live models, by where they are.",
                [({"place": "resident"}, usage.resident), ({"place": "resting"}, usage.resting)]),
        _family("rank_memory_bytes", "gauge", "Resident memory of each rank's process.", by_rank(usage.host_bytes)),
        _family("device_memory_bytes", "gauge", "Memory that each rank's arrays have on its device.",
                by_rank(usage.device_bytes)),
        _family("device_memory_total_bytes", "gauge", "Memory of each rank's device.", by_rank(usage.device_total)),
    ]  # fmt: skip


def _one(name: str, kind: Literal["counter", "gauge"], text: str, value: float) -> Family:
    return Family(name=name, kind=kind, help=text, samples=(({}, value),))


def _family(
    name: str, kind: Literal["counter", "gauge"], text: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> Family:
    return Family(name=name, kind=kind, help=text, samples=tuple(samples))


def exposition(families: Iterable[Family]) -> str:
    """Returns the families in the text format of Prometheus, version 0.0.4."""
    lines = []
    for one in families:
        name = PREFIX + one.name
        lines += [f"# HELP {name} {one.help}", f"# TYPE {name} {one.kind}"]
        for labels, value in one.samples:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{f'{{{inside}}}' if inside else ''} {value:.17g}")
    return "\n".join([*lines, ""])


PREFIX = "rankfold_serve_"
"""Before each name."""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
