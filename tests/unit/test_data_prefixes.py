"""Rows whose documents share their beginnings: every document is found again along its path, with its positions, labels
and weights; and rows are full and no more."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest

from engine.batch import IGNORE_LABEL, Batch, SharedTokens
from engine.branches import check_parents
from engine.data.blend import blend
from engine.data.collate import build_batch
from engine.data.columns import contiguous
from engine.data.dataset import TokenDataset, dataset_of
from engine.data.hold_out import hold_out
from engine.data.mapped_dataset import map_dataset, save_dataset
from engine.data.prefixes import LEAST_REUSED, branches_of_row, with_shared_prefixes
from engine.preferences.data.answer_columns import AnswerColumns
from engine.rollouts.data.completions import Completion, completion_columns

Documents = list[tuple[list[int], list[bool]]]


def _alike(seed: int, *, count: int = 12, longest: int = 90) -> Documents:
    """Returns documents that begin like one of some others, with targets at drawn places."""
    draw = random.Random(seed)
    found: Documents = []
    for _ in range(count):
        tokens, targets = [1], [False]
        if found and draw.random() < 0.8:
            other = draw.choice(found)
            cut = draw.randint(1, len(other[0]))
            tokens, targets = other[0][:cut], other[1][:cut]
        more = draw.randint(1, max(1, longest - len(tokens)))
        learns = draw.random() < 0.7
        tokens = [*tokens, *(draw.randint(2, 5) for _ in range(more))][:longest]
        targets = [*targets, *(learns and draw.random() < 0.8 for _ in range(more))][: len(tokens)]
        found.append((tokens, targets))
    return found


def _paths(batch: Batch) -> list[list[int]]:
    """Returns the columns (of the flat tokens) along the way from a root to each document's end."""
    starts = [0, *accumulate(batch.document_lengths)]
    parents = batch.document_parents or (-1,) * len(batch.document_lengths)
    found = []
    for number in range(len(parents)):
        way: list[int] = []
        one = number
        while one >= 0:
            way = [*range(starts[one], starts[one + 1]), *way]
            one = parents[one]
        found.append(way)
    return found


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("packing", [False, True])
def test_documents_are_found_along_paths(seed: int, packing: bool) -> None:
    documents = _alike(seed)
    plain = dataset_of(documents, seq_length=256, packing=packing)
    shared = with_shared_prefixes(plain)
    found: list[tuple[list[int], list[int], int]] = []
    weight = 0.0
    for row in range(len(shared)):
        batch = build_batch(shared, [row], [0], length=256)
        tokens, labels, positions, weights = (
            one.flatten().tolist()
            for one in (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.loss_weights_BS)
        )
        if batch.document_parents:
            check_parents(batch.document_parents, len(batch.document_lengths))
        weight += sum(weights)
        paths = _paths(batch)
        ways = {tuple(tokens[column] for column in way): way for way in paths}
        for document in shared.rows.row(row).tolist():
            ids, targets = documents[document]
            way = next(way for text, way in ways.items() if list(text[: len(ids)]) == ids and _ends(text, ids, row))
            held = way[: len(ids)]
            assert [positions[column] for column in held] == list(range(len(ids)))
            expected = [ids[i + 1] if targets[i + 1] else IGNORE_LABEL for i in range(len(ids) - 1)]
            assert [labels[column] for column in held[:-1]] == expected
            assert all(weights[column] > 0 for column, label in zip(held, expected, strict=False) if label >= 0)
            found.append((ids, targets, document))
    assert sorted(document for *_, document in found) == list(range(len(documents)))
    assert weight == sum(sum(targets[1:]) for _, targets in documents) == sum(shared.target_counts)


def _ends(text: tuple[int, ...], ids: list[int], row: int) -> bool:
    """Returns whether a path is a document's own and not that of a longer one that begins like it."""
    return all(token == 0 for token in text[len(ids) :])


def test_counts_of_a_group() -> None:
    prompt, answers = list(range(2, 42)), [[50 + n, 60 + n, 70 + n] for n in range(4)]
    columns = completion_columns([_completion(prompt, answer) for answer in answers], "tokens")
    shared = with_shared_prefixes(TokenDataset(columns, seq_length=64))
    assert len(shared) == 1 and shared.row_lengths.tolist() == [39 + 4 * 4]
    said = "172 tokens (12 trained on), 117 of them shared with other samples (68% saved)"  # 4 x 43; 3 x 39
    assert said in shared.report.summary()
    batch = build_batch(shared, [0], [5], length=60)
    assert batch.document_lengths == (39, 4, 4, 4, 9) and batch.document_parents == (-1, 0, 0, 0, 0)
    part = batch.part(SharedTokens)
    assert part is not None and part.counts_BS[0].tolist() == [4.0] * 39 + [1.0] * 21
    assert batch.token_index_BS[0].tolist() == list(range(5 * 64, 5 * 64 + 60))
    assert batch.loss_weights_BS.sum() == 12


def _completion(prompt: list[int], tokens: list[int]) -> Completion:
    return Completion(prompt=prompt, tokens=tokens, sampled_logps=[-1.0] * len(tokens), advantage=1.0)


def test_documents_with_values_of_their_own_share_no_target() -> None:
    """The answers of a pair begin alike: the tokens they have in common are predicted by both."""
    question, common = list(range(10, 40)), [7] * 25
    tokens = [[*question, *common, 3], [*question, *common, 4, 4]]
    columns = contiguous(
        np.array([*tokens[0], *tokens[1]], dtype=np.int32),
        np.array([index >= 30 for one in tokens for index in range(len(one))]),
        np.cumsum([0, *map(len, tokens)]),
        group=2,
        extras=[AnswerColumns(signs=np.array([1, -1], dtype=np.float32))],
    )
    shared = with_shared_prefixes(TokenDataset(columns, seq_length=128))
    assert shared.rows.reused is not None and shared.rows.reused.tolist() == [0, 29]


def test_few_common_tokens_are_not_shared() -> None:
    documents = [([1] * LEAST_REUSED + [n, n], [False] + [True] * (LEAST_REUSED + 1)) for n in (2, 3)]
    plain = dataset_of(documents, seq_length=64)
    assert with_shared_prefixes(plain) is plain
    documents = [([1] * (LEAST_REUSED + 1) + [n, n], [False] + [True] * (LEAST_REUSED + 2)) for n in (2, 3)]
    plain = dataset_of(documents, seq_length=64)
    assert with_shared_prefixes(plain, least_saved=0.5) is plain
    assert with_shared_prefixes(plain).row_lengths.tolist() == [LEAST_REUSED + 6]


@pytest.mark.parametrize("packing", [False, True])
def test_rows_never_exceed_their_length(packing: bool) -> None:
    for seed in range(20):
        shared = with_shared_prefixes(dataset_of(_alike(seed, count=40), seq_length=90, packing=packing))
        assert shared.row_lengths.max() <= 90


def test_rows_are_kept_by_copies(tmp_path) -> None:
    shared = with_shared_prefixes(dataset_of(_alike(3, count=40), seq_length=200, packing=True))
    save_dataset(shared, tmp_path)
    assert map_dataset(tmp_path).fingerprint() == shared.fingerprint()
    train, held = hold_out(shared, 0.3, 1)
    assert sorted([*train.row_lengths, *held.row_lengths]) == sorted(shared.row_lengths)


def test_rows_of_a_blend_share_what_they_share_alone() -> None:
    shared = with_shared_prefixes(dataset_of(_alike(3, count=40), seq_length=200, packing=True))
    plain = dataset_of([([7] * 30, [False] + [True] * 29)] * 3, seq_length=200, packing=True)
    assert shared.rows.reused is not None and shared.rows.reused.any() and plain.rows.reused is None
    mixed = blend([plain, shared], [1.0, float(len(shared))])
    assert mixed.row_lengths.tolist() == [90, *shared.row_lengths.tolist()]
    for row in range(len(shared)):
        ours, own = (build_batch(data, [at], [0], length=200) for data, at in ((mixed, row + 1), (shared, row)))
        assert ours.document_parents == own.document_parents
        for name in ("tokens_BS", "labels_BS", "positions_BS", "loss_weights_BS", "document_offsets"):
            assert getattr(ours, name).equal(getattr(own, name)), name


def test_runs_of_a_tree_by_hand() -> None:
    # abcd, abce (reuses ab), abcef.. (reuses abc), x
    assert branches_of_row([4, 5, 6, 3], [0, 2, 3, 0]) == ([2, 2, 1, 2, 3, 3], [-1, 0, 0, 2, 2, -1], [3, 1, 2, 1, 1, 1])
