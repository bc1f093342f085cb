"""One completion of several turns: the model's, and between them the results of the tools that it calls.

The tokens only grow: what the model sampled, then what the results are rendered to, then what it samples behind them.
The conversation ends with a turn without calls, a turn that no token ended, the last turn that is allowed, a call by
which the environment ends it, or results that leave no room for another turn; the last two leave their results out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from engine.rollouts.data.prompts import Prompt
from engine.rollouts.data.routes import after_turn, with_unknown
from engine.rollouts.sampler import Dialogue, Sampled, Turns
from engine.rollouts.turns.chat import ToolChat, tool_message
from engine.rollouts.turns.pool import EnvironmentPool, Seat
from engine.rollouts.turns.tool_calls import ToolCall
from engine.rollouts.turns.worker import failure_text
from engine.rollouts.user_process import CallFailed

_UNNAMED = "unknown"
"""The name of a tool in the result of a call that names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Talk:
    """The parts that all conversations of a run share.

    Args:
        chat: the template.
        pool: calls tools.
        rewards: whether the environment scores conversations.
        ends: tokens that end a turn.
        longest: tokens of a completion, with all its turns.
        room: tokens of a prompt.
        max_turns: of the model; None for any number.
        vocabulary: entries of the model's.
    """

    chat: ToolChat
    pool: EnvironmentPool
    rewards: bool
    ends: frozenset[int]
    longest: int
    room: int
    max_turns: int | None
    vocabulary: int

    def listen(self, copy: int) -> None:
        """Does nothing: the run's own processes call tools."""

    def converse(self, prompt: Prompt) -> Conversation:
        """Returns a conversation that has not begun."""
        return Conversation(self, prompt)

    def notes(self) -> list[str]:
        """Returns sentences for the log."""
        return []

    def close(self) -> None:
        """Ends the processes."""
        self.pool.close()


class Conversation:
    """A completion while it is made. One call at a time.

    Args:
        talk: what it shares with others.
        prompt: of its record.
    """

    def __init__(self, talk: Talk, prompt: Prompt) -> None:
        assert not isinstance(prompt.given, str)
        self._talk, self._prompt = talk, prompt
        self._given: list[dict[str, Any]] = prompt.given
        self._ids = prompt.ids
        self._tokens: list[int] = []
        self._logps: list[float] = []
        self._written: list[bool] = []
        self._messages: list[dict[str, Any]] = []
        self._turns = self._calls = self._failed_calls = 0
        self._seat: Seat | None = None
        self._is_done = False
        """Whether the environment has ended the conversation."""
        self._failure: str | None = None
        self._reward: float | None = None
        self._routes: NDArray[Any] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far, which the model continues."""
        return (*self._ids, *self._tokens)

    @property
    def room(self) -> int:
        """The most tokens of the next turn."""
        return 1 if self._failure is not None else self._talk.longest - len(self._tokens)

    @property
    def noise(self) -> int:
        """0: the place of a turn in the conversation alone is the place of its random numbers."""
        return 0

    def begin(self) -> None:
        """Begins the conversation: its environment may add to the prompt. Where that fails, one token is sampled."""
        if not self._talk.pool.has_environment:
            return
        try:
            self._seat = self._talk.pool.take()
            columns = {**self._prompt.columns, "prompt": self._given}
            observation = self._seat.ask({"do": "reset", "columns": columns})["observation"]
            if observation is not None:
                self._observe(observation)
        except (CallFailed, UserError) as failure:
            self._failure = str(failure)

    def _observe(self, text: str) -> None:
        """Adds what the environment shows first to the last message of the prompt.

        Raises:
            UserError: the prompt is too long then, or the template refuses it.
        """
        last = self._given[-1]
        content: Any = last["content"]
        content = f"{content}{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
        given = [*self._given[:-1], {**last, "content": content}]
        ids = self._talk.chat.prompt(given)
        if len(ids) > self._talk.room:
            raise UserError(
                f"with what reset() returned, the prompt has {len(ids)} tokens, and data.seq_length less "
                f"rollout.max_completion_length leaves room for {self._talk.room}"
            )
        self._require_known(ids)
        self._given, self._ids = given, tuple(ids)

    def take(self, tokens: Sequence[int], logps: Sequence[float], routes: NDArray[Any] | None = None) -> bool:
        """Takes a turn that the model sampled behind `ids`, and calls the tools that it asks for.

        Args:
            routes: [all tokens - 1, layers, experts of a token], the experts that a server chose; None for none.

        Returns:
            Whether the model continues.
        """
        talk = self._talk
        self._append(tokens, logps, written=False)
        self._turns += 1
        self._routes = after_turn(self._routes, routes)
        if self._failure is not None:
            self._messages.append({"role": "assistant", "content": ""})
            return self._end()
        try:
            turn = talk.chat.turn(tokens)
            self._messages.append(turn.message())
            is_last = tokens[-1] not in talk.ends or self._turns == talk.max_turns
            if is_last or not turn.calls:
                return self._end()
            messages = []
            for call in turn.calls:
                messages.append(self._result(call))
                if self._is_done:
                    return self._end()
            ids = talk.chat.results(messages)
            if len(self._tokens) + len(ids) >= talk.longest:
                return self._end()
            self._require_known(ids)
        except (CallFailed, UserError) as failure:
            self._failure = str(failure)
            return self._end()
        self._messages += messages
        self._append(ids, [0.0] * len(ids), written=True)
        return True

    def sampled(self) -> Sampled:
        """Returns the completion, when it has ended."""
        return Sampled(
            tokens=np.array(self._tokens, dtype=np.int32),
            logps=np.array(self._logps, dtype=np.float32),
            truncated=self._tokens[-1] not in self._talk.ends,
            written=np.array(self._written, dtype=np.bool_),
            prompt=None if self._ids == self._prompt.ids else np.array(self._ids, dtype=np.int32),
            turns=Turns(turns=self._turns, calls=self._calls, failed_calls=self._failed_calls),
            routes=None if self._routes is None else with_unknown(self._routes, len(self._ids) + len(self._tokens)),
            dialogue=Dialogue(prompt=self._given, messages=self._messages, reward=self._reward, failure=self._failure),
            failed=self._failure is not None,
        )

    def _append(self, tokens: Sequence[int], logps: Sequence[float], *, written: bool) -> None:
        self._tokens += tokens
        self._logps += logps
        self._written += [written] * len(tokens)

    def _result(self, call: ToolCall) -> dict[str, Any]:
        """Calls a tool; returns the message with its result.

        Raises:
            CallFailed: the process that calls it hung or ended.
        """
        self._calls += 1
        name = call.name or _UNNAMED
        if call.problem is not None:
            self._failed_calls += 1
            return tool_message(name, failure_text(call.problem))
        request = {"do": "call", "name": call.name, "arguments": dict(call.arguments)}
        try:
            if self._seat is not None:
                reply = self._seat.ask(request)
            else:
                with self._talk.pool.seat() as seat:
                    reply = seat.ask(request)
        except CallFailed as failure:
            raise CallFailed(f"a call of the tool {name}: {failure}") from None
        self._failed_calls += reply["failed"]
        self._is_done = reply["done"]
        return tool_message(name, reply["result"])

    def _end(self) -> bool:
        """Has the environment score the conversation, and lets go of it; returns False."""
        seat, self._seat = self._seat, None
        if seat is None:
            return False
        try:
            if self._talk.rewards and self._failure is None:
                self._reward = seat.ask({"do": "reward"})["reward"]
        except CallFailed as failure:
            self._failure = str(failure)
        finally:
            self._talk.pool.give_back(seat)
        return False

    def _require_known(self, ids: Sequence[int]) -> None:
        if max(ids) >= self._talk.vocabulary:
            raise UserError(
                f"what the environment wrote has token {max(ids)}, but the model's vocabulary has "
                f"{self._talk.vocabulary} entries"
            )
