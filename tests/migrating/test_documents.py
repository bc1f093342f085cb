"""Files of other trainers that are damaged or hostile are refused in a sentence, before they take time or memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import UserError
from rankfold.migrating.command import convert
from rankfold.migrating.reading import read_file

_RUN = "learning_rate: 1e-4\nmodel_name_or_path: m\n"
_ALIASES = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bomb.yaml", f"a: &a [x, x, x]\n{_ALIASES}{_RUN}", "stands for more than 100,000 values"),
        ("map.yaml", f"base_model: m\na: &a\n  b: *a\n{_RUN}", "in line 2 that holds itself"),
        ("list.yaml", f"{_RUN}lora_target_modules: &a [q_proj, *a]\n", "that holds itself"),
        ("twice.yaml", f"{_RUN}learning_rate: 5e-4\n", "has the key learning_rate a second time in line 3"),
        ("twice.json", '{"a": 1, "a": 2}', "is not valid JSON"),
        ("deep.json", '{"a":' * 20000 + "1" + "}" * 20000, "nests too deeply"),
        ("deep.yaml", "a: " + "[" * 20000 + "]" * 20000, "nested too deeply"),
        ("tag.yaml", "base_model: !!python/object/apply:os.system [exit]\n", "could not determine a constructor"),
        ("date.yaml", f"{_RUN}output_dir: 2026-13-41\n", "is not valid YAML or JSON"),
        ("two.yaml", f"{_RUN}---\n{_RUN}", "found another document"),
        ("large.yaml", f"{_RUN}# {'x' * (1 << 20)}", "characters, too many for a configuration"),
        ("itself.yaml", f"{_RUN}deepspeed: itself.yaml\n", "which names it in turn"),
        ("notes.ipynb", '{"cells": [], "nbformat": 4}', "is a notebook"),
    ],
)  # fmt: skip
def test_sentences(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_file(tmp_path / name)


def test_json_may_be_indented_with_tabs(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n\t"zero_optimization": {\n\t\t"stage": 2\n\t}\n}\n', encoding="utf-8")
    found, _ = convert(read_file(tmp_path / "ds.json"), values=[], ranks=None)
    assert found.options["parallel.shard"] == "gradients"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("training_file: f\nmethod: {supervised: {hyperparameters: {n_epochs: 3}}}\nseed: 1\n", "OpenAI"),
        ("input_features: [i]\nbase_model: m\nadapter: {type: lora}\n", "Ludwig"),
        ("train: {lr_warmup_steps: 1, micro_batch_size: 2}\nseed: 1\n", "LitGPT"),
        ("data: {instruct_data: a.jsonl}\nmodel_id_or_path: m\n", "mistral-finetune"),
        ("max_duration: 1ep\nseed: 17\n", "Composer"),
        ("seed_everything: 1\ntrainer: {max_epochs: 3}\n", "Lightning"),
    ],
)
def test_others_are_called_by_their_names(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"belongs to {words}"):
        convert(read_file(tmp_path / "file.yaml"), values=[], ranks=None)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run_glue.py --task_name mrpc", "a classifier"),
        ("run_mlm_no_trainer.py", "a masked language model"),
        ("train.py --mlm_probability 0.15", "a masked language model"),
        ("main.py --num_padding_at_beginning 1", "DeepSpeed-Chat"),
        ("train_dreambooth.py --instance_data_dir images", "draw images"),
    ],
)
def test_scripts_with_other_objectives(command: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python {command} --model_name_or_path m --learning_rate 1e-5\n", encoding="utf-8")
    with pytest.raises(UserError, match=words):
        convert(read_file(script), values=[], ranks=None)
