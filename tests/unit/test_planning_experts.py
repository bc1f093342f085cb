"""What the planner says of experts that are divided over ranks: against real ranks that send each other rows, by hand,
and against transformers' counts of published models."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from engine.config.lora import LoraOptions
from engine.config.parallel import ParallelOptions
from engine.distributed.transfer_meter import METER
from engine.errors import UserError
from engine.experts.ops import routing
from engine.experts.ops.routing import RoutingRule
from engine.layers.recompute import MemoryPlan
from engine.models.describe import active_parameters, num_parameters
from engine.models.families import family_of
from engine.planning import launches
from engine.planning.launch_times import filling
from engine.planning.ledger import ADAPTERS, GRADIENTS, MASTERS, OPTIMIZER, WEIGHTS
from engine.planning.machine import MACHINES
from engine.planning.peak import predict_layout
from engine.planning.predict import workload_of
from engine.planning.rank_layout import Layout, Routing, Workload
from engine.planning.search import Candidate, SearchRequest, layouts, search
from engine.planning.step_time import predict_time
from engine.planning.traced_batch import expert_rows
from engine.planning.traces import rank_model
from engine.runtime.launch import Launch
from engine.training.start_model import check_model, model_source
from rankfold.planning import memory as memory_command
from rankfold.planning import memory_config
from rankfold.planning.memory_measure import measure
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.unit.test_planning_memory import ALL, CPU, EXACT, ROUGH, Case, _prediction
from tests.unit.test_planning_search import FREE, ROOT, _config, _workload

MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 704, "moe_intermediate_size": 192,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2000,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
}  # fmt: skip


def _case(world: int, parallel: str, **changes: Any) -> Case:
    return Case(family="qwen3_moe", world=world, parallel=parallel, **{"length": 256, **changes})


CASES = {
    "2": _case(2, "{expert: 2}", micro_batches=2),
    "4, tensor 2, shard optimizer": _case(4, "{tensor: 2, expert: 4, shard: optimizer}", micro_batches=2, **ALL),
    "2, tensor 2": _case(4, "{tensor: 2, expert: 2}", micro_batches=2),
    "2, tensor 2, cut": _case(4, "{tensor: 2, expert: 2, expert_tensor: 2}", micro_batches=2),
    "2, tensor 2, without sequence": _case(2, "{tensor: 2, expert: 2, sequence: false}"),
    "2, context 2": _case(2, "{expert: 2, context: 2}"),
    "2, pipeline 2": _case(4, "{expert: 2, pipeline: 2}", micro_batches=4, layers=4),
    "2, full": _case(2, "{expert: 2}", micro_batches=2, memory="{recompute: full}"),
    "2, dropout, accumulation": _case(2, "{expert: 2}", micro_batches=4, dropout=0.1),
    "2, shared outer": _case(2, "{expert: 2}", micro_batches=2, experts="shared_outer"),
    "2, nf4": _case(2, "{expert: 2}", micro_batches=2, base="nf4"),
    "2, int8, bf16": _case(2, "{expert: 2}", micro_batches=2, base="int8", dtype="bfloat16"),
    "2, fp8": _case(2, "{expert: 2}", micro_batches=2, base="fp8"),
    "2, all": _case(2, "{expert: 2}", micro_batches=2, **ALL),
    "2 of 4, shard optimizer": _case(4, "{expert: 2, shard: optimizer}", micro_batches=4, length=128, **ALL),
    "2 of 4, shard gradients": _case(4, "{expert: 2, shard: gradients}", micro_batches=4, length=128, **ALL),
    "2 of 4, shard parameters": _case(4, "{expert: 2, shard: parameters}", micro_batches=4, length=128, **ALL),
    "2, shard parameters": _case(2, "{expert: 2, shard: parameters}", micro_batches=2, length=128),
    "2, native": _case(2, "{expert: 2}", micro_batches=2, kernels="native"),
}
QUICK = ("2",)
KINDS: tuple[Routing, ...] = ("balanced", "worst")


def _choosing(kind: Routing) -> Any:
    """Returns a router's choice that does not look at the scores."""

    def choose(logits_TE: Tensor, rule: RoutingRule, *more: Any) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = plain(logits_TE, rule, *more)
        tokens, count = ids_TK.shape
        if kind == "worst":
            return weights_TK, torch.arange(count).repeat(tokens, 1)
        return weights_TK, (torch.arange(tokens * count) % rule.num_experts).view(tokens, count)

    plain = routing.choose
    return choose


def _on_a_rank(case: Case, folder: str) -> list[tuple[int, float]]:
    """Returns the peak of a step, and the bytes that were sent to other ranks' experts in one, under each routing."""
    config = case.write(Path(folder) / str(dist.get_rank()))
    found = []
    for kind in KINDS:
        modules: Any = routing
        plain, modules.choose = routing.choose, _choosing(kind)
        METER.start()
        peak = measure(config, Launch(rank=dist.get_rank(), world_size=case.world, device=CPU)).step
        found.append((peak, METER.totals()["ep all_to_all"].sent / 3))  # of three steps
        METER.stop()
        modules.choose = plain
    return found


def _sent(case: Case, folder: Path) -> float:
    """Returns the bytes that the planner has a rank send to other ranks in a step of one micro-batch and stage; nothing
    trains below the first layer, whose input needs no gradient."""
    config = case.write(folder)
    workload = _workload_of(case, folder)
    model, memory = rank_model(workload, config.parallel), MemoryPlan(recompute=config.memory.recompute)
    sizes = 0
    for index in range(case.layers):
        launches = model.layer(0, memory, needs=index > 0 or "*" in case.trainable).launches
        sizes += sum(launches.exchanged_forward) + sum(launches.exchanged_backward)
    return sizes * (config.parallel.expert - 1) / config.parallel.expert


def _workload_of(case: Case, folder: Path) -> Workload:
    config = case.write(folder)
    source = model_source(config)
    plan = check_model(config, source.model, case.world).modules
    return workload_of(config, source.model.decoder, plan, device_type="cpu")


@pytest.mark.distributed
@pytest.mark.parametrize("name", sampled(CASES, QUICK))
def test_the_peak_of_a_step_and_what_it_sends(name: str, tmp_path: Path) -> None:
    """The first rank's peak where all tokens choose its experts, the last rank's where they spread evenly. A thread of
    Gloo may hold what it has sent for a moment longer, so measured peaks are now and then a tensor higher."""
    case = CASES[name]
    for rank in range(case.world):
        (tmp_path / str(rank)).mkdir()
    measured = spawn(_on_a_rank, world=case.world, args=(case, str(tmp_path)))
    config = case.write(tmp_path)
    first, last = (_prediction(case, config, place) for place in (0, case.world - 1))
    crowded = _prediction(case, config, 0, "worst")
    (even, sent), (worst, _) = measured[0]
    for what, found, peak in (
        ("even, first", first.step, even),
        ("even, last", last.step, measured[-1][0][0]),
        ("worst", crowded.step, worst),
    ):
        print(f"\n{name:32} {what:12} predicted {found / 2**20:7.2f} MiB  measured {peak / 2**20:7.2f}", end="")
        assert found == pytest.approx(peak, rel=ROUGH), what
        assert found <= peak * (1 + (ROUGH if "parameters" in name else EXACT)), what
    assert crowded.step > 1.1 * first.step
    if config.parallel.pipeline == 1 and config.train.global_batch_size == case.world // config.parallel.tensor:
        assert sent == pytest.approx(_sent(case, tmp_path), rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_sent_and_received(kind: Routing, ranks: int) -> None:
    """32 tokens with 4 of 16 experts each: a rank of one expert gets each token once at most."""
    sent, received = expert_rows(kind, per_token=4, ranks=ranks)(32 * 4, 16)
    here = 16 // ranks
    assert sum(map(sum, sent)) == 32 * 4 and [len(one) for one in (*sent, *received)] == [here] * 2 * ranks
    assert sum(map(sum, received)) == (32 * 4 if kind == "balanced" else ranks * 32 * min(4, here))


def test_what_the_optimizer_holds_of_experts() -> None:
    """By hand: 8 ranks, experts on 4 of them each, so that 2 ranks share what 8 share of the rest."""
    config = _config(lora=LoraOptions(rank=0), trainable=("*",))
    workload = _workload(MIXTURE, config)
    experts = 4 * 16 * 3 * 256 * 192
    rest = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 16 * 256 + 2 * 256 + 2 * 32) + 2 * 2000 * 256 + 256
    own = rest / 8 + experts / 4 / 2
    for level in ("optimizer", "gradients", "parameters"):
        layout = Layout(parallel=ParallelOptions(expert=4, shard=level), data=8)
        (found,) = predict_layout(workload, layout, MemoryPlan())
        assert found.static[MASTERS] == pytest.approx(4 * own, rel=1e-3)
        assert found.static[OPTIMIZER] == pytest.approx(8 * own, rel=1e-3)
        gradients = rest + experts / 4 if level == "optimizer" else own
        assert found.static[GRADIENTS] == pytest.approx(4 * gradients, rel=1e-3)
        weights = own if level == "parameters" else rest + experts / 4
        assert found.static[WEIGHTS] == pytest.approx(2 * weights, rel=1e-3)


def test_whole_experts_are_shared_with_tensor_ranks_too() -> None:
    config = _config(lora=LoraOptions(rank=0), trainable=("mlp.experts.*",))
    layout = Layout(parallel=ParallelOptions(tensor=2, expert=2, shard="optimizer"), data=4)
    assert layout.copies == {"dp_cp": 4, "edp": 4}
    cut = Layout(parallel=replace(layout.parallel, expert_tensor=2), data=4)
    assert cut.copies == {"dp_cp": 4, "edp": 2}
    whole, halves = (predict_layout(_workload(MIXTURE, config), one, MemoryPlan())[0] for one in (layout, cut))
    assert whole.static[MASTERS] == halves.static[MASTERS] == 4 * 4 * 16 * 3 * 256 * 192 // 8
    assert whole.static[GRADIENTS] == 2 * halves.static[GRADIENTS]  # all features of half of the experts, or half


@pytest.mark.parametrize("ranks, near", [(2, 2), (8, 8), (16, 8)])
def test_the_time_of_exchanges(ranks: int, near: int) -> None:
    """Rows of bf16 there and back, forward and backward, twice each: of 16 ranks half are on another node. Weights of
    rows, their gradients, and counts are in the two percent that are allowed."""
    machine = replace(FREE, products=1e15, link=100.0, network=25.0, node_size=8)
    workload = _workload(MIXTURE, _config(rows=16))
    found = predict_time(workload, Layout(parallel=ParallelOptions(expert=ranks), data=16), MemoryPlan(), machine)
    one = 512 * 4 * 256 * 2  # bytes of one exchange
    links = max((near - 1) / ranks * one / 100e9, (ranks - near) / ranks * one / 25e9)
    assert found.links == pytest.approx(4 * 4 * links, rel=0.02)
    full = predict_time(
        workload, Layout(parallel=ParallelOptions(expert=ranks), data=16), MemoryPlan(recompute="full"), machine
    )
    # rows leave once more; outputs of the second run, which nobody reads, do not come back
    assert full.links == pytest.approx(4 * 5 * links, rel=0.02)


def test_whole_experts_need_no_sums_over_tensor_ranks() -> None:
    """With sequence parallelism a tensor rank's tokens stay apart around the experts: of four crossings two are left,
    forward and backward."""
    machine = replace(FREE, products=1e15, link=100.0, network=100.0)
    workload = _workload(MIXTURE, _config())
    cut, whole = (
        predict_time(workload, Layout(parallel=ParallelOptions(tensor=2, expert_tensor=one)), MemoryPlan(), machine)
        for one in (2, 1)
    )
    assert cut.links > 0 and whole.links == pytest.approx(cut.links / 2)


def test_few_tokens_of_each_expert_fill_a_device_badly() -> None:
    """Each expert's last tile of 128 rows is half empty, on the average."""
    h100, inner = MACHINES["h100-80"], 2048

    def share(rows: int) -> float:
        launch = launches.Launch("", 0, 2.0 * 128 * rows * 4096 * inner, (rows, 4096), "grouped product", products=128)
        return filling(launch, h100)

    assert share(24) / share(128) == pytest.approx((24 / 88) / (128 / 192))
    assert share(3072) > 3 * share(24)


def test_a_search_spreads_experts_every_way() -> None:
    """And proposes nothing that a run refuses."""
    assert {one.parallel.expert for one in layouts(4)} == {1}
    ways = {
        (one.parallel.expert, one.parallel.shards_experts)
        for one in layouts(4, has_experts=True)
        if (one.parallel.tensor, one.parallel.sequence, one.data) == (2, None, 2)
    }
    assert ways == {(1, True), (2, True), (1, False), (2, False), (4, False)}
    odd = {**MIXTURE, "num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 200}
    config = _config(128, 4, lora=LoraOptions(rank=4))
    workload = _workload(odd, config)
    wanted = SearchRequest(config=config, devices=4, capacity=2**34, recompute=("selective",))
    found = search(wanted, workload, MACHINES["h100-80"])
    spread = {(one.layout.parallel.expert, one.layout.parallel.shards_experts) for one in found.fitting}
    assert {(2, True), (2, False), (1, False)} <= spread
    reasons = {one.reason for one in found.refused if one.layout.parallel.expert == 4}
    assert any("does not divide the model's 6 experts" in reason for reason in reasons)
    assert not [one for one in found.fitting if one.layout.parallel.expert == 4]
    # 200 features over 4 tensor ranks are 50, which a GPU's grouped products do not take
    cut = [one for one in found.fitting if one.layout.parallel.tensor == 4 and one.layout.parallel.shards_experts]
    assert not cut and any("a multiple of 8" in one.reason for one in found.refused)


def test_what_must_fit_is_a_choice() -> None:
    config = _config(2048, 8)
    workload, memory = _workload(MIXTURE, config), MemoryPlan(recompute="none")
    layout = Layout(parallel=ParallelOptions(expert=8), data=8)
    even, worst = (Candidate.predict(workload, layout, memory, routing) for routing in KINDS)
    assert even.estimates == worst.estimates and even.worst() == worst.crowded
    assert worst.peak > 2 * even.peak == 2 * even.estimate.peak
    wanted = SearchRequest(config=config, devices=8, capacity=even.peak)
    assert wanted.holds(even) and not wanted.holds(worst) and replace(wanted, capacity=worst.peak).holds(worst)


def test_experts_of_a_dense_model_are_refused() -> None:
    dense = {**MIXTURE, "model_type": "qwen3"}
    with pytest.raises(UserError, match="has no experts that a router chooses"):
        predict_layout(_workload(dense, _config()), Layout(parallel=ParallelOptions(expert=2), data=2), MemoryPlan())


PUBLISHED: dict[str, PreTrainedConfig] = {
    "Mixtral-8x7B": MixtralConfig(),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    ),
    "GLM-4.5-Air": Glm4MoeConfig(head_dim=128, attention_bias=True),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": GptOssConfig(),
    "DeepSeek-V3": DeepseekV3Config(),
}  # fmt: skip
"""The other sizes are not given: the classes' defaults are those published."""
BILLIONS = {
    "Mixtral-8x7B": (46.7, 12.9), "Qwen3-30B-A3B": (30.5, 3.35), "GLM-4.5-Air": (106.9, 13.4),
    "gpt-oss-20b": (20.9, 4.19), "gpt-oss-120b": (116.8, 5.71), "DeepSeek-V3": (671.0, 37.6),
}  # fmt: skip
"""Totals as published; active ones with the embedding, which some publishers leave out (gpt-oss: 3.6 and 5.1)."""


@pytest.mark.parametrize("name", sampled(PUBLISHED, ["Mixtral-8x7B", "gpt-oss-20b"]))
def test_total_and_active_parameters_are_those_of_transformers(name: str) -> None:
    hf = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    total = sum(one.numel() for one in model.parameters())
    routed = sum(one.numel() for key, one in model.named_parameters() if ".mlp.experts." in key)
    sizes = hf.to_dict()
    count = next(sizes[key] for key in ("num_local_experts", "n_routed_experts", "num_experts") if key in sizes)
    family, text = family_of(sizes)
    decoder = family.config_from_hf(text)
    found = num_parameters(decoder), active_parameters(decoder)
    assert found == (total, total - routed + routed // count * sizes["num_experts_per_tok"])
    assert [one / 1e9 for one in found] == pytest.approx(BILLIONS[name], rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus, memory, options",
    [(1, 139, ""), (8, 80, "parallel: {shard: gradients}\n"), (8, 80, "parallel: {expert: 8}\n")],
)
def test_the_example_fits(gpus: int, memory: int, options: str, tmp_path: Path) -> None:
    """The files that examples/qwen3_30b_a3b/README.md names, on the machines that it names."""
    written = (ROOT / "examples/qwen3_30b_a3b/run.yaml").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(written + options)
    parser = argparse.ArgumentParser()
    memory_command.add_arguments(parser)
    model = str(ROOT / "examples/memory/models/qwen3-30b-a3b.json")
    given = ["--config", str(tmp_path / "run.yaml"), "--model", model, "--gpus", str(gpus), "--gpu-memory", str(memory)]
    assert f"fits {memory} GiB" in memory_config.report(parser.parse_args(given))


@pytest.mark.parametrize("fused", ["none", "gate_up"])
def test_no_part_of_an_expert_is_summed_over_other_ranks_than_its_own(fused: str) -> None:
    """One adapter over gate and up is an expert's own too: what a rank holds of adapters falls with the experts."""
    workload = _workload(MIXTURE, _config(lora=LoraOptions(rank=8, fused=fused, targets=("gate_proj", "up_proj"))))
    whole, eighth = (
        predict_layout(workload, Layout(parallel=ParallelOptions(expert=one), data=8), MemoryPlan())[0]
        for one in (1, 8)
    )
    assert whole.static[ADAPTERS] == 8 * eighth.static[ADAPTERS]
    trained = rank_model(workload, ParallelOptions(expert=8)).shape.trained_elements()
    assert set(trained) == {"dp_cp", "edp"} and not trained["dp_cp"]
