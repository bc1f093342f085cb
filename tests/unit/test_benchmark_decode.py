"""Section decode of tools/benchmark.py, with functions in place of graphs: what is timed has been compared."""

from __future__ import annotations

import pytest
import torch

from engine.errors import UserError
from rankfold.benchmarking import decode
from rankfold.benchmarking.decode import GRAPHS, LAUNCHED
from rankfold.benchmarking.first_hour.targets import judge
from rankfold.benchmarking.sections import DecodeOptions
from tests.support.graph_stand_in import Again

CPU = torch.device("cpu")
OPTIONS = DecodeOptions(
    hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=131, rank=4, prompt=9, new=7, batches="64",
    repeats=2, device="cpu",
)  # fmt: skip


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
