"""The commands that wait, and which of them are executed next.

Keys, and within each its models and samplers, are served by the tokens that each has had: who has had least is next.
Who comes back after a pause begins with what the others have had, so that pauses save nothing up. Nobody who has
something to execute is passed over more than `PATIENCE` times in a row, and once only where it is short (a step, a
save). What is chosen depends on the order in which commands came, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.errors import UserError
from rankfold.serving.commands import read_json
from rankfold.serving.journal import Command

PATIENCE = 8
"""Groups of commands that are executed while a key has rows waiting, before it goes first."""
TOGETHER = 64
"""Commands that are executed together, at most."""
TOKENS_TOGETHER = 65_536
"""Their tokens, at most, unless one command alone has more."""
SHORT = 1024
"""What a command without rows counts, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A command that waits.

    Args:
        command: of the journal.
        tokens: that it counts.
        weights: what an asample reads, a path or "" for the base; "" for other commands.
    """

    command: Command
    tokens: int
    weights: str = ""

    @property
    def is_short(self) -> bool:
        """Whether it has no rows to compute."""
        return self.command.kind not in ("forward_backward", "asample")


@dataclass(kw_only=True, slots=True)
class _Share:
    """What a key, a model or a sampler has had.

    Args:
        served: tokens.
        passed: groups in a row that were executed while it waited.
    """

    served: float = 0.0
    passed: int = 0


@dataclass(kw_only=True, slots=True)
class _Shares:
    """Shares of those who compete with each other, and the least that one of them had when it was chosen last."""

    floor: float = 0.0
    known: dict[str, _Share] = field(default_factory=dict)

    def of(self, name: str) -> _Share:
        """Returns a share, which is at least what the others have had."""
        share = self.known.setdefault(name, _Share())
        share.served = max(share.served, self.floor)
        return share

    def first(self, waiting: dict[str, bool]) -> str:
        """Returns who is next.

        Args:
            waiting: each that has something to execute, in the order of arrival -> whether something short.
        """

        def urgency(name: str) -> tuple[float, float]:
            share = self.of(name)
            late = share.passed >= (1 if waiting[name] else PATIENCE)
            return (-share.passed if late else 0.0, share.served)

        return min(waiting, key=urgency)

    def forget(self, waiting: Iterable[str]) -> None:
        """Forgets those who wait for nothing, and would begin with the floor if they came back."""
        wait = set(waiting)
        self.known = {name: one for name, one in self.known.items() if name in wait or one.served > self.floor}


class FairQueue:
    """The commands that wait.

    Args:
        is_next: (model, seq) -> whether the model's commands before that one have been executed.
    """

    def __init__(self, is_next: Callable[[str, int], bool]) -> None:
        self._is_next = is_next
        self._waiting: dict[str, dict[str, dict[str, Waiting]]] = {}
        """Key -> model or sampler -> request -> the command."""
        self._owners: dict[str, tuple[str, str]] = {}
        self._keys = _Shares()
        self._targets: dict[str, _Shares] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, one: Waiting) -> None:
        """Takes a command."""
        command = one.command
        self._waiting.setdefault(command.owner, {}).setdefault(command.target, {})[command.request] = one
        self._owners[command.request] = command.owner, command.target

    def find(self, request: str) -> Waiting | None:
        """Returns a command that waits; None where none of that name does."""
        if request not in self._owners:
            return None
        owner, target = self._owners[request]
        return self._waiting[owner][target][request]

    def remove(self, request: str) -> None:
        """Takes a command out."""
        owner, target = self._owners.pop(request)
        targets = self._waiting[owner]
        del targets[target][request]
        if not targets[target]:
            del targets[target]
        if not targets:
            del self._waiting[owner]

    def take(self) -> list[Waiting]:
        """Takes the commands that are executed next, together; [] where none is ready."""
        heads = {
            owner: {target: head for target in targets if (head := self._head(targets[target])) is not None}
            for owner, targets in self._waiting.items()
        }
        heads = {owner: own for owner, own in heads.items() if own}
        if not heads:
            return []
        ready = {owner: {target: one.is_short for target, one in own.items()} for owner, own in heads.items()}
        owner = self._keys.first({name: any(own.values()) for name, own in ready.items()})
        target = self._of(owner).first(ready[owner])
        self._keys.floor = max(self._keys.floor, self._keys.of(owner).served)
        self._of(owner).floor = max(self._of(owner).floor, self._of(owner).of(target).served)
        group = self._with_others(heads[owner][target], heads)
        self._note(group, ready)
        return group

    def _of(self, owner: str) -> _Shares:
        return self._targets.setdefault(owner, _Shares())

    def _head(self, waiting: dict[str, Waiting]) -> Waiting | None:
        """Returns the first command of a model or a sampler, if it is ready."""
        for one in waiting.values():
            command = one.command
            # to unload a model waits for all that came before and can be executed
            if command.seq is None or self._is_next(command.target, command.seq):
                return one
        return None

    def _with_others(self, first: Waiting, heads: dict[str, dict[str, Waiting]]) -> list[Waiting]:
        """Takes a command, and others that can be executed in the same passes, in the order of shares."""
        group: list[Waiting] = []
        tokens = 0
        one: Waiting | None = first
        while one is not None and (not group or tokens + one.tokens <= TOKENS_TOGETHER):
            group.append(one)
            tokens += one.tokens
            owner, target = one.command.owner, one.command.target
            self._keys.of(owner).served += one.tokens
            self._of(owner).of(target).served += one.tokens
            self.remove(one.command.request)
            del heads[owner][target]
            rest = self._waiting.get(owner, {}).get(target)
            if one.command.kind == "asample" and rest:
                heads[owner][target] = next(iter(rest.values()))
            one = None if first.is_short or len(group) == TOGETHER else self._like(first, heads)
        return group

    def _like(self, first: Waiting, heads: dict[str, dict[str, Waiting]]) -> Waiting | None:
        def share(one: Waiting) -> tuple[float, float, int]:
            owner, target = one.command.owner, one.command.target
            return self._keys.of(owner).served, self._of(owner).of(target).served, one.command.number

        kind, weights = first.command.kind, first.weights
        same = [
            one for own in heads.values() for one in own.values() if (one.command.kind, one.weights) == (kind, weights)
        ]
        return min(same, key=share, default=None)

    def _note(self, group: list[Waiting], ready: dict[str, dict[str, bool]]) -> None:
        """Notes who was passed over."""
        taken = {(one.command.owner, one.command.target) for one in group}
        served = {owner for owner, _ in taken}
        for owner, targets in ready.items():
            share = self._keys.of(owner)
            share.passed = 0 if owner in served else share.passed + 1
            for target in targets:
                own = self._of(owner).of(target)
                own.passed = 0 if (owner, target) in taken else own.passed + 1
            self._of(owner).forget(self._waiting.get(owner, ()))


def tokens_of(kind: str, body: bytes, context: int) -> int:
    """Returns what a command counts, in tokens.

    That of an asample is its prompt and all that its completions may have; that of a forward_backward is told from its
    size, as if each token had a target and a weight. Bodies that cannot be read count as commands without rows.

    Args:
        context: tokens of the longest row.
    """
    if kind == "forward_backward":
        return math.ceil(len(body) / _BYTES_A_TOKEN)
    if kind != "asample":
        return SHORT
    try:
        asked = read_json(body)
        prompt = sum(len(chunk["tokens"]) for chunk in asked["prompt"]["chunks"])
        new, count = asked["sampling_params"].get("max_tokens"), asked.get("num_samples", 1)
        new = context if new is None else min(max(int(new), 0), context)
        return int(prompt + min(max(int(count), 1), _MOST_SAMPLES) * new)
    except (UserError, AttributeError, KeyError, TypeError, ValueError):
        return SHORT


_BYTES_A_TOKEN = 16
_MOST_SAMPLES = 1024
