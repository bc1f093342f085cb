"""Rows held out for evaluation: which, how many, and that nothing is lost, doubled or in both parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.dataset import TokenDataset
from engine.data.hold_out import hold_out
from engine.data.loader import EvalLoader
from engine.data.row_shape import RowShape
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.preferences.batch_parts import Answers
from engine.preferences.data.answer_columns import answer_columns
from engine.preferences.data.judged import MISMATCHED
from tests.support.answer_data import build_judged, build_pairs
from tests.unit.test_data_loader import random_dataset


def contents(dataset: TokenDataset) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of each row's documents."""
    return [tuple(tuple(tokens.tolist()) for tokens, _ in dataset.documents(row)) for row in range(len(dataset))]


@given(count=st.integers(2, 40), packing=st.booleans(), share=st.floats(0.01, 0.9), seed=st.integers(0, 9))
def test_every_row_is_in_one_part_and_in_its_old_order(count: int, packing: bool, share: float, seed: int) -> None:
    whole = random_dataset(count, packing=packing)
    if len(whole) < 2 or max(1, round(share * len(whole))) >= len(whole):
        return
    train, held = hold_out(whole, share, seed)
    assert len(held) == max(1, round(share * len(whole)))
    rows = contents(whole)
    assert sorted(contents(train) + contents(held)) == sorted(rows)
    for part in (train, held):
        places = [rows.index(row) for row in contents(part)]
        assert places == sorted(places)
        assert part.target_counts.tolist() == [whole.target_counts[place] for place in places]
        assert part.row_lengths.tolist() == [whole.row_lengths[place] for place in places]
        assert part.report.target_tokens == part.target_counts.sum()
        assert part.report.rows == len(part) and part.report.documents == sum(len(row) for row in contents(part))
    again = hold_out(random_dataset(count, packing=packing), share, seed)
    assert [part.fingerprint() for part in again] == [train.fingerprint(), held.fingerprint()]
    assert train.fingerprint() != held.fingerprint()


def test_another_seed_holds_other_rows_out() -> None:
    whole = random_dataset(40)
    drawn = {tuple(contents(hold_out(whole, 0.2, seed)[1])) for seed in range(6)}
    assert len(drawn) == 6
    counts = np.zeros(40)
    rows = contents(whole)
    for seed in range(400):
        counts[[rows.index(row) for row in contents(hold_out(whole, 0.25, seed)[1])]] += 1
    assert counts.min() > 60 and counts.max() < 140, "each row is drawn a quarter of the time"


def test_all_rows_cannot_be_held_out() -> None:
    with pytest.raises(UserError, match=r"data.validation_split 0.9 holds 2 of 2 rows out, which leaves none"):
        hold_out(random_dataset(2), 0.9, 1)


@pytest.mark.parametrize("packing", [False, True])
def test_pairs_stay_together(packing: bool, tmp_path: Path, stories_dir: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f'{{"prompt": "{"x" * n} ", "chosen": "good", "rejected": "bad"}}\n' for n in range(1, 30)))
    whole = build_pairs(path, tokenizer=load_tokenizer(stories_dir), seq_length=64, packing=packing)
    train, held = hold_out(whole, 0.3, 1)
    assert sorted(contents(train) + contents(held)) == sorted(contents(whole))
    assert held.group == 2 and held.report.unit == "pair"
    assert answer_columns(held).signs.tolist() == [1.0, -1.0] * 29
    assert train.target_counts.sum() + held.target_counts.sum() == 29
    loader = EvalLoader(held, RowShape(micro_batch_size=2))
    assert sum(len(one.documents) for batch in loader if (one := batch.part(Answers))) == 2 * held.report.documents


def test_mismatched_answers_go_with_theirs(tmp_path: Path, stories_dir: Path) -> None:
    path = tmp_path / "judged.jsonl"
    path.write_text("".join(f'{{"prompt": "{"x" * n} ", "completion": "c", "label": true}}\n' for n in range(1, 12)))
    whole = build_judged(path, tokenizer=load_tokenizer(stories_dir), seq_length=64)
    pairs = set(zip(contents(whole), contents(whole.companions[MISMATCHED]), strict=True))
    for part in hold_out(whole, 0.3, 1):
        assert set(zip(contents(part), contents(part.companions[MISMATCHED]), strict=True)) <= pairs
