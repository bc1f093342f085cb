"""The command `rankfold`: its help, its version, what it refuses, and training by it under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from engine import __version__
from rankfold.__main__ import COMMANDS
from tests.support.commands import REPOSITORY, losses
from tests.wrong_inputs.workplace import make_place, run_here

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def rankfold(*words: str, launcher: tuple[str, ...] = (), status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the command as `python -m rankfold`; fails the test where it ends with another status."""
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "rankfold", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_alone_it_prints_its_help() -> None:
    alone = rankfold()
    assert alone.stdout.startswith("usage: rankfold ") and alone.stderr == ""
    assert rankfold("--help").stdout == alone.stdout
    for name, does in COMMANDS.items():
        assert f"\n  {name:<10}  {does}\n" in alone.stdout
        assert callable(import_module(f"rankfold.{name}").main)


def test_version() -> None:
    assert rankfold("--version").stdout == f"rankfold {__version__}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "rankfold has no command 'trian', but quickstart, train, "),
        ("--versoin", "--versoin is not an option of rankfold: did you mean --version?"),
        ("train --lr 3", "--lr is not an option: did you mean --optim.lr?"),
        ("train --help lorra", "did you mean --help lora?"),
        ("convert import --tensr 2", "--tensr is not an option of rankfold convert import: did you mean --tensor?"),
    ],
)
def test_mistakes_are_one_sentence(words: str, sentence: str) -> None:
    done = rankfold(*words.split(), status=2)
    assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sentence in done.stderr


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_help_names_the_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, usage in (
        (f"rankfold {command}", f"usage: rankfold {command} "),
        (f"{command}.py", f"usage: {command}.py "),
    ):
        monkeypatch.setattr(sys, "argv", [argv, "--help"])
        with pytest.raises(SystemExit) as ended:
            import_module(f"rankfold.{command}").main()
        text = capsys.readouterr().out
        assert ended.value.code in (0, None) and text.startswith(usage)
        assert f"rankfold {command} " in text.partition("\n\n")[2] and "tools/" not in text


@pytest.mark.distributed
def test_two_ranks_train_as_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_place(tmp_path / "place")
    place.set(train__steps=3, train__global_batch_size=2, checkpoint__dir=tmp_path / "one")
    sections: dict[str, dict[str, object]] = {}
    for name, value in place.options.items():
        section, _, option = name.partition(".")
        sections.setdefault(section, {})[option] = str(value) if isinstance(value, Path) else value
    sections["lora"]["targets"] = ["q_proj"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    assert run_here("pretrain_lora", ["--config", tmp_path / "run.yaml"], capsys).status == 0
    changed = ["--config", str(tmp_path / "run.yaml"), "--checkpoint.dir", str(tmp_path / "two")]
    both = rankfold("train", *changed, "--parallel.tensor", "2", launcher=TORCHRUN)
    assert "layout: 2 ranks, tensor 2" in both.stderr and both.stderr.count("\ndone\n") == 1
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    # float32 sums of two halves in another order
    assert len(one) == 3 and one == pytest.approx(two, rel=1e-5)


@pytest.mark.distributed
def test_a_refusal_under_torchrun_is_said_once(tmp_path: Path) -> None:
    place = make_place(tmp_path / "place")
    refused = rankfold("train", *place.arguments(), "--parallel.tensor", "3", launcher=TORCHRUN, status=1)
    said = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and said[0].startswith("error: The run has 2 ranks and parallel.tensor 3 x "), refused.stderr
    assert "Traceback" not in refused.stderr.partition("torch/distributed/")[0]
