"""The cases: layouts of a small model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from engine.choices import DecodeGraph
from tests.fake_cuda.models import (
    COGAGENT,
    COGVLM,
    COGVLM2,
    DEEPSEEK,
    GEMMA,
    GPT_OSS,
    HYBRID,
    IMAGES,
    INTERNVL,
    LLAMA_8B,
    LLAVA,
    MINICPM_V,
    MINICPM_V_2_6,
    MIXTURE,
    NEXT,
    OMNILMM,
    ONEVISION,
    QWEN,
    QWEN2_5_VL,
    QWEN3_VL,
    SHARED_EXPERT,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank of a layout.

    Args:
        options: of the run, beside those that all have.
        world, rank: which rank of how many.
        model: keys of config.json that differ from the small Llama's.
        trains_all: all parameters, in place of adapters.
        generates: tokens, in place of training; with the number of pipeline ranks in `pipeline`.
        slots: rows that are generated at a time.
        cuda_graph: of their passes.
        quick: belongs to the quick suite.
        rows_arrive: tokens of other ranks have chosen experts of this one, where these are on several.
        expects: operations that must have been seen, so that the case shows what its name says.
    """

    options: str = ""
    world: int = 1
    rank: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    trains_all: bool = False
    generates: bool = False
    pipeline: int = 1
    slots: int = 4
    cuda_graph: DecodeGraph = "auto"
    quick: bool = False
    rows_arrive: bool = True
    expects: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return 4 if "pipeline" in self.options or "layers" in self.options else 2

    @property
    def global_batch_size(self) -> int:
        """Two micro-batches a rank, four where they go through a pipeline, eight where four complete a prompt."""
        sizes = re.findall(r"--parallel.(?:tensor|context|pipeline) (\d+)", self.options)
        each = 8 if "grpo" in self.options else 4 if "pipeline" in self.options else 2
        return self.world // prod(map(int, sizes)) * each

    @property
    def steps(self) -> int:
        """Enough for moments that one step leaves and the next one finds, and for a graph to be replayed twice."""
        return 5 if "graph" in self.options else 3


WIDE = {"hidden_size": 1024, "intermediate_size": 2048}
TIED = {"tie_word_embeddings": True}
TP2, TP8, PP2, PP4, CP4 = (
    f"--parallel.{axis}" for axis in ("tensor 2", "tensor 8", "pipeline 2", "pipeline 4", "context 4")
)
PACKED = "--data.packing true"
LATENT = "--lora.targets [q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj,gate_proj,up_proj,down_proj]"
GRPO = (
    f"{PACKED} --objective.name grpo --objective.beta 0.1 --rollout.rewards [exact_match] --rollout.num_generations 4 "
    "--rollout.max_completion_length 5 --rollout.slots 4 --rollout.top_p 0.9 --rollout.steps_per_generation 2"
)
SHARED = "--data.share_prefixes true"
LEVELS = ("calls of levels",)
FEW_ROWS = "launch of coded_rows._coded_rows_kernel"
REPLAYS = ("graph replays",)
ULYSSES = "--parallel.context_method ulysses"
JOINT = "--parallel.sequence false --parallel.lora_reduce joint"

CASES = {
    # one GPU
    "triton kernels": Case(expects=("triton launches",)),
    "reference kernels": Case(options="--model.kernels reference"),
    "packed rows": Case(options=PACKED),
    "packed rows, shared beginnings": Case(options=f"{PACKED} {SHARED}", quick=True, expects=LEVELS),
    "packed rows, shared beginnings, recomputed": Case(
        options=f"{PACKED} {SHARED} --memory.recompute full", expects=LEVELS
    ),
    "gpt-oss, shared beginnings": Case(model=GPT_OSS, options=f"{PACKED} {SHARED}", expects=LEVELS),
    "states, shared beginnings": Case(
        model=HYBRID, options=f"{PACKED} {SHARED} --memory.recompute full",
        expects=(*LEVELS, "launch of delta._states_kernel"),
    ),
    "states, ring of 2, shared beginnings": Case(
        model=HYBRID, options=f"{PACKED} {SHARED} --parallel.context 2", world=8, rank=1, expects=("all_gather",)
    ),
    "ring of 2, shared beginnings": Case(
        options=f"{PACKED} {SHARED} --parallel.context 2", world=8, rank=1, expects=("transfer",)
    ),
    "ulysses of 2, shared beginnings": Case(
        options=f"{PACKED} {SHARED} --parallel.context 2 {ULYSSES}", world=8, rank=1, expects=LEVELS
    ),
    "all parameters": Case(trains_all=True),
    "all parameters in float16": Case(trains_all=True, options="--model.dtype float16"),
    "all parameters, tied": Case(trains_all=True, model=TIED),
    "dora": Case(options="--lora.dora true"),
    "embedding and head adapters": Case(options="--lora.targets [q_proj,embed_tokens,lm_head]"),
    "gemma 2": Case(model=GEMMA),
    "gemma 3 with images, tensor 2": Case(
        model=IMAGES, world=8, rank=1, quick=True, expects=("all_gather",),
        options=f"{TP2} {PACKED} --trainable [vision_tower,multi_modal_projector]",
    ),
    "llava, tensor 2": Case(model=LLAVA, world=8, rank=1, options=f"{TP2} {PACKED} --trainable [vision_tower]"),
    "llava onevision, tensor 2": Case(
        model=ONEVISION, world=8, rank=1, expects=("all_gather",),
        options=f"{TP2} {PACKED} --trainable [vision_tower,image_newline]",
    ),
    "llava next, ring of 2": Case(
        model=NEXT, world=8, rank=1, expects=("all_gather",),
        options=f"--parallel.context 2 {PACKED} --trainable [vision_tower,image_newline]",
    ),
    "llava, adapters in the tower, recomputed": Case(
        model=LLAVA, options=f"{PACKED} --memory.recompute full --lora.targets [q_proj,vision_tower.*.q_proj]",
    ),
    "internvl, tensor 2": Case(
        model=INTERNVL, world=8, rank=1, options=f"{TP2} {PACKED} --trainable [vision_tower,multi_modal_projector]"
    ),
    "cogvlm, tensor 2": Case(
        model=COGVLM, world=8, rank=1, expects=("all_gather",), options=f"{TP2} {PACKED} --trainable [vision]"
    ),
    "cogvlm 2, pipeline 2": Case(
        model=COGVLM2, world=8, rank=7, expects=("transfer",), options=f"{PP2} {PACKED} --trainable [vision]"
    ),
    "cogagent, tensor 2": Case(
        model=COGAGENT, world=8, rank=1, expects=("all_gather",),
        options=f"{TP2} {PACKED} --trainable [vision,cross_vision]",
    ),
    "cogagent, last stage, recomputed": Case(
        model=COGAGENT, world=8, rank=7, expects=("transfer",),
        options=f"{PP2} {PACKED} --trainable [cross_vision] --memory.recompute full",
    ),
    "minicpm-v 2, tensor 2": Case(
        model=MINICPM_V, world=8, rank=1, expects=("all_gather",), options=f"{TP2} {PACKED} --trainable [vpm,resampler]"
    ),
    "minicpm-v 2.6": Case(model=MINICPM_V_2_6, options=f"{PACKED} --trainable [vpm,resampler]"),
    "omnilmm, pipeline 2": Case(
        model=OMNILMM, world=8, rank=0, expects=("transfer",),
        options=f"{PP2} {PACKED} --trainable [vision_tower,resampler]",
    ),
    "qwen 2.5 vl, tensor 2": Case(
        model=QWEN2_5_VL, world=8, rank=1, expects=("all_gather",), options=f"{TP2} {PACKED} --trainable [visual]"
    ),
    "qwen 3 vl, first stage": Case(
        model=QWEN3_VL, world=8, rank=0, expects=("transfer",),
        options=f"{PP2} {PACKED} --trainable [visual]",
    ),
    "qwen 3 vl, last stage, recomputed": Case(
        model=QWEN3_VL, world=8, rank=7, expects=("transfer",),
        options=f"{PP2} {PACKED} --trainable [visual] --memory.recompute full",
    ),
    "qwen 3, tensor 2": Case(model=QWEN, options=TP2, world=8, rank=1),
    "mixture, balanced, tensor 2": Case(
        model=MIXTURE, options=f"{TP2} {PACKED} --train.router_aux_loss_coef 0.01", world=8, rank=1
    ),
    # tensor, context and pipeline
    "tensor 8": Case(options=TP8, world=8, rank=3, model={"num_attention_heads": 16}),
    "tensor 8, joint sums": Case(options=f"{TP8} {JOINT}", world=8, rank=3),
    "tensor 8, local sums": Case(options=f"{TP8} --parallel.sequence false", world=8, rank=3),
    "tensor 2, all parameters, tied": Case(options=TP2, world=8, rank=3, trains_all=True, model=TIED),
    "ring of 4": Case(options=CP4, world=8, rank=2, expects=("transfer",)),
    "ulysses of 4": Case(options=f"{CP4} {ULYSSES}", world=8, rank=2, expects=("all_to_all",)),
    "ring of 2, tensor 2": Case(options=f"--parallel.context 2 {TP2}", world=8, rank=2, expects=("transfer",)),
    "1f1b, first rank": Case(options=PP4, world=4, rank=0, expects=("transfer",)),
    "1f1b, inner rank": Case(options=PP4, world=8, rank=5, expects=("transfer",)),
    "1f1b, last rank": Case(options=PP4, world=8, rank=7, expects=("transfer",)),
    "interleaved, tied": Case(
        options=f"{PP2} --parallel.virtual 2", world=8, rank=7, trains_all=True, model=TIED, expects=("transfer",)
    ),
    "zero bubble": Case(
        options=f"{PP2} --parallel.schedule zb_h1", world=8, rank=0, trains_all=True, expects=("transfer",)
    ),
    "zero bubble in a V, tied": Case(
        options=f"{PP2} --parallel.schedule zb_v", world=8, rank=7, trains_all=True, model=TIED, quick=True,
        expects=("transfer",),
    ),
    "tensor 2, pipeline 2, ring of 2": Case(
        options=f"{TP2} {PP2} --parallel.context 2", world=8, rank=5, expects=("transfer", "all_gather")
    ),
    # sharded state
    "sharded optimizer": Case(
        options="--parallel.shard optimizer", world=8, rank=2, expects=("all_reduce", "all_gather")
    ),
    "sharded gradients": Case(
        options="--parallel.shard gradients", world=8, rank=2, trains_all=True, expects=("reduce_scatter", "all_gather")
    ),
    "sharded parameters": Case(
        options="--parallel.shard parameters", world=8, rank=2, trains_all=True, expects=("all_gather",)
    ),
    "sharded parameters, adapters": Case(options="--parallel.shard parameters", world=8, rank=2),
    "sharded parameters, a stage that trains nothing": Case(
        options=f"--parallel.shard parameters {PP2} --lora.layers [3]", world=8, rank=0, quick=True,
    ),
    "sharded parameters in nf4": Case(options="--parallel.shard parameters --model.base_dtype nf4", world=8, rank=1),
    # memory
    "offloaded activations": Case(options="--memory.offload_activations true", model=WIDE, quick=True),
    "offloaded weights": Case(options="--memory.offload_weights true", model=WIDE),
    "offloaded weights in nf4": Case(options="--memory.offload_weights true --model.base_dtype nf4", model=WIDE),
    "offloaded optimizer": Case(options="--memory.offload_optimizer true", trains_all=True),
    "offloaded optimizer, sharded parameters": Case(
        options="--memory.offload_optimizer true --parallel.shard parameters", world=8, rank=1, trains_all=True,
        quick=True,
    ),
    "recomputed layers": Case(options="--memory.recompute full"),
    "recomputed attention, activations in float8": Case(
        options="--memory.recompute attention --memory.activation_dtype float8"
    ),
    # an encoded base
    "nf4": Case(options="--model.base_dtype nf4"),
    "nvfp4, tensor 2": Case(options=f"--model.base_dtype nvfp4 {TP2}", world=8, rank=1),
    "sharded parameters in fp8 blocks": Case(
        options="--parallel.shard parameters --model.base_dtype fp8_block", world=8, rank=1
    ),
    "int8, tensor 2": Case(options=f"--model.base_dtype int8 {TP2}", world=8, rank=1),
    "fp8": Case(options="--model.base_dtype fp8"),
    "fp8 by row, tensor 2": Case(options=f"--model.base_dtype fp8_row {TP2}", world=8, rank=1),
    "FP8 blocks by codes, tensor 2": Case(
        options=f"--model.base_dtype fp8_block --model.base_products codes {TP2}", world=8, rank=1
    ),
    # graphs
    "graphs of layers": Case(options=f"{PACKED} --memory.cuda_graph layer"),
    "graphs of layers, tensor 2, pipeline 2": Case(
        options=f"{PACKED} --memory.cuda_graph layer {TP2} {PP2}", world=8, rank=1, expects=("transfer",)
    ),
    "graph of a step": Case(options=f"{PACKED} --memory.cuda_graph step"),
    "graph of a step in nf4": Case(options=f"{PACKED} --memory.cuda_graph step --model.base_dtype nf4"),
    "graph of a step, tensor 2, recomputed": Case(
        options=f"{PACKED} --memory.cuda_graph step --memory.recompute full {TP2}", world=8, rank=1, quick=True
    ),
    # mixtures of experts
    "experts": Case(model=MIXTURE, options=PACKED),
    "experts, all parameters": Case(model=MIXTURE, options=PACKED, trains_all=True),
    "experts that share factors": Case(model=MIXTURE, options=f"{PACKED} --lora.experts shared_outer"),
    "experts in nf4": Case(model=MIXTURE, options=f"{PACKED} --model.base_dtype nf4"),
    "experts in nvfp4": Case(model=MIXTURE, options=f"{PACKED} --model.base_dtype nvfp4"),
    "experts in fp8, tensor 2": Case(
        model=MIXTURE, options=f"{PACKED} --model.base_dtype fp8 {TP2}", world=8, rank=1
    ),
    "experts on 2 ranks": Case(
        model=MIXTURE, options=f"{PACKED} --parallel.expert 2", world=8, rank=1, expects=("all_to_all",)
    ),
    "experts in nf4 on 2 ranks, balanced, tensor 2, measured": Case(
        model=MIXTURE, world=8, rank=1, quick=True, expects=("all_to_all", "all_gather"),
        options=f"{PACKED} {TP2} --parallel.expert 2 --model.base_dtype nf4 --train.router_aux_loss_coef 0.01 "
        "--log.communication true",
    ),
    "experts on 2 ranks, of which one gets no rows": Case(
        model=MIXTURE, options=f"{PACKED} --parallel.expert 2", world=8, rank=1, rows_arrive=False,
        expects=("all_to_all",),
    ),
    "experts on 2 ranks, balanced, all parameters": Case(
        model=MIXTURE, world=8, rank=1, trains_all=True, expects=("all_to_all",),
        options=f"{PACKED} --parallel.expert 2 --train.router_aux_loss_coef 0.01",
    ),
    "experts on 2 ranks, balanced, pipeline 2, tensor 2": Case(
        model=MIXTURE, world=8, rank=7, expects=("all_to_all", "transfer"),
        options=f"{PACKED} --parallel.expert 2 {PP2} {TP2} --train.router_aux_loss_coef 0.01",
    ),
    "experts on 2 ranks, balanced, recomputed": Case(
        model=MIXTURE, world=8, rank=1, expects=("all_to_all",),
        options=f"{PACKED} --parallel.expert 2 --train.router_aux_loss_coef 0.01 --memory.recompute full",
    ),
    "experts on 4 ranks, tensor 2, recomputed": Case(
        model=MIXTURE, options=f"{PACKED} --parallel.expert 4 {TP2} --memory.recompute full", world=8, rank=3,
        expects=("all_to_all",),
    ),
    "experts on 2 ranks, all parameters, sharded optimizer": Case(
        model=MIXTURE, options=f"{PACKED} --parallel.expert 2 --parallel.shard optimizer", world=8, rank=5,
        trains_all=True, expects=("all_to_all", "all_gather"),
    ),
    "experts on 2 ranks, pipeline 2, ring of 2": Case(
        model=MIXTURE, options=f"{PACKED} --parallel.expert 2 {PP2} --parallel.context 2", world=8, rank=6,
        expects=("all_to_all", "transfer"),
    ),
    "experts, sharded parameters": Case(
        model=MIXTURE, options=f"{PACKED} --parallel.shard parameters", world=8, rank=2, trains_all=True
    ),
    "experts, offloaded weights": Case(model=MIXTURE, options=f"{PACKED} --memory.offload_weights true"),
    "experts beside a shared one, tensor 2": Case(model=SHARED_EXPERT, options=f"{PACKED} {TP2}", world=8, rank=1),
    "experts beside a shared one, on 2 ranks, tensor 2": Case(
        model=SHARED_EXPERT, options=f"{PACKED} {TP2} --parallel.expert 2", world=8, rank=1, expects=("all_to_all",)
    ),
    "gpt-oss": Case(model=GPT_OSS, options=PACKED),
    "gpt-oss, all parameters, on 2 ranks": Case(
        model=GPT_OSS, options=f"{PACKED} --parallel.expert 2", world=8, rank=1, trains_all=True
    ),
    "deepseek v3, tensor 2": Case(model=DEEPSEEK, options=f"{PACKED} {TP2} {LATENT}", world=8, rank=1),
    "experts, tokens": Case(model=MIXTURE, generates=True, quick=True, expects=REPLAYS),
    "gpt-oss, tokens": Case(model=GPT_OSS, generates=True, expects=REPLAYS),
    "deepseek v3, tokens": Case(model=DEEPSEEK, options=LATENT, generates=True, expects=REPLAYS),
    "states, tokens": Case(model=HYBRID, generates=True, quick=True, expects=REPLAYS),
    # rollouts
    "rollouts": Case(options=GRPO, quick=True, expects=(*REPLAYS, "launch of paged_attention._split_kernel")),
    "rollouts, rows of one completion": Case(
        options=GRPO.replace(PACKED, ""), quick=True, expects=("_flash_attention_forward",)
    ),
    "rollouts, launched kernel by kernel": Case(options=f"{GRPO} --rollout.cuda_graph none"),
    "rollouts, tensor 2": Case(options=f"{GRPO} {TP2}", world=8, rank=3, expects=(*REPLAYS, "all_gather")),
    "rollouts, window and soft cap": Case(
        model=GEMMA, options=f"{GRPO}", expects=(*REPLAYS, "launch of paged_attention._split_kernel")
    ),
    "rollouts, states": Case(model=HYBRID, options=GRPO, expects=REPLAYS),
    "rollouts, experts": Case(model=MIXTURE, options=GRPO, expects=REPLAYS),
    "rollouts, tensor 2, pipeline 2": Case(options=f"{GRPO} {TP2} {PP2}", world=8, rank=7, expects=("transfer",)),
    "rollouts, first of two stages": Case(options=f"{GRPO} {PP2}", world=8, rank=0, expects=("transfer",)),
    "rollouts, sharded parameters": Case(options=f"{GRPO} --parallel.shard parameters", world=8, rank=2),
    "rollouts in nf4": Case(options=f"{GRPO} --model.base_dtype nf4", expects=REPLAYS),
    "rollouts in nvfp4": Case(options=f"{GRPO} --model.base_dtype nvfp4", expects=(*REPLAYS, FEW_ROWS)),
    "rollouts, experts in mxfp4": Case(
        model=MIXTURE, options=f"{GRPO} --model.base_dtype mxfp4", expects=(*REPLAYS, FEW_ROWS)
    ),
    "rollouts, experts on 2 ranks": Case(
        model=MIXTURE, options=f"{GRPO} --parallel.expert 2", world=8, rank=1, expects=("all_to_all",)
    ),
    # objectives, meters, tokens
    "dpo, tensor 2, pipeline 2": Case(options=f"--objective.name dpo {TP2} {PP2}", world=8, rank=7),
    "dpo, ring of 2": Case(options="--objective.name dpo --parallel.context 2", world=8, rank=1, quick=True),
    "measured communication": Case(options=f"{TP2} --log.communication true", world=8, rank=1),
    "measured communication, ring of 4": Case(options=f"{CP4} --log.communication true", world=8, rank=1),
    "synthetic steps": Case(
        options=f"--train.synthetic_steps 2 {TP2} --memory.offload_optimizer true", world=8, rank=1
    ),
    "tokens": Case(generates=True, quick=True, expects=REPLAYS),
    "tokens, without graphs": Case(generates=True, cuda_graph="none"),
    "tokens, tensor 2": Case(options=TP2, world=2, rank=1, generates=True, expects=(*REPLAYS, "all_gather")),
    "tokens of llama 3.1 8b in 64 rows": Case(model=LLAMA_8B, slots=64, generates=True, expects=REPLAYS),
    "tokens of llama 3.1 8b in 64 rows, without graphs": Case(
        model=LLAMA_8B, slots=64, generates=True, cuda_graph="none"
    ),
    "tokens after images, gemma 3": Case(model=IMAGES, generates=True, expects=REPLAYS),
    "tokens after images, llava next, tensor 2": Case(
        model=NEXT, options=TP2, world=2, rank=1, generates=True, expects=(*REPLAYS, "all_gather")
    ),
    "tokens after images, qwen 2.5 vl": Case(model=QWEN2_5_VL, generates=True, expects=REPLAYS),
    "tokens after images, qwen 3 vl, first stage": Case(
        model=QWEN3_VL, world=2, rank=0, pipeline=2, generates=True, quick=True, expects=("transfer",)
    ),
    "tokens after images, cogvlm": Case(model=COGVLM, generates=True),
    "tokens after images, cogagent, tensor 2": Case(
        model=COGAGENT, options=TP2, world=2, rank=1, generates=True, quick=True, expects=("all_gather",)
    ),
    "tokens after images, minicpm-v 2.6, last stage": Case(
        model=MINICPM_V_2_6, world=2, rank=1, pipeline=2, generates=True, expects=("transfer",)
    ),
    "tokens after images, omnilmm": Case(model=OMNILMM, generates=True),
    "tokens, tensor 2, pipeline 2, first": Case(options=TP2, world=4, rank=1, pipeline=2, generates=True),
    "tokens, tensor 2, pipeline 2, last": Case(options=TP2, world=4, rank=3, pipeline=2, generates=True),
}  # fmt: skip
