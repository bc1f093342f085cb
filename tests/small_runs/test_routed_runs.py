"""Whole runs of a small mixture of experts: trained, resumed, exported and asked for text; and what is refused."""

from __future__ import annotations

import json
import math

import pytest

from tests.small_runs.conftest import SmallRuns
from tests.small_runs.routed_place import put_experts
from tests.support.commands import losses
from tests.support.sweeps import sampled
from tests.wrong_inputs.workplace import run_here


@pytest.fixture
def routed(run: SmallRuns) -> SmallRuns:
    """The workplace's model with experts, of which the last has no tokens."""
    put_experts(run.place)
    return run


@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16"], ["float32"]))
def test_a_run_is_resumed_exported_and_asked_for_text(
    dtype: str, routed: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    routed.place.set(model__dtype=dtype)
    routed.place.change_config(torch_dtype=dtype)
    said = routed(train__steps=8, optim__schedule="constant", optim__warmup_steps=0)
    assert "the router sent no token to layers.0.mlp.experts.4, layers.1.mlp.experts.4, whose adapters" in said
    assert "of tensors predicted for rank 0" in said
    whole = losses(routed.folder)
    assert whole[8] < whole[1]
    records = [json.loads(line) for line in (routed.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    # the fifth of each layer has none; two of four opposite rows are chosen, which is half a bit less than all five
    assert {record["idle_experts"] for record in steps} == {2.0}
    assert all(0.4 < record["expert_entropy"] < 0.87 for record in steps)
    assert all(1.25 <= record["expert_imbalance"] <= 2.5 for record in steps)
    assert all(record["layer_idle_experts"] == [1.0, 1.0] for record in steps)
    assert all(max(record["layer_expert_imbalance"]) == record["expert_imbalance"] for record in steps)
    rows = [record["expert_rows"] for record in records if "expert_rows" in record]
    assert all(one.keys() == {"0", "1"} and one["0"][4] == one["1"][4] == 0 for one in rows)
    tokens = sum(record["tokens"] for record in steps)
    assert {sum(sum(one[layer]) for one in rows) for layer in ("0", "1")} == {2 * tokens}
    again = routed.folder.with_name("again")
    routed(checkpoint__dir=again, train__steps=4)
    assert "resum" in routed(train__steps=8)
    assert losses(again) == whole
    out = routed.folder.with_name("adapter")
    seen = run_here("convert", ["export", "--source", again, "--out", out, "--format", "peft"], capsys)
    assert seen.status == 0, seen.printed
    assert "checked with" in seen.printed and "adapters are untrained" in seen.printed
    assert "lora_dropout is 0 in adapter_config.json and was 0.1 in training" in seen.printed
    assert json.loads((out / "adapter_config.json").read_text())["lora_dropout"] == 0
    texts = []
    for adapter in (again, out):
        arguments = ["--model", routed.place.model, "--adapter", adapter, "--prompt", "abab", "--max-new-tokens", 6]
        seen = run_here("generate", arguments, capsys)
        assert seen.status == 0, seen.printed
        texts.append([line for line in seen.printed.splitlines() if not line.startswith("reading weights")])
    assert texts[0] == texts[1] and texts[0]


def test_a_base_in_four_bits_trains(routed: SmallRuns) -> None:
    """A resumed run encodes the base again, and continues with the same bits."""
    routed.place.set(model__base_dtype="nf4")
    said = routed(train__steps=8, optim__schedule="constant", optim__warmup_steps=0)
    assert "frozen base: 38 weights of the layers are nf4" in said
    whole = losses(routed.folder)
    assert whole[8] < whole[1]
    again = routed.folder.with_name("again")
    constant = {"optim__schedule": "constant", "optim__warmup_steps": 0}
    routed(checkpoint__dir=again, train__steps=4, **constant)
    assert "resum" in routed(train__steps=8, **constant)
    assert losses(again) == whole


def test_routers_are_balanced_where_that_is_asked_for(run: SmallRuns) -> None:
    """Two experts a token, so that the loss of equal shares is 2."""
    put_experts(run.place, sees_signs=False)
    routed = run
    routed.place.change_config(output_router_logits=True, router_aux_loss_coef=0.02, attention_dropout=0.1)
    routed.place.set(lora__rank=0, trainable="router", optim__schedule="constant", optim__warmup_steps=0)
    without, balanced = routed.folder.with_name("without"), routed.folder.with_name("balanced")
    said = routed(train__steps=8, checkpoint__dir=without)
    assert "which is left out: train.router_aux_loss_coef 0.02 adds it" in said
    assert "note: config.json has attention_dropout 0.1, and the model's own dropout is not applied" in said
    assert "router_aux_loss" not in (without / "metrics.jsonl").read_text()
    said = routed(
        train__steps=8,
        checkpoint__dir=balanced,
        train__router_aux_loss_coef=10.0,
        optim__lr=0.05,
        train__global_batch_size=2,
    )
    assert "routers: auxiliary loss over the global batch, times 10; every micro-batch goes forward twice" in said
    records = [json.loads(line) for line in (balanced / "metrics.jsonl").read_text().splitlines()]
    balance = [record["router_aux_loss"] for record in records if "router_aux_loss" in record]
    assert len(balance) == 8 and balance[-1] < balance[0] - 0.1 and min(balance) > 1.8, balance


def test_answers_are_compared_with_the_base_alone(routed: SmallRuns) -> None:
    """The base computes without adapters of experts and routers, so that losses are those of a run that has kept the
    base's likelihoods. With adapters left on in its pass they stay at ln 2."""
    routed.place.set(
        lora__targets="router,gate_proj,up_proj,down_proj", lora__dropout=0.0, lora__experts="shared_outer"
    )
    pairs = [("ab", "abab cab", "bac aa"), ("b", "a", "cab")]
    records = routed.folder.with_name("pairs.jsonl")
    lines = [json.dumps(dict(zip(("prompt", "chosen", "rejected"), pair, strict=True))) for pair in pairs]
    records.write_text("".join(f"{line}\n" for line in lines))
    found = []
    for reference in ("base", "initial"):
        folder = routed.folder.with_name(reference)
        routed(
            data__train=records, objective__name="dpo", objective__reference=reference, checkpoint__dir=folder,
            train__steps=4, train__global_batch_size=2, optim__warmup_steps=0, optim__schedule="constant",
            optim__lr=0.1,
        )  # fmt: skip
        found.append(losses(folder))
    base, initial = found
    assert base[1] == pytest.approx(math.log(2), abs=1e-6) and base[4] < base[1] - 1e-4
    assert base == pytest.approx(initial, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora__dora": "true"}, "lora.dora is true and layers.0.mlp.experts.0.gate_proj is to have an adapter"),
        ({"lora__bias": "true"}, "lora.bias is true and layers.0.mlp.experts.0.gate_proj is to have an adapter"),
        (
            {"lora__fused": "gate_up", "lora__rank_pattern": '{"experts.1.up_proj": 3}'},
            "tell layers.0.mlp.experts.1.gate_proj, layers.0.mlp.experts.1.up_proj apart",
        ),
        ({"lora__targets": "shared_expert_gate"}, "matches no module of this model"),
        (
            {"lora__experts": "shared", "lora__rank_pattern": '{"experts.1.up_proj": 3}'},
            "layers.0.mlp.experts.0.up_proj and layers.0.mlp.experts.1.up_proj share a factor, but of",
        ),
        (
            {"lora__experts": "shared_outer", "lora__targets": "q_proj,experts.0.up_proj"},
            "layers.0.mlp.experts.0.up_proj and layers.0.mlp.experts.1.up_proj share a factor, but of",
        ),
        ({"lora__experts": "shared_outer", "lora__targets": "q_proj"}, "no expert that a router chooses is to have an"),
        (
            {"lora__targets": "router", "lora__dora": "true"},
            "lora.dora is true and layers.0.mlp.router is to have an adapter, but a router has a plain adapter alone",
        ),
        ({"lora__targets": "gate", "trainable": "router"}, "is in lora.targets and in trainable"),
        ({"train__router_aux_loss_coef": -1}, "train.router_aux_loss_coef is -1"),
    ],
)
def test_what_experts_do_not_have_is_refused(routed: SmallRuns, options: dict[str, str], words: str) -> None:
    assert words in routed(status=2, **options)


def test_a_balance_is_refused_where_there_is_none(run: SmallRuns) -> None:
    said = run(status=2, train__router_aux_loss_coef=0.01)
    assert "train.router_aux_loss_coef is 0.01, but this llama model has no experts that a router chooses" in said
