"""Rules for CogVLM2's own script of PEFT, finetune_demo/peft_lora.py, which trains in a loop of its own."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, dropped, fact, named_file, number, option, text, whole
from rankfold.migrating.given import Given
from rankfold.migrating.trainer import Default, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import shared

_SPLIT = "data.validation_split"


def _dataset(conversion: Conversion, given: Given) -> None:
    conversion.know(
        given,
        "data.train of the hub",
        f"{given.value} (a folder of images and labels_en)",
        "data.train: write its records",
    )


def _rate(conversion: Conversion, given: Given) -> None:
    share = number(given)
    if share < 1:
        conversion.take(given, _SPLIT, round(1 - share, 6), "1 less this")
    else:
        conversion.drop(given, "all of the data is trained on")


def _length(conversion: Conversion, given: Given) -> None:
    conversion.know(given, f"length {given.key}", whole(given), "data.seq_length: both, and 2303 for the image")


RULES: dict[str, Rule] = hf.RULES | {
    "lr": option("optim.lr", number),
    "batch_size": option("train.micro_batch_size", whole),
    "torch_type": shared.dtype,
    "save_step": option("checkpoint.every", whole),
    "save_path": option("checkpoint.dir", text),
    "lora_target": shared.targets,
    "train_dataset_rate": Rule(_rate, (_SPLIT,)),
    "dataset_path": Rule(_dataset, ("data.train",)),
    "max_input_len": Rule(_length, ("data.seq_length",)),
    "max_output_len": Rule(_length, ("data.seq_length",)),
    "ds_config": Rule(named_file, ("parallel.shard",)),
    "train_micro_batch_size_per_gpu": dropped("of the script's own batch_size"),
    "gradient_accumulation_steps": fact("accumulation", whole, became="the script steps after each pass"),
    "offload_optimizer.*": dropped("outside zero_optimization, where DeepSpeed does not read it"),
    "activation_checkpointing.*": dropped("the script switches no recomputation on"),
}


def _finish(conversion: Conversion) -> None:
    facts = conversion.facts
    length = facts.get("length max_input_len", 128) + facts.get("length max_output_len", 128) + 2303
    conversion.imply("derived", "max_input_len + max_output_len + 2303", "data.seq_length", length)
    conversion.notes.append(
        "the script draws one round of each record at random, and pads; here each answer of a record is a sample"
    )


COGVLM2 = Trainer(
    name="CogVLM2's script",
    rules=RULES,
    defaults=hf.DEFAULTS
    | {
        "model.dtype": Default("bfloat16", "peft_lora.py: --torch_type"),
        "data.mask_prompt": Default(True, "build_conversation_input_ids: labels are the answer's tokens"),
        "optim.lr": Default(1e-7, "peft_lora.py: --lr"),
        "optim.weight_decay": Default(0.01, "torch.optim.AdamW: weight_decay"),
        "train.micro_batch_size": Default(2, "peft_lora.py: --batch_size"),
        "train.epochs": Default(5.0, "peft_lora.py: --num_epochs"),
        "lora.alpha": Default(32.0, "peft_lora.py: --lora_alpha"),
        "lora.dropout": Default(0.1, "peft_lora.py: --lora_dropout"),
        "lora.targets": Default(["vision_expert_query_key_value"], "peft_lora.py: --lora_target"),
        "checkpoint.dir": Default("output", "peft_lora.py: --save_path"),
        "checkpoint.every": Default(100, "peft_lora.py: --save_step"),
        "data.validation_split": Default(0.2, "peft_lora.py: --train_dataset_rate = 0.8"),
    },
    adapters=lambda conversion: True,
    finish=_finish,
)
