"""The version and the digest of the weights that sampled a token: computed, stored, verified, and limited in age."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.load import load_config
from engine.errors import UserError
from engine.rollouts.buffer import FILE, Buffer
from engine.rollouts.data.completions import CompletionColumns
from engine.rollouts.rules import check_rollouts
from engine.rollouts.sampler import Sampled
from engine.rollouts.source import RolloutSource
from engine.rollouts.weights import Weights, _sum, trained_digest
from tests.support.commands import options
from tests.support.rollout_runs import prepared, records, rollout_settings, run_here, texts
from tests.support.spawning import spawn
from tests.support.sweeps import sampled


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (3, 4, 5), (0, 3)])
def test_the_sum_of_parts_is_that_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ranges = [(0, size) for size in shape]
    expected = int(_sum(whole, ranges, shape))
    for dim, size in enumerate(shape):
        for cut in range(size + 1):
            parts = [ranges[:dim] + [place] + ranges[dim + 1 :] for place in ((0, cut), (cut, size))]
            tensors = whole.split([cut, size - cut], dim)
            sums = [_sum(one, part, shape) for one, part in zip(tensors, parts, strict=True)]
            assert int(sum(sums)) == expected
    for place in range(whole.numel()):
        changed = whole.clone()
        changed.view(-1)[place] = torch.nextafter(changed.view(-1)[place], torch.tensor(9.0))
        assert int(_sum(changed, ranges, shape)) != expected
    if whole.numel() > 1:
        assert int(_sum(whole.flatten().roll(1).view(shape), ranges, shape)) != expected


def drawn_digest(settings: dict[str, object]) -> str:
    """The digest of a run's adapter, whose elements are functions of their places."""
    with ExitStack() as opened:
        run = prepared(settings, opened)
        before = trained_digest(run.training)
        for shard in run.training.optimizer.flat.master_shards():
            shard.tensor.mul_(3)
        after = trained_digest(run.training)
    assert before != after
    return before + after


LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor": (2, {"parallel.tensor": 2}),
    "pipeline": (2, {"parallel.pipeline": 2}),
    "data": (2, {}),
    "context": (2, {"parallel.context": 2}),
    "parameters": (2, {"parallel.shard": "parameters"}),
    "tensor, optimizer": (4, {"parallel.tensor": 2, "parallel.shard": "optimizer"}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", sampled(LAYOUTS, ("tensor, optimizer",)))
def test_a_digest_is_the_same_in_every_layout(layout: str, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    settings = rollout_settings(tmp_path, trainable="embed_tokens,norm") | {"objective.beta": 0}
    expected = drawn_digest(settings)
    assert spawn(drawn_digest, world=world, args=(settings | changes,), timeout=90) == [expected] * world


def test_tokens_keep_their_weights_and_a_resumed_run_verifies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = rollout_settings(
        tmp_path, train__steps=1, rollout__steps_per_generation=2, train__global_batch_size=8, rollout__max_staleness=1
    )
    run_here(settings)
    settings["train.steps"] = 3
    read, path = TrainingCheckpoint.beside, tmp_path / "run" / "checkpoints" / "step_00000001" / FILE

    def forged(checkpoint: TrainingCheckpoint, name: str) -> bytes:
        buffer = Buffer.from_bytes(read(checkpoint, name), path, generation=0, num_steps=2, iterations=1)
        assert [one.version for one in buffer.weights] == [0] and len(buffer.weights[0].digest) == 32
        assert all((one.token_versions == 0).all() for one in buffer.completions)
        return replace(buffer, weights=(Weights(0, "0" * 32),)).to_bytes()

    with monkeypatch.context() as changes:
        changes.setattr(TrainingCheckpoint, "beside", forged)
        words = (
            f"{path} is of the weights of step 0 with the digest 000000000000, and the run's record of that step says "
        )
        with pytest.raises(UserError, match=f"{re.escape(words)}[0-9a-f]{{12}}: use another"):
            run_here(settings)
    run_here(settings)
    found = records(tmp_path / "run")
    assert [(one["staleness/mean"], one["staleness/max"]) for one in found] == [(0, 0), (1, 1), (0, 0)]
    assert all(one["staleness/masked_tokens"] == 0 for one in found)
    lines = [str(one["completion/1"]) for one in texts(tmp_path / "run")]
    shown = [re.search(r"weights of step (\d) \(([0-9a-f]{12})\)", line) for line in lines]
    assert [one[1] for one in shown if one] == ["0", "2"] and len({one[2] for one in shown if one}) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.steps_per_generation": 3}, "rollout.max_staleness is 1, and with .* is 2 behind .* to 2 or more"),
        ({"objective.num_iterations": 2, "rollout.steps_per_generation": 2}, "is 3 behind"),
        ({"rollout.overlap": "true", "rollout.server": "http://a", "rollout.steps_per_generation": 2}, "is 3 behind"),
        ({"rollout.overlap": "true", "rollout.server": "http://a"}, None),
        ({"rollout.steps_per_generation": 2}, None),
    ],
)
def test_a_limit_that_is_always_exceeded_is_refused(changes: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    given = rollout_settings(tmp_path, rollout__max_staleness=1) | {"train.global_batch_size": 8} | changes
    if words is None:
        check_rollouts(load_config(options(given)))
        return
    with pytest.raises(UserError, match=words):
        load_config(options(given))


def mixed(run: Any) -> tuple[RolloutSource, Buffer]:
    """A buffer of a run whose completions were sampled by the weights of steps 3 and 5, some by both."""
    source = run.source
    next(iter(source.stream(0, 0, 1)))
    assert isinstance(source, RolloutSource) and source.buffer is not None
    generator = np.random.default_rng(2)
    completions = []
    for place, one in enumerate(source.buffer.completions):
        first = (0, len(one.tokens), int(generator.integers(len(one.tokens) + 1)))[place % 3]
        versions = np.where(np.arange(len(one.tokens)) < first, 3, 5).astype(np.int32)
        completions.append(replace(one, versions=versions))
    weights = (Weights(3, "03" * 16), Weights(5, "05" * 16))
    return source, replace(source.buffer, completions=tuple(completions), weights=weights)


def test_a_buffer_with_a_version_too_few_is_refused() -> None:
    one = Sampled(tokens=np.array([3, 4], np.int32), logps=np.zeros(2, np.float32), truncated=False).sampled_by(3)
    shorter = replace(one, versions=one.token_versions[:1])
    buffer = Buffer(
        generation=0, prompts=np.arange(1), completions=(one, shorter), rewards_NF=np.zeros((2, 1)),
        advantages=np.zeros(2, np.float32), uniform=np.zeros(1, np.bool_), num_steps=1, iterations=1,
        weights=(Weights(3, "03" * 16),),
    )  # fmt: skip
    with pytest.raises(UserError, match="completion 1 has no version for each token"):
        Buffer.from_bytes(buffer.to_bytes(), Path("b"), generation=0, num_steps=1, iterations=1)


def test_tokens_that_are_too_old_are_no_targets(tmp_path: Path) -> None:
    with ExitStack() as opened:
        run = prepared(rollout_settings(tmp_path, rollout__max_staleness=1, train__global_batch_size=8), opened)
        source, buffer = mixed(run)
        source._ledger.keep(*buffer.weights)
        rows = source._rows(buffer, 0)
        dataset = source._dataset(buffer, range(2), taken=0)
        later = source._dataset(buffer, range(2), taken=2)
    versions = [one.token_versions for one in buffer.completions]
    old = sum(int((one == 3).sum()) for one in versions)
    assert rows.figures["staleness/masked_tokens"] == old and rows.figures["staleness/max"] == 2
    assert rows.targets == sum(map(len, versions)) - old
    # completions that are old from end to end are no documents, and of the others the new tokens alone are targets
    kept = [one for one in versions if (one == 5).any()]
    assert len(dataset.lengths) == len(kept) < len(versions)
    columns = dataset.extra(CompletionColumns)
    assert columns is not None
    for end, one in zip((dataset.starts + dataset.lengths).tolist(), kept, strict=True):
        assert dataset.targets[end - len(one) : end].tolist() == (one == 5).tolist()
    # nothing is left of a step that is two steps later, and its loss is 0
    assert len(later.lengths) == 1 and not later.targets.any()
