"""Log-probabilities that samples bring: against transformers on the merged model, and those of training."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rankfold.serving.protobuf import decode
from tests.serving.bodies import datum, random_datum, sample
from tests.serving.clients import MODEL, VOCAB, Client, peft_model, write_base

PROMPT = [5, 6, 7, 30, 31, 9, 9, 40]


class Trained:
    """A model after two steps, its saved weights, and the merged model in transformers."""

    def __init__(self, client: Client) -> None:
        self.client = client
        client.create(MODEL)
        for step in range(2):
            client.train(MODEL, [random_datum(20, step, VOCAB)])
            client.step(MODEL, learning_rate=1e-2)
        self.path = json.loads(client.do(MODEL, "save_weights_for_sampler", path="a").body)["path"]
        self.merged = peft_model(client.backend._options.path, client.weights(MODEL)).merge_and_unload()

    def logps(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[tokens, vocabulary], of what follows each token."""
        with torch.no_grad():
            logits: torch.Tensor = self.merged(input_ids=torch.tensor(ids)[None]).logits[0]
        return (logits / temperature).log_softmax(-1)

    def ask(self, *bodies: bytes) -> list[dict[str, Any]]:
        return [decode("SampleResponse", one.body) for one in self.client.samples(self.path, *bodies)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(Client(write_base(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("state")))


def best(message: dict[str, Any]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    shape = message["length"], message["k"]
    ids, logps = np.frombuffer(message["token_ids"], "<i4"), np.frombuffer(message["logprobs"], "<f4")
    return ids.reshape(shape), logps.reshape(shape)


def array(message: dict[str, Any]) -> NDArray[Any]:
    return np.frombuffer(message["dense"], "<f4" if message["dtype"] == 1 else "<i8").reshape(message["shape"])


def test_the_most_likely_tokens(trained: Trained) -> None:
    body = sample("t", 0, PROMPT, 2, max_tokens=5, seed=8, stop=[], temperature=0.7)
    more = {"prompt_logprobs": True, "topk_prompt_logprobs": 4, "topk_sample_logprobs": 3}
    few = {"prompt_logprobs": True, "topk_prompt_logprobs": 4, "prompt_logprobs_last_n": 2}
    answer, alone, last = trained.ask(*(json.dumps({**json.loads(body), **one}).encode() for one in (more, {}, few)))
    assert [one["tokens"] for one in answer["sequences"]] == [one["tokens"] for one in alone["sequences"]]
    ids, logps = best(answer["topk_prompt_logprobs"])
    expected = trained.logps(PROMPT)[:-1].topk(4)
    assert (ids[0] == 0).all() and (logps[0] == -99999.0).all()
    np.testing.assert_array_equal(ids[1:], expected.indices)
    np.testing.assert_allclose(logps[1:], expected.values, atol=1e-5)
    prompt = np.frombuffer(answer["prompt_logprobs"], "<f4")
    for place, token in enumerate(PROMPT[1:], 1):  # the same bits, where the prompt's token is among them
        assert all(one == prompt[place] for one in logps[place][ids[place] == token])
    few_ids, few_logps = best(last["topk_prompt_logprobs"])
    assert (few_logps[:-2] == -99999.0).all() and np.array_equal(few_ids[-2:], ids[-2:])
    assert np.array_equal(few_logps[-2:], logps[-2:])
    for one in answer["sequences"]:
        tokens, sampled = np.frombuffer(one["tokens"], "<i4"), np.frombuffer(one["logprobs"], "<f4")
        ids, logps = best(one["topk_sampled_logprobs"])
        whole = trained.logps([*PROMPT, *tokens.tolist()], 0.7)[len(PROMPT) - 1 : -1]
        np.testing.assert_array_equal(ids, whole.topk(3).indices)
        np.testing.assert_allclose(logps, whole.topk(3).values, atol=1e-5)
        for place, token in enumerate(tokens):
            assert all(abs(one - sampled[place]) < 5e-6 for one in logps[place][ids[place] == token])


def test_tokens_that_the_client_names(trained: Trained) -> None:
    draw = np.random.default_rng(0)
    named = np.where(draw.random((len(PROMPT) - 1, 3)) < 0.5, draw.integers(0, VOCAB, (len(PROMPT) - 1, 3)), -1)
    dense = {"data": named.flatten().tolist(), "dtype": "int64", "shape": list(named.shape)}
    here = named >= 0
    sparse = {
        **dense,
        "data": named[here].tolist(),
        "sparse_crow_indices": [0, *here.sum(1).cumsum().tolist()],
        "sparse_col_indices": np.nonzero(here)[1].tolist(),
    }
    bodies = [sample("t", 0, PROMPT, 1, max_tokens=1) for _ in range(2)]
    asked = zip(bodies, (dense, sparse), strict=True)
    answers = trained.ask(*(json.dumps({**json.loads(b), "target_prompt_logprobs": one}).encode() for b, one in asked))
    found = array(answers[0]["target_prompt_logprobs"])
    expected = trained.logps(PROMPT)[:-1].gather(1, torch.from_numpy(named.clip(0))).numpy()
    np.testing.assert_allclose(found, np.where(here, expected, 0.0), atol=1e-5)
    one = answers[1]["target_prompt_logprobs"]
    assert np.array_equal(np.frombuffer(one["sparse_csr"]["values"], "<f4"), found[here])
    assert np.frombuffer(one["sparse_csr"]["col_indices"], "<i8").tolist() == sparse["sparse_col_indices"]
    trained.client.seq[MODEL] = 6
    _, (training,) = trained.client.score(MODEL, [datum(PROMPT[:-1], named.clip(0))])
    assert np.array_equal(training[here], found[here]), "the bits of training"


def test_tokens_that_are_drawn(trained: Trained) -> None:
    """A thousand draws at a position have the frequencies of its distribution, at the request's temperature."""
    count, temperature = 1000, 0.8
    body = json.loads(sample("t", 0, PROMPT, 1, max_tokens=1, seed=3, temperature=temperature))
    answer, again, greedy = trained.ask(
        *(json.dumps({**body, "prompt_alt_tokens_k": count}).encode() for _ in range(2)),
        json.dumps({**body, "prompt_alt_tokens_k": 2, "sampling_params": {"max_tokens": 1, "temperature": 0}}).encode(),
    )
    assert answer == again
    tokens, logps = (array(answer["prompt_alt_tokens"][name]) for name in ("tokens", "logprobs"))
    assert tokens.shape == logps.shape == (len(PROMPT) - 1, count)
    expected = trained.logps(PROMPT)[:-1]
    np.testing.assert_allclose(logps, expected.gather(1, torch.from_numpy(tokens.copy())), atol=1e-5)
    drawn_from = trained.logps(PROMPT, temperature)[:-1].exp().numpy()
    for place, own in enumerate(tokens):
        shares = np.bincount(own, minlength=VOCAB) / count
        # the expected distance of the shares from probabilities p is below sqrt(2 p (1 - p) / (pi count)) summed
        spread = np.sqrt(2 * drawn_from[place] * (1 - drawn_from[place]) / (np.pi * count)).sum()
        assert abs(shares - drawn_from[place]).sum() < 1.4 * spread, place
    assert (array(greedy["prompt_alt_tokens"]["tokens"]) == expected.argmax(-1)[:, None].numpy()).all()


def test_what_cannot_be_is_refused(trained: Trained) -> None:
    targets = {"data": [1] * 7, "dtype": "int64", "shape": [7, 1]}
    for asked, sentence in (
        ({"topk_prompt_logprobs": VOCAB + 1}, "topk_prompt_logprobs is 97"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1"),
        ({"prompt_alt_tokens_k": True}, "prompt_alt_tokens_k is True"),
        ({"prompt_logprobs_last_n": 1}, "set both, or"),
        ({"target_prompt_logprobs": {**targets, "shape": [7]}}, "send a matrix"),
        ({"target_prompt_logprobs": {**targets, "shape": [6, 1]}}, "its shape is [6, 1]"),
        ({"target_prompt_logprobs": {**targets, "shape": [7, 1], "data": [-1] * 7}}, "at least one token id"),
        ({"target_prompt_logprobs": {**targets, "data": [VOCAB] * 7}}, "counted from 0 to 95"),
        ({"target_prompt_logprobs": {**targets, "data": ["1"] * 7}}, "lists of whole numbers"),
        ({"target_prompt_logprobs": {**targets, "sparse_crow_indices": [0] * 8}}, "lists of whole numbers"),
        (
            {"target_prompt_logprobs": {**targets, "sparse_crow_indices": [0] * 8, "sparse_col_indices": []}},
            "do not fit each other",
        ),
        ({"record_stability_info": True}, "set loss_fn to"),
    ):
        body = {**json.loads(sample("t", 0, PROMPT, 1, max_tokens=1)), **asked}
        (outcome,) = trained.client.samples("", json.dumps(body).encode())
        assert not outcome.good and sentence in json.loads(outcome.body)["error"], (asked, outcome.body)


def test_a_prompt_of_one_token(trained: Trained) -> None:
    body = json.loads(sample("t", 0, [5], 1, max_tokens=1))
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 3}
    (answer,) = trained.ask(json.dumps({**body, **asked}).encode())
    assert best(answer["topk_prompt_logprobs"])[1].tolist() == [[-99999.0, -99999.0]]
    assert answer["prompt_alt_tokens"]["tokens"]["shape"] == [0, 3]
