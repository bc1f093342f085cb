"""Documents that continue others in micro-batches of several tenants that are joined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, SharedTokens
from engine.data.collate import build_batch, context_part
from engine.data.dataset import dataset_of
from engine.data.prefixes import with_shared_prefixes
from engine.telemetry.log import Log
from engine.tenants import joined_batch, joint_pass
from engine.tenants.joined_batch import can_join, join
from engine.tenants.tenants import Tenants
from rankfold.benchmarking.small_run import SMALL_LLAMA, write_small_run
from tests.parity.test_shared_prefixes import alike
from tests.support.small_training import packed_batch
from tests.tenants.test_shared_base import ADAPTERS, SMALLER, configs, launched


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


def _shared(seed: int) -> Batch:
    data = with_shared_prefixes(dataset_of(alike(seed, count=8), seq_length=64, packing=True))
    return build_batch(data, [0], [0], length=64)


def test_tenants_that_share_beginnings_are_joined_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has a micro-batch that shares nothing, whose tokens count once each."""
    write_small_run(tmp_path, {**SMALL_LLAMA, **SMALLER})
    tenants = Tenants(configs(tmp_path)[0], launched(), Log(1), tokens=400)
    numbers = [tenants.add(config) for config in configs(tmp_path, ADAPTERS[:2])]
    batches = {numbers[0]: [_shared(5), _shared(6)], numbers[1]: [packed_batch([(9, 12)], 96, 1), _shared(7)]}
    joined: list[Batch] = []

    def noted(parts: Sequence[tuple[int, Batch]]) -> Batch:
        joined.append(joined_batch.join(parts))
        return joined[-1]

    def gradients(some: Sequence[int]) -> list[torch.Tensor]:
        for number in some:
            tenants[number].optimizer.flat.gradient.zero_()
        tenants.gradients({number: batches[number] for number in some}, dict.fromkeys(some, 20.0))
        return [tenants[number].optimizer.flat.gradient.clone() for number in some]

    for number in numbers:
        for entry in tenants[number].stages.entries():
            if entry.name.endswith("lora_B"):
                entry.parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    monkeypatch.setattr(joint_pass, "join", noted)
    found = gradients(numbers)
    assert all(can_join(own) for own in batches.values()) and joined
    for one in joined:
        part, expected = one.part(SharedTokens), []
        for batch in one.part(joined_batch.Joined).batches:
            counts = batch.part(SharedTokens)
            expected += [1.0] * batch.num_tokens if counts is None else counts.counts_BS.flatten().tolist()
        assert part is not None and part.counts_BS.flatten().tolist() == expected and max(expected) > 1
    for number, together in zip(numbers, found, strict=True):
        (alone,) = gradients([number])
        assert alone.norm() > 0 and torch.equal(together, alone), number
