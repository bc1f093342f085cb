"""Policy gradients on rows that have each prompt once, against TRL's GRPOTrainer, in fp32 and on several layouts.

As `tests.parity.test_trl_grpo`, with prompts so long that they are shared; B is drawn, and adapters move.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.data import prefixes
from tests.distributed.sharded_runs import assemble
from tests.parity.grpo_training import (
    STEPS,
    Found,
    Job,
    engine_ranks,
    engine_settings,
    engine_steps,
    save_start,
    start_adapter,
    trl_steps,
)
from tests.parity.test_trl_grpo import BALANCE, CANCELS, JOBS, relative
from tests.parity.trl_training import NEEDS_TRL
from tests.support.sweeps import sampled

pytestmark = NEEDS_TRL

SHARED = [
    name
    for name, job in JOBS.items()
    if not name.startswith(("balanced", "moving"))
    and job.settings["loss_type"] != "bnpo"
    and "top_entropy_quantile" not in job.settings
    and job.parts == 1
]
QUICK = ["tools dapo twice", "gspo twice", "entropy", "masked dapo", "token_mask vespo"]
FEW, ROW = 4, 80


def long_settings(folder: Path, job: Job) -> dict[str, object]:
    """The engine's options, with rows that a group fits into; one is a micro-batch."""
    return {**engine_settings(folder, job), "data.seq_length": ROW, "train.micro_batch_size": 1}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    save_start(folder, prompts=(19, 26))
    return folder


@cache
def theirs(workspace: Path, name: str, steps: int) -> Found:
    return trl_steps(workspace, JOBS[name], steps, workspace / "trl")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of tokens that each data set saved."""
    saved: list[float] = []
    plain = prefixes.with_shared_prefixes

    def counted(dataset: Any, **options: Any) -> Any:
        found = plain(dataset, **options)
        saved.append(1 - float(found.row_lengths.sum() / dataset.row_lengths.sum()))
        return found

    monkeypatch.setattr(prefixes, "with_shared_prefixes", counted)
    return saved


@pytest.mark.parametrize("name", sampled(SHARED, QUICK))
def test_losses_and_gradients_are_trls(name: str, workspace: Path, shared: list[float]) -> None:
    job, expected = JOBS[name], theirs(workspace, name, FEW)
    losses, _, gradients, _ = engine_steps(workspace, long_settings(workspace, job), FEW, job.tools)
    assert min(shared) > 0.35, "prompts were not shared"
    looser = 5 if job.settings["loss_type"] == "vespo" else 1
    assert losses == pytest.approx(expected.losses, rel=1e-5, abs=CANCELS * looser)
    for ours, theirs_ in zip(gradients, expected.gradients, strict=True):
        found = assemble([ours])
        errors = {key: relative(found[key], value) for key, value in theirs_.items()}
        print(f"{name}: largest gradient deviation {max(errors.values()):.1e}")
        assert max(errors.values()) < 1e-5 * looser, sorted(errors.items(), key=lambda item: -item[1])[:3]


LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one-process": (1, {}),
    "packed": (1, {"data.packing": "true", "data.seq_length": 128}),
    "two rows": (1, {"train.micro_batch_size": 2}),
    "recomputed": (1, {"memory.recompute": "full"}),
    "reference kernels": (1, {"model.kernels": "reference"}),
    "tensor-2": (2, {"parallel.tensor": 2}),
    "sequence-2": (2, {"parallel.tensor": 2, "parallel.sequence": "true"}),
    "pipeline-2": (2, {"parallel.pipeline": 2}),
    "context-2": (2, {"parallel.context": 2}),
    "context-2, ulysses": (2, {"parallel.context": 2, "parallel.context_method": "ulysses"}),
    "context-2, packed": (2, {"parallel.context": 2, "data.packing": "true", "data.seq_length": 128}),
    "data-2, sharded optimizer": (2, {"parallel.shard": "optimizer"}),
    "data-2, sharded parameters": (2, {"parallel.shard": "parameters"}),
    "tensor-2, context-2": (4, {"parallel.tensor": 2, "parallel.context": 2}),
    "pipeline-2, data-2, sharded": (4, {"parallel.pipeline": 2, "parallel.shard": "parameters"}),
}
RUNS = [("gspo twice", layout) for layout in LAYOUTS] + [("dapo twice", layout) for layout in LAYOUTS]
QUICK_RUNS = [("gspo twice", "packed")]


@pytest.mark.parametrize(("name", "layout"), sampled(RUNS, QUICK_RUNS))
def test_whole_trainings_end_with_trls_adapter(name: str, layout: str, workspace: Path) -> None:
    job, expected = JOBS[name], theirs(workspace, name, STEPS)
    world, changes = LAYOUTS[layout]
    settings = {**long_settings(workspace, job), **changes}
    ranks = engine_ranks(workspace, settings, STEPS, world)
    for losses, *_ in ranks:
        assert losses == pytest.approx(expected.losses, rel=1e-5, abs=CANCELS)
    found = assemble([rank[2][0] for rank in ranks])
    largest = max(relative(found[key], value) for key, value in expected.gradients[0].items())
    found = assemble([rank[3] for rank in ranks])
    errors = {key: relative(found[key], value) for key, value in expected.adapter.items()}
    start = start_adapter(workspace)
    moved = min(relative(value, start[key]) for key, value in expected.adapter.items())
    print(f"| {name} | {layout} | {largest:.1e} | {max(errors.values()):.1e} | {moved:.1e} |")
    assert largest < 1e-5 and moved > 1e-2
    assert max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:3]


BALANCED: dict[str, tuple[int, dict[str, object]]] = {
    "one-process": (1, {}),
    "experts-2": (2, {"parallel.expert": 2}),
    "pipeline-2": (2, {"parallel.pipeline": 2}),
    "context-2": (2, {"parallel.context": 2}),
    "tensor-2": (2, {"parallel.tensor": 2, "parallel.sequence": "true"}),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_start(folder, experts=True, prompts=(19, 26))
    return folder


@pytest.mark.parametrize("layout", sampled(BALANCED, ["one-process"]))
def test_auxiliary_loss_counts_shared_tokens_as_trl_does(layout: str, mixture: Path) -> None:
    """A prompt's token counts once for each completion: TRL computes it with each of them."""
    job = replace(JOBS["dapo"], settings={**JOBS["dapo"].settings, "beta": 0.3, "router_aux_loss_coef": BALANCE})
    JOBS["balanced, shared"] = job
    expected = theirs(mixture, "balanced, shared", FEW)
    world, changes = BALANCED[layout]
    settings = {**long_settings(mixture, job), **changes}
    ranks = engine_ranks(mixture, settings, FEW, world)
    for losses, figures, *_ in ranks:
        aux = [one["router_aux_loss"] for one in figures]
        assert aux == pytest.approx([one["aux_loss"] for one in expected.figures], rel=1e-5)
        whole = [loss + BALANCE * one for loss, one in zip(losses, aux, strict=True)]
        assert whole == pytest.approx(expected.losses, rel=1e-5, abs=CANCELS)
    for number, theirs_ in enumerate(expected.gradients):
        found = assemble([rank[2][number] for rank in ranks])
        errors = {key: relative(found[key], value) for key, value in theirs_.items()}
        print(f"balanced, {layout}: largest gradient deviation {max(errors.values()):.1e}")
        assert max(errors.values()) < 1e-5, errors
