"""Several targets of a token, in dense and sparse tensors, against transformers with PEFT and torch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import UserError
from rankfold.serving.loss_request import read_forward_backward
from tests.serving.bodies import datum, forward_backward, read_output, tensor
from tests.serving.clients import MODEL, OTHER, VOCAB, Client, peft_model, peft_tensors, write_base

LENGTHS, COLUMNS = (11, 25, 7), 5


pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    made = Client(write_base(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("state"))
    made.create(MODEL)
    made.create(OTHER)
    return made


def drawn(seed: int) -> list[tuple[list[int], NDArray[np.int64], NDArray[np.float32]]]:
    """Tokens, targets and weights of some documents; some targets have no weight."""
    draw = np.random.default_rng(seed)
    found = []
    for length in LENGTHS:
        weights = (draw.random((length, COLUMNS)) * (draw.random((length, COLUMNS)) < 0.2)).astype(np.float32)
        targets = np.where(weights != 0, draw.integers(1, VOCAB, (length, COLUMNS)), 0)
        found.append((draw.integers(1, VOCAB, length).tolist(), targets, weights))
    return found


def sparse(values: NDArray[Any]) -> dict[str, Any]:
    """A sparse tensor, as torch makes it."""
    found = torch.from_numpy(values).to_sparse_csr()
    parts = {
        "values": found.values().numpy().tobytes(),
        "crow_indices": found.crow_indices().numpy().tobytes(),
        "col_indices": found.col_indices().numpy().tobytes(),
    }
    return {"sparse_csr": parts, "dtype": 1 if values.dtype == np.float32 else 2, "shape": list(values.shape)}


def logps_of(model: Any, tokens: list[int], targets: NDArray[np.int64]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor(tokens)[None]).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(targets))


def test_they_train_as_peft_and_torch_do(client: Client, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Adam's eps is so large that a step is a multiple of the gradient."""
    base = client.backend._options.path
    client.seq[MODEL] = 1
    peft = peft_model(base, client.weights(MODEL))
    optimizer = torch.optim.AdamW(peft_tensors(peft).values(), lr=0.1, betas=(0.9, 0.95), eps=10.0, weight_decay=0.0)
    before = {name: one.clone() for name, one in client.weights(MODEL).items()}
    for step in range(2):
        some = drawn(step)
        body = [datum(tokens, targets, weights=weights) for tokens, targets, weights in some]
        loss, logps = read_output(client.train(MODEL, body).body)
        expected = [logps_of(peft, tokens, targets) for tokens, targets, _ in some]
        total = torch.stack([-(own * torch.from_numpy(one[2])).sum() for own, one in zip(expected, some, strict=True)])
        optimizer.zero_grad()
        total.sum().backward()
        optimizer.step()
        assert loss == pytest.approx(total.sum().item(), rel=1e-5)
        for own, one in zip(expected, logps, strict=True):
            np.testing.assert_allclose(one, own.detach().numpy(), atol=1e-5)
        assert client.step(MODEL, learning_rate=0.1, eps=10.0).good
    found = client.weights(MODEL)
    for name, one in peft_tensors(peft).items():
        moved, expected_move = found[name] - before[name], one.data - before[name]
        assert expected_move.norm() > 0 and (moved - expected_move).norm() < 1e-4 * expected_move.norm(), name


@pytest.mark.parametrize("model", [MODEL, OTHER], ids=["trained head", "frozen head"])
def test_forms_of_the_same_tensors(client: Client, model: str) -> None:
    """Dense or sparse, float32 or bfloat16 of numbers that both hold, one column or none: the same numbers."""
    some = [(tokens, targets, weights.round(1) * 10) for tokens, targets, weights in drawn(7)]

    def run(body: list[dict[str, Any]]) -> tuple[float, float, list[NDArray[Any]]]:
        client.seq[model] = 1
        loss, logps = read_output(client.train(model, body).body)
        step = json.loads(client.step(model, learning_rate=0.0).body)
        return loss, step["metrics"]["grad_norm"], logps

    dense = run([datum(tokens, targets, weights=weights) for tokens, targets, weights in some])
    others = []
    for tokens, targets, weights in some:
        one = datum(tokens, targets)
        one["loss_fn_inputs"] |= {"target_tokens": sparse(targets), "weights": sparse(weights)}
        others.append(one)
    halves = []
    for tokens, targets, weights in some:
        one = datum(tokens, targets)
        words = (weights.view(np.uint32) >> 16).astype("<u2")
        one["loss_fn_inputs"]["weights"] = {"dense": words.tobytes(), "dtype": 4, "shape": list(weights.shape)}
        halves.append(one)
    for body in (others, halves):
        *numbers, logps = run(body)
        assert (*numbers,) == dense[:2] and dense[1] > 0
        for mine, theirs in zip(logps, dense[2], strict=True):
            assert mine.shape == theirs.shape and np.array_equal(mine, theirs)
    flat = run([datum(tokens, one[:, 0], weights=weights[:, 0]) for tokens, one, weights in some])
    column = run([datum(tokens, one[:, :1], weights=weights[:, :1]) for tokens, one, weights in some])
    assert flat[0] == column[0] and flat[1] == pytest.approx(column[1], rel=1e-6)
    assert all(np.array_equal(mine, theirs[:, 0]) for mine, theirs in zip(flat[2], column[2], strict=True))


def test_data_with_other_columns(client: Client) -> None:
    """Their log-probabilities are those that each has alone."""
    client.seq[MODEL] = 1
    some = [datum(t, one[:, : 1 + n], weights=w[:, : 1 + n]) for n, (t, one, w) in enumerate(drawn(3))]
    _, together = client.score(MODEL, some)
    assert [one.shape for one in together] == [(length, 1 + n) for n, length in enumerate(LENGTHS)]
    for number, one in enumerate(some):
        _, (alone,) = client.score(MODEL, [one])
        assert np.array_equal(together[number], alone)


def _csr(**changed: Any) -> dict[str, Any]:
    found = sparse(np.array([[0, 4], [5, 0], [0, 0]]))
    parts = {name: np.asarray(value, "<i8").tobytes() for name, value in changed.items() if name != "shape"}
    return {**found, "sparse_csr": {**found["sparse_csr"], **parts}, "shape": changed.get("shape", [3, 2])}


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (_csr(crow_indices=[0, 1, 2]), "do not fit each other"),
    (_csr(crow_indices=[0, 2, 1, 2]), "do not fit each other"),
    (_csr(crow_indices=[0, 1, 2, 3]), "do not fit each other"),
    (_csr(col_indices=[2, 0]), "do not fit each other"),
    (_csr(col_indices=[-1, 0]), "do not fit each other"),
    (_csr(crow_indices=[0, 2, 2, 2], col_indices=[1, 1]), "do not fit each other"),
    (_csr(shape=[3, 1 << 40]), "at most two dimensions"),
    (_csr(shape=[]), "do not fit each other"),
    (_csr(shape=[2, 3]), "do not fit each other"),
    (tensor([[1], [2]], whole=True), "but 3 tokens"),
    (tensor([[[1]], [[2]], [[3]]], whole=True), "at most two dimensions"),
    (tensor([[1.0], [2.0], [3.0]]), "they are token ids"),
    (tensor([[], [], []], whole=True), "of shape [3, 0]"),
    ({**tensor([1, 2, 3], whole=True), "shape": [4]}, "has 3 numbers"),
    ({**tensor([1, 2, 3], whole=True), "dtype": 9}, "has dtype 9"),
    ({**tensor([1, 2, 3], whole=True), "dense": b"123"}, "no whole number of elements"),
    (tensor([[1], [2], [VOCAB]], whole=True), f"token {VOCAB} in target_tokens"),
)


def test_what_does_not_fit_is_refused() -> None:
    for targets, sentence in WRONG:
        one = datum([1, 2, 3], [1, 2, 3])
        one["loss_fn_inputs"]["target_tokens"] = targets
        with pytest.raises(UserError) as refusal:
            read_forward_backward(forward_backward(MODEL, 1, [one]), vocab_size=VOCAB, limit=64)
        assert sentence in str(refusal.value), (targets, str(refusal.value))
    several = datum([1, 2, 3], [[1], [2], [3]], logprobs=[[0.0]] * 3, advantages=[[1.0]] * 3)
    flat = datum([1, 2, 3], [[1], [2], [3]], weights=[1.0] * 3)
    for one, loss, sentence in ((several, "ppo", "ppo takes one target"), (flat, "cross_entropy", "in the same shape")):
        with pytest.raises(UserError, match=sentence):
            read_forward_backward(forward_backward(MODEL, 1, [one], loss), vocab_size=VOCAB, limit=64)
