"""A server with a fault is found in its first rollout with an adapter that does something, and the fault is named."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import UserError
from engine.rollouts.delivery import Known, fault
from tests.support import bad_servers as bad
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import records, run_here
from tests.support.served_runs import save_weights, served_settings
from tests.support.sweeps import sampled
from tests.support.tool_runs import tool_settings

_GIVEN = r"{url} was given the adapter of step %d and computes "
_NEITHER = _GIVEN % 1 + r"with neither this one, nor the one before, nor without: .* lie -?\d\.\d\d of the way"
_MADE_AGAIN = r"{url} cannot be sampled from: .* as where (its|their) text was made into tokens again: let token ids"
FAULTS: dict[str, tuple[type[StandIn], dict[str, Any], str]] = {
    # the adapter of step 0 changes nothing, so that a server has ignored that of step 1, or is behind
    "old": (bad.Ignoring, {}, _GIVEN % 1 + "without adapter: it ignores the call that loads one, or is one version"),
    "ignoring": (bad.Ignoring, {"right": 2}, _GIVEN % 2 + "without adapter: it ignores the call that loads one;"),
    "behind": (bad.Behind, {"right": 2}, _GIVEN % 2 + "with the one before: it is one version behind;"),
    **{name: (bad.Partial, {"change": change}, _NEITHER) for name, change in bad.PARTS.items()},
    "mixed": (bad.Mixed, {}, _GIVEN % 1 + r"with another one in \d+ of 16 answers, where the rest is right"),
    "retokenising": (bad.Retokenising, {}, _MADE_AGAIN),
    "other output": (StandIn, {"mangle": bad.other_output}, _MADE_AGAIN),
}


def _settings(folder: Path, *servers: StandIn, turns: bool = False, **changes: object) -> dict[str, object]:
    given = {"rollout__num_generations": 2, "train__global_batch_size": 8, "train__steps": 3, **changes}
    if turns:
        settings = tool_settings(folder, **given)
        del settings["model.init"]
    else:
        settings = served_settings(folder, **given)
    urls = ",".join(one.url for one in servers)
    return settings | {"model.path": servers[0].model, "rollout.server": urls, "rollout.server_kind": servers[0].kind}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models whose completions have one turn, or several."""
    one, several = (tmp_path_factory.mktemp(name) for name in ("one", "several"))
    served_settings(one)
    tool_settings(several)
    save_weights(several / "model")
    return {False: one / "model", True: several / "model"}


def _refused(folder: Path, *servers: StandIn, turns: bool) -> str:
    """The sentence with which a run ends."""
    with pytest.raises(UserError) as refused:
        run_here(_settings(folder, *servers, turns=turns))
    return str(refused.value)


TURNS = pytest.mark.parametrize("turns", sampled((False, True), (False,)), ids=["one turn", "several"])


@pytest.mark.parametrize(
    ("name", "kind", "turns"),
    sampled(
        product(FAULTS, ("vllm", "sglang"), (False, True)),
        [("behind", "vllm", False), ("half of the layers", "sglang", True), ("retokenising", "vllm", True)],
    ),
)
def test_the_fault_is_named(name: str, kind: str, turns: bool, models: dict[bool, Path], tmp_path: Path) -> None:
    made, changes, words = FAULTS[name]
    with made(models[turns], kind=kind, **changes) as server:
        told = _refused(tmp_path, server, turns=turns)
    assert re.search(words.replace("{url}", re.escape(server.url)), told), told
    # nothing that was sampled with the wrong adapter was trained on
    metrics, step = tmp_path / "run" / "metrics.jsonl", re.search("adapter of step ([0-9])", told)
    assert (len(records(tmp_path / "run")) if metrics.exists() else 0) == (0 if step is None else int(step[1]))


@TURNS
def test_another_models_answer_is_refused(turns: bool, models: dict[bool, Path], tmp_path: Path) -> None:
    with StandIn(models[turns], mangle=bad.renamed) as server:
        told = _refused(tmp_path, server, turns=turns)
    words = r"was asked for tokens of the adapter rankfold-\S+ and answers with those of another model \(another\)"
    assert re.search(words, told) and server.url in told


@pytest.mark.slow
@pytest.mark.parametrize("turns", [False, True])
def test_tokens_that_are_made_again_unseen(turns: bool, models: dict[bool, Path], tmp_path: Path) -> None:
    """The answers show neither the prompt's tokens nor how many they were, but whose log-probabilities they are."""
    with bad.SilentlyRetokenising(models[turns]) as server:
        told = _refused(tmp_path, server, turns=turns)
    assert re.search("asked about [0-9]+ token ids and answers about .*text was made into tokens", told), told


@pytest.mark.slow
@TURNS
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_are_named_one_by_one(kind: str, turns: bool, models: dict[bool, Path], tmp_path: Path) -> None:
    model, change = models[turns], bad.PARTS["A scaled"]
    with (
        StandIn(model, kind=kind) as good,
        bad.Behind(model, kind=kind) as late,
        bad.Partial(model, kind=kind, change=change) as wrong,
    ):
        told = _refused(tmp_path, good, late, wrong, turns=turns)
    assert good.url not in told and told.count("was given the adapter of step 1") == 2
    assert told.index(f"{late.url} was given") < told.index("version behind") < told.index(f"{wrong.url} was given")


@TURNS
def test_swapped_adapters_are_named(turns: bool, models: dict[bool, Path], tmp_path: Path) -> None:
    with bad.Swapped(models[turns]) as first, bad.Swapped(models[turns]) as second:
        first.other, second.other = second, first
        told = _refused(tmp_path, first, second, turns=turns)
    for one in (first, second):
        assert f"{one.url} was given the adapter of step 1 and computes" in told


_ROUNDING = 0.004
"""Distance of bfloat16's log-probabilities from those in float32, as vLLM's are on a CPU."""


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("rounds", [False, True], ids=["server", "both"])
def test_a_right_server_is_left_alone_in_any_precision(size: float, rounds: bool) -> None:
    """Its numbers are rounded, and so may be the trainer's, while adapters change little or much."""
    generator = np.random.default_rng(7)
    for _ in range(50):
        without, effect, step = generator.normal(size=(3, 400))
        before, now = without + size * effect, without + size * (effect + 0.1 * step)

        def rounded(exact: Any, noise: float) -> Any:
            return (exact + noise * generator.normal(size=400)).astype(np.float32)

        known = Known(*(rounded(one, _ROUNDING if rounds else 0.0) for one in (without, before, now)))
        noise = _ROUNDING * (2**0.5 if rounds else 1)
        assert fault(rounded(now, _ROUNDING), known, noise=noise, rows=[40] * 10) is None


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_each_fault_is_named_in_low_precision(size: float) -> None:
    generator = np.random.default_rng(7)
    for _ in range(50):
        without, effect, step, part = generator.normal(size=(4, 400))
        before, now = without + size * effect, without + size * (effect + step)
        known = Known(*(one.astype(np.float32) for one in (without, before, now)))

        def told(exact: Any, known: Known = known) -> str:
            served = (exact + _ROUNDING * generator.normal(size=400)).astype(np.float32)
            return fault(served, known, noise=_ROUNDING, rows=[40] * 10) or ""

        assert "ignores the call" in told(without)
        assert "one version behind" in told(before)
        assert "neither" in told((without + now) / 2) and "neither" in told(without + 2 * (now - without))
        assert "neither" in told(now + size * part)
        half = np.where(np.arange(400) < 200, now, before)
        assert "in 5 of 10 answers" in told(half)
