"""Documents that continue others in micro-batches of several tenants that are joined."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from engine.batch import Batch
from engine.data.collate import context_part
from engine.tenants.joined_batch import join


def _batch(row_length: int, lengths: tuple[int, ...], parents: tuple[int, ...]) -> Batch:
    whole = torch.arange(row_length)[None]
    return Batch(
        tokens_BS=whole, labels_BS=whole, positions_BS=whole, token_index_BS=whole, loss_weights_BS=whole.float(),
        document_offsets=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        document_lengths=lengths, document_parents=parents,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        ((-1, 0), (-1, 0, 1), (-1, 0, -1, 2, 3)),
        ((), (-1, 0, 0), (-1, -1, -1, 2, 2)),
        ((-1, 0), (), (-1, 0, -1, -1, -1)),
        ((), (), ()),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_parents_are_numbered_over_all_parts(
    first: tuple[int, ...], second: tuple[int, ...], joined: tuple[int, ...], size: int
) -> None:
    parts = (_batch(8, (5, 3), first), _batch(12, (4, 4, 4), second))
    found = join([(number, context_part(part, size=size, rank=size - 1)) for number, part in enumerate(parts)])
    assert found.documents.parents == found.document_parents == joined
    assert found.document_lengths == (5, 3, 4, 4, 4)
    if size > 1:
        assert found.context_plan is not None and found.context_plan.layout.document_parents == joined
        alone = context_part(parts[0], size=size, rank=0).context_plan
        assert alone is not None and alone.layout.document_parents == first
