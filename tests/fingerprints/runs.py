"""The runs that are fingerprinted: each a command line of `rankfold train`, five steps long."""

from __future__ import annotations

from dataclasses import dataclass, field

STEPS, KEPT = 5, 3
"""Optimizer steps of a run, and the step of the checkpoint from which it can be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run.

    Args:
        model: folder of the fixtures with the model.
        data: its file of records, without the ending.
        ranks: processes under torchrun; 1 runs without it.
        merge: export the merged model in place of a PEFT adapter.
        form: `--adapter-form` of the exported adapter.
        store: file of records that `rankfold preprocess` makes a store of before the run.
        options: of the training, beside DEFAULTS; `{at}` stands for the folder of the fixtures.
    """

    model: str = "llama"
    data: str = "text"
    ranks: int = 1
    merge: bool = False
    form: str | None = None
    store: str | None = None
    options: dict[str, object] = field(default_factory=dict)


DEFAULTS: dict[str, object] = {
    "data.seq_length": 96, "lora.rank": 4, "lora.alpha": 8, "lora.dropout": 0.1, "optim.lr": 0.01, "train.steps": STEPS,
    "train.micro_batch_size": 2, "train.global_batch_size": 4, "checkpoint.every": KEPT, "checkpoint.keep": 0,
    "log.peak_tflops": 0,
}  # fmt: skip
_FULL: dict[str, object] = {
    "lora.rank": 0, "lora.dropout": 0, "trainable": '["*"]', "optim.lr": 0.001, "optim.weight_decay": 0.1,
}  # fmt: skip
_LONGER: dict[str, object] = {"data.seq_length": 192}
_EPOCH: dict[str, object] = {"train.global_batch_size": 16}
"""More rows than the files of records have."""
_PACKED: dict[str, object] = {"data.packing": "true"}
_EXPERTS: dict[str, object] = {**_PACKED, "lora.targets": r"q_proj,v_proj,o_proj,.*\.experts\.\d+\..*"}
_IMAGES: dict[str, object] = {"data.seq_length": 256}
_GRPO: dict[str, object] = {
    **_PACKED, "data.seq_length": 32, "objective.name": "grpo", "objective.num_iterations": 2, "objective.beta": 0.05,
    "rollout.rewards": "{at}/rewards.py:ones,{at}/rewards.py:long", "rollout.reward_weights": "1,0.5",
    "rollout.num_generations": 4, "rollout.max_completion_length": 6, "rollout.slots": 8, "train.global_batch_size": 8,
}  # fmt: skip
_TOWER = r"q_proj,v_proj,vpm\.blocks\..*(qkv|proj)"
_COGAGENT: dict[str, object] = {**_IMAGES, "lora.targets": "all-linear", "train.global_batch_size": 2}

RUNS: dict[str, Run] = {
    # adapters, full training, encoded bases
    "lora": Run(options={"lora.rank_pattern": "{down_proj: 6}", "optim.schedule": "linear", "optim.warmup_steps": 2}),
    "full": Run(merge=True, options=_FULL),
    "dora": Run(data="completions", options={"lora.dora": "true", "trainable": "lm_head", "lora.exclude": "lm_head"}),
    "nf4": Run(data="alpaca", merge=True, options={**_LONGER, "model.base_dtype": "nf4", "lora.rslora": "true"}),
    "fp8": Run(data="alpaca", options={**_LONGER, "model.base_dtype": "fp8", "lora.bias": "true", "lora.fused": "qkv"}),
    "float16": Run(options={"model.dtype": "float16", "memory.recompute": "full"}),
    "reference": Run(model="mixtral", options={**_EXPERTS, "model.kernels": "reference", "optim.backend": "torch"}),
    # data: overlong records, packing, mixes, stores, validation
    "packed": Run(
        data="messages",
        options={
            **_PACKED, "data.validation": "{at}/messages.jsonl", "train.eval_every": 2, "data.learn_after_end": "false",
            "train.sample_every": 3, "train.sample_prompts": '["On Monday", "two"]', "train.sample_tokens": 8,
        },
    ),
    "drop": Run(
        data="messages",
        options={**_EPOCH, "data.overlong": "drop", "data.validation_split": 0.2, "train.eval_every": 4},
    ),
    "cut": Run(data="tokens", options={**_EPOCH, "data.overlong": "cut", "data.seq_length": 30}),
    "concatenate": Run(data="tokens", options={"data.packing": "concatenate", "data.seq_length": 30}),
    "mix": Run(
        store="text",
        options={
            **_EPOCH, **_PACKED, "data.overlong": "cut", "data.mix": '["{at}/more_text.jsonl=0.5", "{store}=0.7"]',
        },
    ),
    "whole_epoch": Run(data="alpaca", options={**_EPOCH, "data.mask_prompt": "false"}),
    # preferences and policy gradients
    "dpo": Run(data="pairs", options={**_PACKED, "objective.name": "dpo", "data.seq_length": 60}),
    "dpo_initial": Run(
        data="pairs", merge=True, options={**_FULL, "objective.name": "dpo", "objective.reference": "initial"}
    ),
    "orpo": Run(data="chat_pairs", options={"objective.name": "orpo", "data.overlong": "drop"}),
    "kto": Run(data="judged", options={"objective.name": "kto", "data.seq_length": 40}),
    "dpo_images": Run(model="gemma3", data="shown_pairs", options={**_IMAGES, "objective.name": "dpo"}),
    "grpo": Run(data="prompts", options=_GRPO),
    "grpo_dp2": Run(data="prompts", ranks=2, options={**_GRPO, "rollout.steps_per_generation": 2}),
    # mixtures of experts
    "mixtral_ep2": Run(
        model="mixtral", ranks=2, options={**_EXPERTS, "parallel.expert": 2, "train.router_aux_loss_coef": 0.01}
    ),
    "deepseek_v3": Run(model="deepseek_v3", merge=True, options={**_FULL, **_PACKED, "trainable": '["layers"]'}),
    "gpt_oss": Run(model="gpt_oss", form="stacked", options={**_EXPERTS, "lora.fused": "gate_up", "lora.dropout": 0}),
    # images
    "minicpm_v": Run(
        model="minicpm_v", data="single_shown", options={**_IMAGES, "lora.targets": _TOWER, "trainable": "resampler"}
    ),
    "minicpm_v_cp2": Run(
        model="minicpm_v", data="single_shown", ranks=2, options={**_IMAGES, **_PACKED, "parallel.context": 2}
    ),
    "cogagent": Run(model="cogagent", data="single_shown", options=_COGAGENT),
    "cogagent_tp2": Run(model="cogagent", data="single_shown", ranks=2, options={**_COGAGENT, "parallel.tensor": 2}),
    "cogagent_pp2": Run(model="cogagent", data="single_shown", ranks=2, options={**_COGAGENT, "parallel.pipeline": 2}),
    "gemma3": Run(model="gemma3", data="shown", options={**_IMAGES, **_PACKED, "trainable": "multi_modal_projector"}),
    "gemma3_cp2": Run(
        model="gemma3",
        data="shown",
        ranks=2,
        options={**_IMAGES, **_PACKED, "parallel.context": 2, "parallel.context_method": "ulysses"},
    ),
    "qwen3_vl": Run(model="qwen3_vl", data="shown", merge=True, options={**_FULL, **_IMAGES, **_PACKED}),
    "qwen3_vl_pp2": Run(model="qwen3_vl", data="shown", ranks=2, options={**_IMAGES, "parallel.pipeline": 2}),
    # layouts and memory
    "tp2": Run(ranks=2, options={"model.dtype": "bfloat16", "parallel.tensor": 2, "memory.recompute": "attention"}),
    "pp2": Run(ranks=2, options={"parallel.pipeline": 2, "parallel.virtual": 2}),
    "cp2": Run(ranks=2, options={**_PACKED, "parallel.context": 2}),
    "zero_bubble": Run(
        ranks=2, merge=True, options={**_FULL, "parallel.pipeline": 2, "parallel.schedule": "zb_h1"}
    ),
    "shard_parameters": Run(ranks=2, merge=True, options={**_FULL, "parallel.shard": "parameters"}),
    "offload": Run(options={"memory.offload_weights": "true", "memory.offload_optimizer": "true"}),
}  # fmt: skip
