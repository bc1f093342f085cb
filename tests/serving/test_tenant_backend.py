"""The model's process: gradients and steps against PEFT and torch, samples against scores, files against memory."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import UserError
from rankfold.serving.adapter_file import read_adapter
from rankfold.serving.commands import Saved
from tests.serving.bodies import adam, datum, forward_backward, random_datum, read_output, read_samples, sample
from tests.serving.clients import MODEL, OTHER, THIRD, VOCAB, Client, peft_model, peft_tensors, write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def client(base: Path, tmp_path: Path) -> Client:
    made = Client(base, tmp_path)
    made.create(MODEL)
    return made


def data(seed: int, **inputs: float) -> list[dict[str, Any]]:
    """Three documents that do not fit one micro-batch."""
    lengths = (11, 25, 17)
    return [
        random_datum(length, seed + length, VOCAB, **{name: [one] * length for name, one in inputs.items()})
        for length in lengths
    ]


def losses_of(model: Any, some: list[dict[str, Any]], weights: list[list[float]]) -> Tensor:
    """The sum of weighted losses, by transformers and torch."""
    total = torch.zeros(())
    for one, weight in zip(some, weights, strict=True):
        tokens = torch.from_numpy(np.frombuffer(one["model_input"][0]["encoded_text"]["tokens"], "<i4").astype(int))
        targets = torch.from_numpy(np.frombuffer(one["loss_fn_inputs"]["target_tokens"]["dense"], "<i8").copy())
        logits = model(input_ids=tokens[None]).logits[0]
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        total = total + (each * torch.tensor(weight)).sum()
    return total


def test_it_trains_as_peft_and_torch_do(client: Client, base: Path) -> None:
    peft = peft_model(base, client.weights(MODEL))
    options = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}
    for step, (clip, rate) in enumerate(((0.0, 1e-2), (0.5, 3e-3), (0.0, 2e-2))):
        own = {**options, "learning_rate": rate, "grad_clip_norm": clip}
        optimizer: torch.optim.AdamW
        if step == 0:
            optimizer = torch.optim.AdamW(peft_tensors(peft).values(), betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        for part in range(2):  # two requests in one step
            some = data(100 * step + part, weights=0.5)
            loss, _ = read_output(client.train(MODEL, some).body)
            expected = losses_of(peft, some, [[0.5] * 11, [0.5] * 25, [0.5] * 17])
            expected.backward()
            assert loss == pytest.approx(expected.item(), rel=1e-5)
        if clip:
            torch.nn.utils.clip_grad_norm_(peft_tensors(peft).values(), clip)
        optimizer.step()
        assert client.step(MODEL, **own).good
    found = client.weights(MODEL)
    for name, tensor in peft_tensors(peft).items():
        distance = (found[name] - tensor.data).norm() / tensor.data.norm()
        assert distance < 1e-4, (name, distance)


def test_neighbours_change_nothing(client: Client, base: Path, tmp_path: Path) -> None:
    client.create(OTHER)
    alone = Client(base, tmp_path / "alone")
    alone.create(OTHER)
    for step in range(2):
        bodies = {
            MODEL: forward_backward(MODEL, client.seq[MODEL], data(step)),
            OTHER: forward_backward(
                OTHER, client.seq[OTHER], data(step + 50, logprobs=-4.0, advantages=0.7), "importance_sampling"
            ),
        }
        tasks = [client.task(model, "forward_backward", body) for model, body in bodies.items()]
        assert [one.good for one in client.backend.execute(tasks)] == [True, True]
        assert alone.do(OTHER, "forward_backward", bodies[OTHER]).good
        assert client.step(MODEL).good and client.step(OTHER).good and alone.step(OTHER).good
    expected = alone.weights(OTHER)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in expected} == {"gate_proj", "up_proj", "down_proj"}
    for name, tensor in client.weights(OTHER).items():
        assert torch.equal(tensor, expected[name]), name


def test_samples_have_the_scores_of_training(client: Client) -> None:
    for step in range(2):
        client.train(MODEL, data(step))
        client.step(MODEL, learning_rate=1e-2)
    path = json.loads(client.do(MODEL, "save_weights_for_sampler", path="a").body)["path"]
    body = sample("t", 0, [5, 6, 7], 3, max_tokens=8, seed=8, stop=[], prompt_logprobs=True)
    first, other, again = client.samples(path, body, sample("t", 1, [9, 9], 2, max_tokens=8, seed=5), body)
    sequences, scores = read_samples(first.body)
    assert first.body == again.body and len(read_samples(other.body)[0]) == 2
    assert np.isnan(scores[0]) and not np.isnan(scores[1:]).any()
    assert len({tuple(tokens) for tokens, _, _ in sequences}) > 1
    largest = 0.0
    for tokens, logps, _ in sequences:
        ids = [5, 6, 7, *tokens]
        _, (trained,) = client.score(MODEL, [datum(ids[:-1], ids[1:])])
        largest = max(largest, float(np.abs(trained - np.asarray(scores[1:] + logps, np.float32)).max()))
    assert largest < 5e-6
    assert 1 not in sequences[0][0], "the end token"
    for ending in ({"stop": [sequences[0][0][2]]}, {"stop": f"w{sequences[0][0][2]}"}):
        (found,) = client.samples(path, sample("t", 0, [5, 6, 7], 1, max_tokens=8, seed=8, **ending))
        ((tokens, _, reason),) = read_samples(found.body)[0]
        assert tokens == sequences[0][0][:3] and reason == 0
    (base,) = client.samples("", sample("t", 0, [5, 6, 7], 1, max_tokens=8, seed=8, temperature=0, stop=[]))
    assert read_samples(base.body)[0][0][2] == 1


def test_samplers_that_follow_a_model(client: Client) -> None:
    """Both have the weights that were saved last, and a snapshot those that it was made with."""
    path = "tinker://s:train:0/sampler_weights/"
    body = sample("t", 0, [5, 6, 7], 1, max_tokens=8, seed=8, stop=[], prompt_logprobs=True)

    def save(number: int, **more: Any) -> None:
        body = json.dumps({"sampling_session_seq_id": number, **more}).encode()
        assert client.do(MODEL, "save_weights_for_sampler", body).good is (number < 3)

    def change() -> None:
        client.train(MODEL, data(1))
        client.step(MODEL, learning_rate=1e-2)

    change()
    save(0, kind="inflight")
    (before,) = client.samples(f"{path}_inflight", body)
    save(1)
    change()
    snapshot = f"{path}_unnamed-{client.seq[MODEL] - 3}"
    for _ in range(2):
        assert client.samples(f"{path}_inflight", body)[0].body == before.body, "until the next save"
    save(2, kind="inflight")
    assert client.samples(f"{path}_inflight", body)[0].body != before.body
    assert client.samples(snapshot, body)[0].body == before.body
    for wrong in ({"kind": "x"}, {"kind": "inflight", "path": "a"}):
        save(3, **wrong)


def test_a_policy_earns_more(client: Client) -> None:
    """Completions are rewarded for tokens of the first half of the vocabulary."""
    prompt, rewards = [5, 6, 7], list[float]()
    for step in range(8):
        client.seq[MODEL] = 3 * step + 1
        path = json.loads(client.do(MODEL, "save_weights_for_sampler", path=f"s{step}").body)["path"]
        asked = sample("t", step, prompt, 24, max_tokens=6, stop=[], seed=step)
        sequences, _ = read_samples(client.samples(path, asked)[0].body)
        earned = [float(np.mean([one < VOCAB // 2 for one in tokens])) for tokens, _, _ in sequences]
        rewards.append(float(np.mean(earned)))
        some = []
        for (tokens, logps, _), reward in zip(sequences, earned, strict=True):
            ids, before = [*prompt, *tokens], [0.0] * (len(prompt) - 1)
            advantage = [reward - rewards[-1]] * len(tokens)
            some.append(datum(ids[:-1], ids[1:], logprobs=before + logps, advantages=before + advantage))
        loss, _ = read_output(client.train(MODEL, some, "importance_sampling").body)
        assert abs(loss) < 1e-4, "ratios are 1, and advantages add up to 0"
        assert client.step(MODEL, learning_rate=2e-2).good
    assert rewards[-1] > 0.8 > 0.7 > rewards[0], rewards


def test_files_bring_a_model_back(client: Client, base: Path, tmp_path: Path) -> None:
    client.train(MODEL, data(0))
    assert client.step(MODEL).good
    expected = {name: tensor.clone() for name, tensor in client.weights(MODEL).items()}
    assert client.do(MODEL, "save_weights", path="one").good
    refused = client.do(MODEL, "save_weights", path="one")
    assert b"is there already" in refused.body and client.do(MODEL, "save_weights", path="one", overwrite=True).good
    client.train(MODEL, data(1))  # a gradient that no step has taken
    later = Client(base, tmp_path)
    restored = later.backend.restore(MODEL)
    assert restored is not None and restored.seq == 2
    assert json.loads(restored.outcome.body)["metrics"]["skipped"] == 0.0
    later.seq[MODEL] = 7
    bodies = [forward_backward(MODEL, 7, data(1)), adam(MODEL, 8)]
    for one in (later, client):
        if one is later:
            assert all(torch.equal(tensor, expected[name]) for name, tensor in one.weights(MODEL).items())
            one.do(MODEL, "forward_backward", bodies[0])
        one.do(MODEL, "optim_step", bodies[1])
    for name, tensor in client.weights(MODEL).items():
        assert torch.equal(tensor, later.weights(MODEL)[name]), name
    path = "tinker://s:train:0/weights/one"
    for optimizer in (True, False):
        assert later.do(MODEL, "load_weights", path=path, optimizer=optimizer).good
        assert all(torch.equal(tensor, expected[name]) for name, tensor in later.weights(MODEL).items())
        assert float(later.backend._training(MODEL).optimizer.step_count) == float(optimizer)
    later.create(OTHER)
    assert b"rank" in later.do(OTHER, "load_weights", path=path, optimizer=True).body
    assert later.do(MODEL, "unload_model").good and later.backend.restore(MODEL) is None


def run_three(client: Client) -> list[bytes]:
    """Trains three models in turns, one of them without steps, and samples; returns all answers."""
    answers = []
    for model in (MODEL, OTHER, THIRD):
        client.create(model)
    for step in range(2):
        tasks = []
        for number, model in enumerate((MODEL, OTHER, THIRD)):
            body = forward_backward(model, client.seq[model], data(10 * step + number))
            tasks.append(client.task(model, "forward_backward", body))
        answers += [one.body for one in client.backend.execute(tasks)]
        for model in (OTHER, MODEL):
            answers.append(client.train(model, data(step)).body)
            answers.append(client.step(model, learning_rate=1e-2).body)
        for model in (THIRD, MODEL):
            client.do(model, "save_weights_for_sampler", path=f"p{step}")
            path = f"tinker://{model}/sampler_weights/p{step}"
            answers += [one.body for one in client.samples(path, sample("t", 0, [5, 6], 2, max_tokens=2, seed=8))]
    assert client.do(MODEL, "save_weights_for_sampler", path="p0", overwrite=True).good
    path = f"tinker://{MODEL}/sampler_weights/p0"
    answers += [one.body for one in client.samples(path, sample("t", 0, [5, 6], 2, max_tokens=2, seed=8))]
    assert answers[-1] == answers[-2] != answers[-7], "weights that are written anew"
    return answers


def test_models_that_rest_come_back_exactly(base: Path, tmp_path: Path) -> None:
    ample, scarce = Client(base, tmp_path / "ample"), Client(base, tmp_path / "scarce", resident=0.0)
    assert run_three(ample) == run_three(scarce)
    residents = scarce.backend._residents
    assert len(residents._places) == 1 and len(ample.backend._residents._places) > 5
    for model in (THIRD, MODEL, OTHER):
        found, expected = scarce.backend._training(model).optimizer, ample.backend._training(model).optimizer
        pairs = zip(found.state_shards(), expected.state_shards(), strict=True)
        assert all(torch.equal(one.tensor, other.tensor) for one, other in pairs), model
        assert float(found.step_count) == float(expected.step_count) == 2 * (model != THIRD)
        assert torch.equal(found.flat.gradient, expected.flat.gradient)
        assert bool(found.flat.gradient.any()) == (model == THIRD)
    later = Client(base, tmp_path / "scarce", resident=0.0)
    assert all(later.backend.restore(model) for model in (MODEL, OTHER, THIRD))
    assert not later.backend._residents._places, "a restart builds what is asked for"
    later.folder.model(MODEL).write_bytes(b"nothing")
    later.seq[MODEL] = 99
    for outcome in (later.train(MODEL, data(0)), later.step(MODEL)):
        assert not outcome.good and b"is damaged" in outcome.body
    later.seq[OTHER] = 99
    assert later.train(OTHER, data(0)).good


def test_readers_are_neither_built_nor_read_needlessly(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def noted(path: Path, *args: Any, **options: Any) -> None:
        reads.append(path.stem)
        read_adapter(path, *args, **options)

    monkeypatch.setattr("rankfold.serving.residents.read_adapter", noted)
    asked = sample("t", 0, [5, 6], 1, max_tokens=1, seed=8)

    def sampled(name: str) -> bytes:
        (outcome,) = client.samples(f"tinker://{MODEL}/sampler_weights/{name}", asked)
        assert outcome.good
        return outcome.body

    names = [f"p{number}" for number in range(5)]
    for name in names:
        assert client.do(MODEL, "save_weights_for_sampler", path=name).good
    bodies = [sampled(name) for name in names * 3]
    assert reads == names and bodies[:5] * 3 == bodies, "in turns all of them stay"
    places = len(client.backend._residents._places)
    for step in range(12):  # the newest weights of a client that trains
        client.do(MODEL, "save_weights_for_sampler", path=f"q{step}")
        for _ in range(5):
            client.backend._training(MODEL)
            sampled(f"q{step}")
    assert len(client.backend._residents._places) <= places + 4, "weights that nobody asks for make way"


WRONG: tuple[tuple[str, bytes, str], ...] = (
    ("forward_backward", forward_backward(MODEL, 1, data(0), "stable_reinforce"), "set loss_fn to importance_sampling"),
    ("forward_backward", forward_backward(MODEL, 1, data(0), "custom"), "has no loss_id"),
    ("forward_backward", forward_backward(MODEL, 1, data(0), beta=1.0), "cross_entropy takes nothing"),
    ("forward_backward", forward_backward(MODEL, 1, data(0, mask=1.0)), "which no loss here reads"),
    ("forward_backward", forward_backward(MODEL, 1, data(0, weights=float("nan"))), "not finite"),
    ("forward_backward", forward_backward(MODEL, 1, [random_datum(4, 0, 999)]), "but the model has 96"),
    ("forward_backward", forward_backward(MODEL, 1, []), "has no data"),
    (
        "forward_backward",
        forward_backward(MODEL, 1, [{"model_input": [{"dmel": {}}], "loss_fn_inputs": {}}]),
        "a chunk of dmel",
    ),
    ("optim_step", adam(MODEL, 1, learning_rate=-1.0), "learning_rate is -1.0"),
    ("optim_step", b"[]", "no mapping"),
    ("optim_step", b'{"adam_params": {"beta1": 1}}', "beta1 is 1"),
    ("save_weights", b'{"path": "../x"}', "a name of at most 128 letters"),
    ("load_weights", b'{"path": "tinker://a/weights/../b"}', "no path of saved weights"),
    ("load_weights", b'{"path": "tinker://a/weights/b"}', "there are no weights at"),
)


def test_a_number_that_float32_does_not_have(client: Client) -> None:
    for beta, sentence in ((1e300, "beta = 1e+300, but dro takes beta"), (-1.0, "beta = -1")):
        outcome = client.train(MODEL, data(0, logprobs=-1.0, advantages=1.0), "dro", beta=beta)
        assert not outcome.good and sentence in json.loads(outcome.body)["error"]


def test_what_is_wrong_is_refused(client: Client) -> None:
    for kind, body, sentence in WRONG:
        outcome = client.do(MODEL, kind, body)
        assert not outcome.good and sentence in json.loads(outcome.body)["error"], (kind, sentence, outcome.body)
    for body, sentence in (
        (sample("t", 0, [], 1), "at least one token"),
        (sample("t", 0, [3], 1, max_tokens=10**6), "set max_tokens to"),
        (sample("t", 0, [3], 1, temperature=-1.0), "temperature is -1.0"),
        (sample("t", 0, [3], 0), "num_samples is 0"),
    ):
        (outcome,) = client.samples("", body)
        assert sentence in json.loads(outcome.body)["error"], sentence
    assert client.train(MODEL, data(0)).good


def test_a_full_disk(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is not on disk is not acknowledged; a copy is refused, and the model goes on."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    client.train(MODEL, data(0))
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        outcome = client.do(MODEL, "save_weights", path="one")
        assert not outcome.good and json.loads(outcome.body)["category"] == "server"
        with pytest.raises(UserError, match="full|space"):
            client.step(MODEL)
    assert client.backend.restore(MODEL) is not None
    assert client.weights(MODEL)["lm_head.lora_B"].count_nonzero() == 0, "as it was created"


def test_a_damaged_file_is_refused(client: Client) -> None:
    path = client.folder.model(MODEL)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="is damaged"):
        client.backend.restore(MODEL)


def test_a_damaged_file_is_a_sentence_and_can_be_replaced(client: Client) -> None:
    assert client.do(MODEL, "save_weights", path="one").good
    file = client.folder.saved(Saved(model=MODEL, kind="weights", name="one"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    for kind, asked, good in (
        ("load_weights", {"path": f"tinker://{MODEL}/weights/one"}, False),
        ("save_weights", {"path": "one"}, False),
        ("save_weights", {"path": "one", "overwrite": True}, True),
        ("load_weights", {"path": f"tinker://{MODEL}/weights/one"}, True),
    ):
        outcome = client.do(MODEL, kind, **asked)
        assert outcome.good is good and (b"is damaged" in outcome.body) is not good, outcome
    own = client.folder.model(MODEL)
    own.write_bytes(own.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged .*restore it from a copy, or delete it"):
        client.backend.restore(MODEL)
    for _ in range(2):  # the process may end between the file and the answer
        assert client.do(MODEL, "unload_model").good and not own.exists()
