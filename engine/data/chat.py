"""Finds the characters of a rendered conversation that the assistant wrote, and their tokens.

A chat template turns messages into one string, which does not tell who wrote what. The conversation as a
whole, rendered once, is the reference; a turn is found in it by rendering the conversation again with that one answer
replaced by a mark. The common prefix of both renderings is before the answer, the common suffix after it. So it
does not matter whether a template renders earlier turns differently from the last one.

This module is pure: it knows neither tokenizers nor files, `render` is given by the caller.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from engine.errors import UserError

Message = Mapping[str, Any]
Learn = Literal["answers", "last", "all"]
"""The targets of a conversation: all answers of the assistant, the last one, or everything."""
Span = tuple[int, int]
Render = Callable[[Sequence[Message], bool], str]
"""(messages, with the prompt for the next assistant turn) -> text. Raises UserError where the template refuses."""

ALPACA_TASK = "Below is an instruction. Write a response that fulfils it."
"""The text before the instruction, in Alpaca's template and in records of its fields."""
MARK = "\ufdd2"
"""A code point that Unicode reserves as a noncharacter, so that no text contains it."""


def assistant_spans(
    messages: Sequence[Message], text: str, render: Render, *, opening: str, control: re.Pattern[str]
) -> list[Span]:
    """Returns the assistant's turns in a rendered conversation, each with what ends it.

    A turn begins where the prompt for it ends, because the model is given that much when it generates. What the
    template writes in between (an empty reasoning block) belongs to the turn. It ends with its end token and what the
    template writes after that before the next turn's header.

    Args:
        messages: the conversation; each has a "role".
        text: all of it, rendered.
        render: renders conversations.
        opening: of a turn, see `turn_opening`.
        control: matches each control token of the tokenizer.

    Returns:
        Character ranges [start, end), ascending and disjoint.

    Raises:
        UserError: an answer cannot be found in `text`.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, behind, ending = _around(messages, index, render)
        start = _common_prefix(before, text)
        if opening and before.endswith(opening):
            start = min(start, len(before) - len(opening))
        end = len(text) - len(behind)
        answer = str(message.get("content") or "")
        answer = answer.rpartition("</think>")[2].strip()
        if not text.endswith(behind) or (answer and answer not in text[start:end]):
            raise UserError(
                f"the chat template drops or rewrites message {index + 1}, an answer of the assistant, so its "
                "tokens cannot be found; mark them in the template with {% generation %} and {% endgeneration %}."
            )
        end += _ending(behind, ending, control)
        spans.append((max(start, spans[-1][1] if spans else 0), end))
    return [span for span in spans if span[0] < span[1]]


def _around(messages: Sequence[Message], index: int, render: Render) -> tuple[str, str, str]:
    """Returns the text before and after an answer, and the text after it if the conversation ended there."""
    message = messages[index]
    marked: dict[str, Any] = {"role": message["role"], "content": MARK}
    if message.get("tool_calls"):  # tool results may be refused without them
        marked["tool_calls"] = message["tool_calls"]
    before, found, behind = render([*messages[:index], marked, *messages[index + 1 :]], False).partition(MARK)
    if index + 1 == len(messages):
        through = behind
    else:
        through = render([*messages[:index], marked], False).partition(MARK)[2]
    if not found or MARK in behind:
        raise UserError(
            f"the chat template does not write the content of message {index + 1}, an answer of the assistant, once; "
            "mark the trained text in the template with {% generation %} and {% endgeneration %}."
        )
    return before, behind, through


def turn_opening(render: Render) -> str:
    """Returns what the template writes at the beginning of a turn that it does not write in the prompt for one."""
    question = {"role": "user", "content": "?"}
    try:
        prompt = render([question], True)
        before = render([question, {"role": "assistant", "content": MARK}], False).partition(MARK)[0]
    except UserError:  # the template refuses such a conversation
        return ""
    return before[_common_prefix(prompt, before) :]


def _ending(behind: str, ending: str, control: re.Pattern[str]) -> int:
    """Returns how many characters after an answer end its turn: those that would be there if nothing followed."""
    same = list(
        takewhile(
            lambda pair: pair[0] == pair[1], zip(_pieces(behind, control), _pieces(ending, control), strict=False)
        )
    )
    length = sum(len(piece) for piece, _ in same)
    if behind != ending and not any(control.fullmatch(piece) for piece, _ in same):
        # an answer that is not the last ends with another token, or with the header of the next turn
        first = control.match(behind, len(behind) - len(behind.lstrip()))
        if first is not None:
            return max(length, first.end())
    return length


def _pieces(text: str, control: re.Pattern[str]) -> Iterator[str]:
    """Splits a text into control tokens and the characters between them."""
    done = 0
    for match in control.finditer(text):
        yield from text[done : match.start()]
        yield match.group()
        done = match.end()
    yield from text[done:]


def _common_prefix(first: str, second: str) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:  # bisection: comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def covered_tokens(spans: Sequence[Span], offsets: Sequence[Span]) -> list[bool]:
    """Returns whether each token has a character of a range, at least in part.

    A character may be several tokens (its bytes). As in transformers' masks, and so in TRL's, a range goes up to the
    first of its last character, which is mostly a line break after the end of a turn.

    Args:
        spans: character ranges, ascending and disjoint.
        offsets: character range of each token, ascending.
    """
    mask = [False] * len(offsets)
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    for start, end in spans:
        first, stop = bisect_right(ends, start), bisect_right(ends, end - 1)
        stop += stop < len(starts) and starts[stop] < end
        mask[first:stop] = [True] * (stop - first)
    return mask


def without_tail(mask: list[bool], text: str, offsets: Sequence[Span], is_control: Sequence[bool]) -> list[bool]:
    """Returns the mask without the white space after the last control token of each run of target tokens."""
    kept = list(mask)
    for first, stop in _runs(mask):
        last = max((token for token in range(first, stop) if is_control[token]), default=None)
        if last is not None and not text[offsets[last][1] : offsets[stop - 1][1]].strip():
            kept[last + 1 : stop] = [False] * (stop - last - 1)
    return kept


def _runs(mask: Sequence[bool]) -> Iterator[Span]:
    start = None
    for token, flag in enumerate([*mask, False]):
        if flag and start is None:
            start = token
        elif not flag and start is not None:
            yield start, token
            start = None
