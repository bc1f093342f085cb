"""Clients of a server over several ranks: each has what it has alone there, and other ranks go on from its files."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import UserError
from rankfold.benchmarking.small_run import SMALL_MIXTURE, write_small_run
from rankfold.serve import main
from tests.serving.bodies import adam
from tests.serving.clients import write_base
from tests.serving.served_ranks import CLIENTS, ONE_RANK, Layout, Served, kept, trained_in
from tests.support.spawning import spawn
from tests.tenants.test_shared_base import SMALLER

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "one": ONE_RANK,
    "nf4": Layout(1, {}, {"base_dtype": "nf4"}),
    "tensor": Layout(2, {"tensor": 2}),
    "tensor, resting": Layout(2, {"tensor": 2}, {"resident": 0.0}),
    "pipeline": Layout(2, {"pipeline": 2}),
    "context": Layout(2, {"context": 2}),
    "data": Layout(2, {}),
    "tensor, pipeline": Layout(4, {"tensor": 2, "pipeline": 2}),
    "tensor, context": Layout(4, {"tensor": 2, "context": 2}),
    "pipeline, data": Layout(4, {"pipeline": 2}),
    "pipeline, nf4": Layout(2, {"pipeline": 2}, {"base_dtype": "nf4"}),
}
OF_EXPERTS = {
    "tensor": Layout(2, {"tensor": 2}),
    "pipeline": Layout(2, {"pipeline": 2}),
    "expert, data": Layout(2, {"expert": 2}),
    "expert, tensor": Layout(2, {"tensor": 2, "expert": 2}),
    "expert, context": Layout(2, {"context": 2, "expert": 2}),
}
"""Layouts of a mixture of experts."""
SAME_SUMS = ("one", "nf4", "pipeline", "pipeline, nf4")
"""Layouts that add up in the order of one rank."""
BOUND = 4e-6
"""Largest difference of a master, all of which have moved by 0.02, where a layout adds up in another order."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder: Path = tmp_path_factory.mktemp("mixture")
    write_small_run(folder, {**SMALL_MIXTURE, **SMALLER})
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def run(base: Path, state: Path, layout: Layout, models: Sequence[str], steps: Sequence[int]) -> Any:
    """What `trained_in` returns on rank 0."""
    arguments = (base, state, layout, models, steps)
    if layout.world == 1:
        return trained_in(*arguments)
    return spawn(trained_in, world=layout.world, args=arguments)[0]


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items() if "optim" not in name)


def tokens(found: Any) -> list[list[list[int]]]:
    """The tokens of each model's samples."""
    return [[sequence[0] for sequence in sequences] for sequences, _ in found["samples"]]


def refused_alike(base: Path, state: Path) -> list[str]:
    """What each rank is told where the disk of rank 0 takes nothing."""
    served, told = Served(base, state, LAYOUTS["tensor"]), list[str]()
    (model,) = models = ["s:train:1"]
    served.create(models)
    served.steps(models, [0])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 0:
        pytest.MonkeyPatch().setattr(os, "fsync", full)
    (refused,) = served.backend.execute([served.task(model, "save_weights", b'{"path": "one"}')])
    told.append(json.loads(refused.body)["error"])
    served.do("forward_backward", {model: served.body(model, 1)})
    try:
        served.do("optim_step", {model: adam(model, served.seq[model])})
    except UserError as error:
        told.append(str(error))
    return told


def test_two_ranks(base: Path, tmp_path: Path) -> None:
    """Two clients over two ranks, each as alone there; one rank goes on from their files. A full disk is told to
    all ranks."""
    models = ["s:train:1", "s:train:3"]
    together = run(base, tmp_path / "together", LAYOUTS["tensor"], models, [0, 1])
    alone = run(base, tmp_path / "alone", LAYOUTS["tensor"], models[1:], [0, 1])
    assert torch.equal(together["logps"][3], alone["logps"][1]) and together["samples"][1] == alone["samples"][0]
    files = kept(tmp_path / "together")
    for name, tensor in kept(tmp_path / "alone")[models[1]].items():
        assert torch.equal(files[models[1]][name], tensor), name
    one = run(base, tmp_path / "one", ONE_RANK, models, [0, 1])
    assert one["losses"] == pytest.approx(together["losses"], abs=1e-4)
    for model, expected in kept(tmp_path / "one").items():
        assert largest(files[model], expected) < BOUND
    restored = run(base, tmp_path / "together", ONE_RANK, models, [])
    assert restored["again"] and tokens(restored) == tokens(one)
    first, second = spawn(refused_alike, world=2, args=(base, tmp_path / "full"))
    assert first == second and len(first) == 2 and all("No space left" in one for one in first)


@pytest.mark.parametrize(
    ("words", "started", "sentence"),
    [
        ("--data 0", None, "--data is 0, but 1 or more is expected"),
        ("--tensor 0", None, "--tensor is 0"),
        ("--expert 3 --data 2", None, "--expert is 3, but a pipeline stage has 2"),
        ("--tensor 2", "3", "has 3 ranks and --tensor 2"),
        ("--tensor 2 --data 3", "4", "the layout has 6 ranks, but torchrun has started 4"),
    ],
)
def test_what_is_no_layout(
    words: str, started: str | None, sentence: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", started)
    monkeypatch.setattr("sys.argv", ["rankfold serve", "--model", str(base), *words.split()])
    with pytest.raises(UserError, match=re.escape(sentence)):
        main()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_client_has_what_it_has_alone(name: str, base: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    together = run(base, tmp_path / "together", layout, list(CLIENTS), [0, 1, 2])
    files = kept(tmp_path / "together")
    for place, model in enumerate(CLIENTS):
        alone = run(base, tmp_path / model, layout, [model], [0, 1, 2])
        assert together["losses"][place :: len(CLIENTS)] == alone["losses"]
        assert all(map(torch.equal, together["logps"][place :: len(CLIENTS)], alone["logps"]))
        assert together["samples"][place] == alone["samples"][0]
        for tensor, expected in kept(tmp_path / model)[model].items():
            assert torch.equal(files[model][tensor], expected), (model, tensor)
    plain = Layout(1, {}, layout.model)
    one = run(base, tmp_path / "one", plain, list(CLIENTS), [0, 1, 2])
    largest_error = max(largest(files[model], expected) for model, expected in kept(tmp_path / "one").items())
    print(f"{name}: {largest_error:.1e}")
    assert largest_error <= (0.0 if name in SAME_SUMS else BOUND)
    assert tokens(together) == tokens(one)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_clients_of_a_mixture(name: str, mixture: Path, tmp_path: Path) -> None:
    """As clients of a dense model; log-probabilities are compared with those of one rank, as an update of a number
    whose gradient is rounding alone may be any."""
    together = run(mixture, tmp_path / "together", OF_EXPERTS[name], list(CLIENTS), [0, 1])
    files = kept(tmp_path / "together")
    for place, model in list(enumerate(CLIENTS))[::2]:
        alone = run(mixture, tmp_path / model, OF_EXPERTS[name], [model], [0, 1])
        assert together["samples"][place] == alone["samples"][0]
        for tensor, expected in kept(tmp_path / model)[model].items():
            assert torch.equal(files[model][tensor], expected), (model, tensor)
    one = run(mixture, tmp_path / "one", ONE_RANK, list(CLIENTS), [0, 1])
    apart = max(float((a - b).abs().max()) for a, b in zip(together["logps"], one["logps"], strict=True))
    print(f"mixture, {name}: {apart:.1e}")
    assert apart < 1e-5 and tokens(together) == tokens(one)
    assert run(mixture, tmp_path / "together", ONE_RANK, list(CLIENTS)[:2], [])["again"]


@pytest.mark.slow
def test_other_layouts_go_on(base: Path, tmp_path: Path) -> None:
    """A server is started again in one layout after the other: files are read and written again bit for bit, and
    training goes on as over one rank."""
    order = ("one", "tensor", "pipeline", "context", "data", "tensor, pipeline", "tensor, context", "one")
    for step, name in enumerate(order):
        found = run(base, tmp_path / "changing", LAYOUTS[name], list(CLIENTS), [step])
        assert found["again"], name
    one = run(base, tmp_path / "one", ONE_RANK, list(CLIENTS), list(range(len(order))))
    assert found["losses"] == pytest.approx(one["losses"][-len(CLIENTS) :], abs=1e-4)
    files = kept(tmp_path / "changing")
    for model, expected in kept(tmp_path / "one").items():
        assert largest(files[model], expected) < 4 * BOUND
