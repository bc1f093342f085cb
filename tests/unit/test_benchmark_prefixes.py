"""The benchmark of beginnings computed once: counts by hand, and that rows which compute something else are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from rankfold.benchmarking import prefixes
from rankfold.benchmarking.prefixes import ALONE, COMPLETIONS, EACH, ONCE, PAIRS, Case
from rankfold.benchmarking.sections import PrefixesOptions

TINY = PrefixesOptions(
    hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=97, rank=2, prompts=2, prompt=24, group=3,
    completion=5, pairs=2, question=30, answer=8, repeats=2, warmup=0, times_only=True, kernels="reference",
    device="cpu",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("prefixes")
    prefixes._write_model(TINY, found)
    return found


def test_all_cases_are_measured() -> None:
    table = prefixes.run(TINY)
    assert [row[0] for row in table.rows] == [
        f"{one}, {kind}" for one in (COMPLETIONS, PAIRS, ALONE) for kind in (EACH, ONCE)
    ]
    for one in table.data["cases"].values():
        assert all(len(taken) == 2 and min(taken) > 0 for taken in one["seconds"].values())
    demands = {name: one["demands"] for name, one in table.data["cases"].items()}
    # the prompt but for its last token once, and that one before each completion
    assert demands[COMPLETIONS][EACH]["tokens"] == demands[ALONE][ONCE]["tokens"] == 2 * 3 * (24 + 5)
    assert demands[COMPLETIONS][ONCE]["tokens"] == 2 * (23 + 3 * (1 + 5))
    saved = demands[PAIRS][EACH]["tokens"] - demands[PAIRS][ONCE]["tokens"]
    assert saved == 2 * 29


def test_demand_is_that_of_the_rows(folder: Path) -> None:
    """By hand: of 23 tokens and three branches of 6 behind them; and of each completion with its prompt."""
    case = Case(COMPLETIONS, TINY, CPU, folder)
    assert case.demand(ONCE).pairs == 2 * (23 * 24 // 2 + 3 * (6 * 7 // 2 + 6 * 23))
    assert case.demand(EACH).pairs == 2 * 3 * (29 * 30 // 2)
    weights = 2 * (32 * (2 * 32 + 2 * 16) + 3 * 32 * 48) + 32 * 97
    tokens, pairs, operations = case.demand(ONCE)
    assert operations == 4 * tokens * weights + 14 * 2 * 32 * pairs


def test_rows_that_compute_something_else_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(COMPLETIONS, TINY, CPU, folder)
    assert max(prefixes.check(case)) < 1e-5
    alike = case.rows

    def without_branches(kind: str) -> object:
        found = alike(kind)
        if kind == ONCE:
            found.columns.extras[0].advantages[0] += 0.1
        return found

    monkeypatch.setattr(case, "rows", without_branches)
    with pytest.raises(RuntimeError, match="completions: rows that share compute something else"):
        prefixes.check(case)


def test_a_case_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="--only has 'pair'"):
        PrefixesOptions(only="pair")
