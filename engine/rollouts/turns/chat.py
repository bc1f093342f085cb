"""The token ids between two turns of the model, and the calls in a turn that it sampled.

A conversation is a sequence of token ids that only grows: sampled tokens stay as they are, and are never made from text
again. So the messages that answer a turn are rendered behind a stand-in for it, a small conversation with a call of the
same tool, and what the template writes behind the end of the stand-in's turn follows the sampled tokens. Templates that
write earlier turns differently once others follow (those that drop their reasoning) do not matter to that; a line of
the log says so, because a server that renders whole conversations will show the model something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from engine.choices import ToolFormat
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.rollouts.turns.stand_ins import QUESTION, StandIns, answer_message, call_message
from engine.rollouts.turns.tool_calls import Turn, format_of_template, parse_turn

_RESULT, _THOUGHT, _VALUE = "Resulting value", "Considerations", "some text"
"""Texts that are looked for in what a template writes."""

Schemas = Sequence[Mapping[str, Any]]


class ToolChat:
    """The chat template of a run whose model calls tools.

    Args:
        tokenizer: of the model.
        ends: tokens that end a turn.
        schemas: of the tools.
        tool_format: how the model writes calls; None for the one that the template asks for.

    Raises:
        UserError: the template has no calls, no results, or calls in another format.
    """

    def __init__(
        self, tokenizer: Tokenizer, ends: frozenset[int], schemas: Schemas, tool_format: ToolFormat | None
    ) -> None:
        self._tokenizer, self._ends, self.schemas = tokenizer, ends, schemas
        found = tool_format or format_of_template(tokenizer.chat_template or "")
        if found is None:
            raise UserError(
                "the chat template shows no format in which the model calls tools: set rollout.tool_format to that of "
                "the model, such as hermes, or data.chat_template to a template with tools."
            )
        self.tool_format: ToolFormat = found
        self._stand_ins = StandIns(tokenizer, ends)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of a prompt, with the descriptions of the tools.

        Raises:
            UserError: the template refuses these messages.
        """
        return self._tokenizer.chat_ids([dict(one) for one in messages], tools=self._tools, prompt=True)

    def turn(self, ids: Sequence[int]) -> Turn:
        """Returns the turn that the model sampled."""
        text = self._tokenizer.show(ids[:-1] if ids[-1] in self._ends else ids)
        return parse_turn(text, self.tool_format)

    def results(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the token ids between the end of a turn with calls and the begin of the model's next turn.

        Args:
            messages: results of the calls, at least one.

        Raises:
            UserError: the template refuses these messages.
        """
        return self._stand_ins.between(messages)

    def check(self) -> list[str]:
        """Checks that the template shows tools, calls and results; returns notes for the log.

        Raises:
            UserError: it does not.
        """
        show, tools = self._tokenizer.show, self._tools
        name = str(self.schemas[0]["function"]["name"]) if self.schemas else "tool"
        advice = "set data.chat_template to a template with tools"
        prompt = self._tokenizer.chat_ids([QUESTION], tools=tools, prompt=True)
        notes = []
        if tools and name not in show(prompt):
            notes.append("the chat template does not show the tools to the model, whose prompts must describe them")
        try:
            called = self._tokenizer.chat_ids([QUESTION, call_message(name, {"key": _VALUE})], tools=tools)
            results = show(self.results([tool_message(name, _RESULT)]))
        except UserError as error:
            raise UserError(f"the chat template cannot show calls of tools ({error}): {advice}.") from error
        if _RESULT not in results:
            raise UserError(f"the chat template does not show the result of a call: {advice}.")
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, called, strict=False)))
        places = [place for place in range(common, len(called)) if called[place] in self._ends]
        turn = parse_turn(show(called[common : places[-1] if places else None]), self.tool_format)
        if [(one.name, one.arguments) for one in turn.calls] != [(name, {"key": _VALUE})]:
            raise UserError(
                f"the chat template writes calls of tools in another format than {self.tool_format}: set "
                "rollout.tool_format to the model's."
            )
        if self._drops_reasoning(name):
            notes.append(
                "the chat template drops the reasoning of earlier turns; in rollouts it stays, as it was sampled"
            )
        return notes

    def _drops_reasoning(self, name: str) -> bool:
        thought = {**call_message(name), "content": "", "reasoning_content": _THOUGHT}
        chat = [QUESTION, thought, tool_message(name, _RESULT)]
        try:
            alone, after = (
                self._tokenizer.show(self._tokenizer.chat_ids(one))
                for one in (chat, [*chat, answer_message(), QUESTION])
            )
        except UserError:  # reported where the conversations of the run are refused
            return False
        return _THOUGHT in alone and _THOUGHT not in after

    @property
    def _tools(self) -> Schemas | None:
        return self.schemas or None  # some templates write about tools where there is an empty list


def tool_message(name: str, content: str) -> dict[str, Any]:
    """Returns the message that gives the result of a call."""
    return {"role": "tool", "name": name, "content": content}
