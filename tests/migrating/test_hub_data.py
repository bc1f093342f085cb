"""Data sets that another trainer's input names as on the hub become hub:OWNER/NAME, with their splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rankfold.migrating.command import convert
from rankfold.migrating.conversion import Conversion
from rankfold.migrating.reading import read_file
from tests.support.trainer_commands import converted

TRL = "trl sft --model_name_or_path acme/tiny --dataset_name acme/chats --use_peft --output_dir out "


def _data(conversion: Conversion) -> tuple[Any, ...]:
    assert not [line for line in conversion.to_fill if line.startswith("data.train")]
    return tuple(conversion.options.get(f"data.{name}") for name in ("train", "mix", "validation"))


def _file(folder: Path, name: str, content: str) -> Conversion:
    (folder / name).write_text(content, encoding="utf-8")
    return convert(read_file(folder / name), values=[], ranks=1)[0]


@pytest.mark.parametrize(
    ("flags", "train", "validation"),
    [
        ("--dataset_test_split test", "hub:acme/chats", None),  # TRL evaluates nothing by default
        ("--dataset_test_split dev --eval_strategy steps", "hub:acme/chats", "hub:acme/chats?split=dev"),
        ("--eval_strategy steps", "hub:acme/chats", "hub:acme/chats?split=test"),
        ("--dataset_config en --dataset_train_split all", "hub:acme/chats?subset=en&split=all", None),
    ],
)
def test_trls_command(flags: str, train: str, validation: str | None) -> None:
    assert _data(converted(TRL + flags)[0]) == (train, None, validation)


@pytest.mark.parametrize(
    ("lines", "train", "validation"),
    [
        ("load_dataset('acme/chats', split='train[:1000]')", "hub:acme/chats?limit=1000", None),
        ("load_dataset('acme/chats', 'en', split='all')", "hub:acme/chats?subset=en&split=all", None),
        (
            "load_dataset(path='acme/chats')\nload_dataset('acme/chats', split='test')\nSFTConfig(eval_steps=5)",
            "hub:acme/chats", None,
        ),
        (
            "a = load_dataset('acme/chats', split='train')\nb = load_dataset('acme/chats', split='test')\n"
            "SFTConfig(eval_strategy='steps', eval_steps=5)\nSFTTrainer('m', train_dataset=a, eval_dataset=b)",
            "hub:acme/chats", "hub:acme/chats?split=test",
        ),
        (
            "d = load_dataset('acme/chats')\nSFTConfig(eval_strategy='steps', eval_steps=5)\n"
            "SFTTrainer('m', train_dataset=d['few'], eval_dataset=d['dev'])",
            "hub:acme/chats?split=few", "hub:acme/chats?split=dev",
        ),
        (  # its test split is a part of train, which is not on the hub
            "d = load_dataset('acme/chats', split='train').train_test_split(0.1)\n"
            "SFTConfig(eval_strategy='steps', eval_steps=5)\nSFTTrainer('m', eval_dataset=d['test'])",
            "hub:acme/chats", "path/to/validation.jsonl",
        ),
    ],
)  # fmt: skip
def test_scripts(lines: str, train: str, validation: str | None, tmp_path: Path) -> None:
    lines += "" if "SFTConfig" in lines else "\nSFTConfig()"
    assert _data(_file(tmp_path, "train.py", f"from trl import *\n{lines}\n")) == (train, None, validation)


def test_axolotls_lists(tmp_path: Path) -> None:
    content = {
        "base_model": "m", "adapter": "lora", "eval_steps": 5,
        "datasets": [
            {"path": "acme/chats", "name": "en", "split": "train[:9]", "type": "chat_template"}, {"path": "a.jsonl"}
        ],
        "test_datasets": [{"path": "acme/chats", "revision": "v1"}],
    }  # fmt: skip
    found = _file(tmp_path, "a.yml", yaml.safe_dump(content))
    assert _data(found) == (
        "hub:acme/chats?subset=en&limit=9", ["a.jsonl=1"], "hub:acme/chats@v1?split=test"
    )  # fmt: skip


def test_what_has_no_name_here_is_left_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice in percent, a folder of that name, a data set without an owner, a name of LLaMA-Factory's."""
    found, _ = converted(TRL + "--dataset_train_split train[:10%]")
    assert found.options["data.train"] == "hub:acme/chats"
    assert any(line.startswith("data.train: train[:10%] is no split") for line in found.to_fill)
    monkeypatch.chdir(tmp_path)
    Path("acme", "chats").mkdir(parents=True)
    for command in (TRL, TRL.replace("acme/chats", "imdb"),
                    "llamafactory-cli train --model_name_or_path m --stage sft --dataset acme/x"):  # fmt: skip
        assert converted(command)[0].options["data.train"] == "path/to/train.jsonl"


def test_without_eval_steps_evaluations_go_by_the_trainers_logging_steps() -> None:
    trainer = "train.py --model_name_or_path m --num_train_epochs 1 --per_device_train_batch_size 1 "
    for command, every in ((TRL, 10), (TRL + "--logging_steps 7 ", 7), (trainer, 500)):
        assert converted(command + "--eval_strategy steps")[1].train.eval_every == every
