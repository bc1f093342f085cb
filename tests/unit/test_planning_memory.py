"""What the planner says a rank holds against what it does hold: every storage of real steps, counted as it is made.

The compared steps run on a CPU, most of them with the plain-torch backend, of which the count sees every buffer; of
compiled kernels it sees what they are given and what they give. Ranks of a layout are ranks of a world that does not
exist: their shapes, memory and order of operations are the real ones.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config.load import from_yaml
from engine.config.run import RunConfig
from engine.hybrids.layers.state_layers import StateLayers
from engine.kernels.native.loader import native_status
from engine.planning.ledger import DECODED
from engine.planning.peak import PeakEstimate
from engine.planning.predict import predict_peak
from engine.planning.rank_layout import Routing
from engine.runtime.launch import Launch
from engine.training.start_model import check_model, model_source
from rankfold.planning.memory_measure import build, draw_batches, measure
from tests.support import family_models, family_table
from tests.support.fake_world import fake_world
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

CPU = torch.device("cpu")
EXACT = 0.001
"""Largest relative error of the peak. What is left out are a few numbers a micro-batch. A tensor forgotten is more:
half of SwiGLU's gradient is 2% to 6% of these models' peaks."""
WITH_TABLES = 0.004
"""Where layers have states: plain torch's tables of the tokens of each state, which all layers share, are predicted for
each of them. Compiled kernels have none."""
WITH_SHARED_KEYS = 0.02
"""Where layers read the keys of others: gradients of these wait for the layer that made them, and pieces traced by
themselves show neither that nor what of a message its stage keeps."""
ROUGH = 0.03
"""Where formulas are left that approximate: of weights that come and go, where the two largest neighbours are not
layers, and of the actions of a split backward, which hold what their micro-batches leave for different times."""


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "olmo2": {},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    "gemma2": {
        "head_dim": 16, "sliding_window": 128, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 2048,
    },
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
        "norm_topk_prob": True,
    },
    "gemma4_text": {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 128, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 1000, "use_double_wide_mlp": True, "attention_k_eq_v": False,
    },
    "falcon_h1": {
        "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_ssm": 96, "mamba_n_groups": 1, "mamba_d_state": 24,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.5, "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.75, "mlp_multipliers": [0.5, 0.25], "ssm_multipliers": [0.5, 0.25, 0.5, 2.0, 1.0],
    },
}  # fmt: skip
"""What their config.json has beside Llama's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is trained, and on which rank of how many."""

    hidden: int = 128
    intermediate: int = 320
    layers: int = 3
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 1000
    tied: bool = False
    rows: int = 1
    micro_batches: int = 1
    length: int = 512
    rank: int = 8
    targets: str = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    fused: str = "auto"
    experts: str = "per_expert"
    dropout: float = 0.0
    trainable: str = "[]"
    dtype: str = "float32"
    parallel: str = "{}"
    memory: str = "{}"
    base: str = "null"
    products: str = "decoded"
    merges: str = "false"
    objective: str = "{}"
    balance: float = 0.0
    world: int = 1
    place: int = 0
    family: str = "llama"
    kernels: str = "reference"
    tolerance: float = EXACT

    def write(self, folder: Path) -> RunConfig:
        """The configuration, and the config.json that it names."""
        sizes = {
            "model_type": self.family, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab, "tie_word_embeddings": self.tied,
            **FAMILIES[self.family],
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(sizes))
        return from_yaml(
            f"model: {{path: '{folder}', dtype: {self.dtype}, init: random, kernels: {self.kernels},"
            f" base_dtype: {self.base}, base_products: {self.products}}}\n"
            f"lora: {{rank: {self.rank}, dropout: {self.dropout}, targets: {self.targets},"
            f" fused: {self.fused}, experts: {self.experts}, merge_aware: {self.merges}}}\n"
            f"trainable: {self.trainable}\n"
            f"data: {{seq_length: {self.length}}}\n"
            f"train: {{micro_batch_size: {self.rows}, global_batch_size: {self.rows * self.micro_batches},"
            f" router_aux_loss_coef: {self.balance}}}\n"
            f"optim: {{backend: torch}}\nparallel: {self.parallel}\nmemory: {self.memory}\n"
            f"objective: {self.objective}\n"
        )


BESIDE = "[in_proj, out_proj, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
"""The linears of a layer with Mamba2 beside attention."""
OF_INPUTS = "[q_proj, v_proj, per_layer_input_gate, per_layer_projection, per_layer_model_projection]"
"""With those of Gemma 4's inputs of layers."""
ALL = {"rank": 0, "trainable": "['*']"}
CASES = {
    "lora": Case(),
    "lora, wide, one layer": Case(hidden=256, intermediate=704, layers=1, length=256),
    "lora, many layers, short": Case(layers=8, length=128),
    "lora, two rows": Case(rows=2, length=256),
    "lora, accumulation": Case(micro_batches=3),
    "lora, dropout": Case(dropout=0.1),
    "lora, one for q, k and v and one for gate and up": Case(fused="all", dropout=0.1),
    "lora, bf16": Case(dtype="bfloat16"),
    "lora, bf16, dropout": Case(dtype="bfloat16", dropout=0.1),
    "lora, large vocabulary": Case(vocab=20000, length=1024),
    "lora, bf16, large vocabulary": Case(vocab=20000, length=1024, dtype="bfloat16"),
    "lora of queries and values": Case(targets="[q_proj, v_proj]"),
    "lora of the upper layers": Case(layers=4, targets="['layers[.][23][.].*_proj']"),
    "lora and head": Case(targets="['.*_proj', lm_head]"),
    "lora and embedding": Case(trainable="[embed_tokens]"),
    "all": Case(**ALL),
    "all, bf16": Case(dtype="bfloat16", **ALL),
    "all, tied": Case(tied=True, **ALL),
    "lora, a copy of a tied head": Case(tied=True, trainable="[lm_head]"),
    "lora, a copy of a tied embedding, bf16": Case(tied=True, trainable="[embed_tokens]", dtype="bfloat16"),
    "head alone": Case(rank=0, trainable="[lm_head]", vocab=4000),
    "norms alone": Case(rank=0, trainable="[input_norm, post_attention_norm, norm]"),
    "none": Case(memory="{recompute: none}"),
    "none, dropout": Case(memory="{recompute: none}", dropout=0.1),
    "attention": Case(memory="{recompute: attention}"),
    "full": Case(memory="{recompute: full}"),
    "full, dropout": Case(memory="{recompute: full}", dropout=0.1),
    "full, all": Case(memory="{recompute: full}", **ALL),
    "full, two of four layers": Case(layers=4, memory="{recompute: full, recompute_layers: 2}"),
    "tensor 2": Case(world=2, parallel="{tensor: 2}"),
    "tensor 2, without sequence": Case(world=2, parallel="{tensor: 2, sequence: false}"),
    "tensor 2, joint": Case(world=2, parallel="{tensor: 2, sequence: false, lora_reduce: joint}"),
    "tensor 2, all": Case(world=2, parallel="{tensor: 2}", **ALL),
    "tensor 4, full": Case(world=4, parallel="{tensor: 4}", memory="{recompute: full}"),
    "tensor 2, none": Case(world=2, parallel="{tensor: 2}", memory="{recompute: none}"),
    "data 2": Case(world=2, micro_batches=2),
    "data 2, shard optimizer": Case(world=2, micro_batches=2, parallel="{shard: optimizer}", **ALL),
    "data 2, shard gradients": Case(world=2, micro_batches=2, parallel="{shard: gradients}", **ALL),
    "data 2, shard gradients, accumulation": Case(world=2, micro_batches=4, parallel="{shard: gradients}", **ALL),
    "data 2, shard parameters": Case(world=2, micro_batches=2, parallel="{shard: parameters}", **ALL),
    "data 4, shard parameters, lora": Case(
        world=4, hidden=256, intermediate=704, micro_batches=4, length=128, parallel="{shard: parameters}"
    ),
    "offloaded weights": Case(memory="{offload_weights: true}"),
    "offloaded weights, full, bf16": Case(memory="{offload_weights: true, recompute: full}", dtype="bfloat16"),
    "offloaded weights, head and embedding train": Case(
        memory="{offload_weights: true}", vocab=2000, targets="['.*_proj', lm_head]", trainable="[embed_tokens]"
    ),
    "offloaded optimizer": Case(memory="{offload_optimizer: true}", **ALL),
    "offloaded optimizer, bf16, shard optimizer": Case(
        world=2,
        micro_batches=2,
        memory="{offload_optimizer: true}",
        parallel="{shard: optimizer}",
        dtype="bfloat16",
        **ALL,
    ),
    "offloaded optimizer, shard gradients": Case(
        world=2, micro_batches=2, memory="{offload_optimizer: true}", parallel="{shard: gradients}", **ALL
    ),
    "nf4": Case(base="nf4"),
    "nvfp4": Case(base="nvfp4"),
    "mxfp4, bf16": Case(base="mxfp4", dtype="bfloat16"),
    "int4, bf16": Case(base="int4", dtype="bfloat16", intermediate=384),
    "fp8_block": Case(base="fp8_block"),
    "mxfp8": Case(base="mxfp8"),
    "mxfp8 by codes": Case(base="mxfp8", products="codes", dtype="bfloat16"),
    "fp8_block by codes": Case(base="fp8_block", products="codes", hidden=256, intermediate=640, kv_heads=8),
    "nvfp4 by codes": Case(base="nvfp4", products="codes", dtype="bfloat16"),
    "nvfp4, merged, bf16": Case(base="nvfp4", dtype="bfloat16", merges="true"),
    "int4, merged, tensor 2": Case(
        world=2, base="int4", merges="true", parallel="{tensor: 2}", hidden=256, intermediate=512
    ),
    "nf4, bf16, dropout": Case(base="nf4", dtype="bfloat16", dropout=0.1),
    "int8": Case(base="int8", hidden=256, intermediate=704),
    "int8, bf16, full": Case(base="int8", dtype="bfloat16", memory="{recompute: full}"),
    "fp8": Case(base="fp8"),
    "fp8, bf16, dropout": Case(base="fp8", dtype="bfloat16", dropout=0.1),
    "fp8_row": Case(base="fp8_row"),
    "fp8_row, bf16, two of four layers full": Case(
        base="fp8_row", dtype="bfloat16", layers=4, memory="{recompute: full, recompute_layers: 2}"
    ),
    "nf4, queries and values, head": Case(base="nf4", targets="[q_proj, v_proj]", trainable="[lm_head]"),
    "nf4, gates train": Case(base="nf4", trainable="[gate_proj]", targets="[q_proj, k_proj, v_proj, o_proj]"),
    "nf4, tensor 2": Case(world=2, base="nf4", parallel="{tensor: 2}", intermediate=384),
    "fp8_row, tensor 2, bf16": Case(world=2, base="fp8_row", dtype="bfloat16", parallel="{tensor: 2}"),
    "int8, shard parameters": Case(
        world=4,
        base="int8",
        hidden=256,
        intermediate=704,
        micro_batches=4,
        length=128,
        parallel="{shard: parameters}",
        tolerance=ROUGH,
    ),
    "nf4, offloaded weights": Case(
        base="nf4", memory="{offload_weights: true}", hidden=256, intermediate=704, tolerance=ROUGH
    ),
    "fp8, both offloads, kept in float8": Case(
        base="fp8",
        dtype="bfloat16",
        layers=6,
        memory="{offload_weights: true, offload_optimizer: true, activation_dtype: float8, recompute: full}",
        tolerance=ROUGH,
    ),
    "dpo": Case(objective="{name: dpo}", length=256),
    "dpo, nf4, two rows": Case(objective="{name: dpo}", length=128, rows=2, base="nf4", dtype="bfloat16"),
    "orpo, head": Case(objective="{name: orpo}", length=256, targets="['.*_proj', lm_head]"),
    "context 2": Case(world=2, parallel="{context: 2}"),
    "context 2, second": Case(world=2, place=1, parallel="{context: 2}"),
    "context 4, bf16": Case(world=4, parallel="{context: 4}", dtype="bfloat16"),
    "context 2, ulysses": Case(world=2, parallel="{context: 2, context_method: ulysses}"),
    "tensor 2, context 2": Case(world=4, parallel="{context: 2, tensor: 2}"),
    "qwen3": Case(family="qwen3"),
    "qwen3, bf16": Case(family="qwen3", dtype="bfloat16"),
    "qwen3, all": Case(family="qwen3", **ALL),
    "olmo2": Case(family="olmo2"),
    "olmo2, full": Case(family="olmo2", memory="{recompute: full}"),
    "granite": Case(family="granite", vocab=4000),
    "gemma2": Case(family="gemma2", tied=True),
    "gemma2, bf16": Case(family="gemma2", tied=True, dtype="bfloat16"),
    "mixture": Case(family="qwen3_moe"),
    "mixture, shared outer, dropout, two of three layers full": Case(
        family="qwen3_moe", experts="shared_outer", dropout=0.1, memory="{recompute: full, recompute_layers: 2}"
    ),
    "mixture, tensor 2": Case(family="qwen3_moe", world=2, parallel="{tensor: 2}"),
    "mixture, all": Case(family="qwen3_moe", **ALL),
    "mixture, balanced": Case(family="qwen3_moe", balance=0.1),
    "mixture, balanced, two micro-batches": Case(family="qwen3_moe", balance=0.1, micro_batches=2, rows=2),
    "gemma4": Case(layers=4, family="gemma4_text", tolerance=WITH_SHARED_KEYS),
    "gemma4, inputs of layers": Case(
        layers=4, family="gemma4_text", targets=OF_INPUTS, tolerance=WITH_SHARED_KEYS, dropout=0.1
    ),
    "gemma4, full": Case(layers=4, family="gemma4_text", memory="{recompute: full}", tolerance=WITH_SHARED_KEYS),
    "gemma4, all, tied": Case(layers=4, family="gemma4_text", tied=True, tolerance=WITH_SHARED_KEYS, **ALL),
    "gemma4, tensor 2": Case(
        layers=4, family="gemma4_text", world=2, parallel="{tensor: 2}", tolerance=WITH_SHARED_KEYS
    ),
    "falcon_h1": Case(family="falcon_h1", tolerance=WITH_TABLES, targets=BESIDE),
    "falcon_h1, bf16, dropout": Case(
        family="falcon_h1", tolerance=WITH_TABLES, targets=BESIDE, dtype="bfloat16", dropout=0.1
    ),
    "falcon_h1, none": Case(family="falcon_h1", tolerance=WITH_TABLES, targets=BESIDE, memory="{recompute: none}"),
    "falcon_h1, attention": Case(
        family="falcon_h1", tolerance=WITH_TABLES, targets=BESIDE, memory="{recompute: attention}"
    ),
    "falcon_h1, full, all": Case(family="falcon_h1", tolerance=WITH_TABLES, memory="{recompute: full}", **ALL),
    "falcon_h1, tensor 2": Case(
        family="falcon_h1", tolerance=WITH_TABLES, targets=BESIDE, world=2, parallel="{tensor: 2}"
    ),
    "falcon_h1, tensor 2, all": Case(
        family="falcon_h1", tolerance=WITH_TABLES, world=2, parallel="{tensor: 2, sequence: false}", **ALL
    ),
    "falcon_h1, context 2": Case(
        family="falcon_h1", tolerance=WITH_TABLES, targets=BESIDE, world=2, parallel="{context: 2}"
    ),
    "kept in bf16": Case(memory="{activation_dtype: bfloat16}"),
    "kept in float8": Case(memory="{activation_dtype: float8}", layers=6),
    "kept in float8, bf16, full": Case(
        memory="{activation_dtype: float8, recompute: full}", layers=6, dtype="bfloat16"
    ),
    "kept in bf16, attention": Case(memory="{activation_dtype: bfloat16, recompute: attention}", layers=6),
    "kept in bf16, none": Case(memory="{activation_dtype: bfloat16, recompute: none}"),
}

NATIVE: dict[str, dict[str, Any]] = {
    "lora": {}, "lora, bf16, dropout": {"dtype": "bfloat16", "dropout": 0.1}, "none": {"memory": "{recompute: none}"},
    "full": {"memory": "{recompute: full}"}, "all": ALL, "lora and head": {"targets": "['.*_proj', lm_head]"},
    "nf4": {"base": "nf4"}, "context 2": {"world": 2, "parallel": "{context: 2}"},
    "tensor 2": {"world": 2, "parallel": "{tensor: 2}"}, "qwen3": {"family": "qwen3"}, "gemma2": {"family": "gemma2"},
    "mixture": {"family": "qwen3_moe"}, "falcon_h1": {"family": "falcon_h1", "targets": BESIDE},
    "kept in float8": {"memory": "{activation_dtype: float8}"},
}  # fmt: skip
CASES |= {f"native, {name}": Case(**changes, kernels="native") for name, changes in NATIVE.items()}
QUICK = (
    "lora, one for q, k and v and one for gate and up", "lora of the upper layers",
    "lora, a copy of a tied head", "full, two of four layers", "none, dropout",
    "data 2, shard gradients, accumulation", "data 4, shard parameters, lora",
    "offloaded weights, head and embedding train", "offloaded optimizer, bf16, shard optimizer",
    "dpo, nf4, two rows", "nvfp4, merged, bf16", "fp8_row, bf16, two of four layers full", "orpo, head",
    "tensor 2, context 2", "granite", "kept in bf16, attention",
    "native, lora, bf16, dropout", "mixture, balanced", "falcon_h1, attention",
)  # fmt: skip
"""Each kind of training, storage, axis, objective and backend at least once, many of them together."""


PIPELINES = {
    "pipeline 2": Case(world=2, layers=4, micro_batches=4, parallel="{pipeline: 2}"),
    "pipeline 2x2": Case(world=2, layers=4, micro_batches=4, parallel="{pipeline: 2, virtual: 2}"),
    "pipeline 2, upper layers": Case(
        world=2, layers=4, micro_batches=4, targets="['layers[.][23][.].*_proj']", parallel="{pipeline: 2}"
    ),
    "gemma4, pipeline 2": Case(
        world=2, layers=4, micro_batches=4, family="gemma4_text", parallel="{pipeline: 2}", tolerance=WITH_SHARED_KEYS
    ),
    "gemma4, pipeline 2, inputs of layers": Case(
        world=2,
        layers=4,
        micro_batches=4,
        family="gemma4_text",
        parallel="{pipeline: 2}",
        targets=OF_INPUTS,
        tolerance=WITH_SHARED_KEYS,
    ),
    "pipeline 2, tied, all": Case(world=2, layers=4, micro_batches=4, tied=True, parallel="{pipeline: 2}", **ALL),
    "pipeline 2, a copy of a tied head": Case(
        world=2, layers=4, micro_batches=4, tied=True, parallel="{pipeline: 2}", trainable="[lm_head]"
    ),
    "pipeline 2, split backward": Case(
        world=2, layers=4, micro_batches=4, parallel="{pipeline: 2, schedule: zb_h1}", tolerance=ROUGH, **ALL
    ),
    "pipeline 2, V": Case(
        world=2, layers=4, micro_batches=4, parallel="{pipeline: 2, schedule: zb_v}", tolerance=ROUGH, **ALL
    ),
    "pipeline 2, full": Case(
        world=2, layers=4, micro_batches=4, parallel="{pipeline: 2}", memory="{recompute: full}", dtype="bfloat16"
    ),
}
"""Measured in a world of two processes."""
QUICK_PIPELINES = ("pipeline 2, split backward",)


def _prediction(case: Case, config: RunConfig, place: int, routing: Routing = "balanced") -> PeakEstimate:
    source = model_source(config)
    plan = check_model(config, source.model, case.world).modules
    rank = place * config.parallel.pipeline // case.world
    return predict_peak(
        config,
        source.model.decoder,
        plan,
        world_size=case.world,
        pipeline_rank=rank,
        device_type="cpu",
        routing=routing,
    )


def _compare(name: str, found: PeakEstimate, step: int, tolerance: float) -> None:
    """Prints a row of the table, which pytest -s shows. On a CPU host memory is counted with the device's."""
    step -= found.host
    ratio = found.step / step
    print(
        f"\n{name:36} predicted {found.step / 2**20:7.2f} MiB  measured {step / 2**20:7.2f}  ratio {ratio:.3f}", end=""
    )
    assert found.step == pytest.approx(step, rel=tolerance)


@pytest.mark.parametrize("name", sampled(CASES, QUICK))
def test_the_peak_of_a_step(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.kernels == "native" and not native_status().available:
        pytest.skip(native_status().reason)
    config = case.write(tmp_path)
    with fake_world(case.place, case.world) if case.world > 1 else nullcontext():
        measured = measure(config, Launch(rank=case.place, world_size=case.world, device=CPU))
    _compare(name, _prediction(case, config, case.place), measured.step, case.tolerance)


EXPERTS_OF_GPUS = {"intermediate_size": 56, "moe_intermediate_size": 24}
"""Widths of experts whose products a GPU takes; families name them by either."""


@pytest.mark.parametrize("family", sampled(family_table.FAMILIES, ["minicpm", "phi3", "gemma3"]))
def test_every_family_is_traced(family: str, tmp_path: Path) -> None:
    """With dropout, and DoRA where a family has it; in bfloat16 with Triton's kernels too, which cannot run here."""
    routed = family in family_table.ROUTED
    family_models.make_model(family, tmp_path, **(EXPERTS_OF_GPUS if routed else {}))
    config = from_yaml(
        f"model: {{path: '{tmp_path}', dtype: float32, init: random, kernels: reference}}\n"
        f"lora: {{rank: 4, dora: {str(not routed).lower()}, dropout: 0.1, targets: [all-linear]}}\n"
        "data: {seq_length: 32}\n"
        "train: {micro_batch_size: 1, global_batch_size: 1}\noptim: {backend: torch}\n"
    )
    measured = measure(config, Launch(rank=0, world_size=1, device=CPU)).step
    variants = model_source(config).model.decoder.variants
    tolerance = WITH_TABLES if any(isinstance(one, StateLayers) for one in variants) else EXACT
    if family == "gemma4 small":
        tolerance = WITH_SHARED_KEYS
    _compare(family, _prediction(Case(), config, 0), measured, tolerance)
    fast = replace(config, model=replace(config.model, dtype="bfloat16", kernels="triton"))
    decoder = model_source(fast).model.decoder
    plan = check_model(fast, model_source(fast).model, 1).modules
    assert predict_peak(fast, decoder, plan).step < measured


def _on_a_rank(case: Case, folder: str) -> int:
    config = case.write(Path(folder) / str(dist.get_rank()))
    return measure(config, Launch(rank=dist.get_rank(), world_size=case.world, device=CPU)).step


@pytest.mark.distributed
@pytest.mark.parametrize("name", sampled(PIPELINES, QUICK_PIPELINES))
def test_the_peak_of_every_pipeline_rank(name: str, tmp_path: Path) -> None:
    case = PIPELINES[name]
    for rank in range(case.world):
        (tmp_path / str(rank)).mkdir()
    measured = spawn(_on_a_rank, world=case.world, args=(case, str(tmp_path)))
    config = case.write(tmp_path)
    for rank, step in enumerate(measured):
        _compare(f"{name}, rank {rank}", _prediction(case, config, rank), step, case.tolerance)


TRACKED = ("all", "lora", "nf4", "int8, bf16, full", "fp8_row", "offloaded weights", "nf4, offloaded weights")


@pytest.mark.parametrize("name", sampled(TRACKED, ["lora", "int8, bf16, full", "nf4, offloaded weights"]))
def test_the_count_is_that_of_torchs_own_tracker(name: str, tmp_path: Path) -> None:
    """The same steps under torch's MemTracker, which follows storages on its own. It wants all parameters to ask for a
    gradient, which nothing here looks at. The scratch of decoded weights is there before its first step is over."""
    config = CASES[name].write(tmp_path)
    launch = Launch(rank=0, world_size=1, device=CPU)
    counted = measure(config, launch)
    training = build(config, launch)
    batches = draw_batches(config, training, launch)
    for part in training.parts:
        part.requires_grad_(True)
    tracker = MemTracker()
    tracker.track_external(*training.parts)
    with tracker:
        training.step(batches, 512.0, 1e-4)
        between = tracker.get_tracker_snapshot("current")[CPU]["Total"]
        tracker.reset_mod_stats()
        training.step(batches, 512.0, 1e-4)
    peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    scratch = _prediction(CASES[name], config, 0).static[DECODED]
    assert peak - between == pytest.approx(counted.step - counted.static - scratch, rel=0.01)


@pytest.mark.parametrize(
    "base", sampled(["nf4", "int8", "nvfp4", "fp8_block", "int4", "mxfp8"], ["nf4", "int8", "nvfp4"])
)
def test_the_peak_of_loading_an_encoded_base(base: str, tmp_path: Path) -> None:
    """Weights are stored in 2 bytes, where the prediction allows for 4; a matrix has 512 x 2048 numbers, and NVFP4 has
    two at a time."""
    sizes = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1000,
    )  # fmt: skip
    LlamaForCausalLM(sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    config = from_yaml(
        f"model: {{path: '{tmp_path}', dtype: bfloat16, kernels: reference, base_dtype: {base}}}\n"
        "lora: {rank: 8}\ndata: {seq_length: 64}\ntrain: {micro_batch_size: 1, global_batch_size: 1}\n"
        "optim: {backend: torch}\n"
    )
    measured = measure(config, Launch(rank=0, world_size=1, device=CPU))
    spared = 2 * 512 * 2048 * (2 if base == "nvfp4" else 1)
    assert _prediction(Case(), config, 0).load - spared == pytest.approx(measured.load, rel=0.05)
