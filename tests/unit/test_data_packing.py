"""Packing: every document once, rows never too full, never worse than next-fit, as good as best-fit done naively; a
dataset's rows are these, by the compiled code or without it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data import columns
from engine.data.columns import contiguous
from engine.data.dataset import TokenDataset
from engine.data.packing import one_each, pack
from engine.kernels.native.loader import NativeStatus, native_status


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity = draw(st.integers(1, 40))
    return np.array(draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60)), dtype=np.int64), capacity


def next_fit_rows(lengths: np.ndarray, capacity: int) -> int:
    rows, used = 1, 0
    for length in lengths.tolist():
        if used + length > capacity:
            rows, used = rows + 1, 0
        used += length
    return rows


def best_fit_rows(lengths: np.ndarray, capacity: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return len(rooms)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_pack_holds_each_document_once_within_capacity(problem: tuple[np.ndarray, int]) -> None:
    lengths, capacity = problem
    packs = pack(lengths, capacity)
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    for row in range(len(packs)):
        assert 1 <= lengths[packs.row(row)].sum() <= capacity
    assert packs.offsets[-1] == len(lengths)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_pack_needs_no_more_rows_than_the_simple_algorithms(problem: tuple[np.ndarray, int]) -> None:
    lengths, capacity = problem
    assert len(pack(lengths, capacity)) == min(next_fit_rows(lengths, capacity), best_fit_rows(lengths, capacity))


@settings(max_examples=20, deadline=None)
@given(problems())
def test_pack_is_a_function_of_its_input(problem: tuple[np.ndarray, int]) -> None:
    lengths, capacity = problem
    first, second = pack(lengths, capacity), pack(lengths.copy(), capacity)
    assert first.documents.tolist() == second.documents.tolist()
    assert first.offsets.tolist() == second.offsets.tolist()


def test_next_fit_wins_where_best_fit_decreasing_is_worse() -> None:
    lengths = np.array([4, 3, 3, 4, 3, 3])
    assert best_fit_rows(lengths, 10) == 3
    assert len(pack(lengths, 10)) == 2


def test_pack_refuses_what_cannot_fit() -> None:
    with pytest.raises(AssertionError):
        pack(np.array([3, 11]), 10)


def test_no_documents_give_no_rows() -> None:
    assert len(pack(np.array([], dtype=np.int64), 10)) == 0
    assert [one_each(3).row(index).tolist() for index in range(3)] == [[0], [1], [2]]


def test_many_documents_pack_tightly_and_fast() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, 200_000)
    started = time.process_time()
    packs = pack(lengths, 2048)
    assert time.process_time() - started < 5
    assert lengths.sum() / (len(packs) * 2048) > 0.99


def _dataset(lengths: np.ndarray, capacity: int) -> TokenDataset:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    targets = np.ones(offsets[-1], dtype=bool)
    targets[offsets[:-1]] = False
    return TokenDataset(
        contiguous(np.zeros(offsets[-1], dtype=np.int32), targets, offsets), seq_length=capacity, packing=True
    )


@settings(max_examples=200, deadline=None)
@given(problems())
def test_rows_of_a_dataset_are_those_of_pack(problem: tuple[np.ndarray, int]) -> None:
    expected, rows = pack(*problem), _dataset(*problem).rows
    assert rows.documents.tolist() == expected.documents.tolist()
    assert rows.offsets.tolist() == expected.offsets.tolist()


@pytest.mark.parametrize("available", [True, False])
def test_a_dataset_is_packed_by_the_compiled_code_where_it_is_built(
    available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if available and not native_status().available:
        pytest.skip(native_status().reason)
    calls: list[str] = []
    compiled = columns.native_packing.pack
    status = NativeStatus(available=available, reason="")
    monkeypatch.setattr(columns, "native_status", lambda: status)
    monkeypatch.setattr(columns, "pack", lambda *given: (calls.append("plain"), pack(*given))[1])
    monkeypatch.setattr(columns.native_packing, "pack", lambda *given: (calls.append("compiled"), compiled(*given))[1])
    lengths = np.random.default_rng(1).integers(1, 300, 5000)
    built = _dataset(lengths, 300)
    assert calls == ["compiled" if available else "plain"]
    expected = pack(lengths, 300)
    assert np.array_equal(built.rows.documents, expected.documents)
    assert np.array_equal(built.rows.offsets, expected.offsets)
