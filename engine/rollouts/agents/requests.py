"""The requests of clients: bodies of OpenAI's two routes and of vLLM's route of token ids, checked.

A setting of sampling that is not the run's changes nothing: what is trained on has been sampled as the run says. It is
named once in the log. A setting that a client cannot do without (several answers, texts that end one, a grammar) is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.config.rollout import RolloutOptions
from engine.foreign.fields import described, is_integer, is_number
from engine.rollouts.agents.messages import WrongMessage, parse_messages
from engine.sentences import on_one_line

Route = Literal["chat", "completion", "generate"]
ROUTES: dict[str, Route] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/inference/v1/generate": "generate",
}
_ALONE: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stop": ([], ""), "echo": (False,), "suffix": ("",), "use_beam_search": (False,),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "functions": ([],), "features": (), "content_parts": (), "continue_final_message": (False,), "audio": (),
}  # fmt: skip
"""Settings that are refused, but for these values and null."""
_NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0, "ignore_eos": False, "logit_bias": {},
    "bad_words": [], "typical_p": 1,
}  # fmt: skip
"""Settings that change nothing, and their values that are none."""
_SENTENCE = 200
"""Maximum characters of a value that is repeated."""


class Refusal(Exception):
    """Raised where a request is not answered.

    Args:
        words: for the client.
        status: of HTTP.
        code: by which OpenAI's clients know some errors.
    """

    def __init__(self, words: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(words)
        self.status, self.code = status, code


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request for one turn of the model.

    Args:
        route: that it came by.
        messages: of a conversation.
        tools: that the client offers.
        calls: whether the turn may call them.
        prompt: of the other routes: a text, or token ids.
        most: tokens of the turn; None for as many as there is room for.
        stream: whether the answer is sent as events.
        with_usage: whether events end with the counts of tokens.
        with_logps: whether the answer has log-probabilities.
        with_ids: whether it has token ids.
        names_ids: whether tokens are named by their ids.
        ignored: settings that are not the run's, in words.
    """

    route: Route
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    calls: bool = False
    prompt: str | tuple[int, ...] = ()
    most: int | None = None
    stream: bool = False
    with_usage: bool = False
    with_logps: bool = False
    with_ids: bool = False
    names_ids: bool = False
    ignored: tuple[str, ...] = ()


def parse_request(route: Route, body: Any, rollout: RolloutOptions, model: str) -> Asked:
    """Returns a request.

    Args:
        body: its JSON.
        rollout: the run's options.
        model: the name by which the run's model is known.

    Raises:
        Refusal: it cannot be answered.
    """
    if not isinstance(body, dict):
        raise Refusal(f"the body is {described(body)}, where an object is expected")
    settings: Any = body
    if route == "generate":
        settings = body.get("sampling_params") or {}
        if not isinstance(settings, dict):
            raise Refusal(f"sampling_params is {described(settings)}, where an object is expected")
        _refuse_unanswerable(body)
    _refuse_unanswerable(settings)
    ignored = _ignored(settings, rollout)
    if body.get("model") not in (None, model):
        ignored.append(f"model {_short(body['model'])}, and gets {model}")
    common: dict[str, Any] = {
        "most": _most(settings),
        "stream": body.get("stream") is True,
        "with_usage": isinstance(body.get("stream_options"), dict)
        and bool(body["stream_options"].get("include_usage")),
        "with_ids": body.get("return_token_ids") is True,
        "names_ids": body.get("return_tokens_as_token_ids") is True,
    }
    if route == "chat":
        return _chat(body, common, ignored)
    name = "prompt" if route == "completion" else "token_ids"
    logprobs = settings.get("logprobs")
    return Asked(
        route=route,
        prompt=_prompt(body.get(name), name, texts=route == "completion"),
        with_logps=logprobs is not None and logprobs is not False,
        ignored=tuple(ignored),
        **common,
    )


def _chat(body: Mapping[str, Any], common: Mapping[str, Any], ignored: list[str]) -> Asked:
    try:
        messages = parse_messages(body.get("messages"))
    except WrongMessage as flaw:
        raise Refusal(str(flaw)) from None
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise Refusal("response_format asks for a grammar, and the run samples without one: leave it out")
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list) or not all(_is_tool(one) for one in tools):
        raise Refusal("tools has something else than functions with names, as {'type': 'function', 'function': {...}}")
    if choice not in (None, "auto", "none"):
        ignored.append(f"tool_choice {_short(choice)}, and the model chooses")
    return Asked(
        route="chat",
        messages=tuple(messages),
        tools=tuple(tools),
        calls=bool(tools) and choice != "none",
        with_logps=body.get("logprobs") is True,
        ignored=tuple(ignored),
        **common,
    )


def _is_tool(one: Any) -> bool:
    function = one.get("function") if isinstance(one, dict) and one.get("type", "function") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _prompt(given: Any, name: str, *, texts: bool) -> str | tuple[int, ...]:
    if texts and isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if texts and isinstance(given, str):
        return given
    if not isinstance(given, list) or not given or not all(is_integer(one) and one >= 0 for one in given):
        kind = "one text, or the token ids of one," if texts else "a list of token ids"
        raise Refusal(f"{name} is {described(given)}, where {kind} is expected")
    return tuple(given)


def _most(settings: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = settings.get(name)
        if value is None:
            continue
        if not is_integer(value) or value < 1:
            raise Refusal(f"{name} is {described(value)}, where an integer of at least 1 is expected")
        return value
    return None


def _refuse_unanswerable(settings: Mapping[str, Any]) -> None:
    for name, allowed in _ALONE.items():
        value = settings.get(name)
        if value is None or value in allowed:
            continue
        raise Refusal(f"{name} is {_short(value)}, which a training run does not offer: leave it out")


def _ignored(settings: Mapping[str, Any], rollout: RolloutOptions) -> list[str]:
    """Returns the settings of sampling that are not the run's, in words."""
    own: dict[str, Any] = {
        "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p,
        "repetition_penalty": rollout.repetition_penalty,
    }  # fmt: skip
    found = []
    for name, value in own.items():
        given = settings.get(name)
        if name == "top_k" and is_number(given) and given <= 0:
            given = None
            if value is None:
                continue
            found.append(f"top_k of all tokens, and gets {value}")
        elif given is not None and given != value:
            found.append(f"{name} {_short(given)}, and gets {'all tokens' if value is None else value}")
    for name, nothing in _NEUTRAL.items():
        if settings.get(name) not in (None, nothing):
            found.append(f"{name} {_short(settings[name])}, and gets none")
    if settings.get("seed") is not None:
        found.append(f"seed {_short(settings['seed'])}, and gets the run's")
    return found


def _short(value: Any) -> str:
    return on_one_line(json.dumps(value), most=_SENTENCE)
