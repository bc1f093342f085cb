"""Batches and their order: against brute force, transformers' flattening collator, and under every layout."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DataCollatorWithFlattening

from engine.batch import IGNORE_LABEL, Batch
from engine.data.dataset import TokenDataset, dataset_of
from engine.data.loader import DataLoader, EvalLoader, RowMeanLoader
from engine.data.order import DataOrder, permutation
from engine.data.row_shape import RowShape
from engine.errors import UserError

SEQ = 16


def random_documents(count: int, longest: int = SEQ, seed: int = 0) -> list[tuple[list[int], list[bool]]]:
    """Documents whose tokens tell which document and place they come from: document * 100 + place + 1."""
    rng = np.random.default_rng(seed)
    documents = []
    for document in range(count):
        length = int(rng.integers(2, longest + 1))
        targets = [False, *(rng.random(length - 1) < 0.7).tolist()]
        documents.append(([document * 100 + place + 1 for place in range(length)], targets))
    return documents


def random_dataset(count: int, *, packing: bool = False) -> TokenDataset:
    return dataset_of(random_documents(count), seq_length=SEQ, packing=packing)


def make_loader(dataset: TokenDataset, *, rank: int = 0, size: int = 1, micro: int = 2, **options: int) -> DataLoader:
    fields = {name: options.pop(name) for name in RowShape.__dataclass_fields__ if name in options}
    chosen: dict[str, Any] = {"global_batch_size": 8, "seed": 3, **options}
    return DataLoader(dataset, RowShape(micro_batch_size=micro, data_rank=rank, data_size=size, **fields), **chosen)


def same(first: Batch, second: Batch) -> bool:
    names = ("tokens_BS", "labels_BS", "positions_BS", "token_index_BS", "loss_weights_BS", "document_offsets")
    equal = all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)
    return equal and first.document_lengths == second.document_lengths


def check_record(batch: Batch) -> None:
    """What engine.batch promises of every batch."""
    rows, columns = batch.num_rows, batch.row_length
    for tensor in (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.token_index_BS):
        assert tensor.dtype == torch.int64 and tensor.shape == (rows, columns)
    assert batch.loss_weights_BS.dtype == torch.float32 and batch.document_offsets.dtype == torch.int32
    assert batch.document_offsets.tolist() == np.cumsum([0, *batch.document_lengths]).tolist()
    assert batch.document_offsets[-1] == rows * columns
    assert set(range(0, rows * columns + 1, columns)) <= set(batch.document_offsets.tolist())
    assert torch.equal(batch.loss_weights_BS, (batch.labels_BS != IGNORE_LABEL).float())
    expected = [place for length in batch.document_lengths for place in range(length)]
    assert batch.positions_BS.flatten().tolist() == expected
    last_of_documents = batch.document_offsets[1:].long() - 1
    assert (batch.labels_BS.flatten()[last_of_documents] == IGNORE_LABEL).all()


def learnt(batches: Sequence[Batch]) -> list[tuple[int, int]]:
    """(token that is read, token that is learnt) of every target."""
    pairs = []
    for batch in batches:
        chosen = batch.labels_BS != IGNORE_LABEL
        pairs += list(zip(batch.tokens_BS[chosen].tolist(), batch.labels_BS[chosen].tolist(), strict=True))
    return pairs


def test_permutation_is_a_fixed_function_of_seed_and_epoch() -> None:
    order = permutation(7, 2, 1000)
    assert sorted(order.tolist()) == list(range(1000))
    # The order must never change from one version to the next: a resumed run would read other samples.
    assert permutation(1234, 0, 10).tolist() == [8, 9, 7, 3, 0, 1, 4, 2, 5, 6]
    others = [permutation(7, 3, 1000), permutation(8, 2, 1000)]
    assert all((order != other).mean() > 0.9 for other in others)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1


def test_an_epoch_reads_each_sample_once_and_its_last_batch_has_the_rest() -> None:
    order = DataOrder(count=21, batch=8, seed=3)
    starts = list(order.starts(0, 9))
    assert starts == [0, 8, 16, 21, 29, 37, 42, 50, 58]
    epochs = [np.concatenate([order.rows(start) for start in starts[first : first + 3]]) for first in (0, 3, 6)]
    assert all(sorted(epoch.tolist()) == list(range(21)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    # what a run with another batch has consumed need not be the start of a batch
    assert order.rows(13).tolist() == epochs[0][13:21].tolist() and order.size(20) == 1
    assert sorted(DataOrder(count=3, batch=8, seed=3).rows(0).tolist()) == [0, 1, 2]


def test_full_batches_run_on_into_the_next_epoch() -> None:
    order = DataOrder(count=21, batch=8, seed=3, last_batch="full")
    assert list(order.starts(0, 4)) == [0, 8, 16, 24]
    stream = np.concatenate([order.rows(step * 8) for step in range(21)])
    for epoch in range(8):
        assert sorted(stream[epoch * 21 : (epoch + 1) * 21].tolist()) == list(range(21))
    assert order.rows(13).tolist() == stream[13:21].tolist()
    assert DataOrder(count=5, batch=8, seed=3, last_batch="full", shuffle=False).rows(3).tolist() == [
        3, 4, 0, 1, 2, 3, 4, 0,
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 12),
    epochs=st.integers(1, 4),
    last_batch=st.sampled_from(["short", "full"]),
    taken=st.integers(0, 30),
)
def test_the_steps_of_a_run_are_those_that_reach_the_end_of_its_epochs(
    count: int, batch: int, epochs: int, last_batch: Any, taken: int
) -> None:
    order = DataOrder(count=count, batch=batch, seed=1, last_batch=last_batch)
    expected = [start for start in order.starts(0, 200) if start < epochs * count]
    assert order.steps_left(0, epochs) == len(expected)
    consumed = list(order.starts(0, taken + 1))[-1]
    assert order.steps_left(consumed, epochs) == max(0, len(expected) - taken)
    assert order.steps_per_epoch == DataOrder(count=count, batch=batch, seed=1).steps_left(0, 1)
    assert order.steps_left(0, 0.001) == 1


@pytest.mark.parametrize(
    ("count", "batch", "last_batch", "sentence"),
    [
        (16, 8, "short", "one epoch is 16 rows in 2 steps of 8"),
        (19, 8, "short", "one epoch is 19 rows in 3 steps of 8, the last of 3"),
        (3, 8, "short", "one epoch is 3 rows in 1 step"),
        (1, 1, "short", "one epoch is 1 row in 1 step of 1"),
        (3, 8, "full", "one epoch is 3 rows in 1 step of 8, the last of which takes 5 from the next epoch"),
    ],
)
def test_the_length_of_an_epoch_in_words(count: int, batch: int, last_batch: Any, sentence: str) -> None:
    assert DataOrder(count=count, batch=batch, seed=1, last_batch=last_batch).sentence().startswith(sentence)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 8), (2, 2), (4, 1), (2, 4)])
def test_slots_lie_where_the_layout_says(packing: bool, size: int, micro: int) -> None:
    dataset = random_dataset(40, packing=packing)
    loaders = [make_loader(dataset, rank=rank, size=size, micro=micro) for rank in range(size)]
    for consumed in (0, 8, 11, 35):
        rows = loaders[0].order.rows(consumed)
        batches = [loader.batches(consumed) for loader in loaders]
        for slot in range(8):
            batch = batches[slot % (micro * size) // micro][slot // (micro * size)]
            row = slot % micro
            check_record(batch)
            assert batch.num_rows == micro
            assert batch.token_index_BS[row].tolist() == list(range(slot * SEQ, slot * SEQ + batch.row_length))
            if slot >= len(rows):  # of a short batch
                assert (batch.tokens_BS[row] == 0).all() and not batch.loss_weights_BS[row].any()
                continue
            documents = list(dataset.documents(int(rows[slot])))
            tokens = np.concatenate([tokens for tokens, _ in documents])
            assert batch.tokens_BS[row, : len(tokens)].tolist() == tokens.tolist()
            assert (batch.tokens_BS[row, len(tokens) :] == 0).all()
            expected = [
                (int(document[place - 1]), int(document[place]))
                for document, targets in documents
                for place in range(1, len(document))
                if targets[place]
            ]
            chosen = batch.labels_BS[row] != IGNORE_LABEL
            found = torch.stack([batch.tokens_BS[row][chosen], batch.labels_BS[row][chosen]], dim=1).tolist()
            assert [tuple(pair) for pair in found] == expected


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 30),
    packing=st.booleans(),
    layout=st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (8, 1)]),
    pad_multiple=st.sampled_from([1, 2, 4]),
    consumed=st.integers(0, 100),
)
def test_layouts_read_the_same_targets_and_count_them(
    count: int, packing: bool, layout: tuple[int, int], pad_multiple: int, consumed: int
) -> None:
    dataset = random_dataset(count, packing=packing)
    one = make_loader(dataset, micro=8)
    size, micro = layout
    loaders = [
        make_loader(dataset, rank=rank, size=size, micro=micro, pad_multiple=pad_multiple) for rank in range(size)
    ]
    batches = [batch for loader in loaders for batch in loader.batches(consumed)]
    for batch in batches:
        check_record(batch)
        assert batch.row_length % pad_multiple == 0
        assert batch.row_length == SEQ or not packing
    assert sorted(learnt(batches)) == sorted(learnt(one.batches(consumed)))
    weights = sum(float(batch.loss_weights_BS.sum()) for batch in batches)
    assert [loader.target_count(consumed) for loader in loaders] == [weights] * size
    assert len({len(loader.batches(consumed)) for loader in loaders}) == 1


def test_rows_are_padded_to_the_longest_of_their_micro_batch() -> None:
    documents = [([5] * length, [False] + [True] * (length - 1)) for length in (3, 9, 4, 5)]
    dataset = dataset_of(documents, seq_length=SEQ)
    loader = make_loader(dataset, global_batch_size=4, pad_multiple=4, pad_token=99, shuffle=False)
    first, second = loader.batches(0)
    assert (first.row_length, second.row_length) == (12, 8)
    assert first.document_lengths == (12, 12)
    assert first.tokens_BS[0].tolist() == [5] * 3 + [99] * 9
    assert first.positions_BS[0].tolist() == list(range(12))
    assert first.labels_BS[0].tolist() == [5, 5] + [IGNORE_LABEL] * 10


def test_row_lengths_are_rounded_up_within_the_configured_one() -> None:
    """Rows of 3 and 9 tokens, then of 4 and 15, of up to 16: multiples of 6 are 12 and 18, which is too long."""
    documents = [([5] * length, [False] + [True] * (length - 1)) for length in (3, 9, 4, 15)]
    dataset = dataset_of(documents, seq_length=SEQ)
    loader = make_loader(dataset, global_batch_size=4, pad_multiple=2, length_multiple=6, shuffle=False)
    assert [batch.row_length for batch in loader.batches(0)] == [12, 16]
    plain = make_loader(dataset, global_batch_size=4, pad_multiple=2, shuffle=False)
    for batch, shorter in zip(loader.batches(0), plain.batches(0), strict=True):
        columns = shorter.row_length
        for name in ("tokens_BS", "labels_BS", "positions_BS", "token_index_BS", "loss_weights_BS"):
            assert torch.equal(getattr(batch, name)[:, :columns], getattr(shorter, name))
        assert not batch.loss_weights_BS[:, columns:].any()
        assert (batch.labels_BS[:, columns:] == IGNORE_LABEL).all()
    evaluated = EvalLoader(dataset, RowShape(micro_batch_size=2, length_multiple=6))
    assert [batch.row_length for batch in evaluated] == [12, 16]
    packed = dataset_of(documents, seq_length=SEQ, packing=True)
    assert make_loader(packed, micro=1, global_batch_size=1, length_multiple=6).batches(0)[0].row_length == SEQ


def test_packed_rows_are_what_the_flattening_collator_of_transformers_makes() -> None:
    documents = random_documents(60)
    dataset = dataset_of(documents, seq_length=SEQ, packing=True)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    full = [row for row in range(len(dataset)) if dataset.row_lengths[row] == SEQ]
    assert len(full) > 10 and max(len(dataset.rows.row(row)) for row in full) > 2
    loader = make_loader(dataset, micro=1, global_batch_size=len(dataset), shuffle=False)
    batches = loader.batches(0)
    for row in full:
        features = [
            {
                "input_ids": tokens.tolist(),
                "labels": np.where(targets, tokens.astype(np.int64), IGNORE_LABEL).tolist(),
            }
            for tokens, targets in dataset.documents(row)
        ]
        theirs, ours = collator(features), batches[row]
        assert torch.equal(ours.tokens_BS, theirs["input_ids"])
        assert torch.equal(ours.positions_BS, theirs["position_ids"])
        assert ours.document_offsets.tolist() == theirs["cu_seq_lens_q"].tolist()
        # Theirs are shifted by the loss, ours are already.
        assert torch.equal(ours.labels_BS[:, :-1], theirs["labels"][:, 1:])
        assert ours.labels_BS[0, -1] == IGNORE_LABEL


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_stream_gives_the_batches_of_each_step(num_workers: int) -> None:
    dataset = random_dataset(30)
    loader = make_loader(dataset, rank=1, size=2, num_workers=num_workers)
    steps = list(loader.stream(5, 9))
    assert len(steps) == 9
    starts = [5, 13, 21, 29, 30, 38, 46, 54, 60]
    assert list(loader.order.starts(5, 9)) == starts
    for start, batches in zip(starts, steps, strict=True):
        assert all(same(a, b) for a, b in zip(batches, loader.batches(start), strict=True))
    # Resuming is starting at a later sample.
    resumed = list(loader.stream(30, 5))
    assert all(same(a, b) for x, y in zip(resumed, steps[4:], strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_while_building_reaches_the_consumer(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    loader = make_loader(random_dataset(30), num_workers=num_workers)
    build = loader.batches

    def failing(consumed: int) -> list[Batch]:
        if consumed == 16:
            raise OSError("disk gone")
        return build(consumed)

    monkeypatch.setattr(loader, "batches", failing)
    stream = loader.stream(0, 6)
    next(stream)
    next(stream)
    with pytest.raises(OSError, match="disk gone"):
        next(stream)


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("data")]


def test_closing_a_stream_ends_its_threads() -> None:
    stream = make_loader(random_dataset(30), num_workers=2).stream(0, 1000)
    next(stream)
    assert data_threads()
    stream.close()  # type: ignore[attr-defined]
    assert not data_threads()


def test_interpreter_exits_with_an_open_stream() -> None:
    code = (
        "from engine.data.dataset import dataset_of\n"
        "from engine.data.loader import DataLoader\n"
        "data = dataset_of([([1, 2], [False, True])], seq_length=4)\n"
        "loader = DataLoader(data, global_batch_size=1, seed=0, num_workers=2)\n"
        "stream = loader.stream(0, 10**9)\n"
        "print(next(stream)[0].tokens_BS.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[[1, 2]]" and not done.stderr


def test_sizes_that_do_not_divide_are_refused_with_the_next_that_does() -> None:
    dataset = random_dataset(5)
    with pytest.raises(UserError, match=r"train\.global_batch_size 10 .*micro_batch_size 2 .* 4 data.* set it to 16"):
        make_loader(dataset, size=4, global_batch_size=10)
    with pytest.raises(UserError, match=r"data\.seq_length 16 is not a multiple of 3.*set data\.seq_length to 18"):
        make_loader(dataset, pad_multiple=3)
    with pytest.raises(UserError, match=r"data\.seq_length 16 is not a multiple of 3"):
        EvalLoader(dataset, RowShape(pad_multiple=3))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 4), (4, 2), (3, 5)])
@pytest.mark.parametrize("max_samples", [None, 4, 1000])
def test_evaluation_reads_every_row_once_on_any_layout(
    packing: bool, size: int, micro: int, max_samples: int | None
) -> None:
    dataset = random_dataset(23, packing=packing)
    loaders = [
        EvalLoader(dataset, RowShape(micro_batch_size=micro, data_rank=rank, data_size=size), max_samples=max_samples)
        for rank in range(size)
    ]
    per_rank = [list(loader) for loader in loaders]
    assert {len(batches) for batches in per_rank} == {len(loaders[0])}
    batches = [batch for rank in per_rank for batch in rank]
    for batch in batches:
        check_record(batch)
        assert batch.num_rows == micro
    read = min(len(dataset), max_samples or len(dataset))
    expected = [
        (int(tokens[place - 1]), int(tokens[place]))
        for row in range(read)
        for tokens, targets in dataset.documents(row)
        for place in range(1, len(tokens))
        if targets[place]
    ]
    assert sorted(learnt(batches)) == sorted(expected)
    assert {loader.target_count() for loader in loaders} == {float(len(expected))}
    assert (len(batches) - 1) * micro < read + size * micro


class _Pinned(Tensor):
    """A tensor that says it lies in page-locked memory."""


@pytest.mark.parametrize("kind", [EvalLoader, RowMeanLoader])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_evaluation_is_built_ahead_with_the_same_bits(
    kind: type[EvalLoader], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By threads, in order, all of it in the memory that is copied from; the main thread builds nothing."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.as_subclass(_Pinned))
    builders: set[str] = set()
    build = kind.batch

    def noted(self: EvalLoader, number: int) -> Batch:
        builders.add(threading.current_thread().name)
        if number == 0:
            time.sleep(0.05)  # the first is ready after the others
        return build(self, number)

    monkeypatch.setattr(kind, "batch", noted)
    dataset = random_dataset(23, packing=True)
    shape = RowShape(micro_batch_size=2, data_rank=1, data_size=2)
    plain = list(kind(dataset, shape))
    assert builders == {"MainThread"}
    builders.clear()
    ahead = list(kind(dataset, shape, num_workers=num_workers, pin_memory=True))
    assert all(name.startswith("data") for name in builders)
    assert len(plain) == len(ahead) > 2
    for one, other in zip(plain, ahead, strict=True):
        for record, ahead_of in zip((one, *one.parts), (other, *other.parts), strict=True):
            for field in fields(record):
                value, again = getattr(record, field.name), getattr(ahead_of, field.name)
                if isinstance(value, Tensor):
                    assert torch.equal(value, again) and isinstance(again, _Pinned) and not isinstance(value, _Pinned)
                elif field.name != "parts":
                    assert value == again


def test_an_evaluation_that_is_left_ends_its_threads() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    loader = EvalLoader(random_dataset(40), num_workers=2)
    batches = iter(loader)
    next(batches)
    assert any(thread.name.startswith("data") for thread in threading.enumerate() if thread.ident not in before)
    del batches
    assert not [one for one in threading.enumerate() if one.ident not in before and one.name.startswith("data")]
