"""A run of GRPO on a model with states is killed while it samples, and its buffers of rollouts are damaged.

States live beside the pages of keys and values, for as long as a rollout: no checkpoint has them. A resumed run samples
again from the weights that it has, or continues inside the buffer that its checkpoint keeps, with the same bits; or it
refuses in one sentence.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.checkpoint.manifest import MANIFEST, sign
from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.errors import UserError
from engine.kernels.checksum import checksum_of
from engine.rollouts.buffer import FILE
from tests.faults.test_killed_rollouts import MOMENTS, kill
from tests.support.family_models import make_model
from tests.support.rollout_runs import final_state, records, rollout_settings, run_here
from tests.support.spawning import RankFailure, spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

STEPS, INSIDE = 4, 1
"""Two steps are trained from each buffer, so that the first checkpoint lies inside one."""
MODELS = ("qwen3.5", "granite hybrid", "lfm2")


def settings_of(name: str, folder: Path) -> dict[str, object]:
    """A run of the hybrid on prompts of sums, with a checkpoint after every step."""
    settings = rollout_settings(
        folder,
        train__steps=STEPS,
        objective__num_iterations=2,
        checkpoint__every=1,
        checkpoint__keep=0,
        lora__dropout=0.1,
    )
    vocabulary = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    make_model(name, folder / "hybrid", vocab_size=vocabulary, max_position_embeddings=128)
    for file in (folder / "model").iterdir():
        if file.name.startswith(("tokenizer", "special")):
            shutil.copy(file, folder / "hybrid" / file.name)
    return settings | {"model.path": folder / "hybrid", "model.init": "checkpoint", "model.dtype": "float32"}


class Whole(NamedTuple):
    """A run that has ended, and the options of it."""

    settings: dict[str, object]
    run: Path


@pytest.fixture(scope="module", params=sampled(MODELS, ["qwen3.5"]))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    settings = settings_of(request.param, folder)
    run_here(settings)
    return Whole(settings, folder / "run")


def _ends_as(whole: Whole, run: Path) -> None:
    expected, found = final_state(whole.run, STEPS), final_state(run, STEPS)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    rewards = [one["reward"] for one in records(whole.run)]
    assert [one["reward"] for one in records(run)] == rewards[-len(records(run)) :]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["later rollout", "inside a buffer", "first save"])
def test_a_killed_run_ends_with_the_same_bits(moment: str, whole: Whole, tmp_path: Path) -> None:
    what, number = {**MOMENTS, "later rollout": ("decode", 9), "inside a buffer": ("step", 2)}[moment]
    settings = whole.settings | {"checkpoint.dir": tmp_path / "run"}
    with pytest.raises(RankFailure, match="died with exit code -9"):
        spawn(kill, world=1, args=(settings, what, number), timeout=100)
    run_here(settings)
    assert len(records(tmp_path / "run")) == STEPS
    _ends_as(whole, tmp_path / "run")


def _until(whole: Whole, step: int, run: Path) -> Path:
    """Copies the checkpoint of a step to another run, and returns its folder there."""
    shutil.copytree(checkpoint_folder(whole.run, step), checkpoint_folder(run, step))
    return checkpoint_folder(run, step)


@pytest.mark.parametrize("step", sampled([INSIDE, INSIDE + 1], [INSIDE]))
def test_it_goes_on_inside_a_buffer_and_between_two(step: int, whole: Whole, tmp_path: Path) -> None:
    settings = whole.settings | {"checkpoint.dir": tmp_path / "run"}
    assert (_until(whole, step, tmp_path / "run") / FILE).is_file() == (step == INSIDE)
    run_here(settings)
    _ends_as(whole, tmp_path / "run")


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    """That of another run of the same prompts and rewards."""
    arrays = load_file(path)
    arrays["tokens"] = np.flip(arrays["tokens"]).copy()
    save_file(arrays, path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-7]), "is damaged"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is damaged"),
    "flipped": (_flipped, "is damaged"),
    "foreign": (_foreign, "is damaged"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is missing"),
}


@pytest.mark.parametrize("kind", sampled(DAMAGE, ["missing", "foreign"]))
def test_a_damaged_buffer_is_refused(kind: str, whole: Whole, tmp_path: Path) -> None:
    damage, words = DAMAGE[kind]
    settings = whole.settings | {"checkpoint.dir": tmp_path / "run"}
    damage(_until(whole, INSIDE, tmp_path / "run") / FILE)
    with pytest.raises(UserError, match=f"{FILE} {words}") as caught:
        run_here(settings)
    assert str(caught.value).endswith(".") and str(caught.value).isprintable()


def _without(name: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda arrays: arrays.pop(name)


def _with(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda arrays: arrays.update({name: np.ascontiguousarray(change(arrays[name]))})


UNFIT: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "without tokens": (_without("tokens"), "is no buffer of rollouts"),
    "fewer log-probabilities": (_with("sampled_logps", lambda one: one[:-1]), "log-probability for each token"),
    "tokens as floats": (_with("tokens", lambda one: one.astype(np.float32)), "has no tokens"),
    "an empty completion": (_with("lengths", lambda one: one * 0), "has no tokens"),
    "fewer rewards": (_with("rewards", lambda one: one[:-1]), "rewards is float64"),
    "fewer columns of rewards": (_with("rewards", lambda one: one[:, :1]), "1 rewards of a completion"),
    "no number": (_with("advantages", lambda one: one * np.float32("nan")), "advantages are not finite"),
    "other prompts": (_with("prompts", lambda one: one + 10**6), "prompts that data.train does not have"),
    "tokens of another model": (_with("tokens", lambda one: one + 10**6), "tokens that the model does not have"),
    "fewer prompts": (lambda arrays: arrays.update(prompts=arrays["prompts"][:-1]), "completions of"),
}


@pytest.mark.parametrize("kind", sampled(UNFIT, ["fewer log-probabilities", "other prompts"]))
def test_a_buffer_of_something_else_is_refused(kind: str, whole: Whole, tmp_path: Path) -> None:
    """With a checksum that is right, so that only its content can give it away."""
    change, words = UNFIT[kind]
    settings = whole.settings | {"checkpoint.dir": tmp_path / "run"}
    folder = _until(whole, INSIDE, tmp_path / "run")
    arrays = load_file(folder / FILE)
    change(arrays)
    save_file(arrays, folder / FILE)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    del manifest["digest"]
    manifest["training"]["beside"][FILE] = checksum_of((folder / FILE).read_bytes())
    (folder / MANIFEST).write_bytes(sign(json.dumps(manifest)))
    with pytest.raises(UserError, match=words) as caught:
        run_here(settings)
    assert str(caught.value).endswith(".") and FILE in str(caught.value)
