"""A server's most likely tokens at each place of a text: the call, and its answer.

Fields as of `engine.rollouts.servers.dialects`: vLLM's prompt_logprobs, SGLang's input_top_logprobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import UserError
from engine.foreign.fields import is_integer, is_number
from engine.rollouts.servers.dialects import LEAST_LOGP, ROUNDING, Call, Dialect, Sglang, WrongValue

Likely = list[tuple[int, float]]
"""Ids of tokens with their log-probabilities, the most likely first."""


def likely_call(dialect: Dialect, model: str, ids: Sequence[int], count: int) -> Call:
    """Returns the call for the most likely tokens at each place of a text.

    Args:
        model: its name on the server.
        ids: the text.
        count: how many.
    """
    path, body, most_bytes = dialect.score(model, ids)
    field = "top_logprobs_num" if isinstance(dialect, Sglang) else "prompt_logprobs"
    return Call(path, {**body, field: count}, most_bytes * (count + 2))


def likely_tokens(dialect: Dialect, answer: Any, ids: Sequence[int], count: int) -> list[Likely]:
    """Reads the answer: the most likely tokens at each place after the first.

    Raises:
        UserError: it lacks some, is about another text, or has impossible values.
    """
    dialect.scored(answer, ids)  # whether it is about these tokens
    if isinstance(dialect, Sglang):
        name, facts = "input_top_logprobs", answer["meta_info"]
        given = [_of_list(entry) for entry in _entries(facts.get(name), name, len(ids))]
    else:
        name = "prompt_logprobs"
        given = [_of_mapping(entry) for entry in _entries(answer["choices"][0].get(name), name, len(ids))]
    return [_checked(entry, name, count) for entry in given]


def _entries(value: object, name: str, length: int) -> list[Any]:
    """Returns the entries after the first."""
    if not isinstance(value, list) or len(value) != length:
        raise UserError(f"the answer has no {name} of all tokens that were sent: see that the server's kind is right")
    return value[1:]


def _of_mapping(entry: object) -> list[tuple[object, object]]:
    if not isinstance(entry, Mapping):
        return []
    found: list[tuple[object, object]] = []
    for token, told in entry.items():
        number = int(token) if isinstance(token, str) and token.isdecimal() else None
        found.append((number, told.get("logprob") if isinstance(told, Mapping) else None))
    return found


def _of_list(entry: object) -> list[tuple[object, object]]:
    if not isinstance(entry, list):
        return []
    return [(one[1], one[0]) if isinstance(one, list) and len(one) > 1 else (None, None) for one in entry]


def _checked(entry: Sequence[tuple[object, object]], name: str, count: int) -> Likely:
    found: Likely = []
    for token, logp in entry:
        if not is_integer(token) or not isinstance(token, int) or token < 0:
            raise WrongValue(f"{name} has {{}} for a token, and an id is expected", token)
        if not is_number(logp) or not isinstance(logp, (int, float)) or logp > ROUNDING:
            raise WrongValue(f"{name} has {{}} for a log-probability, and numbers up to 0 are expected", logp)
        found.append((token, min(max(float(logp), LEAST_LOGP), 0.0)))
    found.sort(key=lambda one: -one[1])
    if len(found) < count:
        raise UserError(
            f"the answer has {len(found)} {name} at a place, and {count} were asked for: let the server give that many "
            "(--max-logprobs), or ask for fewer"
        )
    return found[:count]
