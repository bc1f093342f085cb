"""The best evaluation so far and early stopping, against transformers' EarlyStoppingCallback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.run.step_folders import best_step, checkpoint_folder, list_checkpoints, mark_best, prune
from engine.errors import UserError
from engine.training.evaluations import BestLoss, ending


def _transformers_stops_at(losses: list[float], patience: int, threshold: float) -> int | None:
    """Number of the evaluation after which transformers' Trainer stops, from 1."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

    callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    arguments = TrainingArguments(output_dir="unused", metric_for_best_model="eval_loss", greater_is_better=False)
    for number, loss in enumerate(losses, 1):
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # as Trainer does where it saves the best
            state.best_metric = loss
        if control.should_training_stop:
            return number
    return None


CASES = [
    [3.0, 2.0, 1.0, 0.5],
    [3.0, 2.0, 2.5, 2.4, 1.9],
    [3.0, 2.0, 2.5, 2.4, 2.3, 1.0],
    [1.0, 1.0, 1.0, 1.0],
    [1.0, 0.99, 0.98, 0.97, 0.96],
]


@pytest.mark.parametrize("losses", CASES)
@pytest.mark.parametrize(("patience", "delta"), [(1, 0.0), (2, 0.0), (3, 0.0)])
def test_stops_where_transformers_does(losses: list[float], patience: int, delta: float) -> None:
    best, stopped = BestLoss(), None
    for number, loss in enumerate(losses, 1):
        best.take(number, loss, min_delta=delta)
        if ending(best, target=None, patience=patience) == "patience":
            stopped = number
            break
    assert stopped == _transformers_stops_at(losses, patience, delta)


def test_a_margin_is_measured_from_the_last_improvement_that_counted() -> None:
    """Many small improvements add up to one that counts; transformers compares each with the one before it."""
    best = BestLoss()
    for step, loss in enumerate([1.0, 0.95, 0.92, 0.85]):
        best.take(step, loss, min_delta=0.1)
    assert (best.misses, best.mark, best.loss) == (0, 0.85, 0.85)
    best.take(9, 0.8, min_delta=0.1)
    assert (best.misses, best.loss, best.step) == (1, 0.8, 9)


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]) | st.just(float("nan")), max_size=8), st.integers(0, 8))
def test_a_resumed_count_goes_on_where_it_stood(losses: list[float], stop: int) -> None:
    whole, part = BestLoss(), BestLoss()
    for step, loss in enumerate(losses):
        whole.take(step, loss, min_delta=0.0)
        if step < stop:
            part.take(step, loss, min_delta=0.0)
    part = BestLoss.of_state(part.state())
    for step, loss in enumerate(losses):  # those that were counted are passed over
        part.take(step, loss, min_delta=0.0)
    assert str(part) == str(whole)


def test_the_best_checkpoint_survives(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        folder = checkpoint_folder(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    assert best_step(tmp_path) is None
    mark_best(tmp_path, 4, {"loss": 1.5})
    prune(tmp_path, keep=1)
    assert sorted(list_checkpoints(tmp_path)) == [4, 8]
    mark_best(tmp_path, 8, {"loss": 1.4})
    prune(tmp_path, keep=1)
    assert sorted(list_checkpoints(tmp_path)) == [8]
    (tmp_path / "checkpoints" / "best.json").write_text('{"step": "x"}')
    with pytest.raises(UserError, match=r"best\.json is damaged"):
        best_step(tmp_path)
