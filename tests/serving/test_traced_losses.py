"""Traced losses on the server: runs with them against runs whose losses torch differentiates at the client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rankfold.serving.exchange import Outcome, Task
from rankfold.serving.protobuf import decode, encode
from tests.serving.bodies import datum, read_output
from tests.serving.clients import MODEL, OTHER, VOCAB, Client, write_base
from tests.serving.traced import traced

LENGTHS, LOSS = (9, 14, 30), "s:loss:0"


def soft(logprobs: Tensor, wanted: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = (logprobs.exp() - wanted).square()
    loss = ratio.sum() * scale - torch.nn.functional.logsigmoid(logprobs.sum(-1) + 8).sum()
    return loss, {"custom/distance:mean": ratio.sum(), "custom/tokens:sum": torch.ones_like(logprobs[..., 0]).sum()}


class Run:
    """A client with a model, and the loss on the server."""

    def __init__(self, base: Any, state: Any) -> None:
        self.client = Client(base, state)
        self.client.create(MODEL)
        self.client.create(OTHER)
        assert self.create(LOSS).good

    def create(self, loss: str) -> Outcome:
        body = json.dumps({"session_id": "s", **traced(soft, logprobs=2, wanted=2, scale=0)}).encode()
        task = Task(request=loss, kind="create_custom_loss", target=loss, seq=0, body=body)
        return self.client.backend.execute([task])[0]

    def send(self, data: list[dict[str, Any]], *, forward_only: bool = False, loss: str = LOSS) -> Outcome:
        message = {
            "model_id": MODEL,
            "seq_id": self.client.seq[MODEL],
            "data": data,
            "loss_fn": "custom",
            "forward_only": forward_only,
            "loss_fn_config_v2": {"loss_id": {"text": loss}},
        }
        return self.client.do(MODEL, "forward_backward", encode("ForwardBackwardRequest", message))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def run(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(base, tmp_path_factory.mktemp("state"))


def documents(seed: int) -> list[tuple[list[int], Any, Any]]:
    draw = np.random.default_rng(seed)
    return [
        (draw.integers(1, VOCAB, n).tolist(), draw.integers(1, VOCAB, (n, 2)), draw.random((n, 2)) / 4) for n in LENGTHS
    ]


def bodies(some: list[tuple[list[int], Any, Any]]) -> list[dict[str, Any]]:
    return [datum(tokens, targets, wanted=wanted, scale=[0.5]) for tokens, targets, wanted in some]


def test_a_run_has_the_losses_of_one_at_the_client(run: Run, base: Any, tmp_path: Any) -> None:
    """The client's way is the SDK's: log-probabilities, torch's gradient of the function, and cross_entropy with its
    negative as weights."""
    other = Client(base, tmp_path)
    other.create(MODEL)
    curve = []
    for step in range(4):
        some = documents(step)
        outcome = run.send(bodies(some))
        loss, logps = read_output(outcome.body)
        metrics = decode("ForwardBackwardOutput", outcome.body)["metrics"]
        _, theirs = other.score(MODEL, [datum(tokens, targets) for tokens, targets, _ in some])
        leaves = [torch.tensor(one, requires_grad=True) for one in theirs]
        found = [
            soft(leaf, torch.tensor(wanted, dtype=torch.float32), torch.tensor(0.5))
            for leaf, (_, _, wanted) in zip(leaves, some, strict=True)
        ]
        total = torch.stack([one for one, _ in found]).sum()
        total.backward()
        surrogate = [
            datum(tokens, targets, weights=-leaf.grad.numpy())  # type: ignore[union-attr]
            for leaf, (tokens, targets, _) in zip(leaves, some, strict=True)
        ]
        assert other.train(MODEL, surrogate).good
        assert loss == pytest.approx(total.item(), rel=1e-6)
        assert metrics["custom/tokens:sum"] == sum(LENGTHS)
        mean = torch.stack([one["custom/distance:mean"] for _, one in found]).mean().item()
        assert metrics["custom/distance:mean"] == pytest.approx(mean, rel=1e-5)
        for mine, own in zip(logps, theirs, strict=True):
            np.testing.assert_allclose(mine, own, atol=1e-6)
        steps = [json.loads(one.step(MODEL, learning_rate=1e-2).body) for one in (run.client, other)]
        assert steps[0]["metrics"]["grad_norm"] == pytest.approx(steps[1]["metrics"]["grad_norm"], rel=1e-6)
        curve.append(loss)
    expected = other.weights(MODEL)
    for name, tensor in run.client.weights(MODEL).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    assert len({round(one, 3) for one in curve}) == 4


def test_forward_alone_and_one_request_or_three(run: Run) -> None:
    some = bodies(documents(9))
    whole = decode("ForwardBackwardOutput", run.send(some, forward_only=True).body)["metrics"]
    parts = [decode("ForwardBackwardOutput", run.send([one], forward_only=True).body)["metrics"] for one in some]
    assert whole["loss:sum"] == pytest.approx(sum(one["loss:sum"] for one in parts), rel=1e-6)
    assert whole["custom/tokens:sum"] == sum(one["custom/tokens:sum"] for one in parts)
    means = [one["custom/distance:mean"] for one in parts]
    assert whole["custom/distance:mean"] == pytest.approx(sum(means) / 3, rel=1e-6)


def test_what_is_refused(run: Run) -> None:
    (tokens, targets, wanted), *_ = documents(0)
    good = datum(tokens, targets, wanted=wanted, scale=[0.5])
    for data, loss, sentence in (
        ([good], "s:loss:7", "there is no loss s:loss:7"),
        ([good], "t:loss:0", "of another session"),
        ([good], "../loss:0", "which is no name of a loss"),
        ([good], "", "has no loss_id"),
        ([datum(tokens, targets[:, 0], wanted=wanted, scale=[0.5])], LOSS, "target_tokens of 1 dimensions"),
        ([datum(tokens, targets, wanted=wanted[:, 0], scale=[0.5])], LOSS, "wanted of 1 dimensions"),
        ([datum(tokens, targets, wanted=wanted)], LOSS, "has no scale"),
        ([good, datum(tokens, targets, wanted=wanted[:3], scale=[0.5])], LOSS, "cannot be computed for datum 1"),
    ):
        outcome = run.send(data, loss=loss)
        assert not outcome.good and sentence in json.loads(outcome.body)["error"], outcome.body
    gradient = json.loads(run.client.step(MODEL, learning_rate=0.0).body)["metrics"]["grad_norm"]
    assert gradient == 0.0, "nothing of a refused request was added"


def test_a_loss_is_there_after_a_restart(run: Run, base: Any) -> None:
    later = Client(base, run.client.folder.root)
    assert later.backend.restore(MODEL) is not None
    run.client.seq[MODEL] = later.seq[MODEL] = 40
    some = bodies(documents(3))
    answers = []
    for client in (run.client, later):
        run.client, kept = client, run.client
        answers.append(run.send(some).body)
        run.client = kept
    assert answers[0] == answers[1]
