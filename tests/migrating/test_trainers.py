"""What other trainers do where a key is absent is what the run does; each default against the trainer's own source."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config.load import from_yaml
from engine.config.option_names import option_types
from engine.config.rules import check_config
from engine.config.run import RunConfig
from engine.errors import UserError
from rankfold.migrating import launcher_rules
from rankfold.migrating.command import convert, report, to_text
from rankfold.migrating.conversion import Conversion
from rankfold.migrating.finish import PLACES, finish
from rankfold.migrating.given import Given
from rankfold.migrating.python_script import FLAGS_OF_LORA
from rankfold.migrating.reading import read_file, read_flags
from rankfold.migrating.recognition import recognise, trainers
from rankfold.migrating.table import Default, Ours, Trainer, engine_default
from tests.support.trainer_commands import AXOLOTL, LEAST, converted

TRAINERS = trainers()


def _value(config: RunConfig, name: str) -> Any:
    section, _, leaf = name.rpartition(".")
    value = getattr(getattr(config, section) if section else config, leaf)
    return list(value) if isinstance(value, tuple) else value


def _settable(trainer: Trainer) -> set[str]:
    rules = [*trainer.rules.values(), *launcher_rules.rules().values()]
    return {option for rule in rules for option in rule.options}


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_each_option_that_a_trainer_can_set_has_its_default(trainer: Trainer) -> None:
    """A new rule has to say what the trainer does without its key."""
    assert _settable(trainer) <= option_types().keys(), "a rule sets an option that does not exist"
    assert _settable(trainer) - trainer.defaults.keys() == set()
    for name, default in trainer.defaults.items():
        assert name in option_types(), name
        assert len(default.why if isinstance(default, Ours) else default.where) > 5, name


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_what_nobody_gave_is_the_trainers_default(trainer: Trainer) -> None:
    """In the run's file, or as this engine's own default where that is the same; in the report where it differs."""
    command = LEAST[trainer.name]
    given = read_flags(command, "flags", Path())
    assert recognise(given) is trainer
    conversion, config = converted(command)
    said = report(conversion, 200)
    for name, default in trainer.defaults.items():
        if not isinstance(default, Default) or name in ("train.global_batch_size", "checkpoint.every"):
            continue
        from_key = any(row.kind == "taken" and row.became.startswith(f"{name}:") for row in conversion.rows
                       if row.given.value != "not given")  # fmt: skip
        if from_key or (name.startswith("objective.") and not config.objective.kind.answers):
            continue
        if (name.startswith("lora.") and config.lora.rank == 0) or (name == "trainable" and config.lora.rank == 0):
            continue
        if name == "train.epochs" and config.train.steps is not None:
            continue
        if name == "train.eval_every" and trainer.name == "MLPerf's reference":
            continue
        expected = default.of(conversion)
        assert _value(config, name) == expected, (name, default.where)
        if expected != engine_default(name):
            assert f"{name}: " in said and default.where in said, name


PACKAGES = {
    "TrainingArguments": "transformers", "SFTConfig": "trl", "DPOConfig": "trl", "KTOConfig": "trl",
    "ModelConfig": "trl", "LoraConfig": "peft", "GRPOConfig": "trl",
}  # fmt: skip


def _own_default(package: str, kind: str, name: str) -> Any:
    found = next(one for one in dataclasses.fields(getattr(pytest.importorskip(package), kind)) if one.name == name)
    return found.default if found.default is not dataclasses.MISSING else found.default_factory()  # type: ignore[misc]


@pytest.mark.parametrize("name", ["TRL", "TRL's GRPO", "Hugging Face's Trainer"])
def test_defaults_are_those_of_the_installed_packages(name: str) -> None:
    """Each default whose place is Class.field, by the class itself."""
    trainer = next(one for one in TRAINERS if one.name == name)
    conversion, _ = converted(LEAST[name])
    checked = 0
    for option, default in trainer.defaults.items():
        match = re.fullmatch(r"(\w+)\.(\w+)", default.where) if isinstance(default, Default) else None
        if match is None or match[1] not in PACKAGES or callable(default.value) or option == "memory.recompute":
            continue
        own = _own_default(PACKAGES[match[1]], match[1], match[2])
        assert getattr(own, "value", own) == default.value, (option, default)
        checked += 1
    assert checked >= 10
    beta1, beta2 = (_own_default("transformers", "TrainingArguments", f"adam_beta{one}") for one in (1, 2))
    assert conversion.options.get("optim.betas", engine_default("optim.betas")) == [beta1, beta2]


FIELDS = {
    "Hugging Face's Trainer": ("transformers TrainingArguments", "peft LoraConfig"),
    "TRL": (
        "trl SFTConfig", "trl DPOConfig", "trl KTOConfig", "trl RewardConfig", "trl ScriptArguments", "trl ModelConfig",
        "trl.experimental.orpo ORPOConfig", "trl.experimental.cpo CPOConfig", "trl.scripts.utils DatasetMixtureConfig",
    ),
    "TRL's GRPO": (
        "trl GRPOConfig", "trl ModelConfig", "trl ScriptArguments", "trl.scripts.grpo GRPOScriptArguments",
        "trl.scripts.utils DatasetMixtureConfig",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_the_installed_packages_is_known(name: str) -> None:
    """Taken, or left out with a reason: none is met for the first time in a user's script."""
    trainer = next(one for one in TRAINERS if one.name == name)
    for place in FIELDS[name]:
        package, kind = place.split()
        fields = dataclasses.fields(getattr(pytest.importorskip(package), kind))
        flags = {
            FLAGS_OF_LORA.get(one.name, one.name) if kind == "LoraConfig" else one.name for one in fields if one.init
        }
        known = {flag for flag in flags if trainer.rule(flag) or trainer.field_of_package(flag)}
        assert len(fields) > 2 and flags - known == set(), place


def test_trls_commands_have_rates_of_their_own() -> None:
    for command, kind in (("sft", "SFTConfig"), ("dpo", "DPOConfig"), ("kto", "KTOConfig")):
        _, config = converted(f"trl {command} --model_name_or_path m")
        assert config.optim.lr == _own_default("trl", kind, "learning_rate")
        assert config.data.seq_length == _own_default("trl", kind, "max_length")
        assert config.model.dtype == "bfloat16" and config.memory.recompute == "full"
        if command != "sft":
            assert (config.objective.name, config.objective.beta) == (command, _own_default("trl", kind, "beta"))


FULL = {
    "trl": "trl sft --model_name_or_path m --dataset_name d --learning_rate 2e-5 --output_dir out --lora_r 16",
    "llama-factory": "llamafactory-cli train --model_name_or_path m --finetuning_type full --lora_rank 8",
    "axolotl": "axolotl train --base_model m --lora_r 32 --lora_target_linear true --learning_rate 1e-5",
    "megatron": "pretrain_gpt.py --lr 1e-4 --train-iters 10 --micro-batch-size 2 --seq-length 64 --data-path a",
    "hugging face": "torchrun --nproc_per_node 4 train.py --model_name_or_path m --num_train_epochs 3 --bf16 True",
    "use_peft": "train.py --model_name_or_path m --use_peft False --lora_r 8",
    "accelerate": "accelerate launch --num_processes 2 --mixed_precision bf16",
    "minimind": "train_full_sft.py --epochs 1",
    "sat": "finetune.py --from_pretrained m --train-iters 10 --mode finetune",
}


LANGUAGE_MODEL = ("embed_tokens", "layers", "norm", "lm_head")


@pytest.mark.parametrize("source", FULL)
def test_no_adapters_in_none_out(source: str) -> None:
    """LLaMA-Factory trains the language model alone by default, also where there is a tower."""
    conversion, config = converted(FULL[source])
    assert (config.lora.rank, config.trainable) == (0, LANGUAGE_MODEL if source == "llama-factory" else ("*",))
    assert not [name for name in conversion.options if name.startswith("lora.") and name != "lora.rank"]
    assert "lora.rank: 0" in report(conversion, 120)


@pytest.mark.parametrize("name", [name for name in LEAST if name not in ("Megatron", "the launcher")])
def test_adapters_in_adapters_out(name: str) -> None:
    """Scripts of vision-language models train parts of these in full beside adapters."""
    _, config = converted(LEAST[name])
    beside = {
        "MiniCPM-V's script": ("embed_tokens", "resampler", "vpm"), "LLaVA's script": ("multi_modal_projector",)
    }  # fmt: skip
    assert config.lora.rank > 0 and config.trainable == beside.get(name, ())


@pytest.mark.parametrize(
    ("content", "full"),
    [({"zero_optimization": {"stage": 2}}, True), ({"distributed_type": "FSDP", "num_processes": 2}, True)],
)
def test_a_launchers_file_alone_trains_everything(content: object, full: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    conversion, _ = convert(read_file(path), values=[], ranks=None)
    assert (conversion.options["lora.rank"], conversion.options["trainable"]) == (0, ["*"])
    assert "only the launcher's side was given" in report(conversion, 120)
    if "distributed_type" in str(content):
        assert conversion.options["parallel.shard"] == "parameters"  # accelerate's default strategy is FULL_SHARD


LLAMA_FACTORY = "llamafactory-cli train --model_name_or_path m --dataset a --stage sft "


def test_llama_factory() -> None:
    _, config = converted(LLAMA_FACTORY + "--finetuning_type lora --lora_rank 8 --cutoff_len 1024 --template qwen")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (8, 16.0, ("all-linear",))
    assert (config.data.seq_length, config.optim.lr, config.optim.schedule) == (1024, 5e-5, "linear")
    assert (config.train.micro_batch_size, config.train.epochs, config.memory.recompute) == (8, 3.0, "full")
    _, dpo = converted(LLAMA_FACTORY.replace("sft", "dpo") + "--pref_loss simpo --simpo_gamma 1.2")
    assert (dpo.objective.name, dpo.objective.margin, dpo.objective.beta) == ("simpo", 1.2, 0.1)
    _, pretrain = converted(LLAMA_FACTORY.replace("sft", "pt") + "--finetuning_type full")
    assert pretrain.data.packing == "concatenate"
    with pytest.raises(UserError, match="finetuning_type as oft"):
        converted(LLAMA_FACTORY + "--finetuning_type oft")


def test_deepspeeds_auto_leaves_it_to_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}'
    )
    run = {"model_name_or_path": "m", "finetuning_type": "full", "deepspeed": "ds.json",
           "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "bf16": True}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    conversion, _ = convert(read_file(tmp_path / "run.yaml"), values=[], ranks=2)
    assert (conversion.options["train.global_batch_size"], conversion.options["parallel.shard"]) == (8, "parameters")


def test_freezing_names_layers() -> None:
    conversion, config = converted(
        LLAMA_FACTORY + "--finetuning_type freeze --freeze_trainable_layers -2 --freeze_trainable_modules mlp"
    )
    assert (config.lora.rank, config.trainable) == (0, ("layers.0.mlp", "layers.1.mlp"))
    conversion, config = converted(LLAMA_FACTORY + "--finetuning_type freeze")
    assert len(config.trainable) == 2 and not any(name == "*" for name in config.trainable)
    assert any("the last 2 layers train" in line for line in conversion.to_fill)


def test_axolotl(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(AXOLOTL), encoding="utf-8")
    conversion, _ = convert(read_file(path), values=[], ranks=2)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert [row.given.key for row in conversion.rows if row.kind == "unknown"] == []
    assert (config.data.train, config.data.mix, config.data.format) == ("a.jsonl", ("b.jsonl=1",), "alpaca")
    assert (config.data.packing, config.data.overlong, config.data.mask_prompt) == (True, "drop", True)
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.train.epochs) == (16, 2, 3.0)
    assert (config.model.dtype, config.model.base_dtype, config.optim.lr) == ("bfloat16", "nf4", 2e-4)
    assert (config.optim.warmup_steps, config.optim.warmup_ratio) == (10, None)
    assert config.optim.min_lr == pytest.approx(2e-5)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 16.0, ("all-linear",))
    assert (config.train.seed, config.checkpoint.keep) == (42, 4)
    del AXOLOTL["warmup_steps"]
    path.write_text(yaml.safe_dump(AXOLOTL), encoding="utf-8")
    conversion, _ = convert(read_file(path), values=[], ranks=2)
    assert conversion.options["optim.warmup_ratio"] == 0.03


MEGATRON = """#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES # the machines
    --master_addr $(hostname)
)
GPT_MODEL_ARGS=(
    --num-layers 12
    --hidden-size 512
    --num-attention-heads 8
    --ffn-hidden-size 2048
    --group-query-attention
    --num-query-groups 2
    --swiglu
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 64 --train-iters 5000 --seq-length 2048
    --lr 6.0e-4 --min-lr 6.0e-5 --lr-decay-style cosine --lr-warmup-iters 430 --lr-decay-iters 4300
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
TRAINING_ARGS+=( --recompute-activations --use-distributed-optimizer --sequence-parallel )
if [ "$FAST" = 1 ]; then
    EXTRA="--overlap-grad-reduce"
else
    EXTRA="--no-rope-fusion"
fi
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \\
    "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" $EXTRA \\
    --tensor-model-parallel-size 4 --context-parallel-size 2 \\
    --data-path 0.3 a_text_document 0.7 b_text_document --split 949,50,1 \\
    --tokenizer-type GPT2BPETokenizer --save $1 --save-interval 500 --eval-interval 1000 --eval-iters 10
"""


def test_megatron(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(MEGATRON, encoding="utf-8")
    conversion, ranks = convert(read_file(script), values=[], ranks=None)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert [row.given.key for row in conversion.rows if row.kind == "unknown"] == []
    assert (ranks, config.parallel.tensor, config.parallel.context, config.parallel.sequence) == (16, 4, 2, True)
    assert (config.model.init, config.lora.rank, config.trainable) == ("random", 0, ("*",))
    assert (config.optim.lr, config.optim.min_lr, config.optim.warmup_steps) == (6e-4, 6e-5, 430)
    assert (config.optim.schedule, config.optim.betas, config.optim.weight_decay) == ("cosine", (0.9, 0.95), 0.1)
    assert (config.train.steps, config.train.global_batch_size, config.train.micro_batch_size) == (5000, 64, 1)
    assert (config.parallel.shard, config.memory.recompute) == ("optimizer", "attention")
    assert config.data.train == "a_text_document.bin" and config.data.mix == ("b_text_document.bin=2.33333",)
    assert (config.data.packing, config.train.eval_every, config.train.eval_samples) == ("concatenate", 1000, 640)
    said = report(conversion, 120)
    noted = ("4300 steps and the run takes 5000", "hidden_size 512", "num_key_value_heads 2", "checkpoint.dir: save")
    for words in (*noted, "EXTRA=--no-rope-fusion"):
        assert words in said, words


def test_megatron_counts_samples() -> None:
    base = "pretrain_gpt.py --lr 1e-4 --micro-batch-size 2 --seq-length 64 --data-path a --global-batch-size 10 "
    _, config = converted(base + "--train-samples 1000 --lr-warmup-samples 205")
    assert (config.train.steps, config.optim.warmup_steps, config.optim.weight_decay) == (100, 20, 0.01)
    _, config = converted(base + "--train-iters 100 --lr-warmup-fraction 0.1")
    assert config.optim.warmup(100) == 10
    _, config = converted(base + "--train-iters 100 --recompute-granularity full --data-path a b")
    assert (config.memory.recompute, config.data.mix) == ("full", ("b.bin=1",))
    conversion, config = converted(base + "--train-iters 100 --load other --save out --finetune")
    assert config.model.init == "checkpoint"
    assert any("other is Megatron's checkpoint" in line for line in conversion.to_fill)


def test_what_is_evaluated_and_who_gets_the_figures() -> None:
    base = "axolotl train --base_model m --learning_rate 1e-5 "
    _, config = converted(base + "--val_set_size 0.05 --eval_steps 20 --early_stopping_patience 3 --wandb_project p")
    assert (config.data.validation_split, config.train.eval_every, config.train.early_stopping_patience) == (
        0.05,
        20,
        3,
    )
    assert config.log.wandb_project == "p"
    conversion, config = converted(base + "--val_set_size 0.05 --evals_per_epoch 2 --early_stopping_patience 3")
    assert config.train.early_stopping_patience is None
    assert any(line.startswith("train.early_stopping_patience: 3") for line in conversion.to_fill)
    _, config = converted(LLAMA_FACTORY + "--val_size 0.1 --eval_strategy steps --eval_steps 50 --report_to wandb")
    assert (config.data.validation_split, config.train.eval_every) == (0.1, 50)
    assert config.log.wandb_project == "huggingface"  # TrainingArguments.project
    _, config = converted("train.py --model_name_or_path m --wandb_project p --load_best_model_at_end --eval_steps 5")
    assert config.log.wandb_project is None and config.checkpoint.keep_best
    _, config = converted(LEAST["Megatron"])
    assert (config.data.validation_split, config.train.last_batch) == (0.03, "full")
    _, config = converted(LEAST["Megatron"] + " --split 949,50,1")
    assert config.data.validation_split == 0.05
    _, config = converted(LEAST["Megatron"] + " --split 100,0,0")
    assert config.data.validation_split is None


def test_a_constant_rate_of_transformers_has_no_warm_up() -> None:
    """get_constant_schedule takes none; Megatron's constant style does."""
    base = "train.py --model_name_or_path m --warmup_ratio 0.03 --lr_scheduler_type "
    assert converted(base + "constant")[1].optim.warmup(100) == 0
    assert converted(base + "constant_with_warmup")[1].optim.warmup(100) == 3
    megatron = LEAST["Megatron"] + " --lr-decay-style constant --lr-warmup-iters 5"
    assert converted(megatron)[1].optim.warmup(10) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--optim adafactor", "optim adafactor has no counterpart"),
        ("--lr_scheduler_type inverse_sqrt", "lr_scheduler_type inverse_sqrt has no counterpart"),
        ("--neftune_noise_alpha 5", "no noise is added"),
        ("--label_smoothing_factor 0.1", "labels are not smoothed"),
        ("--max_train_samples 100", "shorten the file"),
        ("--eval_steps 10", "without an eval_strategy"),
    ],
)
def test_what_makes_the_run_differ_is_noted(flags: str, words: str) -> None:
    conversion, _ = converted(f"train.py --model_name_or_path m {flags}")
    assert any(words in note for note in conversion.notes), conversion.notes


PYTHON = """
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from peft import LoraConfig, get_peft_model
MODEL = "models/a"
model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16, load_in_4bit=True)
config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
model = get_peft_model(model, config)
args = TrainingArguments(output_dir="out", learning_rate=3e-4, num_train_epochs=2, bf16=True, max_steps=steps(),
                         per_device_train_batch_size=4, gradient_accumulation_steps=2, optim="paged_adamw_8bit")
"""


def test_a_python_script_is_read_not_run(tmp_path: Path) -> None:
    script = tmp_path / "finetune.py"
    script.write_text(PYTHON, encoding="utf-8")
    conversion, _ = convert(read_file(script), values=[], ranks=1)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert (config.model.path, config.model.dtype, config.model.base_dtype) == ("models/a", "bfloat16", "nf4")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (4, 8.0, ("q_proj", "o_proj"))
    assert (config.optim.lr, config.train.global_batch_size, config.train.epochs) == (3e-4, 8, 2.0)
    assert any(line.startswith("train.steps: max_steps is <computed") for line in conversion.to_fill)
    script.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="no call of TrainingArguments"):
        read_file(script)
    script.write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(UserError, match="not valid Python in line 1"):
        read_file(script)
    script.write_text(PYTHON.replace("TrainingArguments(output_dir", "SFTConfig(output_dir"), encoding="utf-8")
    conversion, _ = convert(read_file(script), values=[], ranks=1)
    assert (conversion.trainer, conversion.options["data.seq_length"]) == ("TRL", 1024)
    assert conversion.options["lora.rank"] == 4


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("train.py --use_peft_lora True --dataset_text_field content --packing True", "TRL"),
        ("accelerate launch -m axolotl.cli.train --base_model m", "Axolotl"),
        ("src/train.py --stage sft --template llama3 --output_dir o", "LLaMA-Factory"),
        ("torchrun pretrain_gpt.py --num-layers 2", "Megatron"),
        ("train.py --max_grad_norm 1", "Hugging Face's Trainer"),
        ("--zero_stage 2 --mixed_precision bf16", "the launcher"),
    ],
)
def test_whose_it_is(command: str, name: str) -> None:
    assert recognise(read_flags(command, "flags", Path())).name == name


def test_what_only_the_shell_knows_is_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "MODEL=\"$1\"\nN=$((2 * 4))\nGPUS=$(python -c 'import torch; print(torch.cuda.device_count())')\n"
        "torchrun --nproc_per_node $GPUS train.py --model_name_or_path $MODEL --per_device_train_batch_size $N "
        "--learning_rate ${LR:-3e-5} --num_train_epochs $(( $E + 1 )) \\\n",
        encoding="utf-8",
    )
    conversion, _ = convert(read_file(script), values=[], ranks=None)
    assert (conversion.options["train.micro_batch_size"], conversion.options["optim.lr"]) == (8, 3e-5)
    asked = " ".join(conversion.to_fill)
    assert "model.path: model_name_or_path is $1" in asked and "train.epochs: num_train_epochs is" in asked
    assert not [row.given.key for row in conversion.rows if row.kind == "unknown"]


def test_every_default_of_a_place_is_asked_for() -> None:
    conversion, _ = converted("train.py --num_train_epochs 1")
    for name in ("model.path", "data.train"):
        assert conversion.options[name] == PLACES[name]
        assert any(line.startswith(name) for line in conversion.to_fill)
    assert "--ranks" in " ".join(conversion.to_fill)


def test_the_commands_are_what_a_shell_makes_of_them() -> None:
    """The words of a plain command line, by the standard library."""
    command = (
        "trl sft --model_name_or_path 'my model' --output_dir \"a b\" --lora_target_modules q_proj v_proj --use_peft"
    )
    given = {one.key: one.value for one in read_flags(command, "flags", Path())}
    assert given["model_name_or_path"] == shlex.split(command)[3] == "my model"
    assert given["lora_target_modules"] == ["q_proj", "v_proj"] and given["(program)"] == "trl sft"


STRANGE: tuple[Any, ...] = (
    None, True, False, "", "x", "auto", "1e999", "nan", "a,b", -1, 0, 3, 2.5, float("inf"), [], ["a"], [1, 2], [None],
    [{"path": None}], [{"path": ["a.jsonl"], "type": {"a": 1}}], "$(date)", "x" * 400, "\x1b[31m",
)  # fmt: skip


def test_no_value_is_a_traceback() -> None:
    """Each rule with values of every kind: a sentence, or the text of a run's file."""
    seen: set[int] = set()
    for trainer in TRAINERS:
        for key, rule in {**launcher_rules.rules(), **trainer.rules}.items():
            if id(rule) in seen or rule.apply.__qualname__.startswith("dropped"):
                continue
            seen.add(id(rule))
            for value in STRANGE:
                conversion = Conversion(trainer=trainer.name)
                try:
                    rule.apply(conversion, Given(source="file", key=key.replace("*", "x"), value=value))
                    finish(conversion, trainer, None)
                    assert report(conversion, 80).replace("\n", "").isprintable()
                except UserError as error:
                    assert str(error).endswith((".", "?")), (key, value, error)
    assert len(seen) > 200


MINICPM_V = "finetune.py --model_name_or_path m --llm_type qwen --data_path t.json "
LLAVA = "train_mem.py --model_name_or_path m --data_path t.json --mm_projector_type mlp2x_gelu "


@pytest.mark.parametrize(
    ("command", "rank", "trainable"),
    [
        (MINICPM_V + "--use_lora true --tune_vision false --tune_llm false", 64, ("embed_tokens", "resampler")),
        (MINICPM_V + "--use_lora true --tune_llm false", 64, ("embed_tokens", "resampler", "vpm")),
        (MINICPM_V + "--tune_vision true --tune_llm false", 0, ("vpm", "resampler")),
        (MINICPM_V + "--tune_vision false --tune_llm true", 0, (*LANGUAGE_MODEL, "resampler")),
        (MINICPM_V + "--tune_vision true", 0, ("*",)),
        (LLAVA + "--tune_mm_mlp_adapter True", 0, ("multi_modal_projector",)),
        (LLAVA + "--lora_enable True --lora_r 128", 128, ("multi_modal_projector",)),
        (LLAVA + "--lora_enable True --freeze_mm_mlp_adapter True", 64, ()),
        (LLAVA + "--mm_use_im_patch_token False", 0, (*LANGUAGE_MODEL, "multi_modal_projector")),
        (LLAVA + "--unfreeze_mm_vision_tower True", 0, (*LANGUAGE_MODEL, "multi_modal_projector", "vision_tower")),
        (LLAMA_FACTORY + "--finetuning_type full --freeze_vision_tower true", 0, LANGUAGE_MODEL),
        ("axolotl train --base_model m --learning_rate 1e-5 --freeze_mm_modules true", 0, LANGUAGE_MODEL),
        ("axolotl train --base_model m --learning_rate 1e-5", 0, ("*",)),
    ],
)
def test_what_trains_of_a_vision_language_model(command: str, rank: int, trainable: tuple[str, ...]) -> None:
    _, config = converted(command)
    assert (config.lora.rank, config.trainable) == (rank, trainable)


def test_targets_of_minicpm_v_are_not_the_towers() -> None:
    """Its expression begins with llm; 2.6's tower has modules of the same names."""
    _, config = converted(MINICPM_V + "--use_lora true")
    tower = ("vision.vpm.encoder.layers.0.self_attn.q_proj", ("vpm.encoder.layers.0.self_attn.q_proj",))
    assert config.lora.targets_module("layers.0.attention.q_proj", ("llm.model.layers.0.self_attn.q_proj",))
    assert not config.lora.targets_module(*tower)


def test_folders_of_images_and_sizes() -> None:
    _, config = converted(LLAMA_FACTORY + "--finetuning_type lora --media_dir images")
    assert config.data.image_folder == "images"
    _, config = converted(LLAVA + "--image_folder ./images --lora_enable True")
    assert config.data.image_folder == "./images"
    conversion, _ = converted(LLAMA_FACTORY + "--finetuning_type lora --image_max_pixels 262144")
    assert any("image_max_pixels 262144 has no counterpart" in note for note in conversion.notes)
    conversion, _ = converted(LLAMA_FACTORY + "--finetuning_type lora --freeze_vision_tower false")
    assert any("puts adapters into the tower" in line for line in conversion.to_fill)
    conversion, _ = converted(MINICPM_V + "--max_slice_nums 4 --use_lora true")
    assert any("max_slice_nums 4: write it into config.json" in line for line in conversion.to_fill)
    conversion, _ = converted(MINICPM_V + "--max_slice_nums 9 --use_lora true")
    assert not any("max_slice_nums" in line for line in conversion.to_fill)


RATES: dict[str, tuple[str, dict[str, float]]] = {
    "llava": (
        LLAVA + "--mm_projector_lr 2e-5 --lora_enable True --learning_rate 2e-4",
        {"multi_modal_projector": 2e-5},
    ),
    "lora+": (LLAMA_FACTORY + "--finetuning_type lora --loraplus_lr_ratio 16 --learning_rate 1e-4", {"lora_B": 16e-4}),
    "embeddings": (
        "axolotl train --base_model m --learning_rate 1e-4 --embedding_lr_scale 0.5",
        {"embed_tokens": 5e-5, "lm_head": 5e-5},
    ),
    "decoupled": (FULL["megatron"] + " --decoupled-lr 3e-4", {"embed_tokens": 3e-4, "lm_head": 3e-4}),
    "one for all": (LLAVA + "--lora_enable True", {}),
}


@pytest.mark.parametrize("source", RATES)
def test_learning_rates_by_module(source: str) -> None:
    command, rates = RATES[source]
    _, config = converted(command)
    assert config.optim.lr_pattern == (pytest.approx(rates) if rates else None)


def test_groups_of_axolotl(tmp_path: Path) -> None:
    """A parameter is in the group whose text is anywhere in its name."""
    groups = [{"name": "o", "modules": ["self_attn.o_proj.weight", "q_proj"], "lr": 1e-6}]
    run = {"base_model": "m", "learning_rate": 2e-5, "lr_groups": groups}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    conversion, _ = convert(read_file(tmp_path / "run.yaml"), values=[], ranks=1)
    assert conversion.options["optim.lr_pattern"] == {"*self_attn.o_proj.weight*": 1e-6, "*q_proj*": 1e-6}
    config = from_yaml(to_text(conversion.options, title="test"))
    assert config.optim.lr_pattern == conversion.options["optim.lr_pattern"]


@pytest.mark.parametrize(
    ("given", "base", "merges"),
    [
        ({"nvfp4_merge_aware": True}, "stored", True),
        ({"nvfp4_merge_aware": False}, None, False),
        ({"gptq": True}, "stored", False),
        ({"peft": {"backend": "torchao", "weight_dtype": "int4"}}, "int4", False),
        ({"peft": {"backend": "bnb", "weight_dtype": "nf4"}}, "nf4", False),
    ],
    ids=["merged", "beside", "gptq", "torchao", "bnb"],
)
def test_bases_in_few_bits_of_axolotl(given: dict[str, object], base: str | None, merges: bool, tmp_path: Path) -> None:
    """As Axolotl's docs/nvfp4_lora.qmd and docs/qlora_torchao.qmd say: merge-aware training is of packed bases."""
    adapter = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    run = {"base_model": "m", "learning_rate": 2e-5, **adapter, **given}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    conversion, _ = convert(read_file(tmp_path / "run.yaml"), values=[], ranks=1)
    config = from_yaml(to_text(conversion.options, title="test"))
    assert (config.model.base_dtype, config.lora.merge_aware) == (base, merges)
