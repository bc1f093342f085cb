"""tools/plan.py schedule: what it prints is what the formulas say, and it refuses with one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UserError
from rankfold.planning.schedule import ScheduleOptions, make_plan, report

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/plan.py", "schedule", *map(str, arguments)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def comparison(text: str) -> dict[str, list[str]]:
    """Schedule -> the cells of its row in the last table."""
    table = text.split("\n\n")[-1].splitlines()
    assert table[0].split() == [
        "schedule",
        "stages",
        "per",
        "rank",
        "time",
        "bubble",
        "waits",
        "inside",
        "peak",
        "activations",
    ]
    rows = [
        line.split() for line in table[1:] if not line.startswith(("bubble:", "peak")) and "not possible" not in line
    ]
    return {row[0]: row[1:] for row in rows}


def test_the_command_for_lora() -> None:
    """4 ranks, 8 micro-batches, F = I = 1 and W = 0: 1F1B takes (8 + 3) 2; two stages a rank halve its bubble."""
    done = command("--pipeline", 4, "--virtual", 2, "--microbatches", 8)
    assert (done.returncode, done.stderr) == (0, "")
    title, grid, ranks, _ = done.stdout.strip("\n").split("\n\n")
    assert title == "lora: 4 ranks, 2 stages each, 8 micro-batches"
    assert grid.splitlines()[1] == (
        "rank 0 F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 ......f4 b2 f5 b3 f6 B0 f7 B1 B2 B3 "
        "...b4 ...b5 ...b6 ...b7 B4 B5 B6 B7"
    )
    assert max(map(len, grid.splitlines())) <= 120
    assert [line.split() for line in ranks.splitlines()[1:]] == [
        [str(rank), f"{rank},{rank + 4}", "-", "16.00", "15.8%", f"{3 - rank}.00", f"{5.5 - rank:.2f}"]
        for rank in range(4)
    ]
    assert comparison(done.stdout) == {
        "1f1b": ["1", "22.00", "27.3%", "6.00", "4.00"],
        "interleaved": ["2", "19.00", "15.8%", "3.00", "5.50"],
        "zb_h1": ["1", "22.00", "27.3%", "6.00", "4.00"],
        "zb_v": ["2", "19.00", "15.8%", "3.00", "4.00"],
        "lora": ["2", "19.00", "15.8%", "3.00", "5.50"],
    }


def test_training_in_full() -> None:
    """F = I = W = 1: bubbles of 9, 4.5, 3 and, beside a late start of (p - 1) / 2, none; 24 is the work."""
    text = report(ScheduleOptions(pipeline=4, microbatches=8, virtual=2, schedule="zb_v", weight_grad=1))
    assert comparison(text) == {
        "1f1b": ["1", "33.00", "27.3%", "9.00", "4.00"],
        "interleaved": ["2", "28.50", "15.8%", "4.50", "5.50"],
        "zb_h1": ["1", "27.00", "11.1%", "3.00", "4.00"],
        "zb_v": ["2", "25.50", "5.9%", "0.00", "4.00"],
        "lora": ["2", "28.50", "15.8%", "4.50", "5.50"],
    }


def test_layers_head_and_frozen_layers() -> None:
    """8 layers on 2 ranks, 2 without backward, a head of one layer, all of it in forward. By hand, with p / L = 1/4."""
    options = ScheduleOptions(pipeline=2, microbatches=1, layers=8, head_cost=1, first_trainable_layer=2)
    plan = make_plan(options, "lora", 1, None)
    assert plan.layers == (5, 3)
    assert plan.costs.forward == (5 / 4, 3 / 4 + 2 / 4) and plan.costs.input_grad == (3 / 4, 3 / 4)
    assert plan.simulation.makespan == 4 and plan.simulation.peak_activations == (3 / 4, 3 / 4)
    given = make_plan(options, "lora", 1, "2,6")
    assert given.layers == (2, 6) and given.schedule.first_trainable_stage == 1
    assert given.simulation.busy == (0.5, 6 / 4 + 2 / 4 + 6 / 4)
    trained = ScheduleOptions(pipeline=2, microbatches=1, layers=8, head_cost=1, trainable_head=True)
    assert make_plan(trained, "lora", 1, "4,4").costs.input_grad == (1, 5 / 4)


def test_schedules_that_are_not_possible_are_named() -> None:
    text = report(ScheduleOptions(pipeline=4, microbatches=4, layers=6))
    assert set(comparison(text)) == {"1f1b", "zb_h1", "lora"}
    assert "zb_v is not possible: 6 layers cannot be split into 8 stages" in text


def test_a_split_that_the_user_wrote() -> None:
    """It is used by all schedules with as many stages; the others split for themselves."""
    text = report(ScheduleOptions(pipeline=2, microbatches=4, layers=6, split="4,2"))
    ranks = [line.split() for line in text.split("\n\n")[2].splitlines()]
    assert [row[2] for row in ranks] == ["layers", "4", "2"]
    times = {name: cells[1] for name, cells in comparison(text).items()}
    # 4/3 of the even share on the first rank, 4 micro-batches of F + I; the other rank fits beside it
    assert times["1f1b"] == times["lora"] == f"{4 / 3 * 4 * 2:.2f}"
    assert times["interleaved"] == times["zb_v"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pipeline", 0], "error: --pipeline is 0: give at least 1 rank."),
        (["--pipeline", 4, "--virtual", 3, "--schedule", "zb_v"], "error: zb_v has two stages a rank, not 3: give 2 "
         "virtual stages, or choose another schedule."),
        (["--pipeline", 4, "--layers", 30, "--split", "8,8,8"], "error: '8,8,8' splits the layers into 3 stages, but "
         "there are 4: give one each."),
        (["--pipeline", 4, "--head-cost", 2], "error: --head-cost counts in layers: give --layers too."),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments: list, sentence: str) -> None:
    done = command("--microbatches", 8, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence + "\n")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"forward": 0}, ["--forward is 0", "above 0"]),
        ({"p2p": -1}, ["--p2p is -1"]),
        ({"width": 10}, ["--width is 10", "40"]),
        ({"layers": 8, "first_trainable_layer": 9}, ["--first-trainable-layer is 9", "--layers is 8"]),
        ({"layers": 8, "first_trainable_layer": 8}, ["nothing to train", "--trainable-head"]),
        ({"split": "4,4"}, ["--split", "--layers"]),
    ],
)
def test_impossible_options(wrong: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        ScheduleOptions(**{"pipeline": 2, "microbatches": 4, **wrong})
    assert all(word in str(caught.value) for word in words)


def test_help_is_quick() -> None:
    """No torch for --help, nor for a plan."""
    code = "import sys, rankfold.plan; rankfold.plan.COMMANDS; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    done = command("--help")
    assert done.returncode == 0 and all(f"--{name}" in done.stdout for name in ("microbatches", "head-cost", "split"))
