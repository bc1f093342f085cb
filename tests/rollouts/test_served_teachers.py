"""Teachers on servers: the same numbers as those of a folder, on one rank and two; answers that cannot be."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import UserError
from engine.rollouts.source import RolloutSource
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import prepared, stepped
from tests.support.spawning import spawn
from tests.support.teachers import distilled_settings


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("served")
    return folder, distilled_settings(folder, ("other",), train__global_batch_size=8)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_says_what_its_model_does(kind: str, place: tuple[Path, dict[str, object]]) -> None:
    folder, settings = place
    with StandIn(folder / "other", kind=kind) as server, ExitStack() as opened:
        teachers = f"[{folder / 'other'},{server.url}]"
        run = prepared(settings | {"distillation.teachers": teachers, "distillation.server_kind": kind}, opened)
        (rows,) = run.source.stream(0, 0, 1)
        assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
        found = np.concatenate(run.source.buffer.teacher_logps, axis=1)
        np.testing.assert_allclose(found[0], found[1], atol=3e-6)
        name = server.url.removeprefix("http://")
        assert rows.figures[f"teachers/{name}/kl"] == pytest.approx(rows.figures["teachers/other/kl"], abs=1e-6)
        assert server.probes and not [one for one in server.probes if "lora" in json.dumps(one.body)]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_ask_once(place: tuple[Path, dict[str, object]]) -> None:
    folder, settings = place
    with StandIn(folder / "other") as server:
        settings = settings | {"distillation.teachers": f"[{server.url}]", "checkpoint.dir": folder / "two"}
        ranks = spawn(stepped, world=2, args=(settings, 1), timeout=120)
        assert ranks[0] == ranks[1]
        assert len(server.probes) == 8 + 1  # and one to check it


def _without(answer: dict[str, Any]) -> None:
    del answer["choices"][0]["prompt_logprobs"]


def _of_others(answer: dict[str, Any]) -> None:
    entries = answer["choices"][0]["prompt_logprobs"]
    answer["choices"][0]["prompt_logprobs"] = [None, *({"99": {"logprob": -1.0}} for _ in entries[1:])]


def _positive(answer: dict[str, Any]) -> None:
    for entry in answer["choices"][0]["prompt_logprobs"][1:]:
        for told in entry.values():
            told["logprob"] = 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mangle": _without}, "has no prompt_logprobs of all tokens that were sent"),
        ({"mangle": _of_others}, "as where their text was made into tokens again"),
        ({"mangle": _positive}, "prompt_logprobs has 0.5 for a log-probability, and numbers up to 0"),
        ({"tokens": [1, 2]}, "has another tokenizer"),
        ({"listed": {"max_model_len": 32}}, "shorter than data.seq_length 32 and one token more, which are 33"),
        ({"key": "other"}, "RANKFOLD_SERVER_KEY"),
    ],
)
def test_servers_that_cannot_teach_are_refused(
    change: dict[str, Any], words: str, place: tuple[Path, dict[str, object]]
) -> None:
    folder, settings = place
    with StandIn(folder / "other", mangles_base=True, **change) as server, ExitStack() as opened:
        with pytest.raises(UserError) as refused:
            prepared(settings | {"distillation.teachers": f"[{server.url}]"}, opened)
        assert words in str(refused.value) and server.url in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distillation.teachers": "['http://a b']"}, "but the address of a server is expected"),
        ({"distillation.teachers": "['http://me:word@h']"}, "a user name or a password before an @"),
        ({"distillation.teachers": "['http://h']", "rollout.temperature": 0.5}, "at temperature 1: set"),
        ({"distillation.server_timeout": 0}, "distillation.server_timeout is 0.0"),
        ({"distillation.server_kind": "other"}, "distillation.server_kind is 'other', but one of vllm, sglang"),
    ],
)
def test_wrong_options(options: dict[str, object], words: str, place: tuple[Path, dict[str, object]]) -> None:
    _, settings = place
    with pytest.raises(UserError) as refused, ExitStack() as opened:
        prepared(settings | options, opened)
    assert words in str(refused.value)
