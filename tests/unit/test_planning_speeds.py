"""The speeds that the planner assumes: against published tables, arithmetic of tiles by hand, and bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.memory import MemoryOptions
from engine.config.train import TrainOptions
from engine.errors import UserError
from engine.layers.recompute import MemoryPlan
from engine.planning.attention_speeds import CUDNN_ON_HOPPER, FLASH2_ON_HOPPER, AttentionShape, flash2_elsewhere
from engine.planning.kernel_times import kernel_times
from engine.planning.launch_times import BEGIN, filling, launch_limits, launch_seconds, speed
from engine.planning.launches import Launch
from engine.planning.machine import MACHINES, Machine, bounds
from engine.planning.rank_layout import Layout
from engine.planning.step_time import predict_range, predict_time
from rankfold.planning import answer_record, time_report
from rankfold.planning.memory_examples import LLAMA_3_8B
from rankfold.planning.memory_question import answer_for, machine_of
from rankfold.planning.memory_report import report
from tests.unit.test_planning_search import SMALL, _config, _workload

H100 = MACHINES["h100-80"]


def _product(rows: int, columns: int, inner: int, *, kind: str = "product", products: int = 1) -> Launch:
    return Launch("mm", 0, 2.0 * products * rows * columns * inner, (rows, columns), kind, products=products)


def _attention(length: float, *, head_dim: int = 128, blocks: int = 10_000, causal: bool = True) -> AttentionShape:
    return AttentionShape(length=length, head_dim=head_dim, blocks=blocks, causal=causal)


@pytest.mark.parametrize(
    "kind, length, head_dim, causal, forward",
    [
        ("attention", 4096, 128, True, 518), ("attention", 512, 128, True, 315), ("attention", 16384, 64, True, 388),
        ("attention", 2048, 256, False, 580), ("packed attention", 512, 128, True, 191),
        ("packed attention", 8192, 64, False, 322),
    ],
)  # fmt: skip
def test_attention_runs_at_the_published_speed(
    kind: str, length: int, head_dim: int, causal: bool, forward: float
) -> None:
    """Figure 5 of arXiv 2407.08608, at the lengths and heads that it has."""
    shape = _attention(length, head_dim=head_dim, causal=causal)
    assert speed(Launch("attention forward", 0, 1.0, None, kind, attention=shape), H100) == pytest.approx(forward)


def test_backward_runs_at_the_published_speed() -> None:
    """Figure 6, without a mask; with one, backward loses what forward does."""
    for table, whole in ((CUDNN_ON_HOPPER, 499), (FLASH2_ON_HOPPER, 310)):
        shape = _attention(4096, causal=False)
        assert table.tflops(shape, backward=True) == pytest.approx(whole)
        ratio = table.tflops(_attention(4096), backward=False) / table.tflops(shape, backward=False)
        assert table.tflops(_attention(4096), backward=True) == pytest.approx(whole * ratio)


def test_between_the_published_lengths_and_beyond() -> None:
    """Short documents and small heads are slower, long ones no faster, and no more than the blocks fill a device."""
    found = [FLASH2_ON_HOPPER.tflops(_attention(length), backward=False) for length in (64, 256, 512, 724, 1024)]
    assert found == sorted(found) and found[2] < found[3] < found[4]
    assert found[3] == pytest.approx((191 + 260) / 2, rel=0.01)  # half way on a logarithmic scale
    assert FLASH2_ON_HOPPER.tflops(_attention(10**6), backward=False) == 335
    assert FLASH2_ON_HOPPER.tflops(_attention(4096, head_dim=32), backward=False) == pytest.approx(284 / 2)
    few = Launch("attention forward", 0, 1.0, None, "attention", attention=_attention(512, blocks=33))
    assert speed(few, H100) == pytest.approx(315 / 4)  # 132 multiprocessors
    a100 = flash2_elsewhere(312)
    assert a100.tflops(_attention(16384, causal=False), backward=False) == pytest.approx(0.73 * 312)


def test_a_products_waves_by_hand() -> None:
    """132 multiprocessors, tiles of 256 x 128 either way round; 8192 x 8192 has 2048 tiles, in 16 waves. Each tile
    takes the time of BEGIN more inner products."""
    best = 2048 / (16 * 132) * 8192 / (8192 + BEGIN)
    assert filling(_product(8192, 8192, 8192), H100) == 1.0
    assert speed(_product(8192, 8192, 8192), H100) == pytest.approx(H100.products)
    half = 1024 / (8 * 132) * 4096 / (4096 + BEGIN)
    assert filling(_product(8192, 4096, 4096), H100) == pytest.approx(half / best)
    # 68 of the large tiles, half of the device; 132 tiles of 128 x 128 fill it, at nine tenths of the speed
    small = 0.9 * 512 * 4160 / (132 * 128 * 128) * 28672 / (28672 + BEGIN)
    assert filling(_product(512, 4160, 28672), H100) >= small / best
    # one tile: eight parts of its inner products run side by side
    alone = filling(_product(128, 128, 65536), H100)
    assert alone > 4 * 128 * 128 / (132 * 128 * 256) / best
    assert filling(_product(8192, 8192, 64), H100) < 0.4
    spread = Machine(name="one", memory=1, products=1, copies=1, link=1)
    assert filling(_product(1, 1, 1), spread) == 1.0


def test_products_of_experts_are_slower() -> None:
    """Between what is published of small experts, 160 to 242 TFLOP/s, and of large ones, 524 to 545."""
    slow, fast = bounds(H100)
    small = _product(512, 1536, 2048, kind="grouped product", products=128)
    large = _product(512, 8192, 5120, kind="grouped product", products=16)
    assert speed(small, slow) < 165 < 242 < speed(small, fast)
    assert speed(large, slow) < 524 < speed(large, fast) < 560
    narrow = _product(512, 16, 2048, kind="grouped product", products=128)
    assert speed(narrow, H100) == pytest.approx(speed(small, H100) / 8)  # of 128 columns
    assert speed(replace(small, kind="product"), H100) > 1.5 * speed(small, H100)


def test_a_launch_takes_its_longest_limit_and_a_gap() -> None:
    copies = H100.copies * 1e9
    launch = _product(8192, 8192, 8192)
    limits = launch_limits(replace(launch, nbytes=int(copies)), H100)
    assert limits["memory"] == pytest.approx(1.0)
    assert limits["products"] == pytest.approx(2 * 8192**3 / (H100.products * 1e12))
    assert launch_seconds(replace(launch, nbytes=int(copies)), H100) == pytest.approx(1.0 + H100.gap)
    shortest = Launch("add", 8)
    assert launch_seconds(shortest, H100) == pytest.approx(H100.launch)
    assert launch_seconds(replace(shortest, count=3), H100) == pytest.approx(3 * H100.launch)
    graphed = H100.graphed()
    assert launch_seconds(replace(launch, count=2), H100) > launch_seconds(replace(launch, count=2), graphed)
    codes = replace(launch, kind="fp8 product")
    assert launch_limits(codes, H100)["products"] == pytest.approx(2 * 8192**3 / (H100.products_fp8 * 1e12))


def test_bounds_are_on_both_sides() -> None:
    """Every card has both, and no machine that was measured as a whole."""
    for machine in MACHINES.values():
        slow, fast = bounds(machine)
        for name in ("products", "copies", "link", "network", "host", "attention_share"):
            assert getattr(slow, name) < getattr(machine, name) < getattr(fast, name), (machine.name, name)
        assert slow.gap > machine.gap > fast.gap > machine.graph_gap / 2
        assert machine.sheet > fast.products
    free = Machine(name="free", memory=80, products=1.0, copies=1.0, link=1.0)
    assert bounds(free) == (free, free)
    measured = H100.with_measured({"products": 700.0})
    assert [one.products for one in (*bounds(measured), measured)] == [700.0] * 3
    assert bounds(measured)[0].copies == bounds(H100)[0].copies


def _step(length: int, **changes: Any) -> Any:
    return _workload(
        LLAMA_3_8B, _config(length, 2, train=TrainOptions(micro_batch_size=2, global_batch_size=2), **changes)
    )


def test_a_step_of_a_model_that_was_judged_beforehand() -> None:
    """Llama-3-8B, 2 x 4096 tokens: 485 to 535 ms were expected of an H100 from published speeds, kernel by kernel, of
    which products of layers 327 to 352 and attention 16 to 18 and 51 to 58."""
    workload = _step(4096, lora=LoraOptions(rank=16))
    found = predict_range(workload, Layout(), MemoryPlan(), H100)
    assert found.fast.step < 0.485 < found.likely.step < 0.535 < found.slow.step
    assert found.slow.tokens_per_second < found.likely.tokens_per_second < found.fast.tokens_per_second
    rows = kernel_times(workload, Layout(), MemoryPlan(), H100)
    attention = [1e3 * one.seconds for one in rows if one.launch.attention is not None]
    assert 16 < attention[0] < 18 and 51 < attention[1] < 58
    products = sum(one.seconds for one in rows if one.launch.result is not None and one.part[0] == "layers")
    assert 0.327 < products < 0.352


def test_the_host_limits_short_steps_but_not_those_of_graphs() -> None:
    """512 tokens: 55 to 75 ms were expected, and 36 to 43 in graphs."""
    one_row: dict[str, Any] = {"train": TrainOptions(global_batch_size=1), "lora": LoraOptions(rank=16)}
    graphs = {"data": DataOptions(seq_length=512, packing=True), "memory": MemoryOptions(cuda_graph="step")}
    eager = _workload(LLAMA_3_8B, _config(512, **one_row))
    graphed = _workload(LLAMA_3_8B, _config(512, **one_row, **graphs))
    found = predict_range(eager, Layout(), MemoryPlan(), H100)
    assert found.likely.waits > 1.3 and found.slow.step > 0.055 and found.likely.step == pytest.approx(
        found.likely.host + found.likely.update, rel=1e-6
    )  # fmt: skip
    replayed = predict_range(graphed, Layout(), MemoryPlan(), H100)
    assert replayed.likely.waits == 1 and replayed.likely.host == 0
    assert replayed.fast.step < 0.036 < replayed.slow.step < 0.043
    long = predict_time(_step(4096), Layout(), MemoryPlan(), H100)
    assert long.waits == 1 and 0.04 < long.host < 0.06


def test_a_report_has_ranges_and_says_what_they_assume(tmp_path: Path) -> None:
    answer = answer_for(SMALL, _config(), devices=1, gpu_memory=80, reserve=0)
    text = report(answer, top=1)
    best = answer.found.fitting[0]
    found = time_report.range_of(best, answer.machine)
    assert f"step {found.likely.step:#.3g} s ({found.fast.step:#.3g} to {found.slow.step:#.3g}), " in text
    assert "assumed: products reach 69% (62 to 80) of the data sheet, memory 79% (72 to 87), attention" in text
    assert "host: launching takes" in text and "so that the GPU waits" in text
    answer_record.write(str(tmp_path / "answer.json"), answer_record.of_answer(answer, top=1))
    record = json.loads((tmp_path / "answer.json").read_text())
    assert record["predicted"] is True and record["machine"]["speeds"]["products"][1] == pytest.approx(0.69 * 989)
    times = record["fitting"][0]["time"]
    assert times["fast"]["step_seconds"] < times["likely"]["step_seconds"] < times["slow"]["step_seconds"]
    assert sum(record["fitting"][0]["ranks"][0]["parts"].values()) == best.estimate.step


def test_measured_speeds_take_the_place_of_assumed_ones(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    file.write_text(json.dumps({"device": "cuda", "speeds": {"products": 500.0, "copies": 2000}}))
    machine = machine_of(None, 80, str(file))
    assert (machine.products, machine.copies, machine.host_launch) == (500.0, 2000.0, H100.host_launch)
    assert "products reach 51% measured of the data sheet, memory 60% measured" in time_report.assumed(machine)


@pytest.mark.parametrize(
    "content, sentence",
    [
        ({"speeds": {}}, "has no measured speeds: give the --json FILE"),
        ({"device": "cpu", "speeds": {"copies": 1.0}}, "has the speeds of a CPU"),
        ({"speeds": {"products": -1}}, "has no speed products that can be used"),
        ({"speeds": {"products": True}}, "has no speed products that can be used"),
        ({"speeds": {"sheet": 1.0}}, "has no speed sheet that can be used"),
    ],
)
def test_other_files_have_no_speeds(content: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=sentence):
        machine_of(None, 80, str(file))
    with pytest.raises(UserError, match="--machine is cpu, which is measured here"):
        machine_of("cpu", 80, str(file))
