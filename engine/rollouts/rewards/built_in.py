"""Rewards that need no file of Python. Those of the table give 1 to a completion that is right and 0 to others.

| name            | a completion is right where                                                              |
|-----------------|------------------------------------------------------------------------------------------|
| exact_match     | it is the text in the column, white space at both ends aside                             |
| numeric_answer  | the last number in it is the last number in the column, whatever either is written like  |
| regex           | the pattern is found somewhere in it                                                     |

and `model`, which gives the score of a reward model (`engine.judges.reward`).

Without a torch import: the processes that call rewards start quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from engine.config.rollout import RewardSource
from engine.seams import resolve

Reward = Callable[..., Any]

ANSWER = "answer"
"""The column that is compared with where none is named."""
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


def compared_column(source: RewardSource) -> str | None:
    """Returns the column that completions are compared with; None of a function that reads others, or none."""
    takes_a_column = source.function in ("exact_match", "numeric_answer")
    return (source.argument or ANSWER) if takes_a_column and source.file is None and not source.in_program else None


def built_in(name: str, argument: str) -> Reward:
    """Returns the reward function of this name.

    Args:
        name: one of `engine.config.rollout.BUILT_IN_REWARDS`.
        argument: a column, "" for `ANSWER`; of regex the pattern; of model its folder and device, in JSON.

    Raises:
        Exception: a reward model cannot be opened.
    """
    if name == "model":
        found: Reward = resolve("engine.judges.reward:JudgeReward")(*json.loads(argument))
        return found
    if name == "regex":
        pattern = re.compile(argument)
        return lambda completions, **_: [float(pattern.search(text_of(one)) is not None) for one in completions]
    column, right = argument or ANSWER, {"exact_match": _same_text, "numeric_answer": _same_number}[name]

    def reward(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        if column not in columns:
            raise KeyError(f"the records have no column {column}")
        pairs = zip(completions, columns[column], strict=True)
        return [None if answer is None else float(right(text_of(one), str(answer))) for one, answer in pairs]

    return reward


def text_of(completion: Any) -> str:
    """Returns the text of a completion, which is a text, or a list of one message where its prompt is messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def last_number(text: str) -> Decimal | None:
    """Returns the last number in a text; None where there is none. Commas in it are those of thousands."""
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def _same_text(completion: str, answer: str) -> bool:
    return completion.strip() == answer.strip()


def _same_number(completion: str, answer: str) -> bool:
    found = last_number(completion)
    return found is not None and found == last_number(answer)
