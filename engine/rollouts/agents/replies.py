"""The answers to clients, in the forms of OpenAI's two routes and of vLLM's route of token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.rollouts.agents.requests import Asked, Refusal
from engine.rollouts.turns.tool_calls import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A turn that the model sampled for a request.

    Args:
        name: of the answer.
        model: name of the model.
        prompt: token ids in front of it.
        tokens: of it, with the one that ended it.
        logps: of each.
        texts: of each, where log-probabilities are asked for by texts.
        ended: whether a token ended it.
        turn: of a conversation.
        first_call: number of its first call in the conversation.
        text: of the other routes.
    """

    name: str
    model: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logps: Sequence[float]
    texts: Sequence[str] = ()
    ended: bool
    turn: Turn | None = None
    first_call: int = 0
    text: str = ""

    @property
    def finish(self) -> str:
        """The reason why it ended."""
        if not self.ended:
            return "length"
        return "tool_calls" if self.turn is not None and self.turn.calls else "stop"

    def usage(self) -> dict[str, int]:
        """Returns the counts of tokens."""
        prompt, own = len(self.prompt), len(self.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own}


def message_of(turn: Turn, first_call: int) -> dict[str, Any]:
    """Returns a turn as a message of OpenAI's.

    Args:
        first_call: number of its first call in the conversation.
    """
    found: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        found["reasoning_content"] = turn.reasoning
    if turn.calls:
        found["content"] = turn.content or None
        found["tool_calls"] = [
            {
                "id": f"call{number:05d}",
                "type": "function",
                "function": {"name": one.name, "arguments": json.dumps(dict(one.arguments))},
            }
            for number, one in enumerate(turn.calls, first_call)
        ]
    return found


def body_of(asked: Asked, answered: Answered, created: int) -> dict[str, Any]:
    """Returns the answer to a request.

    Args:
        created: seconds since 1970.
    """
    if asked.route == "generate":
        choice = {
            "index": 0,
            "token_ids": list(answered.tokens),
            "finish_reason": answered.finish,
            "logprobs": {"content": _entries(asked, answered)} if asked.with_logps else None,
        }
        return {"request_id": answered.name, "choices": [choice], "usage": answered.usage()}
    choice = {"index": 0, "finish_reason": answered.finish, "logprobs": _logprobs(asked, answered)}
    if asked.route == "chat":
        assert answered.turn is not None
        choice["message"] = message_of(answered.turn, answered.first_call)
    else:
        choice["text"] = answered.text
    found = {**_head(asked, answered, created), "choices": [choice], "usage": answered.usage()}
    if asked.with_ids:
        choice["token_ids"] = list(answered.tokens)
        found["prompt_token_ids"] = list(answered.prompt)
        if asked.route == "completion":
            choice["prompt_token_ids"] = list(answered.prompt)
    return found


def events_of(asked: Asked, answered: Answered, created: int) -> bytes:
    """Returns the answer as events: the turn as a whole, its end, the counts where they are asked for."""
    whole = body_of(asked, answered, created)
    (choice,) = whole["choices"]
    head = _head(asked, answered, created)
    if asked.route == "chat":
        message = choice.pop("message")
        for place, call in enumerate(message.get("tool_calls", ())):
            call["index"] = place
        first = {**choice, "delta": message, "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": answered.finish}
        head["object"] = "chat.completion.chunk"
    else:
        first = {**choice, "finish_reason": None}
        last = {"index": 0, "text": "", "finish_reason": answered.finish}
    if "prompt_token_ids" in whole:
        head["prompt_token_ids"] = whole["prompt_token_ids"]
    chunks: list[dict[str, Any]] = [{**head, "choices": [first]}, {**head, "choices": [last]}]
    if asked.with_usage:
        chunks.append({**head, "choices": [], "usage": answered.usage()})
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in chunks) + b"data: [DONE]\n\n"


def error_of(refusal: Refusal) -> dict[str, Any]:
    """Returns a refusal as OpenAI's clients expect one."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": f"{refusal}.", "type": kind, "param": None, "code": refusal.code}}


def _head(asked: Asked, answered: Answered, created: int) -> dict[str, Any]:
    kind = "chat.completion" if asked.route == "chat" else "text_completion"
    return {"id": answered.name, "object": kind, "created": created, "model": answered.model}


def _logprobs(asked: Asked, answered: Answered) -> dict[str, Any] | None:
    if not asked.with_logps:
        return None
    if asked.route == "chat":
        return {"content": _entries(asked, answered)}
    names = [one["token"] for one in _entries(asked, answered)]
    return {"tokens": names, "token_logprobs": list(answered.logps), "top_logprobs": None, "text_offset": []}


def _entries(asked: Asked, answered: Answered) -> list[dict[str, Any]]:
    by_ids = asked.names_ids or asked.route == "generate"
    names = [f"token_id:{one}" for one in answered.tokens] if by_ids else answered.texts
    return [
        {"token": name, "logprob": logp, "bytes": None, "top_logprobs": []}
        for name, logp in zip(names, answered.logps, strict=True)
    ]
