"""Explains a hang in one sentence, from the ranks' reports: the ranks that wait, their operation, and the ranks that
never arrived. Pure.

Ranks are compared by channel (see `engine.distributed.operations`). A rank is blocked in the operation that its host
waits for, with Gloo, or that its device has not passed, with NCCL, whose hosts run ahead of their devices: there the
number of operations begun says nothing. A rank that has not begun an operation in which others are blocked, and is not
blocked itself, is the cause; the rest wait for it directly or indirectly. Where all have begun the operation, and no
member's device is at another one, a device hangs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.distributed.operations import Noted
from engine.distributed.ranks import SPELLED_RANKS, progression


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """The last state that a rank reported.

    Args:
        rank: among all.
        host, pid: its process.
        step: optimizer steps that its main thread has begun or finished.
        idle: seconds in which it began nothing and no wait of it ended.
        place: the engine's function that its main thread is in.
        last: the last operation of each channel; may be left out.
        wait: the operation its main thread waits for, if any.
        device: the first operation that its device has not passed, where devices are followed.
        recent: the last operations in their order; may be left out.
    """

    rank: int
    host: str
    pid: int
    step: int
    idle: float
    place: str
    last: tuple[Noted, ...] = ()
    wait: Noted | None = None
    device: Noted | None = None
    recent: tuple[Noted, ...] = ()

    @property
    def blocked(self) -> Noted | None:
        """The operation that blocks the rank: its device, which comes first, or its host."""
        return self.device or self.wait

    def dump(self) -> str:
        """Writes the state as JSON. A channel is written once, and its members as a range where they are one."""
        channels: dict[tuple[str, bool, tuple[int, ...]], int] = {}

        def short(noted: Noted | None) -> list[object] | None:
            if noted is None:
                return None
            channel = channels.setdefault((noted.axis, noted.is_transfer, noted.members), len(channels))
            return [channel, noted.operation, noted.number, round(noted.seconds, 1), noted.passed]

        values: dict[str, object] = {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "step": self.step,
            "idle": round(self.idle, 1),
            "place": self.place,
            "last": [short(one) for one in self.last],
            "wait": short(self.wait),
            "device": short(self.device),
            "recent": [short(one) for one in self.recent],
        }
        values["channels"] = [[axis, int(is_transfer), _packed(ranks)] for axis, is_transfer, ranks in channels]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RankState:
        """Reads the text of `dump`."""
        values = json.loads(text)
        channels = [(axis, bool(transfer), _unpacked(ranks)) for axis, transfer, ranks in values.pop("channels")]

        def full(short: Sequence[Any] | None) -> Noted | None:
            if short is None:
                return None
            channel, operation, number, seconds, passed = short
            axis, is_transfer, members = channels[channel]
            return Noted(
                axis=axis,
                members=members,
                operation=operation,
                number=number,
                seconds=seconds,
                is_transfer=is_transfer,
                passed=passed,
            )

        for name in ("wait", "device"):
            values[name] = full(values[name])
        for name in ("last", "recent"):
            values[name] = tuple(full(one) for one in values[name])
        return cls(**values)


def _packed(ranks: tuple[int, ...]) -> list[int] | dict[str, int]:
    whole = progression(ranks) if len(ranks) > 2 else None
    return list(ranks) if whole is None else {"from": whole.start, "to": whole.stop, "by": whole.step}


def _unpacked(packed: list[int] | dict[str, int]) -> tuple[int, ...]:
    return tuple(packed) if isinstance(packed, list) else tuple(range(packed["from"], packed["to"], packed["by"]))


@dataclass(kw_only=True, slots=True)
class _Meeting:
    """An operation that blocks the ranks `here`, and that those `missing` have not begun."""

    operation: str
    number: int
    channel: str
    step: int
    seconds: float
    place: str
    here: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


_Begun: TypeAlias = Mapping[str, Mapping[int, Noted]]
"""The last operation that each rank has begun, by channel."""


def explain(states: Mapping[int, RankState], silent: Mapping[int, str], world_size: int) -> str:
    """Explains the states in a sentence without its full stop.

    Args:
        states: the last that is known of each rank; a rank that was never heard of is left out.
        silent: ranks that did not answer when they were asked, with a description of their processes.
        world_size: number of ranks.
    """
    if (words := _different(states)) is not None:
        return words
    begun = _begun(states)
    meetings = _meetings(states, begun)
    blocked = {rank for meeting in meetings for rank in meeting.here}
    blocked |= {rank for rank, state in states.items() if state.device is not None}
    causes = {rank for meeting in meetings for rank in meeting.missing} - blocked
    if not causes and (stuck := _stuck(states, begun)) is not None:
        return f"{_not_ending(stuck)}{_others(blocked, stuck)}"
    if not meetings:
        if silent:
            return f"no rank is known to wait for another; {_all_absent(sorted(silent), states, silent)}"
        return f"no rank waits for another; {_places(states.values())}"
    if not causes:
        return "the ranks wait for each other: " + "; ".join(_waiting(meeting) for meeting in meetings)
    meeting = min(
        (meeting for meeting in meetings if causes.intersection(meeting.missing)),
        key=lambda meeting: (meeting.step, -meeting.seconds),
    )
    missing = [rank for rank in meeting.missing if rank in causes]
    return f"{_waiting(meeting)}, and {_all_absent(missing, states, silent)}{_others(blocked, meeting)}"


def _begun(states: Mapping[int, RankState]) -> _Begun:
    begun: dict[str, dict[int, Noted]] = {}
    for rank, state in states.items():
        for noted in state.last:
            begun.setdefault(noted.channel, {})[rank] = noted
    return begun


def _meetings(states: Mapping[int, RankState], begun: _Begun) -> list[_Meeting]:
    """Finds the operations in which ranks are blocked because a member's host has not begun them."""
    found: dict[tuple[str, int], _Meeting] = {}
    for rank, state in sorted(states.items()):
        assert rank == state.rank
        if (noted := state.blocked) is None:
            continue
        there = begun.get(noted.channel, {})
        missing = [
            member
            for member in noted.members
            if member != rank and (member not in there or there[member].number < noted.number)
        ]
        if missing:
            _meet(found, state, noted, missing)
    return list(found.values())


def _stuck(states: Mapping[int, RankState], begun: _Begun) -> _Meeting | None:
    """Finds devices that stall outside a collective; the earliest, where there are several."""
    found: dict[tuple[str, int], _Meeting] = {}
    for _, state in sorted(states.items()):
        noted = state.device
        if noted is not None and all(_is_there(states.get(member), noted, begun) for member in noted.members):
            _meet(found, state, noted, [])
    return min(found.values(), key=lambda meeting: (meeting.step, -meeting.seconds), default=None)


def _is_there(state: RankState | None, noted: Noted, begun: _Begun) -> bool:
    """Returns whether a member's device has come to the operation, or is past it."""
    if state is None:
        return False
    if state.device is not None and (state.device.channel, state.device.number) == (noted.channel, noted.number):
        return True
    last = begun.get(noted.channel, {}).get(state.rank)
    if last is None or last.number < noted.number:
        return False
    return state.device is None or last.passed >= noted.number


def _meet(found: dict[tuple[str, int], _Meeting], state: RankState, noted: Noted, missing: list[int]) -> None:
    meeting = found.setdefault(
        (noted.channel, noted.number),
        _Meeting(
            operation=noted.operation,
            number=noted.number,
            channel=noted.channel,
            step=state.step,
            seconds=noted.seconds,
            place=state.place,
            missing=missing,
        ),
    )
    meeting.here.append(state.rank)
    meeting.seconds = max(meeting.seconds, noted.seconds)


def _different(states: Mapping[int, RankState]) -> str | None:
    """Finds ranks that have met in one place of a channel for different operations."""
    said: dict[tuple[str, int], dict[int, str]] = {}
    for rank, state in sorted(states.items()):
        for noted in (*state.recent, *((state.wait,) if state.wait is not None else ())):
            if not noted.is_transfer:
                said.setdefault((noted.channel, noted.number), {})[rank] = noted.operation
    for (channel, number), operations in sorted(said.items(), key=lambda item: item[0][1]):
        if len(set(operations.values())) > 1:
            what = " and ".join(
                f"{some_ranks([rank for rank, one in operations.items() if one == operation])} "
                f"{_verb([rank for rank, one in operations.items() if one == operation], 'call')} {operation}"
                for operation in dict.fromkeys(operations.values())
            )
            return f"the ranks differ in operation {number} of {channel}: {what}; {_places(states.values())}"
    return None


def _waiting(meeting: _Meeting) -> str:
    return f"{some_ranks(meeting.here)} {_verb(meeting.here, 'wait')} in {_operation(meeting)}"


def _operation(meeting: _Meeting) -> str:
    return (
        f"{meeting.operation}, operation {meeting.number} of {meeting.channel}, for {meeting.place} "
        f"after step {meeting.step}, since {meeting.seconds:.0f} s"
    )


def _not_ending(meeting: _Meeting) -> str:
    one = len(meeting.here) == 1
    return (
        f"the device{'' if one else 's'} of {some_ranks(meeting.here)} {'does' if one else 'do'} not get through "
        f"{_operation(meeting)}, and no rank is missing there: {'it' if one else 'one of them'} hangs, or what "
        "connects it with the others"
    )


def _others(blocked: Iterable[int], meeting: _Meeting) -> str:
    others = sorted(set(blocked) - set(meeting.here))
    return f"; {some_ranks(others)} {_verb(others, 'wait')} for these" if others else ""


def _all_absent(ranks: Sequence[int], states: Mapping[int, RankState], silent: Mapping[int, str]) -> str:
    more = f"; and {len(ranks) - SPELLED_RANKS} more" if len(ranks) > SPELLED_RANKS else ""
    return "; ".join(_absent(rank, states.get(rank), silent) for rank in ranks[:SPELLED_RANKS]) + more


def _absent(rank: int, state: RankState | None, silent: Mapping[int, str]) -> str:
    if state is None:
        return f"rank {rank} never came and was never heard of"
    where = f"in {state.place} after step {state.step}"
    if rank in silent:
        return f"rank {rank} never came: it does not answer ({silent[rank]}), and was last {where}"
    return f"rank {rank} never came: it is {where}"


def _places(states: Iterable[RankState]) -> str:
    by_place: dict[str, list[int]] = {}
    for state in sorted(states, key=lambda state: state.rank):
        by_place.setdefault(f"{state.place} after step {state.step}", []).append(state.rank)
    return ", ".join(
        f"{some_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {place}" for place, ranks in by_place.items()
    )


def some_ranks(ranks: Sequence[int]) -> str:
    """Names ranks: all of them, or the first few and how many more there are."""
    more = len(ranks) - SPELLED_RANKS
    shown = ", ".join(map(str, ranks[:SPELLED_RANKS])) + (f" and {more} more" if more > 0 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(ranks) > 1 else verb + "s"
