"""Trainings on checkpoints in few bits as they are stored, as stock transformers + PEFT train on the decoded model.

PEFT computes in fp64 on a model that transformers read from decoded weights. The adapters stand on attention and MLPs,
of mixtures on the experts too, with B drawn.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed.sharding import ShardSpec
from engine.runtime.launch import Launch
from tests.support.family_models import make_model, stock_losses
from tests.support.family_table import ROUTED
from tests.support.few_bits import CONFIGS, in_few_bits
from tests.support.peft_following import ALONE, ROWS, batches, build, peft_on, rank_batches, take_steps, their_losses
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

LIMIT = 1e-5
"""Largest error of a loss or a gradient in fp32 against fp64."""
STEPS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
"""Two ranks cut them between blocks of 128."""
NUM_EXPERTS = 4
MORE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen3": {},
    "qwen3 moe": {"moe_intermediate_size": 256, "num_experts": NUM_EXPERTS, "decoder_sparse_step": 1},
    "gpt oss": {"num_local_experts": NUM_EXPERTS},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FORMATS = [name for name in CONFIGS if name != "gpt oss"]
MODELS = [
    *((model, name) for model in ("llama", "qwen3", "qwen3 moe") for name in FORMATS),
    ("gpt oss", "gpt oss"),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "offload": {"memory.offload_weights": "true"},
    "tp2": {"parallel.tensor": 2, "parallel.sequence": "false"},
    "tp2, sequence": {"parallel.tensor": 2},
    "cp2": {"parallel.context": 2},
    "cp2, parameters": {"parallel.context": 2, "parallel.shard": "parameters"},
    "pp2": {"parallel.pipeline": 2},
    "dp2": {},
    "dp2, optimizer": {"parallel.shard": "optimizer"},
    "dp2, gradients": {"parallel.shard": "gradients"},
    "dp2, parameters": {"parallel.shard": "parameters"},
    "ep2": {"parallel.expert": 2},
    "ep2, parameters": {"parallel.expert": 2, "parallel.shard": "parameters"},
    "tp2 x pp2": {"parallel.tensor": 2, "parallel.pipeline": 2},
    "tp2 x dp2, parameters": {"parallel.tensor": 2, "parallel.shard": "parameters"},
    "ep2 x tp2": {"parallel.expert": 2, "parallel.tensor": 2, "parallel.expert_tensor": 2},
    "ep2 x tp2, parameters": {"parallel.expert": 2, "parallel.tensor": 2, "parallel.shard": "parameters"},
    "ep2 x pp2": {"parallel.expert": 2, "parallel.pipeline": 2},
}
WORLDS = {name: 4 if " x " in name else 1 if name in ("one", "offload") else 2 for name in LAYOUTS}


def _stock(folder: Path, model: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(folder / "decoded", dtype=torch.float32, attn_implementation="eager")
    if model in ROUTED:
        stock.set_experts_implementation("eager")
    return stock


def _engine_name(peft_name: str) -> str:
    name = peft_name.removeprefix("base_model.model.model.").replace(".default.weight", "")
    return name.replace("self_attn", "attention")


def _of_experts(name: str, stacked: Tensor, interleaved: bool) -> dict[str, Tensor]:
    """Each expert's part of PEFT's gradient of all experts of a layer: A has their rows one after the other, and of B's
    columns every NUM_EXPERTS-th is one expert's. PEFT has gate and up as the base layer of the adapter on down.

    Args:
        interleaved: gpt-oss has the rows of gate and up in turn.
    """
    layer, _, end = name.partition(".experts.")
    leaf = "gate_up_proj" if "base_layer" in end else "down_proj"
    factor = end.rpartition(".")[2]
    parts = {}
    for expert in range(NUM_EXPERTS):
        part = stacked.chunk(NUM_EXPERTS)[expert] if factor == "lora_A" else stacked[:, expert::NUM_EXPERTS]
        if interleaved and leaf == "gate_up_proj" and factor == "lora_B":
            part = torch.cat((part[::2], part[1::2]))
        parts[f"{layer}.experts.{expert}.{leaf}.{factor}"] = part
    return parts


class _Prepared:
    """A model in few bits, its adapter, and PEFT's losses and first gradients."""

    def __init__(self, folder: Path, model: str, name: str) -> None:
        self.folder = folder
        make_model(model, folder / "plain", **{**SIZES, **MORE[model]})
        in_few_bits(folder / "plain", folder, CONFIGS[name])
        stacks = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} if model in ROUTED else {}
        targets = ATTENTION if stacks else "all-linear"
        peft = peft_on(_stock(folder, model), folder, target_modules=targets, **stacks)
        peft = peft.double().train()
        (batch,) = batches(0)
        (stock_losses(peft, batch)[1].sum() / batch.loss_weights_BS.sum()).backward()
        found = {key: value.grad.clone() for key, value in peft.named_parameters() if value.grad is not None}
        self.gradients: dict[str, Tensor] = {}
        for key, value in found.items():
            name = _engine_name(key)
            of_experts = ".experts." in name
            self.gradients |= _of_experts(name, value, model == "gpt oss") if of_experts else {name: value}
        peft.zero_grad()
        self.losses = their_losses(peft, steps=STEPS)
        more = {"lora.targets": json.dumps([*ATTENTION, r".*mlp\.experts\.\d+\.(gate|up|down)_proj"])} if stacks else {}
        self.given = {
            "model.base_dtype": "stored", "lora.rank": 3, "lora.alpha": 5, "lora.init_from": folder / "start",
            "train.steps": STEPS, **more,
        }  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory):
    return functools.cache(lambda model, name: _Prepared(tmp_path_factory.mktemp("model"), model, name))


Gradients = list[tuple[str, Tensor, ShardSpec]]


def _on_rank(folder: Path, given: dict[str, Any], world: int) -> tuple[list[float], list[str], Gradients]:
    launch = ALONE if world == 1 else Launch(rank=dist.get_rank(), world_size=world, device=torch.device("cpu"))
    training, lines = build(folder, given, launch)
    training.step.gradients(*rank_batches(training, given, 0))
    flat = training.optimizer.flat
    gradients = [(shard.name, shard.tensor.double().clone(), shard.spec) for shard in flat.gradient_shards()]
    flat.gradient.zero_()
    return take_steps(training, given, STEPS), lines, gradients


def _boxes(whole: Tensor, spec: ShardSpec, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a tensor that a rank holds, and where they lie in the rank's."""
    for box in product(*(spec.runs(dim) for dim in range(whole.dim()))):
        theirs, ours = whole, local
        for dim, run in enumerate(box):
            theirs = theirs.narrow(dim, run.global_offset, run.length)
            ours = ours.narrow(dim, run.local_offset, run.length)
        yield theirs, ours


def _check_gradients(ranks: list[Gradients], expected: dict[str, Tensor]) -> None:
    """Each rank's gradients are its parts of PEFT's, and together the ranks have all of them."""
    missing = {name: torch.ones_like(whole, dtype=torch.bool) for name, whole in expected.items()}
    for rank, found in enumerate(ranks):
        for name, gradient, spec in found:
            # a part may be a row that is next to nothing, and an expert that no token chose has no gradient
            limit = LIMIT * expected[name].norm()
            for theirs, ours in _boxes(expected[name], spec, gradient):
                assert (ours - theirs).norm() <= limit, f"{name} of rank {rank}"
            for held, _ in _boxes(missing[name], spec, gradient):
                held.fill_(False)
    left = [name for name, elements in missing.items() if elements.any()]
    assert not left, f"no rank has all of {left}"


QUICK = [
    ("llama", "nvfp4", "one"), ("llama", "mxfp4", "tp2 x pp2"), ("qwen3", "int4", "one"),
    ("qwen3", "int8", "cp2, parameters"), ("qwen3 moe", "nvfp4", "ep2, parameters"), ("gpt oss", "gpt oss", "one"),
]  # fmt: skip
CASES = [
    (model, name, layout)
    for model, name in MODELS
    for layout in LAYOUTS
    if (model in ROUTED or "ep2" not in layout) and (model != "gpt oss" or "cp2" not in layout)  # its windows
]


@pytest.mark.parametrize(("model", "name", "layout"), sampled(CASES, QUICK))
def test_training_follows_peft_on_the_decoded_model(model: str, name: str, layout: str, prepared: Any) -> None:
    """Taking a neighbour's scale, the other half of a byte or another rank's rows moves a loss by 1e-3 and more."""
    case, world = prepared(model, name), WORLDS[layout]
    given = {**case.given, **LAYOUTS[layout]}
    if world > 1:
        given["train.micro_batch_size"] = len(ROWS) // 2
    ranks = [_on_rank(case.folder, given, 1)] if world == 1 else spawn(
        _on_rank, world=world, args=(case.folder, given, world), timeout=240
    )  # fmt: skip
    _check_gradients([gradients for _, _, gradients in ranks], case.gradients)
    for losses, _, _ in ranks:
        assert max(abs(one - other) for one, other in zip(losses, case.losses, strict=True)) < LIMIT
    assert case.losses[-2] < case.losses[0] - 1e-3, "nothing is learnt, so that agreement says little"
    (said,) = (line for line in ranks[0][1] if line.startswith("frozen base: "))
    assert "as the checkpoint has them" in said and "bits a number" in said
