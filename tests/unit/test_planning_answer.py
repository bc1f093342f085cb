"""What an answer of the planner says and recommends: reductions by hand, memory that costs little time, the share of
the data sheet's speed, the command to start with, and the routing that must fit."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.lora import LoraOptions
from engine.config.parallel import ParallelOptions
from engine.layers.recompute import MemoryPlan
from engine.layers.rounding import FLOAT8
from engine.optim.state_sharding import ShardLevel
from engine.planning.ledger import ACTIVATIONS, added
from engine.planning.machine import MACHINES
from engine.planning.peak import PeakEstimate
from engine.planning.rank_layout import Layout
from engine.planning.search import Candidate, SearchResult, _recommended_first
from engine.planning.shapes import Parameters
from engine.planning.step_time import StepRange, StepTime, predict_time
from rankfold.planning import memory, memory_config, time_report
from rankfold.planning.memory_question import GIB, Answer, answer_for, ask
from rankfold.planning.memory_report import report
from rankfold.planning.time_by_kernel import model_flops
from tests.support.terminal import OnTerminal
from tests.unit.test_planning_experts import MIXTURE
from tests.unit.test_planning_search import FREE, ROOT, SMALL, _config, _workload

LATENT = {
    "model_type": "deepseek_v2", "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 512, "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.0, "moe_layer_freq": 1,
}  # fmt: skip
ELEMENTS = 8 * 16 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 704))
"""Of adapters of rank 16 on q and o, k and v, gate, up and down, in 8 layers."""
RING = {
    "none": 2 * 4 / 1e9,  # all-reduce in fp32
    "optimizer": (2 * 4 + 2) / 1e9,  # and all-gather of updated weights in bf16
    "gradients": (4 + 2) / 1e9,  # reduce-scatter, all-gather
    "parameters": 4 / 1e9,  # weights are gathered with the layers
}
"""Seconds an element over links of 1 GB/s, but for the part that a rank has itself."""


@pytest.mark.parametrize("level", RING)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_reductions_are_those_of_a_ring(level: ShardLevel, ranks: int) -> None:
    """(n - 1) / n of the bytes for a reduce-scatter or an all-gather, twice that for an all-reduce. Nothing hides it
    where arithmetic takes no time."""
    machine = replace(FREE, products=1e15, link=1.0)
    layout = Layout(parallel=ParallelOptions(shard=level), data=ranks)
    found = predict_time(_workload(SMALL, _config()), layout, MemoryPlan(), machine)
    expected = (ranks - 1) / ranks * RING[level] * ELEMENTS
    assert found.reduction == pytest.approx(expected, rel=1e-6)
    assert found.exposed_reduction == pytest.approx(expected, rel=1e-3)
    assert found.step == pytest.approx(found.pipeline + expected + found.update, rel=1e-3)


@pytest.mark.parametrize("bucket", [25.0, 0.25])
def test_backward_hides_all_buckets_but_the_last(bucket: float) -> None:
    """In which everything is, where there is no more than 25 MiB of gradients."""
    machine = replace(FREE, products=1e-3, link=1.0)
    layout = Layout(parallel=ParallelOptions(bucket_mb=bucket), data=8)
    found = predict_time(_workload(SMALL, _config()), layout, MemoryPlan(), machine)
    last = min(bucket * 2**20, 4 * ELEMENTS)
    assert found.exposed_reduction == pytest.approx(2 * 7 / 8 * last / 1e9, rel=1e-6)
    assert found.reduction == pytest.approx(2 * 7 / 8 * 4 * ELEMENTS / 1e9, rel=1e-6)


def test_an_update_reads_and_writes_four_numbers_an_element() -> None:
    machine = replace(FREE, copies=1.0)
    for level, ranks in (("none", 1), ("gradients", 8)):
        layout = Layout(parallel=ParallelOptions(shard=level), data=8)
        found = predict_time(_workload(SMALL, _config()), layout, MemoryPlan(), machine)
        assert found.update == pytest.approx(2 * 4 * 4 * ELEMENTS / ranks / 1e9, rel=1e-6)


def test_what_stays_whole_is_not_gathered() -> None:
    held = Parameters(data="dp_cp", base=1000, adapters=100, trained={}, largest=1, moved=0, copied=0, whole=300)
    assert held.gathered_bytes(2, 1) == 0
    assert held.gathered_bytes(2, 4) == 2 * (1000 + 100 - 300)


def _candidate(seconds: float, gib: float, *, host: int = 0, stored: bool = False) -> Candidate:
    estimate = PeakEstimate(
        parts=added({ACTIVATIONS: int(gib * GIB)}), moment="backward", static={}, load=0, save=0, host=host
    )
    memory = MemoryPlan(stored_dtype=FLOAT8 if stored else None)
    time = StepTime(
        step=seconds, pipeline=seconds, bubble=0, links=0, hidden_links=0, reduction=0, exposed_reduction=0, update=0,
        tokens_per_second=1 / seconds,
    )  # fmt: skip
    workload = _workload(SMALL, _config())
    return Candidate(layout=Layout(), workload=workload, memory=memory, estimates=(estimate,), time=time)


def test_memory_is_worth_a_little_time() -> None:
    """Three percent of it for a tenth of the memory or more, but no rounding and no host memory."""
    fastest = _candidate(1.0, 70)
    others = {
        "the least of two": [_candidate(1.02, 60), _candidate(1.025, 50)],
        "too slow": [_candidate(1.04, 20)],
        "hardly less": [_candidate(1.01, 64)],
        "rounded": [_candidate(1.01, 35, stored=True)],
        "in host memory": [_candidate(1.01, 35, host=1)],
    }
    for name, rest in others.items():
        best, *after = _recommended_first([fastest, *rest])
        assert best is (rest[-1] if name == "the least of two" else fastest), name
        assert sorted(map(id, (best, *after))) == sorted(map(id, (fastest, *rest)))
    assert _recommended_first([]) == ()


def _answer(*candidates: Candidate, devices: int = 8, folder: str | None = None) -> Answer:
    answer = answer_for(SMALL, _config(), devices=1, gpu_memory=80, reserve=10, machine="h100-80", folder=folder)
    found = SearchResult(fitting=candidates or answer.found.fitting, too_large=(), refused=())
    return replace(answer, devices=devices, found=found)


def test_the_answer_says_why_not_the_fastest() -> None:
    text = report(_answer(_candidate(1.025, 50), _candidate(1.0, 70)), top=5)
    assert "Yes. Recommended: tensor 1, data 1; recompute selective\n" in text
    assert "2.5% slower than the fastest that fits, and to take 50.0 GiB instead of 70.0" in text
    assert "Yes. Fastest that fits: " in report(_answer(_candidate(1.0, 50), _candidate(1.025, 70)), top=5)


def test_the_answer_says_which_share_of_the_peak_it_comes_to() -> None:
    """Half of the time takes twice the share; 989 TFLOP/s of an H200."""
    slow, likely, fast = (_candidate(seconds, 50).time for seconds in (4e-3, 2e-3, 1e-3))
    assert slow is not None and likely is not None and fast is not None
    flops = 989e12 * 1e-3 / 4
    assert time_report.shares(StepRange(slow=slow, likely=likely, fast=fast), flops, 989) == "12% (6 to 25)"
    answer = _answer(_candidate(1.0, 50))
    (line,) = (line for line in report(answer, top=1).splitlines() if line.startswith("speed: "))
    assert "of the data sheet's 989 TFLOP/s in 16 bits, counting the model's own arithmetic" in line
    found = time_report.range_of(answer.found.fitting[0], answer.machine)
    share = model_flops(answer.workload) / answer.devices / found.likely.step / 989e12
    assert line.startswith(f"speed: {100 * share:.0f}%")


@pytest.mark.parametrize(
    "devices, folder, line",
    [
        (1, "DIR", "rankfold train --config run.yaml --data.train FILE"),
        (8, "DIR", "rankfold train --nproc 8 --config run.yaml --data.train FILE"),
        (4, None, "rankfold train --nproc 4 --config run.yaml --model.path DIR --data.train FILE"),
        (
            16,
            "DIR",
            "rankfold train --nproc 8 --nnodes 2 --rdzv-endpoint HOST:29500 --config run.yaml --data.train FILE",
        ),
    ],
)
def test_the_answer_ends_with_the_command_to_start_with(devices: int, folder: str | None, line: str) -> None:
    assert report(_answer(_candidate(1.0, 50), devices=devices, folder=folder), top=1).endswith(f"\n    {line}")


def test_the_routing_that_must_fit_decides_for_one_configuration_too(tmp_path: Path) -> None:
    """A capacity between the two peaks."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    (tmp_path / "run.yaml").write_text(
        "model: {dtype: bfloat16}\nparallel: {expert: 8}\nlora: {rank: 16}\ndata: {seq_length: 2048}\n"
        "train: {micro_batch_size: 1, global_batch_size: 8}\n"
    )
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    given = ["--config", str(tmp_path / "run.yaml"), "--model", str(tmp_path / "config.json"), "--gpus", "8"]
    given += ["--reserve", "0"]

    def verdict(*options: str) -> tuple[float, str]:
        text = memory_config.report(parser.parse_args([*given, *options]))
        (line,) = (line for line in text.splitlines() if "GiB at most: " in line)
        peak, _, rest = line.partition(" GiB at most: ")
        return float(peak), rest

    even, worst = (verdict("--routing", routing)[0] for routing in ("balanced", "worst"))
    assert worst > 1.5 * even
    between = f"{(even + worst) / 2:.3f}"
    assert verdict("--gpu-memory", between)[1].startswith("fits ")
    assert verdict("--gpu-memory", between, "--routing", "worst")[1].startswith("does not fit ")


def test_a_worst_peak_that_does_not_fit_is_what_lacks() -> None:
    """And not host memory: the evenly spread one would fit."""
    config = _config(2048, 8, lora=LoraOptions(rank=16))
    workload = _workload(MIXTURE, config)
    layout = Layout(parallel=ParallelOptions(expert=8), data=8)
    one = Candidate.predict(workload, layout, MemoryPlan(), "worst")
    capacity = (one.estimate.peak + one.peak) / 2
    answer = answer_for(SMALL, _config(), devices=1, gpu_memory=80, reserve=10)
    answer = replace(answer, capacity=capacity, found=SearchResult(fitting=(), too_large=(one,), refused=()))
    text = report(answer, top=1)
    assert f"lacks {(one.peak - capacity) / GIB:.1f} GiB on a GPU" in text and "lacks host memory" not in text


def test_a_terminal_shows_how_far_the_search_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 2}))
    command = [sys.executable, ROOT / "tools/plan.py", "memory", "--model", tmp_path, "--gpus", 2, "--seq-length", 128]
    with OnTerminal(command, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}, tmp_path) as there:
        there.wait_for("trying layouts.*%")
        there.wait_for("Yes. Fastest that fits")


@pytest.mark.parametrize("query_rank, queries", [(None, ["q_proj"]), (32, ["q_a_proj", "q_b_proj"])])
def test_linears_of_latent_attention_carry_adapters_by_default(
    query_rank: int | None, queries: list[str], tmp_path: Path
) -> None:
    """Where no --targets are given; such a model has no k_proj and v_proj."""
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, "q_lora_rank": query_rank}))
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    answer = ask(parser.parse_args(["--model", str(tmp_path), "--seq-length", "128"]))
    others = ["kv_a_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert list(answer.config.lora.targets) == [*queries, *others] and answer.found.fitting


def test_machines_name_the_data_sheet() -> None:
    assert MACHINES["h200-141"].sheet == 989 and MACHINES["a100-80"].sheet == 312
