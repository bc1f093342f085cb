"""What a run says when it is started again: of changed options, of the learning rate, of being complete."""

from __future__ import annotations

import json
import shutil

import pytest

from engine.config.load import parse_config, to_yaml
from engine.config.resume_rules import changes
from engine.telemetry.format import short_path
from tests.small_runs.conftest import SmallRuns
from tests.support.commands import losses, options
from tests.wrong_inputs.workplace import run_here


def _half(run: SmallRuns, **options: object) -> None:
    """Six steps, of which the first three are kept."""
    run(train__steps=6, checkpoint__every=3, optim__warmup_steps=0, **options)
    shutil.rmtree(run.folder / "checkpoints" / "step_00000006")


def test_the_same_command_says_nothing_of_changes(run: SmallRuns) -> None:
    _half(run)
    said = run(train__micro_batch_size=1, log__every=2)
    assert "resuming from" in said and "after step 3" in said
    assert "warning:" not in said and "done" in said


def test_each_changed_option_is_a_line(run: SmallRuns) -> None:
    _half(run)
    said = run(optim__lr=0.02, lora__dropout=0.25, data__overlong="drop", train__seed=5)
    for line in (
        "optim.lr 0.01 -> 0.02",
        "lora.dropout 0 -> 0.25",
        "data.overlong truncate -> drop",
        "train.seed 1234 -> 5",
    ):
        assert f"warning: changed since step_00000003: {line}\n" in said
    assert (
        "warning: the learning rate of step 4 is 0.01, where the checkpoint's own schedule has 0.005 "
        "(step 3 had 0.0075; 6 steps before, 6 now)\n"
    ) in said
    assert said.count("warning:") == 5


def test_rates_by_pattern_are_said_and_resumed(run: SmallRuns) -> None:
    """The second half of a run has the losses of the whole one; a changed rate, or one added to an older run, is a
    line."""
    said = run(
        train__steps=6, checkpoint__every=3, checkpoint__keep=0, trainable="lm_head", lora__exclude="lm_head",
        optim__lr_pattern="{lm_head: 2e-3, lora_B: 0.1}",
    )  # fmt: skip
    line = "learning rates: 0.002 for lm_head (768 parameters), 0.1 for lora_B ("
    assert line in said, said[said.find("learning rates") :][:200]
    assert "), 0.01 for all else (" in said
    whole = losses(run.folder)
    shutil.rmtree(run.folder / "checkpoints" / "step_00000006")
    assert "warning:" not in run()
    assert losses(run.folder) == whole
    shutil.rmtree(run.folder / "checkpoints" / "step_00000006")
    said = run(optim__lr_pattern="{lm_head: 1e-3}")
    assert "optim.lr_pattern {'lm_head': 0.002, 'lora_B': 0.1} -> {'lm_head': 0.001}" in said
    assert losses(run.folder) != whole
    before = to_yaml(parse_config(options({"model.path": "m"})))
    older = "".join(line for line in before.splitlines(keepends=True) if "lr_pattern" not in line)
    now = to_yaml(parse_config(options({"model.path": "m", "optim.lr_pattern": "{lm_head: 1e-3}"})))
    assert older != before and [str(change) for change in changes(older, now)] == [
        "optim.lr_pattern null -> {'lm_head': 0.001}"
    ]


def test_a_longer_run_has_another_learning_rate(run: SmallRuns) -> None:
    run(train__steps=6, optim__schedule="linear")
    said = run(train__steps=12)
    assert "warning: changed since step_00000006: train.steps 6 -> 12\n" in said
    assert (
        "the learning rate of step 7 is 0.005, where the checkpoint's own schedule has 0 (step 6 had 0.00167; 6 "
        in said
    )
    # epochs: three rows a step are one epoch
    said = run(train__steps=None, train__epochs=5, train__global_batch_size=1)
    assert "train.steps 12 -> null" in said and "train.epochs null -> 5" in said and "12 steps before, 15 now" in said


def test_a_constant_rate_does_not_change_with_the_steps(run: SmallRuns) -> None:
    run(train__steps=6, optim__schedule="constant")
    said = run(train__steps=7)
    assert "train.steps 6 -> 7" in said and "learning rate of step" not in said


@pytest.mark.parametrize("metrics", ["metrics.jsonl", "null"])
def test_a_finished_run_is_left_as_it_is(metrics: str, run: SmallRuns) -> None:
    run(train__steps=2, data__validation=run.place.train, train__eval_every=1, log__metrics=metrics)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.name != "run.lock"}
    said = run()
    assert (
        "this run is complete (step 2 of 2): nothing to do; choose another checkpoint.dir to train anew, or raise "
        "train.steps to go on\n"
    ) in said
    assert "reading weights" not in said and "done" not in said and "speed" not in said
    assert {path: path.read_bytes() for path in before} == before
    assert "resuming" in run(train__steps=3)


def test_an_evaluation_that_was_missed_is_made_up_for(run: SmallRuns) -> None:
    run(train__steps=2, checkpoint__every=2)
    said = run(data__validation=run.place.train)
    assert "step 2: evaluation loss" in said
    assert "  evaluation loss" in said and said.count(" -> ") == 1, "an arrow needs two evaluations"
    assert "this run is complete" in run()


def test_early_stopping(run: SmallRuns) -> None:
    """A learning rate that harms: the first evaluation stays the best."""
    options = {"data__validation": run.place.train, "train__eval_every": 2, "train__early_stopping_patience": 3}
    said = run(train__steps=40, optim__lr=5.0, optim__schedule="constant", guards__spike_policy="off", **options)
    losses = _evaluations(run)
    assert len(losses) >= 4 and min(list(losses.values())[-3:]) >= min(losses.values()) and max(losses) < 40
    assert "early stopping (train.early_stopping_patience)" in said
    assert (run.folder / "checkpoints" / f"step_{max(losses):08d}").is_dir()
    said = run()
    assert f"this run is complete (step {max(losses)}, early stopping after 3 evaluations without improvement)" in said


def test_patience_is_counted_across_a_restart(run: SmallRuns) -> None:
    options = {"data__validation": run.place.train, "train__eval_every": 2, "train__early_stopping_patience": 4}
    run(train__steps=40, optim__lr=5.0, optim__schedule="constant", guards__spike_policy="off", **options)
    whole = _evaluations(run)
    run(checkpoint__dir=run.folder.with_name("other"), checkpoint__every=4, checkpoint__keep=0)
    for path in (run.folder / "checkpoints").iterdir():
        if path.name > "step_00000004":
            shutil.rmtree(path)
    assert "after step 4" in run()
    assert _evaluations(run) == whole


def test_the_best_checkpoint_is_kept_and_exported(run: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(
        data__validation=run.place.train, train__eval_every=2, train__steps=12, optim__lr=20.0,
        optim__schedule="constant", optim__warmup_steps=8, checkpoint__keep=1, checkpoint__keep_best="true",
        guards__spike_policy="off", optim__clip_grad_norm=0,
    )  # fmt: skip
    losses = _evaluations(run)
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 12, losses
    kept = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    assert kept == [f"step_{best:08d}", "step_00000012"]
    kept_in = short_path(run.folder / "checkpoints" / f"step_{best:08d}")
    line = f"best evaluation loss   {losses[best]:.4f} (step {best}), kept in {kept_in}"
    assert line in said
    out = run.folder.with_name("best")
    arguments = ["export", "--source", run.folder, "--out", out, "--format", "peft", "--no-proof"]
    seen = run_here("convert", [*arguments, "--step", "best"], capsys)
    assert seen.status == 0, seen.printed
    assert run_here("convert", ["inspect", run.folder], capsys).printed.count(f"best step      {best}, with") == 1
    other = run_here("convert", [*arguments[:3], "--out", f"{out}-2", *arguments[5:], "--step", str(best)], capsys)
    assert other.status == 0, other.printed
    files = [(folder / "adapter_model.safetensors").read_bytes() for folder in (out, out.with_name("best-2"))]
    assert files[0] == files[1]


def _evaluations(run: SmallRuns) -> dict[int, float]:
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record["eval_loss"] for record in map(json.loads, lines) if "eval_loss" in record}


def test_the_last_step_is_reported_where_log_every_leaves_it_out(run: SmallRuns) -> None:
    """Also where it is saved in turn, which reads the figures of the step."""
    run(train__steps=4, log__every=3, checkpoint__every=2)
    assert [*losses(run.folder)] == [3, 4]


def test_a_copy_of_a_tied_head_is_resumed_and_exported(run: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    """The second half of a run has the losses of the whole one. A run that trained one matrix for both, as all did
    before there was a choice, is not continued with a copy, and the reverse."""
    run.place.change_config(tie_word_embeddings=True)
    run.place.change_tensors(lambda tensors: tensors.pop("lm_head.weight"))
    said = run(train__steps=6, checkpoint__every=3, checkpoint__keep=0, trainable="lm_head", lora__exclude="lm_head")
    assert "a copy of lm_head is trained, as under PEFT" in said
    whole = losses(run.folder)
    shutil.rmtree(run.folder / "checkpoints" / "step_00000006")
    assert "warning:" not in run() and losses(run.folder) == whole
    out = run.folder.with_name("out")
    for form in (("peft",), ("hf", "--merge")):
        arguments = ["export", "--source", run.folder, "--out", out / form[0], "--format", *form]
        assert run_here("convert", arguments, capsys).status == 0
    words = "set lora.ensure_weight_tying to false"
    assert words in run(status=2, train__steps=9, lora__ensure_weight_tying="true")
    together = run.folder.with_name("together")
    run(train__steps=3, checkpoint__dir=together)
    words = "was trained with lora.ensure_weight_tying true, but this run has false"
    assert words in run(status=2, train__steps=6, lora__ensure_weight_tying="false")
