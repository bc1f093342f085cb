"""Records that are tokens already, and evaluation that weighs rows alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import IGNORE_LABEL
from engine.data.dataset import TokenDataset
from engine.data.loader import EvalLoader, RowMeanLoader
from engine.data.row_shape import RowShape
from engine.data.text_reader import build_texts
from engine.errors import UserError
from tests.unit.test_data_loader import random_dataset


class NoTokenizer:
    """Tokens need none."""

    vocab_size, bos_id, eos_id, adds_bos, has_chat_template = 100, 1, 2, True, False

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        assert not texts
        return []


def build(folder: Path, *records: dict[str, object], **options: object) -> TokenDataset:
    path = folder / "tokens.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return build_texts(path, tokenizer=NoTokenizer(), seq_length=4, **options)


def test_labels_say_what_is_learnt(tmp_path: Path) -> None:
    data = build(
        tmp_path,
        {"input_ids": [1, 7, 8, 2], "labels": [-100, -100, 8, 2]},
        {"input_ids": [5, 6, 7, 8]},
        packing="concatenate",
    )
    assert [tokens.tolist() for row in range(2) for tokens, _ in data.documents(row)] == [[1, 7, 8, 2], [5, 6, 7, 8]]
    learnt = [targets.tolist() for row in range(2) for _, targets in data.documents(row)]
    assert learnt == [[False, False, True, True], [False, True, True, True]]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"input_ids": []}, "empty or has negative"),
        ({"input_ids": [1, -2]}, "empty or has negative"),
        ({"input_ids": [1, 2.5]}, "another list"),
        ({"input_ids": [[1], [2, 3]]}, "another list"),
        ({"input_ids": [1, 1 << 31]}, "another list"),
        ({"input_ids": "1 2"}, "a string"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 numbers"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, "'labels' has 3 at 1"),
        ({"input_ids": [1, 2], "labels": ["a", "b"]}, "another list"),
    ],
)
def test_wrong_tokens(tmp_path: Path, record: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=r"tokens.jsonl line 1: ") as caught:
        build(tmp_path, record)
    assert words in str(caught.value)


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("context", [1, 2])
def test_rows_weigh_alike(micro: int, size: int, context: int) -> None:
    """The sum of weighted losses over the target count is the mean of row means, whatever the layout."""
    dataset = random_dataset(7)
    whole = RowShape(micro_batch_size=micro, data_size=size, context_size=context, pad_multiple=2 * context)
    loss_of = torch.rand(int(dataset.tokens.max()) + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total, rows, places = 0.0, {}, [(data, part) for data in range(size) for part in range(context)]
    for data, part in places:
        shape = replace(whole, data_rank=data, context_rank=part)
        loader = RowMeanLoader(dataset, shape)
        for batch in loader:
            losses = loss_of[batch.labels_BS.clamp(min=0)]
            total += float((losses * batch.loss_weights_BS).sum())
        for batch in EvalLoader(dataset, shape):
            for number, labels in zip(
                (batch.token_index_BS[:, 0] // dataset.seq_length).tolist(), batch.labels_BS, strict=True
            ):
                rows.setdefault(number, []).extend(loss_of[labels[labels != IGNORE_LABEL]].tolist())
    expected = np.mean([np.mean(found) for found in rows.values() if found])
    assert loader.target_count() == sum(1 for found in rows.values() if found)
    assert total / loader.target_count() == pytest.approx(expected, rel=1e-6)
    by_tokens = np.mean([loss for found in rows.values() for loss in found])
    assert abs(by_tokens - expected) > 1e-3  # the two means are not the same
