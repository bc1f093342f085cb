"""Parts of a batch: looked up by class, changed with the batch, and cut for a context rank as each says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.batch import Batch, BatchPart, Embeddings, Padding
from engine.data.collate import context_part
from engine.kernels.records import Documents
from engine.preferences.batch_parts import Answers, Mismatched
from engine.rollouts.batch_parts import Completions
from engine.vision.batch_parts import BidirectionalSpans, CrossImages, ExpertTokens, GridPositions, Images
from tests.support.small_training import packed_batch

ROWS, LENGTH = 2, 16
DOCUMENTS = [(16,), (6, 10)]


def batch_of(*parts: BatchPart) -> Batch:
    return packed_batch(DOCUMENTS, vocab_size=7, seed=0).with_parts(*parts)


def numbers() -> Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)


def images(kind: type[Images] = Images) -> Images:
    return kind(
        patches_PF=torch.ones(6, 4), grids=((2, 3),), documents=(1,), places_K=torch.tensor([17, 18, 19]),
        tile_index_N=torch.tensor([5]),
    )  # fmt: skip


def spans() -> BidirectionalSpans:
    found = BidirectionalSpans.of([(17, 20)])
    assert found is not None
    return found


MAKE: dict[str, Callable[[], BatchPart]] = {
    "padding": lambda: Padding(padding_BS=numbers() > 30),
    "embeddings": lambda: Embeddings(embeddings_TH=torch.ones(ROWS * LENGTH, 4)),
    "images": images,
    "cross images": lambda: images(CrossImages),
    "experts": lambda: ExpertTokens.of(torch.tensor([17, 18]), ROWS * LENGTH),
    "spans": spans,
    "grid": lambda: GridPositions(positions_3BS=numbers().repeat(3, 1, 1)),
    "answers": lambda: Answers(
        ids_BS=numbers(), signs=torch.ones(2), lengths=torch.ones(2), documents=(0, 1), reference_logps=torch.ones(2)
    ),
    "completions": lambda: Completions(
        ids_BS=numbers(), advantages=torch.ones(2), lengths=torch.ones(2), documents=(0, 1),
        sampled_logps_BS=numbers().float(),
    ),
    "mismatched": lambda: Mismatched(batch=batch_of(images())),
}  # fmt: skip


def test_a_part_is_found_by_exactly_its_class() -> None:
    first, second = images(), images(CrossImages)
    batch = batch_of(second, None, first)
    assert batch.part(Images) is first and batch.part(CrossImages) is second and batch.part(Padding) is None
    other = images()
    assert batch.with_parts(other).part(Images) is other and len(batch.with_parts(other).parts) == 2
    assert batch.without(Images).parts == (second,)


@pytest.mark.parametrize("name", MAKE)
def test_every_tensor_of_a_part_is_changed_with_the_batch(name: str) -> None:
    """On its way to the device, none may stay behind."""
    seen: list[int] = []

    def change(tensor: Tensor) -> Tensor:
        seen.append(tensor.data_ptr())
        return tensor + 0

    part, core = MAKE[name](), 6
    moved = batch_of(part).map(change)
    inner = part.batch if isinstance(part, Mismatched) else None
    tensors = [value for one in (part, *(() if inner is None else (inner, *inner.parts))) for value in _tensors(one)]
    assert {one.data_ptr() for one in tensors} <= set(seen) and len(seen) == core + len(tensors)
    assert [type(one) for one in moved.parts] == [type(part)] and moved.parts[0] is not part


def _tensors(record: BatchPart | Batch) -> list[Tensor]:
    named = (getattr(record, name) for name in type(record).__dataclass_fields__)
    return [value for value in named if isinstance(value, Tensor)]


@pytest.mark.parametrize("name", ["padding", "grid", "answers", "completions"])
def test_columns_go_to_the_context_rank_that_has_their_tokens(name: str) -> None:
    whole = batch_of(MAKE[name]())
    for rank in range(2):
        held = context_part(whole, size=2, rank=rank)
        columns = held.token_index_BS[0] - whole.token_index_BS[0, 0]
        (before,), (after,) = whole.parts, held.parts
        for field in type(before).__dataclass_fields__:
            one, other = getattr(before, field), getattr(after, field)
            if field.endswith("BS") and one is not None:
                assert torch.equal(other, one[..., columns]), field
            else:
                assert other is one


def test_experts_and_images_of_a_context_rank_are_among_its_own_tokens() -> None:
    whole, seen = batch_of(images(), images(CrossImages), MAKE["experts"]()), []
    for rank in range(2):
        held = context_part(whole, size=2, rank=rank)
        own, experts = held.part(Images), held.part(ExpertTokens)
        assert own is not None and own.features_K is not None and experts is not None
        index = held.token_index_BS.flatten() - whole.token_index_BS[0, 0]
        seen += list(zip(index[own.places_K].tolist(), own.features_K.tolist(), strict=True))
        both = torch.cat([experts.vision_V, experts.language_L])
        assert torch.equal(both.sort().values, torch.arange(held.num_tokens))
        assert set(index[experts.vision_V].tolist()) <= {17, 18}
        assert held.part(CrossImages) is whole.part(CrossImages)
    assert sorted(seen) == [(17, 0), (18, 1), (19, 2)]


def test_a_rank_without_the_input_stage_has_no_patches() -> None:
    batch = batch_of(images(), images(CrossImages), MAKE["mismatched"](), MAKE["answers"]()).without_input()
    beside = batch.part(Mismatched)
    assert beside is not None
    for one in (batch.part(Images), batch.part(CrossImages), beside.batch.part(Images)):
        assert one is not None and one.patches_PF.shape == (0, 4) and one.grids == ((2, 3),)
    assert batch.part(Answers) is not None


def test_what_the_reference_says_may_come_with_the_batch() -> None:
    assert batch_of(MAKE["answers"]()).brings_reference
    assert not batch_of(MAKE["completions"](), MAKE["images"]()).brings_reference


def test_spans_are_the_documents_own() -> None:
    plain, found = batch_of(images()).documents, batch_of(images(), spans()).documents
    assert plain == Documents(lengths=(16, 6, 10), offsets=plain.offsets, max_length=16)
    assert found.seen_whole is not None and found.seen_whole.spans == ((17, 20),)
    assert (found.lengths, found.max_length) == (plain.lengths, plain.max_length)
