"""Messages as clients of OpenAI's interface send them, and the forms in which templates and comparisons want them.

A client sends the whole conversation with each request, and may change what it got: reasoning is often left out, the
arguments of a call are a text in one library and an object in another, white space around a text is cut off. None of
that makes a message another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.files.strict_json import JsonFlaw, JsonLimits, parse_json
from engine.foreign.fields import described

ROLES = ("system", "developer", "user", "assistant", "tool")
_LIMITS = JsonLimits(depth=64, digits=None, finite=True)


class WrongMessage(ValueError):
    """Raised where a message cannot be used; its text is the reason."""


def parse_messages(given: Any) -> list[dict[str, Any]]:
    """Returns messages in the form that chat templates take.

    Raises:
        WrongMessage: one of them cannot be used.
    """
    if not isinstance(given, list) or not given:
        raise WrongMessage(f"messages is {described(given)}, where a list of messages is expected")
    names: dict[str, str] = {}
    return [_message(one, place, names) for place, one in enumerate(given)]


def _message(given: Any, place: int, names: dict[str, str]) -> dict[str, Any]:
    """Returns one message.

    Args:
        names: of the tools that were called so far, by the identifiers of the calls; this one's are added.
    """
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise WrongMessage(f"message {place} has no role that is one of {', '.join(ROLES)}")
    role = "system" if given["role"] == "developer" else given["role"]
    found: dict[str, Any] = {"role": role, "content": _text(given.get("content"), place)}
    if role == "tool":
        name = given.get("name") or names.get(str(given.get("tool_call_id"))) or next(iter(names.values()), "tool")
        found["name"] = str(name)
    if role != "assistant":
        return found
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        found["reasoning_content"] = reasoning
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise WrongMessage(f"message {place} has tool_calls that are {described(calls)}, where a list is expected")
    if calls:
        found["tool_calls"] = [_call(one, place) for one in calls]
        for one, call in zip(calls, found["tool_calls"], strict=True):
            names[str(one.get("id"))] = call["function"]["name"]
    return found


def _text(content: Any, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WrongMessage(f"message {place} has a content that is {described(content)}, where a text is expected")
    parts = []
    for one in content:
        text = one.get("text") if isinstance(one, dict) else None
        if not isinstance(text, str):
            raise WrongMessage(f"message {place} has a part that is no text, and the model is given texts alone")
        parts.append(text)
    return "".join(parts)


def _call(given: Any, place: int) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise WrongMessage(f"message {place} has a call of a tool that names no function")
    return {"type": "function", "function": {"name": name, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    """Returns the arguments of a call as an object, which templates write as JSON; other texts as they are."""
    if not isinstance(given, str):
        return given or {}
    try:
        found = parse_json(given.encode("utf-8", "surrogatepass"), _LIMITS)
    except JsonFlaw:
        return given
    return found if isinstance(found, dict) else given


def compared(message: Mapping[str, Any]) -> str:
    """Returns a text that two messages share if a client that sends one of them back means the other."""
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    return json.dumps([message["role"], str(message["content"]).strip(), calls], sort_keys=True)


def all_compared(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns that text of each message."""
    return tuple(map(compared, messages))
