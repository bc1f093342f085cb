"""`rankfold recipe`: what it lists, shows, writes and refuses."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine.config.load import from_yaml
from engine.errors import UserError
from rankfold.launching.command import launch
from rankfold.recipes import catalog, command
from rankfold.recipes.catalog import Recipe
from rankfold.recipes.command import recipe
from rankfold.recipes.run_file import text_of
from tests.support.commands import REPOSITORY


def test_all_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(catalog.models()) + 1]] == [*catalog.models()]
    assert lines[0].split() == ["model", "parameters", "methods", *catalog.GPUS]


def test_recipes_of_a_model_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(["list", "Qwen/Qwen3-8B", "--gpu", "H100", "--method", "sft"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"qwen3-8b-sft-{count}xh100" for count in (1, 2, 4, 8)]
    recipe(["list", "--gpu", "rtx4090", "--gpus", "1", "--method", "dpo"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names and all(name.endswith("-dpo-1xrtx4090") for name in names)


def test_a_run_file_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(["qwen3-8b", "--gpus", "4", "--gpu", "h100"])
    shown = capsys.readouterr()
    assert from_yaml(shown.out).model.path == "Qwen/Qwen3-8B"
    assert "rankfold train --nproc 4 --config run.yaml --download\n" in shown.err
    assert shown.err.count("--download") == 3 and "--hub.download" not in shown.err


@pytest.mark.parametrize("words", ["write qwen3-8b", "qwen3-8b"])
def test_a_written_file_trains_and_launches(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe(f"{words} --gpus 8 --gpu h200 --method grpo --data my.jsonl --out run.yaml".split())
    printed = capsys.readouterr().out
    options = yaml.safe_load(Path("run.yaml").read_text())
    assert options["data"]["train"] == "my.jsonl" and options["objective"] == {"name": "grpo"}
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("    rankfold ")]
    assert [one[1] for one in commands] == ["plan", "train", "launch"]
    launch(commands[2][2:])  # which checks the file, and the layout on eight GPUs
    assert "#SBATCH --gpus-per-node=8" in Path("run.slurm").read_text()


def test_two_nodes_meet(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(["llama-3.1-70b", "--gpus", "16"])
    said = capsys.readouterr().err
    assert "rankfold train --nproc 8 --nnodes 2 --rdzv-endpoint HOST:29400 --config run.yaml" in said
    assert "--nodes 2 --gpus-per-node 8" in said


def test_a_base_stays_in_the_few_bits_of_its_checkpoint() -> None:
    """gpt-oss is released in MXFP4, so that nothing is rounded again."""
    wanted = Recipe(model=catalog.models()["gpt-oss-120b"], gpu=catalog.GPUS["h200"], count=1)
    assert "path: openai/gpt-oss-120b\n" in (text := text_of(wanted, catalog.plans()[wanted.name]))
    assert "base_dtype: stored\n" in text


def test_rows_beyond_the_context_are_named() -> None:
    assert all(model.context >= 8192 for model in catalog.models().values())
    wanted = Recipe(model=catalog.models()["phi-4"], gpu=catalog.GPUS["h100"], count=1)
    plan = catalog.plans()[wanted.name]
    assert "but the model's context is 16384 tokens" in text_of(wanted, plan, seq_length=32768)
    assert "context" not in text_of(wanted, plan, seq_length=16384)


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists: give another --out"):
        recipe(["write", "qwen3-8b", "--out", str(path)])
    assert path.read_text() == "mine"


def test_others_are_planned_now(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(["qwen3-0.6b", "--gpus", "3", "--gpu", "l40s"])
    shown = capsys.readouterr()
    assert "qwen3-0.6b-sft-3xl40s is not stored, so that it is planned now" in shown.err
    assert from_yaml(shown.out).train.global_batch_size == 18


def test_a_stored_recipe_needs_no_torch() -> None:
    code = (
        "import sys; from rankfold.recipes.command import recipe; recipe(['show', 'qwen3-8b']); recipe(['list'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("qwen3-8", "there is no recipe for qwen3-8, but for {models} other models: did you mean qwen3-8b?"),
        ("lisst", "there is no recipe for lisst, but for {models} other models: "),
        ("show qwen3-8b --gpu v100", "--gpu is v100, but one of rtx4090, "),
        ("show qwen3-8b --gpus 12", "--gpus is 12, but 1 to 8, or whole nodes of 8 up to 1024, are expected"),
        ("show qwen3-8b --gpus 0", "--gpus is 0, but 1 to 8, "),
        ("list --gpus 9", "--gpus is 9, but 1 to 8, "),
        ("show qwen3-8b --method ppo", "--method is 'ppo', "),
        ("show qwen3-8b --seq-length 1", "--seq-length is 1: give at least 2 tokens."),
        ("show llama-3.1-70b --gpu rtx4090", "does not fit 1 x RTX 4090, 24 GB with sft, nor with a base in 4 bits"),
        ("list qwen3-8b --gpus 16", "no stored recipe is so"),
    ],
)
def test_mistakes_are_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        recipe(words.split())
    text = str(refused.value)
    assert sentence.format(models=len(catalog.models())) in text and "\n" not in text


def test_what_holds_a_model_is_named() -> None:
    with pytest.raises(UserError, match=r"--gpu rtx4090 --gpus \d"):
        recipe(["show", "llama-3.1-70b", "--gpu", "rtx4090", "--gpus", "2"])
    assert command._with_command(["--help"]) == ["--help"]
