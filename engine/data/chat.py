"""Which characters of a rendered conversation an assistant wrote.

A chat template turns messages into one string, and nothing in that string says who wrote what. The answer is found by
rendering beginnings of the conversation: what is added between "everything before this turn, plus the prompt to
generate" and "everything up to this turn" is the turn itself. That works only if a longer conversation starts with
the rendering of a shorter one, and this is verified, not assumed: some templates rewrite earlier turns (they drop
the reasoning of all but the last), and for them `assistant_spans` returns None.

This module is pure: it knows neither tokenizers nor files, `render` is given by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""(messages, with the prompt for the next assistant turn) -> text."""


def assistant_spans(messages: Sequence[Message], render: Render) -> tuple[str, list[tuple[int, int]] | None]:
    """Render a conversation and find its assistant turns.

    A turn starts after the generation prompt (`<|im_start|>assistant\\n` and the like), because that much is given to
    the model when it generates. Where the turn opens differently from the prompt (a prompt that closes an empty
    reasoning block, a turn that has reasoning), it starts where the two part.

    Args:
        messages: the conversation; each has a "role".
        render: renders a beginning of it.

    Returns:
        The rendered conversation, and the character range [start, end) of each assistant turn with everything that
        closes it, or None where the template is not prefix-stable.
    """
    text = render(messages, False)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        through = render(messages[: index + 1], False) if index + 1 < len(messages) else text
        if not text.startswith(through):
            return text, None
        start = _turn_start(messages[:index], through, render)
        if start is None:
            return text, None
        spans.append((start, len(through)))
    return text, spans


def _turn_start(before: Sequence[Message], through: str, render: Render) -> int | None:
    if not before:
        # Templates index messages[0], so nothing can be rendered before a conversation's first turn: all of it counts.
        return 0
    prompt = render(before, True)
    if through.startswith(prompt):
        return len(prompt)
    history = render(before, False)
    if not (through.startswith(history) and prompt.startswith(history)):
        return None
    same = len(history)
    while same < min(len(prompt), len(through)) and prompt[same] == through[same]:
        same += 1
    return same


def mask_tokens(
    text: str, spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]], is_special: Sequence[bool]
) -> list[bool]:
    """Carry character ranges over to tokens.

    A token belongs to the range that it starts in. White space after the token that ends a turn (the line break of
    `<|im_end|>\\n`) is left out: generation has stopped by then, so it is no part of the answer.

    Args:
        text: the rendered conversation.
        spans: character ranges, ascending and disjoint.
        offsets: character range of each token, ascending.
        is_special: whether each token is a control token.

    Returns:
        One bool for each token.
    """
    mask = [False] * len(offsets)
    token = 0
    for start, end in spans:
        while token < len(offsets) and offsets[token][0] < start:
            token += 1
        last_special = None
        first = token
        while token < len(offsets) and offsets[token][0] < end:
            if is_special[token]:
                last_special = token
            token += 1
        stop = token
        if last_special is not None and not text[offsets[last_special][1] : end].strip():
            stop = last_special + 1
        mask[first:stop] = [True] * (stop - first)
    return mask
