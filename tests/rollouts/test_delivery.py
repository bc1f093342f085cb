"""A server that computes with the adapter before is found at its delivery; one that follows is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import UserError
from engine.rollouts.delivery import delivery
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import records, run_here
from tests.support.served_runs import served_settings
from tests.support.sweeps import sampled


@pytest.mark.parametrize("noise", [0.0, 0.004])
def test_a_share_is_where_the_server_lies(noise: float) -> None:
    """With the noise of bfloat16, and a change that is no larger than it."""
    generator = np.random.default_rng(0)
    before, change, errors = generator.normal(size=(3, 400)).astype(np.float32)
    now = before + np.float32(0.004) * change
    for share in (0.0, 1.0):
        served = before + np.float32(share) * (now - before) + np.float32(noise) * errors
        found = delivery(served, before, now)
        assert abs(found.share - share) < 4 * found.error + 1e-3 and found.tells
        assert found.failed == (share == 0.0)
    assert not delivery(before, before, before).tells
    tiny = before + np.float32(1e-5) * change
    assert not delivery(before + np.float32(0.004) * errors, before, tiny).tells


def _settings(folder: Path, server: StandIn, **changes: object) -> dict[str, object]:
    given = {"rollout__num_generations": 2, "train__global_batch_size": 8, "train__steps": 3, **changes}
    return served_settings(folder, server.url, rollout__server_kind=server.kind, **given) | {"model.path": server.model}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served_settings(folder)
    return folder / "model"


@pytest.mark.parametrize("kind", sampled(("vllm", "sglang"), ("vllm",)))
def test_an_adapter_that_is_not_used_ends_the_run(kind: str, model: Path, tmp_path: Path) -> None:
    """The adapter of step 0 changes nothing, that of step 1 is used, and in place of that of step 2 the one before."""
    with StandIn(model, kind=kind, keeps="step2") as server:
        words = r"was given the adapter of step 2 and computes with the one before: .* lie -?0\.00 of the way"
        with pytest.raises(UserError, match=words):
            run_here(_settings(tmp_path, server))
        shares = [record.get("sampler_delivery") for record in records(tmp_path / "run")]
        assert shares[0] is None and shares[1] == pytest.approx(1.0, abs=1e-3)
        server.keeps = ""
        run_here(_settings(tmp_path, server))  # from the checkpoint that the failed run has left


def test_an_adapter_that_never_arrives(model: Path, tmp_path: Path) -> None:
    with StandIn(model, keeps="step1") as server:
        with pytest.raises(UserError, match="step 1 and computes without adapter: it ignores the call"):
            run_here(_settings(tmp_path, server))
        run_here(_settings(tmp_path, server, rollout__check_delivery=False, checkpoint__dir=tmp_path / "unchecked"))
        assert not [record for record in records(tmp_path / "unchecked") if "sampler_delivery" in record]


def test_a_server_without_such_log_probabilities_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(answer: dict[str, object]) -> None:
        for choice in answer["choices"]:  # type: ignore[attr-defined]
            choice.pop("prompt_logprobs", None)

    with StandIn(model, mangle=drop, mangles_base=True) as server:
        run_here(_settings(tmp_path, server))
    assert capsys.readouterr().err.count("so that nothing proves which adapter it computes with") == 1
