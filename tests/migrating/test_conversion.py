"""Files and flags of other trainers become this engine's options; what each key became is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from engine.config.load import from_yaml
from engine.config.rules import check_config
from engine.errors import UserError
from rankfold.migrating.command import convert, report, to_text
from rankfold.migrating.conversion import Conversion
from rankfold.migrating.reading import read_file, read_flags

ACCELERATE = {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "gradient_clipping": 0.3, "gradient_accumulation_steps": 1, "offload_optimizer_device": "none",
        "offload_param_device": "none", "zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3,
    },
    "mixed_precision": "bf16", "downcast_bf16": "no", "num_machines": 1, "num_processes": 8, "machine_rank": 0,
    "rdzv_backend": "static", "same_network": True, "use_cpu": False,
}  # fmt: skip
FLAGS = (
    "--max_seq_len 8192 --bf16 --logging_steps 24 --eval_steps 48 --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 1 --lr_scheduler_type cosine --learning_rate 4e-4 --weight_decay 0.0001 "
    "--warmup_ratio 0 --max_grad_norm 0.3 --use_gradient_checkpointing --target_eval_loss 0.925 --use_peft_lora "
    "--lora_r 16 --lora_alpha 32 --lora_dropout 0.1 --max_steps 1024 --use_flash_attn --seed 7 "
    "--lora_target_modules qkv_proj,o_proj"
)


def _convert(tmp_path: Path, content: object, flags: str = "", *, values: list[str] | None = None) -> Conversion:
    path = tmp_path / "accelerate.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    given = read_file(path) + read_flags(flags, "flags", tmp_path)
    return convert(given, values=values or [], ranks=None)[0]


def _unknown(conversion: Conversion) -> list[str]:
    return [row.given.key for row in conversion.rows if row.kind == "unknown"]


def test_the_reference_of_mlperf(tmp_path: Path) -> None:
    """Every figure by hand from the published file and flags."""
    conversion = _convert(tmp_path, ACCELERATE, FLAGS)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert _unknown(conversion) == []
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout, config.lora.fused) == (16, 32.0, 0.1, "qkv")
    assert config.lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (config.optim.lr, config.optim.weight_decay, config.optim.clip_grad_norm) == (4e-4, 1e-4, 0.3)
    assert (config.optim.schedule, config.optim.warmup_steps, config.optim.min_lr) == ("cosine", 0, 0.0)
    assert (config.train.steps, config.train.global_batch_size, config.train.micro_batch_size) == (1024, 8, 1)
    assert (config.data.seq_length, config.data.packing, config.data.mask_prompt) == (8192, "concatenate", False)
    assert (config.parallel.shard, config.memory.recompute, config.model.dtype) == ("parameters", "full", "bfloat16")
    assert (config.train.eval_every, config.log.every, config.train.seed) == (48, 24, 7)


def test_every_key_has_a_line(tmp_path: Path) -> None:
    conversion = _convert(tmp_path, {**ACCELERATE, "fnord": 3}, FLAGS + " --frobnicate 5")
    said = [row.given.key for row in conversion.rows]
    nested = [f"deepspeed_config.{key}" for key in ACCELERATE["deepspeed_config"]]  # type: ignore[attr-defined]
    flags = [word.removeprefix("--") for word in FLAGS.split() if word.startswith("--")]
    assert not {*nested, *flags, *(key for key in ACCELERATE if key != "deepspeed_config")} - set(said)
    assert _unknown(conversion) == ["fnord", "frobnicate"]
    text = report(conversion, 120)
    assert "not known and skipped: fnord, frobnicate" in text
    assert all(key in text for key in said)
    assert "still to set: model.path" in text


def test_deepspeed_clips_by_its_own_value(tmp_path: Path) -> None:
    conversion = _convert(tmp_path, ACCELERATE, "--max_grad_norm 1.0")
    assert conversion.options["optim.clip_grad_norm"] == 0.3
    without = {**ACCELERATE, "deepspeed_config": {"zero_stage": 2}}
    conversion = _convert(tmp_path, without, "--max_grad_norm 1.0")
    assert conversion.options["optim.clip_grad_norm"] == 1.0
    assert any("DeepSpeed without gradient_clipping ignored it" in row.became for row in conversion.rows)


def test_two_keys_that_say_the_same_otherwise(tmp_path: Path) -> None:
    conversion = _convert(tmp_path, {"train_micro_batch_size_per_gpu": 4}, "--per_device_train_batch_size 2")
    assert conversion.options["train.micro_batch_size"] == 2
    row = next(row for row in conversion.rows if row.given.key == "train_micro_batch_size_per_gpu")
    assert row.became == "dropped: per_device_train_batch_size of flags overrides it"


@pytest.mark.parametrize(("stage", "shard"), [(0, "none"), (1, "optimizer"), (2, "gradients"), (3, "parameters")])
def test_stages(stage: int, shard: str, tmp_path: Path) -> None:
    conversion = _convert(tmp_path, json.dumps({"zero_optimization": {"stage": stage}}))
    assert conversion.options["parallel.shard"] == shard


def test_parameters_in_host_memory(tmp_path: Path) -> None:
    """ZeRO-3 with offloaded parameters: the engine keeps weights in one place."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    options = _convert(tmp_path, {"zero_optimization": zero}, "--lora_r 8").options
    assert options["memory.offload_weights"] and options["memory.offload_optimizer"]
    assert options["parallel.shard"] == "gradients"
    check_config(from_yaml(to_text(options, title="test")))


SAT = r"""#! /bin/bash
NUM_GPUS_PER_WORKER=8
MP_SIZE=4
MODEL_ARGS="--from_pretrained my-model \
    --lora_rank 10 --use_lora --max_length 1288"
OPTIONS_NCCL="NCCL_DEBUG=info"
gpt_options=" \
       --model-parallel-size ${MP_SIZE} --train-iters 800 \
       $MODEL_ARGS --warmup .02 --lr-decay-style cosine --save "./checkpoints" \
       --deepspeed_config ds.json --eval-interval 200 --eval-iters 10 --eval-batch-size 1
"
run_cmd="${OPTIONS_NCCL} deepspeed --master_port 16666 finetune.py ${gpt_options}"
eval ${run_cmd}
"""


def test_script_of_sat(tmp_path: Path) -> None:
    """Variables within variables, the DeepSpeed file beside the script, and a batch over 8 / 4 copies."""
    script = tmp_path / "finetune.sh"
    script.write_text(SAT, encoding="utf-8")
    deepspeed = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed), encoding="utf-8")
    conversion, ranks = convert(read_file(script), values=[], ranks=None)
    config = from_yaml(to_text(conversion.options, title="test"))
    assert (ranks, config.parallel.tensor, config.parallel.shard) == (8, 4, "gradients")
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (4, 8)
    assert (config.optim.warmup(800), config.train.steps, config.train.eval_samples) == (16, 800, 20)
    assert (config.optim.lr, config.optim.betas, config.optim.clip_grad_norm) == (1e-5, (0.9, 0.95), 0.1)
    assert (config.lora.rank, config.model.path, config.checkpoint.dir) == (10, "my-model", "./checkpoints")
    assert _unknown(conversion) == []
    (tmp_path / "ds.json").unlink()
    without, _ = convert(read_file(script), values=[], ranks=None)
    assert _unknown(without) == [] and any("what ds.json says" in line for line in without.to_fill)


MINICPM = r"""#!/bin/bash
GPUS_PER_NODE=8
MODEL="models/minicpm" # a comment
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes 1
"
torchrun $DISTRIBUTED_ARGS finetune.py  \
    --model_name_or_path $MODEL --llm_type llama3 --data_path train.json --use_lora true --tune_vision true \
    --lora_target_modules "llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj|o_proj)" --bf16 true \
    --max_steps 10000 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --learning_rate 1e-6 \
    --adam_beta2 0.95 --warmup_ratio 0.01 --lr_scheduler_type "cosine" --report_to "tensorboard" # wandb
"""


def test_script_of_minicpm(tmp_path: Path) -> None:
    script = tmp_path / "finetune_lora.sh"
    script.write_text(MINICPM, encoding="utf-8")
    conversion, ranks = convert(read_file(script), values=[], ranks=None)
    config = from_yaml(to_text(conversion.options, title="test"))
    assert (ranks, config.train.global_batch_size, config.optim.warmup(10000)) == (8, 16, 100)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (64, 64.0, 0.05)
    assert config.lora.targets_module("layers.3.attention.q_proj", ("llm.model.layers.3.self_attn.q_proj",))
    assert not config.lora.targets_module("layers.3.mlp.up_proj", ("llm.model.layers.3.mlp.up_proj",))
    assert config.trainable == ("embed_tokens", "resampler", "vpm")
    assert (config.optim.betas, config.log.tensorboard, config.data.seq_length) == ((0.9, 0.95), True, 2048)


def test_command_of_minimind(tmp_path: Path) -> None:
    given = read_flags("torchrun --nproc_per_node 2 train_dpo.py --data_path dpo.jsonl", "flags", tmp_path)
    conversion, ranks = convert(given, values=["model.path=m"], ranks=None)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert (ranks, config.objective.name, config.objective.reference, config.objective.beta) == (
        2,
        "dpo",
        "initial",
        0.15,
    )
    assert (config.trainable, config.lora.rank, config.optim.lr) == (("*",), 0, 4e-8)
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (4, 8)
    assert config.optim.min_lr == pytest.approx(4e-9)


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ("a: [", "", "not valid YAML or JSON in line"),
        ("just words", "", "has no keys"),
        ({"zero_stage": 4}, "", "stages 0 to 3"),
        ({"num_processes": 8}, "--lora_r many", "gives lora_r as 'many', but a number"),
        ({"num_processes": 8}, "--lora_r 'open", "close every quote"),
        ({"num_processes": 6}, "--model-parallel-size 4", "6 processes do not divide"),
        ({"mixed_precision": "int3"}, "", "write no, bf16 or fp16"),
    ],
)
def test_sentences(content: object, flags: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        _convert(tmp_path, content, flags)


@pytest.mark.parametrize(
    "end",
    [
        "> log.txt", "2>&1 | tee log.txt", ">> log.txt 2> err.txt", "&> log.txt", "2>/dev/null", "< /dev/null",
        '> >(tee "${LOGS}/train.log") 2> >(tee "${LOGS}/train.err" >&2)',
    ],
)  # fmt: skip
def test_where_output_goes_is_no_value(end: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun train.py --model_name_or_path m --bos_token '<s>' --seed 7 {end}\n")
    given = {one.key: one.value for one in read_file(script)}
    assert (given["seed"], given["bos_token"]) == (7, "<s>"), given


def test_a_value_of_ones_own_wins(tmp_path: Path) -> None:
    conversion = _convert(tmp_path, ACCELERATE, FLAGS, values=["train.steps=3", "data.packing=true"])
    assert (conversion.options["train.steps"], conversion.options["data.packing"]) == (3, True)
    with pytest.raises(UserError, match="is not an option"):
        _convert(tmp_path, ACCELERATE, values=["train.stepz=3"])
