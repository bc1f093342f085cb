"""Calls of tools in sampled text, descriptions of tools, and what stands between two turns of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.data.tokenizer import ChatOptions, load_tokenizer
from engine.errors import UserError
from engine.rollouts.turns.chat import ToolChat, tool_message
from engine.rollouts.turns.schemas import NoSchema, tool_schema
from engine.rollouts.turns.tool_calls import format_of_template, parse_turn
from tests.support.tool_runs import ENDS, TEMPLATE, write_tool_tokenizer

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo\nlines\n</parameter>\n"
    "</function>\n</tool_call>"
)
HARMONY = '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "reasoning", "calls"),
    [
        ("hermes", "An answer.", "An answer.", "", []),
        ("hermes", HERMES, "", "", [("f", {"a": 1})]),
        ("hermes", f"Looking.\n{HERMES}\n{HERMES}", "Looking.", "", [("f", {"a": 1})] * 2),
        ("hermes", f"<think>\nWhat?\n</think>\n\n{HERMES}", "", "What?", [("f", {"a": 1})]),
        ("hermes", f"What?</think>{HERMES}", "", "What?", [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", "", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", ', "", "", ["The call is no valid JSON"]),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", "", ["The call has no name"]),
        ("hermes", "<tool_call>[1]</tool_call>", "", "", ["The call is no object"]),
        ("hermes", f'<tool_call>{"[" * 100_000}</tool_call>', "", "", ["The call is no valid JSON"]),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 900}{"]" * 900}}}}}</tool_call>', "", "",
         ["it nests too deeply"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "", "", ["a finite number"]),
        ("llama", f'<|python_tag|>{{"name": "f", "parameters": {{"a": {"[" * 900}{"]" * 900}}}}}', "", "",
         ["it nests too deeply"]),
        ("qwen_xml", "<tool_call><function=f><parameter=a>NaN</parameter></function></tool_call>", "", "",
         [("f", {"a": "NaN"})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "", "", ["The arguments are no object"]),
        ("qwen_xml", XML, "", "", [("f", {"a": 1, "b": "two\nlines"})]),
        ("qwen_xml", "<tool_call>f(1)</tool_call>", "", "", ["The call has no <function=NAME>"]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', "", "", [("f", {"a": 1})]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", "",
         [("f", {}), ("g", {})]),
        ("llama", '{"name": "a person", "age": 3}', '{"name": "a person", "age": 3}', "", []),
        ("llama", "<|python_tag|>import os", "", "", ["The call is no valid JSON"]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", "",
         [("f", {"a": 1}), ("g", {})]),
        ("mistral", 'So.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x12[ARGS]{}', "So.", "",
         [("f", {"a": 1}), ("g", {})]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "", "", ["The call is no valid JSON"]),
        ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|>{HARMONY}", "", "Hm.", [("f", {"a": 1})]),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "", "", [("f", {})]),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4", "4",
         "Hm.", []),
        ("harmony", "no header", "no header", "", []),
    ],
)  # fmt: skip
def test_calls_are_found(
    tool_format: Any, text: str, content: str, reasoning: str, calls: list[tuple[str, dict[str, Any]] | str]
) -> None:
    turn = parse_turn(text, tool_format)
    assert (turn.content, turn.reasoning, len(turn.calls)) == (content, reasoning, len(calls))
    for found, expected in zip(turn.calls, calls, strict=True):
        if isinstance(expected, str):
            assert found.problem is not None and expected in found.problem
        else:
            assert (found.name, found.arguments, found.problem) == (*expected, None)


def multiply(a: int, b: float = 2.0) -> float:
    """
    Multiplies two numbers.
    Exactly.

    Args:
        a: The first, which may be
            long: really.
        b: The second.

    Returns:
        Their product.
    """
    return a * b


def forecast(
    place: str, unit: Literal["c", "f"], tags: list[str], days: dict[str, int] | None = None, x: int | str = 1
) -> str:
    """Looks at the weather.

    Args:
        place: Where.
        unit: Degrees. (choices: ["c", "f"])
        tags: Some words.
        days: Which.
        x: Either.
    """
    return place


def nothing() -> None:
    """Does nothing."""


@pytest.mark.parametrize("function", [multiply, forecast, nothing])
def test_descriptions_are_those_of_transformers(function: Any) -> None:
    from transformers.utils import get_json_schema

    assert tool_schema(function) == get_json_schema(function)


def test_functions_that_a_model_could_not_call_are_refused() -> None:
    def without_hint(a):  # type: ignore[no-untyped-def]
        """Does.

        Args:
            a: it
        """

    def without_words(a: int) -> None:
        """Does."""

    def without_docstring(a: int) -> None: ...

    def with_object(a: object) -> None:
        """Does.

        Args:
            a: it
        """

    def with_unknown(a: Nowhere) -> None:  # noqa: F821
        """Does.

        Args:
            a: it
        """

    def with_choice(a: int) -> None:
        """Does.

        Args:
            a: it (choices: 5)
        """

    for function, why in (
        (with_unknown, "its type hints cannot be read .NameError"), (with_choice, "are no list in JSON"),
        (without_hint, "no type hint"), (without_words, "no line for the argument a"),
        (without_docstring, "no docstring"), (with_object, "no JSON schema of the type object"),
    ):  # fmt: skip
        with pytest.raises(NoSchema, match=why):
            tool_schema(function)


QWEN3 = TEMPLATE.replace(
    "<assistant>{{ message.content }}",
    "<assistant>{%- if loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)
"""Writes reasoning in the last turn alone, so that a turn reads otherwise once a result follows."""


def chat(folder: Path, template: str = TEMPLATE, **options: Any) -> ToolChat:
    write_tool_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = load_tokenizer(folder, ChatOptions())
    schemas = [tool_schema(multiply)]
    return ToolChat(tokenizer, frozenset(range(len(ENDS))), schemas, **({"tool_format": None} | options))


@pytest.mark.parametrize("template", [TEMPLATE, QWEN3])
def test_results_are_what_follows_the_end_of_a_turn(tmp_path: Path, template: str) -> None:
    found = chat(tmp_path, template)
    assert found.check() == [] and found.tool_format == "hermes"
    show = found._tokenizer.show
    assert show(found.results([tool_message("multiply", "6")])) == "<result>6<assistant>"
    # an end in a result is not that of the turn
    both = found.results([tool_message("a", "6<end1>"), tool_message("b", "7")])
    assert show(both) == "<result>6<end1><result>7<assistant>"
    assert "multiply" in show(found.prompt([{"role": "user", "content": "Hi"}]))


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (TEMPLATE.replace("<result>{{ message.content }}", ""), {}, "does not show the result"),
        (TEMPLATE.replace("message.role == 'tool'", "message.role == 'tool' and raise_exception('no tools')"), {},
         "cannot show calls of tools .*no tools"),
        (TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", ""), {}, "no format in which the model calls"),
        (TEMPLATE, {"tool_format": "mistral"}, "in another format than mistral"),
    ],
)  # fmt: skip
def test_templates_without_tools_are_refused(
    tmp_path: Path, template: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        chat(tmp_path, template, **options).check()


def test_templates_that_say_less_are_noted(tmp_path: Path) -> None:
    blind = chat(tmp_path, TEMPLATE.replace("{{ tool.function.name }}", "")).check()
    assert len(blind) == 1 and "does not show the tools" in blind[0]
    drops = (
        "{%- set last = namespace(user=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
        "{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    ) + TEMPLATE.replace(
        "<assistant>{{ message.content }}",
        "<assistant>{%- if loop.index0 > last.user %}{{ message.reasoning_content }}{% endif %}{{ message.content }}",
    )
    dropping = chat(tmp_path, drops).check()
    assert len(dropping) == 1 and "drops the reasoning" in dropping[0]


def test_formats_show_in_templates() -> None:
    shown = {
        "hermes": "<tool_call>", "qwen_xml": "<tool_call>\n<function=f>", "mistral": "[TOOL_CALLS]",
        "harmony": "<|channel|>", "llama": '{"name": "f", "parameters": {}}',
    }  # fmt: skip
    assert {name: format_of_template(text) for name, text in shown.items()} == {name: name for name in shown}
    assert format_of_template("plain") is None
