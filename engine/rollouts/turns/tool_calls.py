"""Finds the calls of tools in sampled text, in the formats of the families that make them.

| format   | a call                                                                    | families              |
|----------|---------------------------------------------------------------------------|-----------------------|
| hermes   | <tool_call>{"name": ..., "arguments": {...}}</tool_call>                  | Qwen2.5, Qwen3, Hermes |
| qwen_xml | <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> | Qwen3-Coder, Qwen3.5 |
| llama    | {"name": ..., "parameters": {...}}, after <\\|python_tag\\|> or alone, ; between several | Llama 3  |
| mistral  | [TOOL_CALLS] and a list of JSON, or [TOOL_CALLS]NAME[ARGS]{...}           | Mistral               |
| harmony  | to=functions.NAME in a message's header, then JSON up to <\\|call\\|>     | gpt-oss               |

A text that begins a call and does not finish it is a call that failed: the model is told so. Text alone is an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.choices import ToolFormat
from engine.files.strict_json import JsonFlaw, JsonLimits, parse_json

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_HARMONY = re.compile(
    r"(?:\A|<\|start\|>assistant)(.*?)<\|message\|>(.*?)(?=<\|(?:end|call|return|start)\|>|\Z)", re.DOTALL
)
_TO = re.compile(r"to=functions\.([\w.-]+)")
_LIMITS = JsonLimits(depth=64, digits=None, finite=True)
"""Of the JSON in a call: what is nested deeper could be parsed here, and not be handed on."""
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool.

    Args:
        name: of the tool; "" where the text names none.
        arguments: by their names.
        problem: why it cannot be made, for the model; None where it can be tried.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A turn of the assistant.

    Args:
        content: its text, without calls and reasoning.
        reasoning: the text before </think>, or of the channel analysis; "" for none.
        calls: in their order.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """Returns the turn as a message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {"type": "function", "function": {"name": one.name, "arguments": dict(one.arguments)}}
                for one in self.calls
            ]
        return found


def format_of_template(template: str) -> ToolFormat | None:
    """Returns the format that a chat template asks the model to write; None where none of them shows in it."""
    marks: tuple[tuple[str, ToolFormat], ...] = (
        ("<function=", "qwen_xml"), ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"),
        ("<|channel|>", "harmony"), ("<|python_tag|>", "llama"), ('"parameters": ', "llama"),
    )  # fmt: skip
    return next((name for mark, name in marks if mark in template), None)


def parse_turn(text: str, tool_format: ToolFormat | None) -> Turn:
    """Returns a turn of the assistant.

    Args:
        text: with its control tokens, but without the one that ended it.
        tool_format: of its calls; None where it may have none.
    """
    if tool_format == "harmony":
        return _harmony(text)
    reasoning, thought = "", _THOUGHT.match(text)
    if thought is not None:
        reasoning, text = thought.group(1).strip(), text[thought.end() :]
    if tool_format is None:
        return Turn(content=text, reasoning=reasoning)
    parse: dict[str, Callable[[str], Turn]] = {
        "hermes": lambda text: _tagged(text, _hermes_call),
        "qwen_xml": lambda text: _tagged(text, _xml_call),
        "llama": _llama,
        "mistral": _mistral,
    }
    found = parse[tool_format](text)
    return Turn(content=found.content, reasoning=reasoning, calls=found.calls)


def _tagged(text: str, parse: Callable[[str], ToolCall]) -> Turn:
    calls = tuple(parse(found.group(1)) for found in _HERMES.finditer(text))
    return Turn(content=_HERMES.sub("", text).strip() if calls else text, calls=calls)


def _hermes_call(text: str) -> ToolCall:
    return _of_value(_json(text), "arguments")


def _xml_call(text: str) -> ToolCall:
    function = _FUNCTION.search(text)
    if function is None:
        return ToolCall(name="", problem="The call has no <function=NAME>.")
    arguments = {key.strip(): _typed(value) for key, value in _PARAMETER.findall(function.group(2))}
    return ToolCall(name=function.group(1).strip(), arguments=arguments)


def _typed(text: str) -> Any:
    """Returns a value in XML, which is a text where it is no JSON."""
    value = _json(text)
    return text if isinstance(value, _Flaw) else value


def _llama(text: str) -> Turn:
    marked = "<|python_tag|>" in text
    content, _, calls = text.rpartition("<|python_tag|>")
    if not marked and not re.match(r"\s*\{\s*\"name\"", text):
        return Turn(content=text)
    found = []
    for value in _values(calls, ";"):
        # without a mark, JSON that calls nothing is an answer
        if not marked and not (isinstance(value, dict) and {"parameters", "arguments"} & value.keys()):
            return Turn(content=text)
        found.append(_of_value(value, "parameters", "arguments"))
    return Turn(content=content.strip(), calls=tuple(found))


def _mistral(text: str) -> Turn:
    content, *parts = _MISTRAL.split(text)
    calls: list[ToolCall] = []
    for part in parts:
        if (named := _MISTRAL_CALL.match(part)) is not None:
            value = _json(part[named.end() :])
            is_right = isinstance(value, dict)
            calls.append(
                ToolCall(name=named.group(1), arguments=value)
                if is_right
                else ToolCall(name=named.group(1), problem=_unreadable(value))
            )
            continue
        value = _json(part)
        calls += [_of_value(one, "arguments") for one in (value if isinstance(value, list) else [value])]
    return Turn(content=content.strip() if calls else text, calls=tuple(calls))


def _harmony(text: str) -> Turn:
    content, reasoning, calls = [], [], []
    for found in _HARMONY.finditer(text):
        header, body = found.groups()
        if (to := _TO.search(header)) is not None:
            value = _json(body)
            if isinstance(value, dict):
                calls.append(ToolCall(name=to.group(1), arguments=value))
            else:
                calls.append(ToolCall(name=to.group(1), problem=_unreadable(value)))
        elif "analysis" in header:
            reasoning.append(body.strip())
        else:
            content.append(body)
    if not (content or reasoning or calls):
        return Turn(content=text)
    return Turn(content="".join(content), reasoning="\n".join(reasoning), calls=tuple(calls))


def _of_value(value: Any, *keys: str) -> ToolCall:
    """Returns the call in a value of JSON.

    Args:
        keys: of its arguments, the first that is there.
    """
    if not isinstance(value, dict):
        return ToolCall(name="", problem=_unreadable(value))
    name = value.get("name")
    if not isinstance(name, str):
        return ToolCall(name="", problem="The call has no name.")
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # some models write the arguments as JSON in a text
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name=name, problem="The arguments are no object of JSON.")
    return ToolCall(name=name, arguments=arguments)


class _Flaw(str):
    """Why a text is no JSON."""


def _json(text: str) -> Any:
    """Returns the value that a text holds, or the flaw that keeps it from being JSON."""
    try:
        return parse_json(text.encode("utf-8", "surrogatepass"), _LIMITS)
    except JsonFlaw as flaw:
        return _Flaw(str(flaw))


def _unreadable(value: Any) -> str:
    return f"The call is no valid JSON: {value}" if isinstance(value, _Flaw) else "The call is no object of JSON."


def _values(text: str, separator: str) -> Iterator[Any]:
    """Yields the values of JSON in a text, with separators between them, and the flaw that ends it."""
    decoder, place = json.JSONDecoder(), 0
    text = text.strip()
    while place < len(text):
        begin = place
        try:
            place = decoder.raw_decode(text, begin)[1]
        except (ValueError, RecursionError) as error:
            yield _Flaw(str(error))
            return
        yield _json(text[begin:place])
        while place < len(text) and text[place] in f" \n\t{separator}":
            place += 1
