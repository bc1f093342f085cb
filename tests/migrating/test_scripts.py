"""Scripts and command lines as people write them: every value that a shell or Python would see counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from rankfold.migrating.command import convert
from rankfold.migrating.conversion import Conversion
from rankfold.migrating.reading import read_file, read_flags


def _converted(folder: Path, name: str, content: str) -> Conversion:
    (folder / name).write_text(content, encoding="utf-8")
    return convert(read_file(folder / name), values=[], ranks=1)[0]


_ADAPTERS = "from peft import LoraConfig\nfrom trl import *\n"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "kw = dict(learning_rate=3e-4, num_train_epochs=7)\nSFTConfig('out', max_length=77, **kw)\n",
            {"optim.lr": 3e-4, "train.epochs": 7.0, "data.seq_length": 77, "checkpoint.dir": "out"},
        ),
        ("SFTConfig(**{'learning_rate': 3e-4})\n", {"optim.lr": 3e-4}),
        ("LR: float = 3e-4\nSFTConfig(learning_rate=LR)\n", {"optim.lr": 3e-4}),
        ("cfg = SFTConfig()\ncfg.learning_rate = 3e-4\n", {"optim.lr": 3e-4}),
        ("def run(given):\n    given.learning_rate = 3e-4\nrun(SFTConfig())\n", {"optim.lr": 3e-4}),
        ("SFTConfig(learning_rate=1e-3, lr_scheduler_kwargs={'min_lr_rate': 0.1})\n", {"optim.min_lr": 1e-4}),
        ("SFTTrainer('m', args=SFTConfig())\n", {"model.path": "m"}),
        (  # PEFT's own defaults, where TRL's command has 16, 32 and 0.05
            "SFTTrainer('m', args=SFTConfig(), peft_config=LoraConfig())\n",
            {"lora.rank": 8, "lora.alpha": 8, "lora.dropout": 0.0},
        ),
    ],
)  # fmt: skip
def test_python(script: str, expected: dict[str, Any], tmp_path: Path) -> None:
    options = _converted(tmp_path, "train.py", _ADAPTERS + script).options
    assert {name: options.get(name) for name in expected} == expected


@pytest.mark.parametrize("change", ["lr *= 8", "lr, n = 1e-3, 2", "for lr in (1e-5, 1e-3): pass"])
def test_a_variable_that_changes_is_no_value(change: str, tmp_path: Path) -> None:
    found = _converted(tmp_path, "train.py", f"{_ADAPTERS}lr = 1e-4\n{change}\nSFTConfig(learning_rate=lr)\n")
    assert any(line.startswith("optim.lr") for line in found.to_fill)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("SFTConfig(**settings())\n", "only known when it runs"),
        ("SFTTrainer('m', args=SFTConfig(), peft_config=LoraConfig(**options))\n", "only known when it runs"),
        ("SFTTrainer('m', SFTConfig('a'))\nDPOTrainer('a', DPOConfig('b'))\n", "may train more than once"),
    ],
)
def test_python_that_is_refused(script: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        _converted(tmp_path, "train.py", _ADAPTERS + script)


def test_shell(tmp_path: Path) -> None:
    """A default in a default, a list in quotes, and what the user may add."""
    options = _converted(
        tmp_path,
        "train.sh",
        "LR=${LR:-${USUAL:-3e-5}}\ntrl sft --model_name_or_path m --use_peft --learning_rate $LR "
        """--lora_target_modules '["q_proj", "v_proj"]' "$@"\n""",
    ).options
    assert (options["optim.lr"], options["lora.targets"]) == (3e-5, ["q_proj", "v_proj"])


def test_values_after_a_file_win(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("finetuning_type: full\nmodel_name_or_path: m\nlearning_rate: 1e-5\n")
    flags = "llamafactory-cli train sft.yaml learning_rate=7e-6 num_train_epochs=5"
    options = convert(read_flags(flags, "flags", tmp_path), values=[], ranks=1)[0].options
    assert (options["optim.lr"], options["train.epochs"]) == (7e-6, 5.0)


def test_a_script_of_several_trainings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="starts 2 trainings"):
        _converted(
            tmp_path,
            "train.sh",
            "swift sft --model m --dataset a.jsonl --lora_rank 8\n"
            "swift rlhf --rlhf_type dpo --model m --dataset b.jsonl\n",
        )


def test_an_adapters_own_file(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 64, "lora_alpha": 128, "bias": "none", "base_model_name_or_path": "m",
               "target_modules": ["q_proj"], "init_lora_weights": True, "lora_bias": False}  # fmt: skip
    found = _converted(tmp_path, "adapter_config.json", json.dumps(adapter))
    assert (found.options["lora.rank"], found.options["model.path"]) == (64, "m")
    assert not [row for row in found.rows if row.kind == "unknown" or "no counterpart" in row.became]
    with pytest.raises(UserError, match="another kind of adapter"):
        _converted(tmp_path, "adapter_config.json", json.dumps(adapter | {"peft_type": "IA3"}))


@pytest.mark.parametrize(
    ("flags", "dropout"),
    [
        ("trl dpo --model_name_or_path m --use_peft --lora_dropout 0.2", 0.0),
        ("trl dpo --model_name_or_path m --use_peft --lora_dropout 0.2 --disable_dropout false", 0.2),
        ("trl kto --model_name_or_path m --use_peft", 0.0),
        ("trl sft --model_name_or_path m --use_peft --lora_dropout 0.2", 0.2),
        ("llamafactory-cli train --stage dpo --model_name_or_path m --finetuning_type lora --lora_dropout 0.2", 0.0),
        ("llamafactory-cli train --stage sft --model_name_or_path m --finetuning_type lora --lora_dropout 0.2", 0.2),
        ("swift rlhf --rlhf_type kto --model m --dataset a.jsonl --lora_dropout 0.2", 0.0),
        ("megatron rlhf --rlhf_type dpo --model m --dataset a.jsonl --tuner_type lora --lora_dropout 0.2", 0.2),
    ],
)
def test_dropout_where_answers_are_compared(flags: str, dropout: float, tmp_path: Path) -> None:
    """DPOTrainer and those made from it switch all dropout off, the adapter's too (disable_dropout_in_model)."""
    options = convert(read_flags(flags, "flags", tmp_path), values=[], ranks=1)[0].options
    assert options["lora.dropout"] == dropout


def test_dropout_of_megatrons_base(tmp_path: Path) -> None:
    flags = "pretrain_gpt.py --lr 1e-4 --train-iters 10 --micro-batch-size 1 --seq-length 64 --attention-dropout 0"
    found = convert(read_flags(flags, "flags", tmp_path), values=[], ranks=1)[0]
    assert any(note.startswith("hidden_dropout was not given") for note in found.notes)


def test_long_texts_of_axolotl_are_cut(tmp_path: Path) -> None:
    found = _converted(
        tmp_path,
        "a.yaml",
        "base_model: m\nlearning_rate: 1e-4\npretraining_dataset: [{path: a.jsonl, type: pretrain}]\n",
    )
    assert found.options["data.overlong"] == "cut"


def test_deepspeeds_scheduler_comes_first(tmp_path: Path) -> None:
    """transformers' deepspeed_optim_sched takes that of the file, whatever lr_scheduler_type is."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps({"scheduler": scheduler, "zero_optimization": {"stage": 2}}))
    flags = "trl sft --model_name_or_path m --lr_scheduler_type {} --warmup_steps 7 --deepspeed ds.json"
    for kind in ("cosine", "constant"):
        given = read_flags(flags.format(kind), "flags", tmp_path)
        options = convert(given, values=[], ranks=1)[0].options
        assert (options["optim.schedule"], options["optim.warmup_steps"]) == ("constant", 7)


@pytest.mark.parametrize(
    "script",
    [
        "case $MODE in\n  lora) MORE='--use_peft';;\n  full) MORE='';;\nesac\n",
        "MORE='--use_peft'\n[ -n \"$FULL\" ] && MORE=''\n",
        "MORE=\nif [ -z $FULL ]; then\n  MORE='--use_peft'\nfi\n",
        "MORE=(--seed 1)\nif [ -z $FULL ]; then\n  MORE+=(--use_peft)\nfi\n",
    ],
)
def test_a_choice_of_the_script_is_reported(script: str, tmp_path: Path) -> None:
    end = "trl sft --model_name_or_path m ${MORE[@]}\n"
    found = _converted(tmp_path, "train.sh", script + end)
    assert any("chooses between values" in note and "MORE" in note for note in found.notes)


def test_a_variable_that_may_hold_options_is_reported(tmp_path: Path) -> None:
    found = _converted(tmp_path, "train.sh", "cd x &&\ntrl sft --model_name_or_path m --seed 1 $MORE &&\necho done\n")
    assert found.options["train.seed"] == 1
    assert any(line.startswith("$MORE") for line in found.to_fill)


def test_arguments_that_sft_saved(tmp_path: Path) -> None:
    saved = {"learning_rate": 1e-5, "packing": True, "loss_type": "nll", "max_length": 64, "seed": 1}
    assert "objective.name" not in _converted(tmp_path, "args.json", json.dumps(saved)).options


def test_an_rlhf_type_that_is_left_empty(tmp_path: Path) -> None:
    found = _converted(tmp_path, "args.yaml", "swift_version: 4.6.0\nmodel: m\nlearning_rate: 1e-4\nrlhf_type:\n")
    assert found.options["objective.name"] == "language_modeling"


@pytest.mark.parametrize(
    ("flags", "dtype"), [("", "bfloat16"), ("--bf16 false", "float32"), ("--fp16", "float16"), ("--bf16", "bfloat16")]
)
def test_dtype_of_trl(flags: str, dtype: str, tmp_path: Path) -> None:
    """SFTConfig.bf16 is true unless fp16 is given, but false where it is said."""
    given = read_flags(f"trl sft --model_name_or_path m {flags}", "flags", tmp_path)
    assert convert(given, values=[], ranks=1)[0].options.get("model.dtype", "float32") == dtype


@pytest.mark.parametrize("named", ["[q_proj]", "[lm_head, q_proj]"])
def test_all_linears_of_axolotl_beside_named_modules(named: str, tmp_path: Path) -> None:
    lines = f"base_model: m\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: {named}\n"
    found = _converted(tmp_path, "a.yaml", f"{lines}learning_rate: 1e-4\nlora_target_linear: true\n")
    assert found.options["lora.targets"] == ["all-linear", *(["lm_head"] if "lm_head" in named else [])]
