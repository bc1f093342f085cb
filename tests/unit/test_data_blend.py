"""Several data sets as one: shares, repeats, and the same documents."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.load import parse_config
from engine.data.blend import blend, sample_counts
from engine.data.collate import build_batch
from engine.data.dataset import TokenDataset, dataset_of
from engine.data.loader import DataLoader
from engine.errors import UserError


def _set(first: int, count: int, packing: bool = False) -> TokenDataset:
    documents = [([first, first + 1 + n], [False, True]) for n in range(count)]
    return dataset_of(documents, seq_length=6, packing=packing)


@pytest.mark.parametrize(
    ("sizes", "weights", "expected"),
    [([10, 10], [1, 1], [10, 10]), ([100, 10], [1, 1], [100, 100]), ([100, 10], [1, 0.1], [100, 10]),
     ([30, 20, 5], [0.5, 0.25, 0.25], [40, 20, 20]), ([7], [3], [7])],
)  # fmt: skip
def test_counts(sizes: list[int], weights: list[float], expected: list[int]) -> None:
    assert sample_counts(sizes, weights) == expected


@pytest.mark.parametrize("packing", [False, True])
def test_rows_are_the_sets_rows(packing: bool) -> None:
    left, right = _set(100, 9, packing), _set(200, 4, packing)
    both = blend([left, right], [1.0, 2.0])
    assert len(both) == 3 * len(left)
    for row in range(len(both)):
        data = left if row < len(left) else right
        place = row if row < len(left) else (row - len(left)) % len(right)
        found = [(tokens.tolist(), targets.tolist()) for tokens, targets in both.documents(row)]
        assert found == [(tokens.tolist(), targets.tolist()) for tokens, targets in data.documents(place)]
        assert both.target_counts[row] == data.target_counts[place]
        assert both.row_lengths[row] == data.row_lengths[place]
    batch = build_batch(both, [0, len(left)], range(2), length=6)
    assert batch.tokens_BS[:, 0].tolist() == [100, 200]


def test_an_epoch_has_the_shares() -> None:
    both = blend([_set(100, 50), _set(200, 10)], [3.0, 1.0])
    loader = DataLoader(both, global_batch_size=len(both), seed=3)
    firsts = np.array([int(next(both.documents(row))[0][0]) for row in loader.order.rows(0).tolist()])
    assert (firsts == 100).sum() == 50 and (firsts == 200).sum() == 17
    half = firsts[: len(firsts) // 2]
    assert 0 < (half == 200).sum() < 17, "the order is shuffled over both"


def test_fingerprint_knows_the_weights() -> None:
    sets = [_set(100, 9), _set(200, 4)]
    assert blend(sets, [1, 1]).fingerprint() == blend(sets, [2, 2]).fingerprint() != blend(sets, [1, 3]).fingerprint()


def test_the_option() -> None:
    config = parse_config(["--model.path", "x", "--data.mix", "a=b.jsonl=0.5"])
    assert config.data.mix == ("a=b.jsonl=0.5",)
    for given, sentence in (
        ("a.jsonl", "PATH=WEIGHT is expected"),
        ("a.jsonl=x", "from 1e-6 to 1e6 is expected"),
    ):
        with pytest.raises(UserError, match=sentence):
            parse_config(["--model.path", "x", "--data.mix", given])
