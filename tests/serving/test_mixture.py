"""Clients of a mixture of experts: the base's losses against transformers, neighbours, and samples against scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rankfold.benchmarking.small_run import write_small_run
from tests.serving.bodies import datum, forward_backward, read_output, read_samples, sample
from tests.serving.served_ranks import CLIENTS, ONE_RANK, Layout, kept
from tests.serving.test_layouts import run, tokens
from tests.serving.test_peft_files import scores_by_peft
from tests.serving.test_tenant_backend import MODEL, OTHER, Client, data, losses_of
from tests.tenants.mixtures import MODELS

LAYOUTS: list[dict[str, int]] = [{"expert": 2}, {"tensor": 2}, {"tensor": 2, "expert": 2}]
FAR = 1e-4
"""Largest distance of a model's masters, relative to their norm, where a layout adds up in another order: AdamW divides
the gradients of experts with few tokens by their size, however small."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights that transformers wrote."""
    from transformers import AutoConfig, Qwen2MoeForCausalLM

    folder: Path = tmp_path_factory.mktemp("mixture")
    write_small_run(folder, MODELS["qwen2 moe"])
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(AutoConfig.from_pretrained(folder, initializer_range=0.1))
    model.save_pretrained(folder)
    return folder


def test_clients_of_a_mixture(base: Path, tmp_path: Path) -> None:
    from transformers import Qwen2MoeForCausalLM

    both, alone = Client(base, tmp_path / "both"), Client(base, tmp_path / "alone")
    for client, model in ((both, MODEL), (both, OTHER), (alone, OTHER)):
        client.create(model)
    adapted = {name.partition(".mlp.")[2].split(".")[0] for name in both.weights(OTHER)}
    assert adapted == {"experts", "shared_expert"}, "train_mlp means experts, and leaves routers as they are"
    theirs = Qwen2MoeForCausalLM.from_pretrained(base, dtype=torch.float32)
    for step in range(3):
        bodies = {
            MODEL: forward_backward(MODEL, both.seq[MODEL], data(step)),
            OTHER: forward_backward(
                OTHER, both.seq[OTHER], data(step + 50, logprobs=-4.0, advantages=0.7), "importance_sampling"
            ),
        }
        outcomes = both.backend.execute([both.task(model, "forward_backward", body) for model, body in bodies.items()])
        assert all(one.good for one in outcomes)
        if step == 0:
            ones = [[1.0] * length for length in (11, 25, 17)]
            with torch.no_grad():
                expected = losses_of(theirs, data(step), ones).item()
            assert read_output(outcomes[0].body)[0] == pytest.approx(expected, rel=1e-6)
        assert alone.do(OTHER, "forward_backward", bodies[OTHER]).good
        for client, model in ((both, MODEL), (both, OTHER), (alone, OTHER)):
            assert client.step(model, learning_rate=1e-2).good
    for name, tensor in alone.weights(OTHER).items():
        assert torch.equal(both.weights(OTHER)[name], tensor), name

    path = json.loads(both.do(OTHER, "save_weights_for_sampler", path="a").body)["path"]
    body = sample("t", 0, [5, 6, 7], 3, max_tokens=8, seed=8, stop=[])
    first, *_, again = both.samples(path, body, sample("t", 1, [9, 9], 2, max_tokens=8, seed=5), body)
    assert first.body == again.body
    differences = []
    for drawn, logps, _ in read_samples(first.body)[0]:
        ids = [5, 6, 7, *drawn]
        _, (trained,) = both.score(OTHER, [datum(ids[:-1], ids[1:])])
        differences.append(trained[2:] - np.asarray(logps, np.float32))
    assert abs(np.concatenate(differences).mean()) < 1e-6 and np.abs(np.concatenate(differences)).max() < 5e-6


@pytest.mark.slow
def test_peft_opens_a_mixtures_adapter(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    base = tmp_path / "base"
    write_small_run(base, MODELS["qwen3 moe"])
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(AutoConfig.from_pretrained(base, initializer_range=0.1)).save_pretrained(base)
    client = Client(base, tmp_path / "state")
    for model in (MODEL, OTHER):
        client.create(model)
        for step in range(2):
            client.train(model, data(step))
            client.step(model, learning_rate=3e-2)
        ids = np.random.default_rng(7).integers(3, 90, 31).tolist()
        _, (expected,) = client.score(model, [datum(ids[:-1], ids[1:])])
        assert client.do(model, "save_weights_external", path="b").good
        folder = client.folder.root / "external_weights" / model.replace(":", "_") / "b"
        assert np.abs(scores_by_peft(base, folder, ids[:-1], ids[1:]) - expected).max() < 5e-6
        assert np.abs(client.score(model, [datum(ids[1:], ids[:-1])])[1][0] - expected).max() > 1e-3


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    names = [name for name in expected if "optim" not in name]
    left, right = (torch.cat([one[name].flatten().double() for name in names]) for one in (found, expected))
    return float((left - right).norm() / right.norm())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_over_ranks(base: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    """Each client has what it has alone there, and nearly what it has on one rank, which goes on from its files."""
    together = run(base, tmp_path / "together", Layout(2, layout), list(CLIENTS), [0, 1])
    files = kept(tmp_path / "together")
    for place, model in enumerate(CLIENTS):
        alone = run(base, tmp_path / model, Layout(2, layout), [model], [0, 1])
        assert together["losses"][place :: len(CLIENTS)] == alone["losses"]
        assert together["samples"][place] == alone["samples"][0]
        for tensor, expected in kept(tmp_path / model)[model].items():
            assert torch.equal(files[model][tensor], expected), (model, tensor)
    one = run(base, tmp_path / "one", ONE_RANK, list(CLIENTS), [0, 1])
    assert one["losses"] == pytest.approx(together["losses"], abs=1e-4)
    for model, expected in kept(tmp_path / "one").items():
        assert far(files[model], expected) < FAR, model
    restored = run(base, tmp_path / "together", ONE_RANK, list(CLIENTS), [])
    assert restored["again"] and tokens(restored) == tokens(one)
