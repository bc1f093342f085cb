"""Completions as documents: what each label has in its column, packed or not, in whole rows or on context ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import IGNORE_LABEL, Batch
from engine.data.collate import rank_batch
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader, EvalLoader
from engine.data.row_shape import RowShape
from engine.rollouts.batch_parts import Completions
from engine.rollouts.data.completions import Completion, CompletionColumns, completion_columns

LENGTH = 16
GIVEN = [
    Completion(
        prompt=list(range(10 * number, 10 * number + prompt)),
        tokens=list(range(100 + 10 * number, 100 + 10 * number + answer)),
        sampled_logps=[-number - 0.1 * place for place in range(1, answer + 1)],
        advantage=number - 2.0,
        trained=number != 3,
    )
    for number, (prompt, answer) in enumerate(((1, 3), (4, 2), (2, 7), (3, 3), (5, 1)), 1)
]


def dataset(*, packing: bool, row_weight: str = "tokens") -> TokenDataset:
    return TokenDataset(completion_columns(GIVEN, row_weight), seq_length=LENGTH, packing=packing)


def held(batch: Batch) -> dict[int, list[tuple[int, float, float]]]:
    """Returns for each completion, by its number, the label, log-probability and advantage of every target."""
    completions = batch.part(Completions)
    assert completions is not None
    found: dict[int, list[tuple[int, float, float]]] = {number: [] for number in completions.documents}
    columns = (batch.labels_BS, batch.loss_weights_BS, completions.ids_BS, completions.sampled_logps_BS)
    for label, weight, number, logp in zip(*(column.flatten().tolist() for column in columns), strict=True):
        assert (weight == 1.0) == (label != IGNORE_LABEL) and (weight or logp == 0.0)
        if weight:
            found[completions.documents[number]].append((label, logp, completions.advantages[number].item()))
    return found


EXPECTED = {
    number: [
        (token, np.float32(logp).item(), one.advantage)
        for token, logp in zip(one.tokens, one.sampled_logps, strict=True)
        if one.trained
    ]
    for number, one in enumerate(GIVEN)
}


@pytest.mark.parametrize("packing", [False, True])
def test_columns_lie_where_their_labels_do(packing: bool) -> None:
    """Shifting the log-probabilities by one token, or giving those of masked completions, fails."""
    data = dataset(packing=packing)
    assert packing == (len(data) < len(GIVEN))
    rows = list(range(len(data)))
    batch = rank_batch(data, [*rows, None], [*rows, len(rows)], _shape())
    assert held(batch) == EXPECTED
    assert batch.part(Completions) is not None
    order = batch.part(Completions).documents
    assert batch.part(Completions).lengths.tolist() == [len(EXPECTED[number]) for number in order]
    assert batch.part(Completions).old_logps_BS is None and batch.part(Completions).reference_logps_BS is None
    moved = batch.map(lambda tensor: tensor + 1).part(Completions)
    assert moved is not None and torch.equal(moved.advantages, batch.part(Completions).advantages + 1)


def _shape(size: int = 1, rank: int = 0) -> RowShape:
    return RowShape(pad_multiple=4, context_size=size, context_rank=rank)


def test_context_ranks_hold_each_target_once() -> None:
    data = dataset(packing=True)
    known = -np.arange(len(data.tokens), dtype=np.float32)
    columns = data.extra(CompletionColumns)
    assert columns is not None
    data.put(replace(columns, old_logps=known, reference_logps=known - 1))
    rows = list(range(len(data)))
    parts = [rank_batch(data, rows, rows, _shape(2, rank)) for rank in range(2)]
    found = [held(part) for part in parts]
    whole = rank_batch(data, rows, rows, _shape()).part(Completions)
    for number, expected in EXPECTED.items():
        assert sorted(found[0][number] + found[1][number]) == sorted(expected)
    for part in parts:
        one = part.part(Completions)
        assert one is not None and one.old_logps_BS is not None and one.reference_logps_BS is not None
        assert whole is not None and torch.equal(one.lengths, whole.lengths), "lengths are those of whole rows"
        targets = part.labels_BS != IGNORE_LABEL
        assert torch.equal(one.reference_logps_BS[targets], one.old_logps_BS[targets] - 1)
        places = (-one.old_logps_BS[targets]).long()
        assert torch.equal(torch.from_numpy(data.tokens.astype(np.int64))[places], part.labels_BS[targets])


@pytest.mark.parametrize(("row_weight", "total"), [("tokens", 3 + 2 + 3 + 1), ("completions", 5)])
def test_rows_weigh_what_was_asked_for(row_weight: str, total: int) -> None:
    for packing in (False, True):
        data = dataset(packing=packing, row_weight=row_weight)
        loader = DataLoader(data, global_batch_size=len(data), seed=0)
        assert loader.target_count(0) == total


def test_what_was_known_at_sampling_is_part_of_the_fingerprint() -> None:
    plain = dataset(packing=False)
    assert plain.fingerprint() == dataset(packing=False).fingerprint()
    better = [*GIVEN[:-1], replace(GIVEN[-1], advantage=0.5)]
    likelier = [*GIVEN[:-1], replace(GIVEN[-1], sampled_logps=[-0.25])]
    for changed in (better, likelier):
        other = TokenDataset(completion_columns(changed, "tokens"), seq_length=LENGTH)
        assert other.fingerprint() != plain.fingerprint()


def test_fillers_have_no_completions() -> None:
    data = dataset(packing=False)
    (batch,) = EvalLoader(data, RowShape(micro_batch_size=5, data_rank=1, data_size=2))
    assert batch.part(Completions) is not None and batch.part(Completions).documents == ()
    assert batch.part(Completions).advantages.shape == (0,)
