"""Section decode of tools/benchmark.py, with functions in place of graphs: what is timed has been compared."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import UserError
from engine.layers.graph_capture import Captured
from rankfold.benchmarking import decode
from rankfold.benchmarking.decode import GRAPHS, LAUNCHED
from rankfold.benchmarking.first_hour.targets import judge
from rankfold.benchmarking.sections import DecodeOptions

CPU = torch.device("cpu")
OPTIONS = DecodeOptions(
    hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=131, rank=4, prompt=9, new=7, batches="64",
    repeats=2, device="cpu",
)  # fmt: skip


class Again:
    """A capture whose graphs run the function again; `wrong` tokens more of them."""

    def __init__(self, wrong: int = 0) -> None:
        self._wrong = wrong
        self.replays = 0

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_pool(self) -> Any:
        return None

    def capture(self, function: Captured, pool: Any) -> _Again:
        return _Again(self, function)


class _Again:
    outputs: tuple[Tensor, ...] = ()

    def __init__(self, capture: Again, function: Captured) -> None:
        self._capture, self._function = capture, function

    def replay(self) -> None:
        self._capture.replays += 1
        self.outputs = tuple(one + self._capture._wrong for one in self._function())


def test_kinds_are_compared_and_timed() -> None:
    model, sentences = decode.build_model(OPTIONS, CPU)
    captures: list[Again] = []

    def again() -> Again:
        captures.append(Again())
        return captures[-1]

    found = decode.measure(OPTIONS, 64, model, CPU, {LAUNCHED: lambda: None, GRAPHS: again})
    assert {name: len(timed) for name, timed in found.items()} == {LAUNCHED: 2, GRAPHS: 2}
    # of six passes two come before the capture; a call for the prompts alone has none
    assert [one.replays for one in captures] == [4, *[0, 4] * 3]
    table = decode.table(OPTIONS, {64: found}, sentences, {})
    assert [row[0] for row in table.rows] == [f"64 rows, {name}" for name in (LAUNCHED, GRAPHS)]
    assert table.rows[0][4] == "1.00" and "All kinds gave the same tokens." in table.findings
    (judged,) = judge({**table.data, "rows": table.rows}, "")
    assert judged.what == "64 rows, graphs: speed over single launches" and f"{judged.value:.2f}" == table.rows[1][4]


def test_other_tokens_are_not_timed() -> None:
    model, _ = decode.build_model(OPTIONS, CPU)
    with pytest.raises(RuntimeError, match="graphs: other tokens"):
        decode.measure(OPTIONS, 2, model, CPU, {LAUNCHED: lambda: None, GRAPHS: lambda: Again(wrong=1)})


def test_on_a_cpu_that_is_asked_for_passes_without_graphs_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = decode.run(OPTIONS)
    assert [row[0] for row in table.rows] == [f"64 rows, {LAUNCHED}"]
    assert any("A CPU has no graphs" in one for one in table.findings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees no GPU here"):
        decode.run(DecodeOptions())
