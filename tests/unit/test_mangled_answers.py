"""Answers of a server in which any value is another: each is taken, or refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from math import isfinite
from typing import Any, Literal

import pytest

from engine.config.rollout import RolloutOptions
from engine.errors import UserError
from engine.rollouts.servers.dialects import Question, SamplingSettings
from engine.rollouts.servers.http import HttpServer
from engine.rollouts.servers.server import CompletionServer, Shown

SETTINGS = SamplingSettings(
    temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=1, ends=(0,)
)
VALUES: list[Any] = [
    None, True, False, 0, -1, 7, 99, 10**19, 0.5, -0.5, 1e308, -1e308, -1e30, "", "0", "\x1b[31m", "x" * 2000,
    [], [[]], [None], [-0.5, 1], {}, {"id": "a"}, {"a": [1]},
]  # fmt: skip
LIKELY = {f"token_id:{token}": -0.1 * token - 1 for token in range(6)}
LISTED = {"data": [{"id": "base", "owned_by": "{kind}", "parent": None, "max_model_len": 64}]}
ANSWERS: dict[str, dict[str, Any]] = {
    "vllm": {
        "/v1/models": LISTED,
        "/tokenize": {"tokens": [1, 2], "count": 2},
        "/v1/completions": {
            "choices": [{"token_ids": [0], "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [LIKELY]}}]
        },
    },
    "sglang": {
        "/v1/models": LISTED,
        "/tokenize": {"tokens": [1, 2], "count": 2},
        "/generate": {
            "output_ids": [0],
            "meta_info": {
                "output_token_logprobs": [[-0.5, 0, None]],
                "output_top_logprobs": [[[-0.1 * token - 1, token, None] for token in range(6)]],
            },
        },
    },
}


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a value."""
    yield here
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*here, key))


def put(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    """A value with another in one place."""
    if not place:
        return other
    copy = deepcopy(value)
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other
    return copy


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_any_value_in_any_place(kind: Literal["vllm", "sglang"], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken of a completion is a token of the vocabulary with a possible
    log-probability."""
    answers = json.loads(json.dumps(ANSWERS[kind]).replace("{kind}", kind))
    now = dict(answers)
    monkeypatch.setattr(HttpServer, "call", lambda self, path, body=None, most_bytes=0: deepcopy(now[path]))
    monkeypatch.setattr(HttpServer, "tell", lambda self, path, body: None)
    server = CompletionServer("http://h", RolloutOptions(server="http://h", server_kind=kind), vocabulary=8)
    assert server.check(Shown(32, "ab", (1, 2), (1, 2)), SETTINGS) == []
    refused, taken = 0, 0
    for path, answer in answers.items():
        for place in places(answer):
            for other in VALUES:
                now[path] = put(answer, place, other)
                try:
                    server.check(Shown(32, "ab", (1, 2), (1, 2)), SETTINGS)
                    server.unload_all("rankfold-")
                    (found,) = server.ask("a", [Question((1, 2), 0)], SETTINGS).result()
                    assert found.tokens in ((0,), (7,)) and isfinite(found.logps[0]) and -1000 <= found.logps[0] <= 1e-3
                    taken += 1
                except UserError as error:
                    refused += 1
                    assert len(str(error)) < 3000 and "\n" not in str(error)
        now[path] = answer
    server.close()
    assert refused > 300 and taken > 100, (refused, taken)
