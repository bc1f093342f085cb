"""Conversations whose turns a server samples: token ids go out, token ids come back, and the next turn begins with the
same ids. Each has a thread, which waits for the server and for its environment alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.rollouts.sampler import Conversing, Sampled
from engine.rollouts.servers.dialects import Answer
from engine.rollouts.servers.server import Asked

SampleTurn = Callable[[int, int, Conversing], Answer]
"""Samples a turn, given the place of the conversation, the number of the turn from 0, and the conversation."""


def ask_for_turns(conversations: Sequence[Conversing], sample: SampleTurn, *, at_once: int) -> Asked[Sampled]:
    """Begins to make completions of several turns.

    Args:
        conversations: of them.
        sample: samples one turn.
        at_once: conversations that are under way at a time.
    """

    def run(place: int, one: Conversing) -> Sampled:
        one.begin()
        turn = 0
        while True:
            answer = sample(place, turn, one)
            if not one.take(answer.tokens, answer.logps, answer.routes):
                return one.sampled()
            turn += 1

    pool = ThreadPoolExecutor(at_once, thread_name_prefix="conversation")
    asked = Asked([pool.submit(run, place, one) for place, one in enumerate(conversations)])
    pool.shutdown(wait=False)
    return asked
