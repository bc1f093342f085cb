"""Several targets, traced losses and scores over the ranks of a layout, against one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankfold.serving.exchange import Task
from rankfold.serving.protobuf import decode, encode
from tests.serving.bodies import datum, read_output, sample
from tests.serving.clients import VOCAB, write_base
from tests.serving.served_ranks import Layout, Served
from tests.serving.test_traced_losses import bodies, documents, soft
from tests.serving.traced import traced
from tests.support.spawning import spawn

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MODEL = "s:train:0"
LAYOUTS = {
    "tensor": Layout(2, {"tensor": 2}),
    "sequence": Layout(2, {"tensor": 2, "sequence": True}),
    "pipeline": Layout(2, {"pipeline": 2}),
    "context": Layout(2, {"context": 2}),
    "data": Layout(2, {}),
}


def answers(base: Path, state: Path, layout: Layout) -> dict[str, Any] | None:
    """What one model is told, and what becomes of it."""
    served = Served(base, state, layout)
    served.create([MODEL])
    body = json.dumps({"session_id": "s", **traced(soft, logprobs=2, wanted=2, scale=0)}).encode()
    task = Task(request="s:loss:0", kind="create_custom_loss", target="s:loss:0", seq=0, body=body)
    assert served.backend.execute([task])[0].good
    losses, metrics = [], []
    for step in range(2):
        message = {"data": bodies(documents(step)), "loss_fn": "custom"}
        message |= {"model_id": MODEL, "loss_fn_config_v2": {"loss_id": {"text": "s:loss:0"}}}
        (outcome,) = served.do("forward_backward", {MODEL: encode("ForwardBackwardRequest", message)})
        several = [datum(tokens, targets, weights=wanted) for tokens, targets, wanted in documents(step + 10)]
        message = {"model_id": MODEL, "data": several, "loss_fn": "cross_entropy"}
        (other,) = served.do("forward_backward", {MODEL: encode("ForwardBackwardRequest", message)})
        if served.backend.ranks.is_first:
            losses += [read_output(outcome.body), read_output(other.body)]
            metrics.append(decode("ForwardBackwardOutput", outcome.body)["metrics"])
        step_body = json.dumps({"adam_params": {"learning_rate": 1e-2}}).encode()
        served.do("optim_step", {MODEL: step_body})
    (saved,) = served.do("save_weights_for_sampler", {MODEL: b'{"path": "a"}'})
    prompt = [5, 6, 7, 30, 31, 9]
    asked = json.loads(sample("t", 0, prompt, 3, max_tokens=4, seed=8, stop=[], prompt_logprobs=True))
    asked |= {"topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 4}
    named = np.random.default_rng(0).integers(0, VOCAB, (5, 2))
    asked["target_prompt_logprobs"] = {"data": named.flatten().tolist(), "dtype": "int64", "shape": [5, 2]}
    path = json.loads(saved.body)["path"]
    task = Task(request="t:0", kind="asample", target=path, seq=0, body=json.dumps(asked).encode())
    (outcome,) = served.backend.execute([task])
    assert outcome.good, outcome
    if not served.backend.ranks.is_first:
        return None
    return {"losses": losses, "metrics": metrics, "sample": decode("SampleResponse", outcome.body)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    base = write_base(tmp_path_factory.mktemp("base"))
    found = answers(base, tmp_path_factory.mktemp("state"), Layout(1, {}))
    assert found is not None
    return base, found


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_those_of_one_rank(alone: tuple[Path, dict[str, Any]], name: str, tmp_path: Path) -> None:
    base, expected = alone
    (found, *_) = spawn(answers, world=2, args=(base, tmp_path, LAYOUTS[name]), timeout=300)
    for (loss, logps), (own, theirs) in zip(found["losses"], expected["losses"], strict=True):
        assert loss == pytest.approx(own, rel=2e-6)
        for one, other in zip(logps, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    mine, theirs = found["sample"], expected["sample"]
    assert mine["topk_prompt_logprobs"]["token_ids"] == theirs["topk_prompt_logprobs"]["token_ids"]
    assert mine["prompt_alt_tokens"]["tokens"] == theirs["prompt_alt_tokens"]["tokens"]
    pairs = [
        (
            own["prompt_alt_tokens"]["logprobs"]["dense"],
            own["target_prompt_logprobs"]["dense"],
            own["topk_prompt_logprobs"]["logprobs"],
        )
        for own in (mine, theirs)
    ]
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(np.frombuffer(one, "<f4"), np.frombuffer(other, "<f4"), atol=1e-5)
    for one, other in zip(mine["sequences"], theirs["sequences"], strict=True):
        assert one["tokens"] == other["tokens"]
        best, own = (np.frombuffer(x["topk_sampled_logprobs"]["logprobs"], "<f4") for x in (one, other))
        np.testing.assert_allclose(best, own, atol=1e-5)
