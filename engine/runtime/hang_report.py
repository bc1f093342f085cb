"""Explains a hang in one sentence, from what the ranks report: which wait in what, and which never came. Pure.

Ranks are compared by channel (see `engine.distributed.operations`). A rank that waits is blocked where another member
of the channel has not begun the operation of that number. Who is not there and is not blocked itself is the cause; the
rest wait for those that wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from engine.distributed.operations import Noted


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """The last state that a rank reported.

    Args:
        rank: among all.
        host, pid: its process.
        step: optimizer steps that its main thread has begun or finished.
        idle: seconds in which it began nothing and no wait of it ended.
        place: the engine's function that its main thread is in.
        last: the last operation of each channel.
        wait: what its main thread waits for, if anything.
        recent: the last operations in their order; may be left out.
    """

    rank: int
    host: str
    pid: int
    step: int
    idle: float
    place: str
    last: tuple[Noted, ...]
    wait: Noted | None = None
    recent: tuple[Noted, ...] = ()

    def dump(self) -> str:
        """Writes the state as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> RankState:
        """Reads what `dump` wrote."""
        values = json.loads(text)
        wait = values.pop("wait")
        last, recent = (tuple(_noted(one) for one in values.pop(name)) for name in ("last", "recent"))
        return cls(**values, last=last, recent=recent, wait=None if wait is None else _noted(wait))


def _noted(values: dict[str, object]) -> Noted:
    members = values.pop("members")
    assert isinstance(members, list)
    return Noted(members=tuple(members), **values)  # type: ignore[arg-type]


@dataclass(kw_only=True, slots=True)
class _Meeting:
    """An operation that some ranks have begun and others have not."""

    operation: str
    number: int
    channel: str
    members: tuple[int, ...]
    step: int
    seconds: float
    place: str
    here: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


def explain(states: Mapping[int, RankState], silent: Mapping[int, str], world_size: int) -> str:
    """Explains the states in a sentence without its full stop.

    Args:
        states: the last that is known of each rank; a rank that was never heard of is left out.
        silent: ranks that did not answer when they were asked, with what is known of their processes.
        world_size: number of ranks.
    """
    if (words := _different(states)) is not None:
        return words
    meetings = _meetings(states)
    if not meetings:
        if silent:
            return f"no rank is known to wait for another; {_all_absent(sorted(silent), states, silent)}"
        return f"no rank waits for another; {_places(states.values())}"
    blocked = {rank for meeting in meetings for rank in meeting.here}
    causes = {rank for meeting in meetings for rank in meeting.missing} - blocked
    if not causes:
        return "the ranks wait for each other: " + "; ".join(_waiting(meeting) for meeting in meetings)
    meeting = min(
        (meeting for meeting in meetings if causes.intersection(meeting.missing)),
        key=lambda meeting: (meeting.step, -meeting.seconds),
    )
    others = sorted(blocked - set(meeting.here))
    rest = f"; {_ranks(others)} {_verb(others, 'wait')} for these" if others else ""
    missing = [rank for rank in meeting.missing if rank in causes]
    return f"{_waiting(meeting)}, and {_all_absent(missing, states, silent)}{rest}"


def _meetings(states: Mapping[int, RankState]) -> list[_Meeting]:
    """Finds where main threads wait for a member that has not come; if none waits on the host, where numbers differ."""
    begun: dict[str, dict[int, Noted]] = {}
    for rank, state in states.items():
        for noted in state.last:
            begun.setdefault(noted.channel, {})[rank] = noted
    found: dict[tuple[str, int], _Meeting] = {}
    for rank, state in sorted(states.items()):
        if state.wait is not None:
            _meet(found, state, state.wait, state.wait.number, begun.get(state.wait.channel, {}))
        assert rank == state.rank
    if not found:
        for ranks in begun.values():
            lowest = _lowest(next(iter(ranks.values())).members, ranks)
            for rank, noted in sorted(ranks.items()):
                if noted.number > lowest:
                    _meet(found, states[rank], noted, lowest + 1, ranks)
    return list(found.values())


def _lowest(members: Iterable[int], begun: Mapping[int, Noted]) -> int:
    return min(begun[member].number if member in begun else 0 for member in members)


def _meet(
    found: dict[tuple[str, int], _Meeting], state: RankState, noted: Noted, number: int, begun: Mapping[int, Noted]
) -> None:
    missing = [member for member in noted.members if member not in begun or begun[member].number < number]
    if not missing:
        return
    operation = next(
        (one.operation for one in state.recent if (one.channel, one.number) == (noted.channel, number)), ""
    )
    meeting = found.setdefault(
        (noted.channel, number),
        _Meeting(
            operation=operation or noted.operation,
            number=number,
            channel=noted.channel,
            members=noted.members,
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
                f"{_ranks([rank for rank, one in operations.items() if one == operation])} "
                f"{_verb([rank for rank, one in operations.items() if one == operation], 'call')} {operation}"
                for operation in dict.fromkeys(operations.values())
            )
            return f"the ranks differ in operation {number} of {channel}: {what}; {_places(states.values())}"
    return None


def _waiting(meeting: _Meeting) -> str:
    return (
        f"{_ranks(meeting.here)} {_verb(meeting.here, 'wait')} in {meeting.operation}, operation {meeting.number} of "
        f"{meeting.channel}, for {meeting.place} after step {meeting.step}, since {meeting.seconds:.0f} s"
    )


def _all_absent(ranks: Sequence[int], states: Mapping[int, RankState], silent: Mapping[int, str]) -> str:
    return "; ".join(_absent(rank, states.get(rank), silent) for rank in ranks)


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
        f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {place}" for place, ranks in by_place.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(ranks) > 1 else verb + "s"
