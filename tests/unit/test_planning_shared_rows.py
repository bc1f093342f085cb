"""Predictions of rows that compute beginnings once: against rows of real documents, and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.data.columns import Columns
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.loader import EvalLoader, with_even_rows
from engine.data.record_files import Place
from engine.data.row_shape import RowShape, evened
from engine.layers.recompute import MemoryPlan
from engine.planning.kernel_times import KernelTime, kernel_times
from engine.planning.machine import MACHINES, Machine
from engine.planning.peak import predict_layout
from engine.planning.rank_layout import Layout, Workload
from engine.planning.search import Candidate
from engine.planning.shared_rows import AlikeDocuments
from engine.planning.step_time import predict_time
from engine.preferences.data.answer_columns import Judgement
from engine.rollouts.data.completions import Completion, completion_columns
from engine.training.prefixes import PrefixSharing
from rankfold.planning import time_report
from tests.distributed.cases import Case, small_config
from tests.distributed.gradient_table import EVERY_LINEAR

AUTO = PrefixSharing(shares=True, least_saved=0.05)
OF_PAIRS = replace(AUTO, regroups=False)
H100 = MACHINES["h100-80"]
CPU = Machine(name="cpu", memory=16, products=0.1, copies=20, link=10)


def _completions(alike: AlikeDocuments) -> TokenDataset:
    """Real completions of one length to random prompts."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(alike.groups):
        prompt = random.integers(0, 1000, alike.common).tolist()
        for member in range(alike.members):
            tokens = [member, *random.integers(0, 1000, alike.own - 1).tolist()]
            found.append(Completion(prompt=prompt, tokens=tokens, sampled_logps=[0.0] * len(tokens), advantage=1.0))
    return TokenDataset(completion_columns(found, "tokens"), seq_length=alike.capacity, packing=alike.packing)


def _pairs(alike: AlikeDocuments) -> TokenDataset:
    random = np.random.default_rng(0)
    found = []
    for _ in range(alike.groups):
        question = random.integers(0, 1000, alike.common)
        for sign in (1, -1):
            tokens = np.array([*question, sign + 1, *random.integers(0, 1000, alike.own - 1)], dtype=np.int32)
            place = Place(Path("pairs"), "index", len(found))
            found.append(Document(place, tokens, np.arange(len(tokens)) >= alike.common, (Judgement(sign),)))
    columns = Columns.of_documents(found, group=2)
    return TokenDataset(columns, seq_length=alike.capacity, packing=alike.packing)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    ("groups", "members", "common", "own", "capacity", "packing"),
    [
        (3, 8, 40, 9, 200, False),
        (3, 8, 40, 9, 90, False),  # a group takes several rows
        (5, 4, 30, 20, 256, True),
        (2, 4, 60, 8, 70, False),  # no two fit
        (6, 4, 17, 50, 300, True),
        (4, 2, 8, 50, 300, False),  # too little in common
    ],
)
def test_rows_are_those_of_completions(
    groups: int, members: int, common: int, own: int, capacity: int, packing: bool, ranks: int
) -> None:
    alike = AlikeDocuments(
        sharing=AUTO, groups=groups, members=members, common=common, own=own, capacity=capacity, packing=packing
    )
    expected = AUTO.rows(_completions(alike), ranks=ranks)
    found = alike.rows(ranks)
    if expected.rows.reused is None:
        assert found is None
        return
    assert found is not None
    assert (found.count, found.tokens) == (len(expected), int(expected.row_lengths.sum()))
    assert found.alone == groups * members * (common + own)
    assert found.length == (capacity if packing else int(expected.row_lengths.max()))
    assert sum(found.lengths) == int(expected.row_lengths.max())


def test_rows_are_those_of_pairs_and_by_hand() -> None:
    alike = AlikeDocuments(
        sharing=OF_PAIRS, groups=3, members=2, common=50, own=14, capacity=128, packing=False, is_sample=True
    )
    expected, found = OF_PAIRS.rows(_pairs(alike)), alike.rows(1)
    assert found is not None and found.tokens == int(expected.row_lengths.sum()) == 3 * (49 + 2 * 15)
    assert (found.lengths, found.parents) == ((49, 15, 15), (-1, 0, 0))


def _workload(members: int, device_type: str) -> Workload:
    config = small_config(num_layers=2)
    alike = AlikeDocuments(sharing=AUTO, groups=4, members=members, common=33, own=7, capacity=400, packing=False)
    return Workload(
        decoder=config, plan=Case(config=config, adapters=EVERY_LINEAR, trained="nothing").plan(), dtype=torch.float32,
        micro_batch=2, global_batch=4 * members, seq_length=40, alike=alike, device_type=device_type,
        kernels="native" if device_type == "cpu" else "triton",
    )  # fmt: skip


def _attention(workload: Workload) -> tuple[list[KernelTime], list[KernelTime]]:
    found = [one for one in kernel_times(workload, Layout(), MemoryPlan(), H100) if "attention" in one.launch.name]
    return tuple([one for one in found if one.part[1] == phase] for phase in ("forward", "backward"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("members", "device_type", "launches"),
    # a level of a micro-batch has a block for each of two rows, which are calls in place
    [(3, "cpu", (1, 3)), (3, "cuda", (1 + 2 * 7, 3 + 2 * 5))],
)
def test_attention_by_hand(members: int, device_type: str, launches: tuple[int, int]) -> None:
    """Pairs of tokens: of each document with itself, and of the branches with what they continue."""
    workload = _workload(members, device_type)
    rows = workload.on(Layout())
    assert (rows.global_batch, rows.micro_batch, rows.seq_length) == (4, 2, 32 + members * 8)
    pairs = 2 * (32 * 33 / 2 + members * (8 * 9 / 2 + 8 * 32))
    width = workload.decoder.num_heads * workload.decoder.head_dim
    for found, factor, wanted in zip(_attention(workload), (4, 10), launches, strict=True):
        steps = 2 * 2  # micro-batches and layers
        assert sum(one.flops for one in found) == steps * factor * pairs * width
        assert sum(one.count * one.launch.count for one in found) == steps * wanted


@pytest.mark.parametrize("slower", [True, False])
def test_reports_say_the_share_of_the_time_also_where_it_grows(slower: bool) -> None:
    """Launches bound short rows on a GPU, which branches have more of; tokens bound a CPU."""
    machine, device_type = (H100, "cuda") if slower else (CPU, "cpu")
    workload = replace(_workload(2, device_type), micro_batch=1)
    if slower:
        assert workload.alike is not None
        pairs = replace(workload.alike, sharing=OF_PAIRS, is_sample=True)
        workload = replace(workload, alike=pairs, global_batch=4)
    layout, plan = Layout(), MemoryPlan()
    found = predict_time(workload, layout, plan, machine)
    alone = predict_time(replace(workload, alike=None), layout, plan, machine)
    candidate = Candidate(layout=layout, workload=workload, memory=plan, estimates=())
    share = round(100 * found.step / alone.step)
    assert (share > 100) == slower
    assert f"; training takes {share}% of the time" in time_report.shared(candidate, machine, found)[0]


def test_tokens_and_memory_follow_the_rows() -> None:
    workload = _workload(4, "cpu")
    shared, apart = workload.on(Layout()), replace(workload, alike=None)
    assert shared.step_tokens == apart.step_tokens == 16 * 40
    # rows of 64 tokens: a step has the linears of 4 of them in place of 16 of 40
    times = [predict_time(one, Layout(), MemoryPlan(), CPU) for one in (workload, apart)]
    assert 1.8 < times[1].pipeline / times[0].pipeline < 16 * 40 / (4 * 64)
    assert times[0].tokens_per_second > times[1].tokens_per_second
    longer = replace(apart, micro_batch=2, global_batch=4, seq_length=64, longest_document=40)
    held, plain = (predict_layout(one, Layout(), MemoryPlan())[0].step for one in (workload, longer))
    assert held == pytest.approx(plain, rel=0.02)  # kept for backward by tokens, whatever they continue


@pytest.mark.parametrize(
    ("most", "rows", "ranks", "expected"), [(8, 2, 1, 2), (8, 9, 1, 5), (4, 8, 1, 4), (2, 3, 4, 1), (1, 7, 2, 1)]
)
def test_micro_batches_have_little_padding(most: int, rows: int, ranks: int, expected: int) -> None:
    assert evened(most, rows, ranks) == expected


def test_rows_that_share_leave_no_micro_batch_to_padding() -> None:
    """Two groups are two rows, of up to eight in a micro-batch."""
    alike = AlikeDocuments(sharing=AUTO, groups=2, members=4, common=40, own=9, capacity=200, packing=False)
    plain = _completions(alike)
    shape = RowShape(micro_batch_size=8)
    assert with_even_rows(shape, plain) == shape
    shared = AUTO.rows(plain)
    (batch,) = EvalLoader(shared, with_even_rows(shape, shared))
    assert batch.tokens_BS.shape == (2, 39 + 4 * 10)
