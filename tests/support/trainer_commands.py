"""Command lines and files of other trainers, and what they are converted to."""

from __future__ import annotations

from pathlib import Path

from engine.config.load import from_yaml
from engine.config.rules import check_config
from engine.config.run import RunConfig
from rankfold.migrating.command import convert, to_text
from rankfold.migrating.conversion import Conversion
from rankfold.migrating.reading import read_flags

LEAST: dict[str, str] = {
    "TRL": "trl sft --model_name_or_path m --dataset_name d.jsonl --use_peft",
    "TRL's GRPO": "trl grpo --model_name_or_path m --dataset_name d.jsonl --use_peft --reward_funcs r.f",
    "LLaMA-Factory": "llamafactory-cli train --model_name_or_path m --stage sft --finetuning_type lora",
    "Axolotl": "axolotl train --base_model m --adapter lora --lora_r 8 --lora_alpha 16 --learning_rate 1e-4",
    "ms-swift": "swift sft --model m --dataset a.jsonl",
    "Megatron-SWIFT": "megatron sft --model m --dataset a.jsonl --tuner_type lora --num_train_epochs 1",
    "CogVLM2's script": "peft_lora.py --train_dataset_rate 0.9",
    "Megatron": "pretrain_gpt.py --lr 1e-4 --train-iters 10 --micro-batch-size 2 --seq-length 64 --data-path a",
    "MiniMind": "train_lora.py --data_path a.jsonl",
    "SwissArmyTransformer": "finetune.py --from_pretrained m --train-iters 10 --lora_rank 10 --use_lora --mode a",
    "MLPerf's reference": "train.py --target_eval_loss 0.9 --use_peft_lora --lora_r 16 --lora_alpha 32",
    "LLaVA's script": "train_mem.py --model_name_or_path m --mm_projector_type mlp2x_gelu --lora_enable True",
    "MiniCPM-V's script": "finetune.py --llm_type llama3 --use_lora true",
    "Hugging Face's Trainer": "train.py --model_name_or_path m --lora_r 8 --output_dir out",
    "the launcher": "accelerate launch --num_processes 2",
}
"""The least that each trainer can be started with and trains adapters, where it can."""

AXOLOTL = {
    "base_model": "models/a", "datasets": [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "alpaca"}],
    "sequence_len": 4096, "sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
    "num_epochs": 3, "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "learning_rate": "2e-4", "bf16": "auto",
    "tf32": False, "gradient_checkpointing": True, "flash_attention": True, "warmup_steps": 10, "adapter": "qlora",
    "load_in_4bit": True, "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True,
    "weight_decay": 0.0, "output_dir": "./out", "cosine_min_lr_ratio": 0.1, "special_tokens": {"pad_token": "<p>"},
    "wandb_project": None,
}  # fmt: skip


def converted(command: str) -> tuple[Conversion, RunConfig]:
    """Returns the conversion of a command line, and its run, whose options are checked."""
    conversion, _ = convert(read_flags(command, "flags", Path()), values=[], ranks=None)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    return conversion, config
