"""What a run sees of itself: bytes and times of collectives, phases of a step, operations, traces, ranks' files."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config.log import LogOptions
from engine.distributed.collectives import all_gather_async, all_reduce_async, post_async, reduce_scatter_async
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.transfer_meter import METER, Moved, TransferMeter
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.flops import forward_flops, step_flops, trained_work
from engine.models.ropes import Rope
from engine.telemetry import rank_file
from engine.telemetry.rank_file import RankFile
from engine.training.reports import flops_ceiling
from engine.training.reports.flops_ceiling import measure_products
from engine.training.reports.phases import PhaseClock
from engine.training.reports.profiler import StepTraces
from tests.support.commands import run_tool
from tests.support.spawning import spawn

CPU = torch.device("cpu")


def _metered() -> None:
    """Bytes by hand: 4 000 of fp32 over 2 ranks."""
    rank = dist.get_rank()
    axis = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=2).tp
    METER.start()
    tensor = torch.ones(1000)
    for _ in range(3):
        if rank:
            time.sleep(0.05)  # the other rank waits, so the end is known there
        all_reduce_async(tensor, axis)[1].wait()
    all_gather_async(tensor, axis)[1].wait()
    reduce_scatter_async(tensor, axis)[1].wait()
    for handle in post_async([(rank == 0, tensor, 1 - rank)], axis):
        handle.wait()
    moved = METER.totals()
    assert moved["tp all_reduce"].calls == 3 and moved["tp all_reduce"].sent == 3 * 4000
    if rank == 0:
        assert moved["tp all_reduce"].timed == 3 * 4000 and moved["tp all_reduce"].seconds > 0.1
    assert moved["tp all_gather"].sent == 4000  # half of the 8000 that it makes
    assert moved["tp reduce_scatter"].sent == 2000
    assert moved["tp send" if rank == 0 else "tp receive"].sent == 4000
    assert METER.totals() == {}
    METER.stop()
    all_reduce_async(tensor, axis)[1].wait()
    assert METER.totals() == {}


@pytest.mark.distributed
def test_bytes_and_times_of_collectives() -> None:
    spawn(_metered, world=2)


class _Work:
    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._end

    def wait(self) -> bool:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return True


def test_what_ended_unseen_has_no_time() -> None:
    meter = TransferMeter()
    assert meter.moment([torch.ones(1)]) is None
    meter.start()
    begun = meter.moment([torch.ones(1)])
    seen = meter.watched(_Work(0.03), begun, "dp all_reduce", 10.0, ())
    unseen = meter.watched(_Work(0.0), begun, "dp all_reduce", 5.0, ())
    assert seen.wait() and unseen.wait()
    moved = meter.totals()["dp all_reduce"]
    assert (moved.calls, moved.sent, moved.timed) == (2, 15.0, 10.0)
    assert 0.03 <= moved.seconds < 1
    assert Moved() == Moved(calls=0, sent=0.0, timed=0.0, seconds=0.0)


def test_phases_of_a_step() -> None:
    clock = PhaseClock(CPU)
    clock.passed("outside")
    for _ in range(2):
        clock.begin()
        time.sleep(0.02)
        clock.passed("first")
        clock.passed("second", last=True)
    clock.begin()
    clock.passed("first")  # a step that has not ended
    found = clock.totals()
    assert set(found) == {"first", "second"}
    assert 0.04 <= found["first"] < 1 and found["second"] < found["first"]
    assert clock.totals() == {}


SHAPES = {"hidden": 48, "intermediate": 80, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}


def _decoder() -> DecoderConfig:
    return DecoderConfig(family="llama", vocab_size=70, norm_eps=1e-5, ropes=(Rope(theta=1e4),), **SHAPES)


def test_operations_are_those_that_torch_counts() -> None:
    """torch counts all scores, of which causal attention needs half."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=70, head_dim=12, attn_implementation="eager",
        )
    )  # fmt: skip
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, labels=tokens).loss
    linears, attention, head = forward_flops(_decoder(), tokens=32, row_tokens=16)
    # rotary embeddings are a product of [12 / 2, 1] and [1, 16] in transformers, for the one set of positions
    assert counter.get_total_flops() - (linears + 2 * attention + head) <= 2 * 6 * 16 * 2
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    shapes = {name.removeprefix("model."): tuple(weight.shape) for name, weight in model.named_parameters()}
    whole = step_flops(_decoder(), tokens=32, row_tokens=16, trained=trained_work(_decoder(), shapes))
    assert counter.get_total_flops() == whole - (linears + attention + head) + 2 * attention


def test_operations_of_adapters_and_of_the_head_alone() -> None:
    linears, attention, head = forward_flops(_decoder(), tokens=100, row_tokens=10)
    adapters = {"layers.0.attention.q_proj.lora_A": (4, 48), "layers.0.attention.q_proj.lora_B": (48, 4)}
    expected = 2 * linears + 3 * attention + 2 * head + 6 * 100 * 2 * 4 * 48
    assert step_flops(_decoder(), tokens=100, row_tokens=10, trained=trained_work(_decoder(), adapters)) == expected
    alone = step_flops(
        _decoder(), tokens=100, row_tokens=10, trained=trained_work(_decoder(), {"lm_head.weight": (70, 48)})
    )
    assert alone == linears + attention + 2 * head
    above = {name.replace("layers.0", "layers.2"): shape for name, shape in adapters.items()}
    lower = step_flops(_decoder(), tokens=100, row_tokens=10, trained=trained_work(_decoder(), above))
    assert lower == pytest.approx(expected - 2 / 3 * (linears + 2 * attention))


def test_the_ceiling_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    assert measure_products(CPU, torch.float32) > 1e7
    assert torch.equal(before, torch.get_rng_state())


def test_a_gpus_ceiling_is_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which a product takes 2 ms, but 5 ms in the first group; the host's clock would see neither."""
    done = [0.0, 0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.milliseconds = done[0]

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.milliseconds - self.milliseconds

    def product() -> None:
        done[0] += 5.0 if done[1] < 4 else 2.0
        done[1] += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert flops_ceiling._by_events(product) == pytest.approx(2e-3)
    assert done[1] == 20


@pytest.mark.filterwarnings("error")
def test_traces_of_chosen_steps(tmp_path: Path) -> None:
    traces = StepTraces((2, 3, 5), tmp_path, rank=1)
    written = []
    for step in range(1, 7):
        traces.before(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        written.append(traces.after(step))
    traces.close()
    names = [path.name for path in written if path is not None]
    assert names == ["steps_2-3_rank_00001.json", "steps_5_rank_00001.json"]
    events = json.loads((tmp_path / names[0]).read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == 2


def test_a_rank_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "telemetry").write_text("a file", encoding="utf-8")
    with pytest.raises(UserError, match="the telemetry file of a rank"):
        RankFile(tmp_path / "telemetry", 0, print)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class _SlowDisk:
    """A disk that does not answer until the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on, self.writes, self._write = threading.Event(), 0, os.write
        monkeypatch.setattr(rank_file, "os", SimpleNamespace(write=self.write))

    def write(self, descriptor: int, data: bytes) -> int:
        assert self.goes_on.wait(20)
        self.writes += 1
        return self._write(descriptor, data[:1000])  # a part of it, as the system may


def test_a_record_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "_MOMENT_SECONDS", 0.01)
    slow = _SlowDisk(monkeypatch)
    file = RankFile(tmp_path, 0, print)
    for step in range(1, 101):
        file.write({"step": step})  # would stop here
    assert _records(tmp_path / "rank_00000.jsonl") == []
    slow.goes_on.set()
    file.close()
    assert [record["step"] for record in _records(tmp_path / "rank_00000.jsonl")] == list(range(1, 101))
    assert slow.writes < 20, "records that come together are written together"


@pytest.mark.parametrize("is_full", [False, True])
def test_the_end_of_a_run_does_not_wait_for_a_dead_disk(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_file, "_MOMENT_SECONDS", 0.01)
    monkeypatch.setattr(rank_file, "_CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(rank_file, "_QUEUED", 5)
    slow = _SlowDisk(monkeypatch)
    said: list[str] = []
    file = RankFile(tmp_path, 0, said.append)
    file.write({"step": 1})
    time.sleep(0.5)  # the thread is at the disk
    for step in range(2, 7 if is_full else 4):
        file.write({"step": step})
    ending = threading.Thread(target=file.close, daemon=True)
    ending.start()
    ending.join(10)
    has_ended = not ending.is_alive()
    slow.goes_on.set()
    assert has_ended
    file.close()
    assert said == [
        f"warning: {tmp_path}/rank_00000.jsonl, the telemetry file of a rank, lacks the last records: its disk did not "
        "answer for 0.2 s."
    ]


def test_closing_writes_all_records(tmp_path: Path) -> None:
    """As a run does that ends by an error; without waiting for the moment to pass."""
    file = RankFile(tmp_path, 3, print)
    begin = time.monotonic()
    for step in (1, 2, 3):
        file.write({"step": step})
    file.close()
    file.close()
    assert time.monotonic() - begin < 1.5
    assert [record["step"] for record in _records(tmp_path / "rank_00003.jsonl")] == [1, 2, 3]


def test_a_full_disk_ends_the_run_at_the_next_record_or_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_file, "_MOMENT_SECONDS", 0.001)
    monkeypatch.setattr(rank_file, "os", SimpleNamespace(write=full))
    said: list[str] = []
    file = RankFile(tmp_path, 0, said.append)
    with pytest.raises(UserError, match="cannot be written .No space left on device"):
        for step in range(10_000):
            file.write({"step": step})
            time.sleep(0.002)
    file.close()
    assert said == []
    file = RankFile(tmp_path, 0, said.append)
    file.write({"step": 1})
    file.close()
    file.close()
    assert len(said) == 1 and said[0].startswith("warning: ") and "No space left on device" in said[0]


@pytest.mark.parametrize("values", [{"profile_steps": (0,)}, {"peak_tflops": -1.0}])
def test_options(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match="log\\."):
        LogOptions(**values)


@pytest.mark.distributed
def test_a_run_tells_of_its_ranks(stories_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All the world's a stage, and all the men and women merely players. " * 20, encoding="utf-8")
    run = tmp_path / "run"
    run_tool(
        "pretrain_lora", "--profile", "2", "--model.path", stories_dir, "--data.train", text, "--data.seq_length", 32,
        "--train.steps", 3, "--train.global_batch_size", 2, "--parallel.tensor", 2, "--log.communication", "true",
        "--log.peak_tflops", 0.5, "--checkpoint.dir", run, ranks=2,
    )  # fmt: skip
    for rank in (0, 1):
        lines = (run / "telemetry" / f"rank_{rank:05d}.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == [1, 2, 3]
        assert all(record["memory"] > 2**20 for record in records)
        assert set(records[0]["phases"]) == {"forward_backward", "reduce", "optimizer"}
        assert sum(record["communication"]["tp all_gather"]["calls"] for record in records[:2]) > 0
        assert (run / "traces" / f"steps_2_rank_{rank:05d}.json").is_file()
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(0 < record["mfu"] < 1 for record in figures if "loss" in record)
    assert json.loads((run / "environment.json").read_text(encoding="utf-8"))["world_size"] == 2
