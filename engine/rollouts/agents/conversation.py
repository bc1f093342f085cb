"""One completion that a program outside drives: its requests, one after the other, each a turn of the model.

The program runs in a process of its own and returns when the conversation has ended. Requests that it makes at the same
time are answered one after the other. What is trained on is one branch of the conversation, see `branches`; the counts
tell how many there were, and how many sampled tokens are in the others.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.rollout import ENVIRONMENT
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.rollouts.agents.branches import Branches, Turn
from engine.rollouts.agents.chat import AgentChat
from engine.rollouts.agents.endpoint import Endpoint, Inbox, Pending
from engine.rollouts.agents.messages import all_compared, parse_messages
from engine.rollouts.agents.replies import Answered, message_of
from engine.rollouts.agents.requests import Asked, Refusal
from engine.rollouts.data.prompts import Prompt
from engine.rollouts.data.routes import after_turn, with_unknown
from engine.rollouts.sampler import Dialogue, Sampled, Turns
from engine.rollouts.turns.pool import EnvironmentPool, Programs, Seat
from engine.rollouts.user_process import CallFailed

_NOISES = 2047
_MOST_TURNS = 4096
"""Turns of a conversation where rollout.max_turns is not set: a program that asks in a loop without end would fill the
memory with branches."""


class AgentTalk:
    """What all conversations of a copy of the model share. Nothing is started before the first of them.

    Args:
        config: of the run.
        chat: the template.
        ends: tokens that end a turn.
        vocabulary: entries of the model's.
    """

    def __init__(self, config: RunConfig, chat: AgentChat, *, ends: frozenset[int], vocabulary: int) -> None:
        self._config, self.chat, self.ends, self.vocabulary = config, chat, ends, vocabulary
        rollout = config.rollout
        self.pool = EnvironmentPool(rollout, Programs())
        self.rewards = ENVIRONMENT in rollout.rewards
        self.longest, self.max_turns = rollout.max_completion_length, rollout.max_turns
        self.room = config.data.seq_length - rollout.max_completion_length
        self.programs = ThreadPoolExecutor(self.pool.size, thread_name_prefix="agent")
        self._endpoint: Endpoint | None = None
        self._said = 0

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint, which `listen` has started."""
        assert self._endpoint is not None
        return self._endpoint

    def listen(self, copy: int) -> None:
        """Starts the endpoint, where there is none.

        Args:
            copy: number of the copy of the model.

        Raises:
            UserError: it cannot listen there.
        """
        if self._endpoint is None:
            config = self._config
            name = Path(config.model.path or "").name or "model"
            self._endpoint = Endpoint(config.rollout, self.chat, model=name, length=config.data.seq_length, copy=copy)

    def converse(self, prompt: Prompt) -> AgentConversation:
        """Returns a conversation that has not begun."""
        return AgentConversation(self, prompt)

    def notes(self) -> list[str]:
        """Returns sentences on settings of requests that are not the run's, which were not returned before."""
        found = () if self._endpoint is None else self._endpoint.ignored()
        new, self._said = found[self._said :], len(found)
        return [f"note: rollout.agent asks for {one}: completions are sampled as the run says" for one in new]

    def close(self) -> None:
        """Ends the processes, and the endpoint."""
        self.pool.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self.programs.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The program returned, or its process failed."""

    outcome: Future[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Open:
    """The request whose turn is being sampled.

    Args:
        pending: of it.
        before: the turn that it continues; None for a new branch.
        base: the conversation in front of the turn, as a turn without tokens of its own.
        room: the most tokens of the turn.
        noise: see `AgentConversation.noise`.
    """

    pending: Pending
    before: Turn | None
    base: Turn
    room: int
    noise: int


class AgentConversation:
    """A completion while it is made; see `engine.rollouts.turns.conversation.Conversation`.

    Args:
        talk: what it shares with others.
        prompt: of its record.
    """

    def __init__(self, talk: AgentTalk, prompt: Prompt) -> None:
        self._talk, self._prompt = talk, prompt
        self._inbox, self._key = Inbox(), ""
        self._seat: Seat | None = None
        self._branches, self._asked = Branches(), Counter[tuple[int, ...]]()
        self._open: _Open | None = None
        self._stub: Sampled | None = None
        self._failure: str | None = None
        self._reward: float | None = None
        self._metrics: dict[str, float] = {}

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far of the branch that the model continues; where there is none, the record's prompt."""
        return self._prompt.ids if self._open is None else self._open.base.ids

    @property
    def room(self) -> int:
        """The most tokens of the next turn."""
        return 1 if self._open is None else self._open.room

    @property
    def noise(self) -> int:
        """A number of the random numbers of the next turn, beside its place in the conversation: 1 to 2047. It depends
        on the tokens in front, and on how often the same ones were asked for, and not on the order of requests."""
        return 0 if self._open is None else self._open.noise

    def begin(self) -> None:
        """Starts the program, and waits for its first request. Where there is none, one token is sampled."""
        talk = self._talk
        try:
            self._seat = talk.pool.take()
        except CallFailed as failure:
            self._failure = str(failure)
            return
        self._key = talk.endpoint.open(self._inbox)
        request = {
            "do": "run",
            "columns": {**self._prompt.columns, "prompt": self._prompt.given},
            "base_url": talk.endpoint.base_url,
            "api_key": self._key,
            "model": talk.endpoint.model,
        }
        outcome = talk.programs.submit(self._seat.ask, request)
        outcome.add_done_callback(lambda done: self._inbox.put(_Ended(done)))
        self._wait()
        if not len(self._branches) and self._open is None and self._failure is None:
            self._failure = "it returned without a request that could be answered"

    def take(self, tokens: Sequence[int], logps: Sequence[float], routes: NDArray[Any] | None = None) -> bool:
        """Takes a turn that the model sampled behind `ids`, and answers its request.

        Args:
            routes: as of `Conversing.take`.

        Returns:
            Whether there is another request.
        """
        if self._open is None:
            self._stub = self._without_turns(tokens, logps, routes)
            return False
        opened, base = self._open, self._open.base
        answered = self._answered(opened, tokens, logps)
        message: dict[str, Any] = {"role": "assistant", "content": answered.text}
        if answered.turn is not None:
            message = parse_messages([message_of(answered.turn, answered.first_call)])[0]
        turn = Turn(
            prompt=base.prompt,
            routes=after_turn(None if opened.before is None else opened.before.routes, routes),
            tokens=(*base.tokens, *tokens),
            logps=(*base.logps, *logps),
            written=(*base.written, *[False] * len(tokens)),
            own=len(tokens),
            turns=base.turns + 1,
            calls=base.calls + (0 if answered.turn is None else len(answered.turn.calls)),
            given=base.given,
            messages=(*base.messages, message),
            seen=(*base.seen, *all_compared([message])) if opened.pending.asked.route == "chat" else (),
            tools=base.tools,
        )
        self._branches.add(turn, opened.before)
        self._open = None
        opened.pending.answer.set_result(answered)
        self._wait()
        return self._open is not None

    def sampled(self) -> Sampled:
        """Returns the completion, when it has ended."""
        ends, talk = self._branches.ends(), self._talk
        if not ends:
            assert self._stub is not None
            return self._stub
        best = ends[0]
        return Sampled(
            tokens=np.array(best.tokens, dtype=np.int32),
            logps=np.array(best.logps, dtype=np.float32),
            truncated=best.tokens[-1] not in talk.ends,
            written=np.array(best.written, dtype=np.bool_),
            prompt=None if best.prompt == self._prompt.ids else np.array(best.prompt, dtype=np.int32),
            turns=Turns(
                turns=best.turns,
                calls=best.calls,
                branches=len(ends),
                left_out=self._branches.num_sampled() - best.num_sampled,
            ),
            dialogue=Dialogue(
                prompt=list(best.given), messages=list(best.messages), reward=self._reward, failure=self._failure
            ),
            failed=self._failure is not None,
            metrics=self._metrics,
            routes=None if best.routes is None else with_unknown(best.routes, len(best.ids)),
        )

    def _without_turns(self, tokens: Sequence[int], logps: Sequence[float], routes: NDArray[Any] | None) -> Sampled:
        """Returns the completion of a program that asked for no turn: what was sampled behind the record's prompt."""
        given = self._prompt.given
        return Sampled(
            tokens=np.array(tokens, dtype=np.int32),
            logps=np.array(logps, dtype=np.float32),
            truncated=tokens[-1] not in self._talk.ends,
            turns=Turns(branches=1),
            dialogue=Dialogue(
                prompt=[{"role": "user", "content": given}] if isinstance(given, str) else given,
                messages=[{"role": "assistant", "content": ""}],
                failure=self._failure,
            ),
            failed=True,
            routes=None if routes is None else with_unknown(routes, len(self._prompt.ids) + len(tokens)),
        )

    def _wait(self) -> None:
        """Waits for a request that can be answered, or for the end of the program."""
        while True:
            event = self._inbox.get()
            if isinstance(event, _Ended):
                self._end(event)
                return
            try:
                self._open = self._opened(event)
                return
            except Refusal as refusal:
                event.answer.set_exception(refusal)
            except UserError as error:
                event.answer.set_exception(Refusal(str(error).rstrip(".")))

    def _end(self, ended: _Ended) -> None:
        talk, seat = self._talk, self._seat
        talk.endpoint.shut(self._key)
        try:
            found = ended.outcome.result()
            if talk.rewards:
                self._reward = found["reward"]
            self._metrics = found["metrics"]
        except CallFailed as failure:
            self._failure = str(failure)
        finally:
            assert seat is not None
            talk.pool.give_back(seat)

    def _opened(self, pending: Pending) -> _Open:
        """Finds the place of a request in the conversation.

        Raises:
            Refusal, UserError: it cannot be answered.
        """
        asked, talk = pending.asked, self._talk
        if len(self._branches) >= (most := talk.max_turns or _MOST_TURNS):
            raise Refusal(f"the conversation has had {most} turns, and rollout.max_turns sets how many it may have")
        before, base = self._chat_base(asked) if asked.route == "chat" else self._token_base(asked)
        ids = base.ids
        self._require_known(ids)
        if len(base.prompt) > talk.room or len(base.tokens) >= talk.longest:
            raise Refusal(
                f"this model's maximum context length is {talk.room} tokens of the first request and {talk.longest} "
                f"behind them, and there are {len(base.prompt)} and {len(base.tokens)}",
                code="context_length_exceeded",
            )
        digest = hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=8).digest()
        noise = (int.from_bytes(digest) + self._asked[ids]) % _NOISES + 1
        self._asked[ids] += 1
        left = talk.longest - len(base.tokens)
        return _Open(pending=pending, before=before, base=base, room=min(asked.most or left, left), noise=noise)

    def _require_known(self, ids: Sequence[int]) -> None:
        if not ids:
            raise Refusal("the request has no tokens, and a model continues at least one")
        if (largest := max(ids)) >= self._talk.vocabulary:
            raise Refusal(
                f"the request has token {largest}, and the model's vocabulary {self._talk.vocabulary} entries"
            )

    def _chat_base(self, asked: Asked) -> tuple[Turn | None, Turn]:
        messages, chat = asked.messages, self._talk.chat
        seen, tools = all_compared(messages), json.dumps(asked.tools, sort_keys=True)
        before = self._branches.by_messages(seen, [one["role"] for one in messages], tools)
        if before is None:
            return None, _begun(chat.prompt(messages, asked.tools), messages, seen, tools)
        new = messages[len(before.seen) :]
        ids = chat.between(new, ended=before.tokens[-1] in self._talk.ends)
        return before, _behind(before, ids, new, seen)

    def _token_base(self, asked: Asked) -> tuple[Turn | None, Turn]:
        chat, prompt = self._talk.chat, asked.prompt
        ids = tuple(chat.encode(prompt)) if isinstance(prompt, str) else prompt
        self._require_known(ids)
        before = self._branches.by_ids(ids)
        if before is None:
            return None, _begun(ids, ({"role": "user", "content": chat.text(ids)},), (), "")
        new = ids[len(before.ids) :]
        return before, _behind(before, new, ({"role": "user", "content": chat.text(new)},) if new else (), ())

    def _answered(self, opened: _Open, tokens: Sequence[int], logps: Sequence[float]) -> Answered:
        chat, asked, base = self._talk.chat, opened.pending.asked, opened.base
        by_texts = asked.with_logps and asked.route != "generate" and not asked.names_ids
        return Answered(
            name=f"rankfold-{hashlib.blake2b(self._key.encode(), digest_size=6).hexdigest()}-{len(self._branches)}",
            model=self._talk.endpoint.model,
            prompt=base.ids,
            tokens=tokens,
            logps=logps,
            texts=chat.tokens(tokens) if by_texts else (),
            ended=tokens[-1] in self._talk.ends,
            turn=chat.turn(tokens, calls=asked.calls) if asked.route == "chat" else None,
            first_call=base.calls,
            text=chat.text(tokens),
        )


def _begun(ids: Sequence[int], messages: Sequence[dict[str, Any]], seen: tuple[str, ...], tools: str) -> Turn:
    """Returns the beginning of a branch."""
    return Turn(
        prompt=tuple(ids), tokens=(), logps=(), written=(), own=0, turns=0, calls=0, given=tuple(messages), messages=(),
        seen=seen, tools=tools,
    )  # fmt: skip


def _behind(before: Turn, ids: Sequence[int], messages: Sequence[dict[str, Any]], seen: tuple[str, ...]) -> Turn:
    """Returns a turn with what a client wrote behind it."""
    return Turn(
        prompt=before.prompt,
        tokens=(*before.tokens, *ids),
        logps=(*before.logps, *[0.0] * len(ids)),
        written=(*before.written, *[True] * len(ids)),
        own=0,
        turns=before.turns,
        calls=before.calls,
        given=before.given,
        messages=(*before.messages, *messages),
        seen=seen,
        tools=before.tools,
    )
