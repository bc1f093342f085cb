"""Whose commands are next, without a server."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from rankfold.serving.fair_queue import PATIENCE, SHORT, TOGETHER, TOKENS_TOGETHER, FairQueue, Waiting, tokens_of
from rankfold.serving.journal import Command
from tests.serving.bodies import sample


class Clients:
    """Commands in order, and what was executed."""

    def __init__(self) -> None:
        self.next: Counter[str] = Counter()
        self.queue = FairQueue(lambda model, seq: self.next[model] == seq)
        self.groups: list[list[Waiting]] = []
        self.number = 0

    def add(self, owner: str, target: str, kind: str, seq: int | None = None, **more: Any) -> None:
        self.number += 1
        command = Command(
            number=self.number, request=f"{target}:{self.number if seq is None else seq}", owner=owner, target=target,
            seq=seq, kind=kind, body=b"", status="waiting", type=None, result=None,
        )  # fmt: skip
        rows = kind in ("forward_backward", "asample")
        self.queue.add(Waiting(command=command, **{"tokens": 100 if rows else SHORT, **more}))

    def execute(self) -> list[str]:
        group = self.queue.take()
        self.groups.append(group)
        for one in group:
            if one.command.seq is not None:
                assert one.command.seq == self.next[one.command.target], "out of order"
                self.next[one.command.target] += 1
        return [one.command.request for one in group]

    def groups_until(self, request: str) -> int:
        for count in range(1000):
            if request in self.execute():
                return count
        raise AssertionError(request)


def test_samples_keep_no_step_waiting() -> None:
    for owner in ("other", "same"):
        clients = Clients()
        for _ in range(1000):
            clients.add("same", "sampler", "asample")
        clients.execute()
        # the model has had far more than the samples so far
        clients.add(owner, "model", "forward_backward", 0, tokens=TOKENS_TOGETHER)
        assert clients.groups_until("model:0") <= 1
        for seq in range(1, 5):
            clients.add(owner, "model", "optim_step", seq)
            assert clients.groups_until(f"model:{seq}") <= 1
            clients.add(owner, "model", "forward_backward", seq + 4, tokens=TOKENS_TOGETHER)
        assert len(clients.queue) > 500


def test_keys_have_as_much_as_each_other() -> None:
    clients = Clients()
    for number in range(400):  # one has many samplers with large requests, the other one small ones
        clients.add("many", f"s{number % 40}", "asample", weights=f"w{number % 40}", tokens=3000)
        clients.add("one", "t", "asample", weights="w", tokens=500)
    had, done = Counter[str](), Counter[str]()
    while max(done.values(), default=0) < 400:  # while both have something to do
        clients.execute()
        for one in clients.groups[-1]:
            had[one.command.owner] += one.tokens
            done[one.command.owner] += 1
    assert abs(had["many"] - had["one"]) < TOKENS_TOGETHER + 3000, had
    assert max(map(len, clients.groups)) <= TOGETHER


def test_nobody_is_passed_over_for_long() -> None:
    """A key that has had far more than the others, and comes back."""
    clients = Clients()
    clients.add("rich", "r", "asample", weights="r", tokens=10**7)
    clients.execute()
    for number in range(500):
        clients.add("poor", f"p{number}", "asample", weights=f"p{number}", tokens=10)
    clients.execute()
    clients.add("rich", "r", "asample", weights="r")
    assert clients.groups_until("r:502") <= PATIENCE


def test_who_pauses_saves_nothing_up() -> None:
    clients = Clients()
    for _ in range(40):
        clients.add("early", "r", "asample", weights="r", tokens=TOKENS_TOGETHER)
    for _ in range(20):
        clients.execute()
    for _ in range(20):
        clients.add("late", "l", "asample", weights="l", tokens=TOKENS_TOGETHER)
    for _ in range(20):
        clients.execute()
    assert 9 <= Counter(group[0].command.owner for group in clients.groups[-20:])["late"] <= 11


def test_orders_are_kept_and_nothing_is_lost() -> None:
    drawn = random.Random(3)
    clients, asked = Clients(), 0
    waiting = [(model, seq) for model in ("a", "b", "c", "d") for seq in range(60)]
    drawn.shuffle(waiting)
    while waiting or len(clients.queue):
        for _ in range(drawn.randrange(4)):
            if waiting:
                model, seq = waiting.pop()
                kind = "optim_step" if seq % 3 == 2 else "forward_backward"
                clients.add("x" if model < "c" else "y", model, kind, seq, tokens=drawn.randrange(1, 5000))
                clients.add("z", "s", "asample", weights=drawn.choice(["", "w"]))
                asked += 2
        clients.execute()
    executed = [one.command.request for group in clients.groups for one in group]
    assert len(executed) == len({*executed}) == asked == 480
    samples = [int(name[2:]) for name in executed if name.startswith("s:")]
    assert samples == sorted(samples)
    for group in clients.groups:
        assert len({(one.command.kind, one.weights) for one in group}) <= 1
        assert len(group) <= 1 or not group[0].is_short
    clients.add("x", "a", "unload_model")
    clients.add("x", "a", "optim_step", 61)
    assert clients.execute() and clients.execute() == []


def test_what_commands_count() -> None:
    assert tokens_of("asample", sample("s", 0, [3, 4], 5, max_tokens=7), 64) == 2 + 5 * 7
    assert tokens_of("asample", sample("s", 0, [3, 4], 5), 64) == 2 + 5 * 64
    assert tokens_of("asample", json.dumps({"prompt": 3}).encode(), 64) == tokens_of("optim_step", b"", 64) == SHORT
    assert tokens_of("forward_backward", b"x" * 161, 64) == 11
