"""Regular expressions over modules' names, matched in bounded time: they may come from an untrusted file.

Python's matcher tries one way after another, and an expression such as `(.*.*)*x` has more ways than there is time. An
expression with repeats inside repeats is matched here by the set of all places where each of its parts may end, which
grows with the product of both lengths and no faster. Simple ones go to `re`, which is quicker and matches the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from engine.errors import UserError

_MAX_CHARACTERS = 10_000
_MAX_STEPS = 1_000_000
"""Maximum steps that one expression may take in a process, over all names: some seconds."""
_FEW_REPEATS = 3
"""Maximum number of consecutive repeats, each of which may try every place of a name."""

_Item = tuple[Any, Any]
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_CHARACTERS = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)
_LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT)


class PatternFlaw(Exception):
    """The reason, in a few words, why a text is not an expression that can be matched."""


@lru_cache(maxsize=4096)
def name_pattern(text: str) -> NamePattern:
    """Compiles an expression.

    Raises:
        PatternFlaw: it is not valid, or too large.
    """
    return NamePattern(text)


class NamePattern:
    """An expression; see `name_pattern`."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_CHARACTERS:
            raise PatternFlaw(f"it has {len(text):,} characters, more than {_MAX_CHARACTERS:,}")
        self._text = text
        try:
            tree = _parser.parse(text)
            self._simple = re.compile(text) if _is_simple(tree) else None
        except re.error as error:
            raise PatternFlaw(str(error)) from None
        except OverflowError:
            raise PatternFlaw("a repetition number is too large") from None
        except RecursionError:
            raise PatternFlaw("it nests too deeply") from None
        if self._simple is None:
            self._tree = tree
            self.single: dict[int, re.Pattern[str]] = {}
            self._prepare(tree, tree.state.flags)
            self._left = _MAX_STEPS

    def matches(self, name: str) -> bool:
        """Returns whether the expression matches all of `name`.

        Raises:
            UserError: it takes too many steps to find out.
        """
        if self._simple is not None:
            return self._simple.fullmatch(name) is not None
        return len(name) in _Places(self, name).after(self._tree, (0,))

    def _prepare(self, items: Iterable[_Item], flags: int) -> None:
        """Compiles items that match one character or none, with the flags in force there."""
        for item in items:
            kind, value = item
            if kind in (*_CHARACTERS, _constants.AT) or (kind in _REPEATS and _is_one_character(value[2])):
                state = _parser.State()
                state.flags = flags
                greedy = item if kind not in _REPEATS else (_constants.MAX_REPEAT, (0, *value[1:]))
                self.single[id(item)] = _compiler.compile(_parser.SubPattern(state, [greedy]))
            elif kind is _constants.SUBPATTERN:
                self._prepare(value[3], (flags | value[1]) & ~value[2])
            elif kind in (*_REPEATS, *_LOOKS):
                self._prepare(value[-1], flags)
            elif kind is _constants.BRANCH:
                for branch in value[1]:
                    self._prepare(branch, flags)
            else:
                raise PatternFlaw("it has repeats inside repeats and a backreference: write it without one of them")

    def count(self, steps: int) -> None:
        """Counts a step, and raises UserError once there have been too many."""
        self._left -= steps
        if self._left < 0:
            shown = self._text if len(self._text) <= 80 else f"{self._text[:80]}..."
            raise UserError(
                f"the expression {shown!r} has too many ways to match a module's name: write it with fewer repeats (*, "
                "+, {}) inside one another."
            )


class _Places:
    """The places where the parts of an expression may end in one name."""

    def __init__(self, pattern: NamePattern, name: str) -> None:
        self._pattern, self._name = pattern, name
        self._known: dict[tuple[int, int], frozenset[int]] = {}

    def after(self, items: Iterable[_Item], begins: Iterable[int]) -> frozenset[int]:
        """Returns the places where the items, in sequence, may end if they begin at one of `begins`."""
        places = frozenset(begins)
        for item in items:
            self._pattern.count(len(places))
            places = frozenset(end for begin in places for end in self._ends(item, begin))
        return places

    def _ends(self, item: _Item, begin: int) -> frozenset[int]:
        key = id(item), begin
        if key not in self._known:
            self._known[key] = self._find(item, begin)
        return self._known[key]

    def _find(self, item: _Item, begin: int) -> frozenset[int]:
        kind, value = item
        if (single := self._pattern.single.get(id(item))) is not None:
            if (found := single.match(self._name, begin)) is None:
                return frozenset()
            least = value[0] if kind in _REPEATS else found.end() - begin
            return frozenset(range(begin + least, found.end() + 1))
        if kind is _constants.SUBPATTERN:
            return self.after(value[3], (begin,))
        if kind is _constants.BRANCH:
            return frozenset(end for branch in value[1] for end in self.after(branch, (begin,)))
        if kind in _LOOKS:
            direction, inside = value
            start = begin if direction > 0 else begin - inside.getwidth()[0]  # behind, the width is one
            ends = self.after(inside, (start,)) if start >= 0 else frozenset()
            holds = bool(ends) if direction > 0 else begin in ends
            return frozenset((begin,)) if holds == (kind is _constants.ASSERT) else frozenset()
        least, most, inside = value
        return self._repeated(least, most, inside, begin)

    def _repeated(self, least: int, most: int, inside: Sequence[_Item], begin: int) -> frozenset[int]:
        # With more rounds than characters one of them is empty, and more of these change nothing.
        enough = len(self._name) + 1
        places = frozenset((begin,))
        for _ in range(min(least, enough)):
            places = self.after(inside, places)
        found = places
        for _ in range(min(most, enough + least) - min(least, enough)):
            places = self.after(inside, places) - found
            if not places:
                break
            found |= places
        return found


def _is_simple(tree: Iterable[_Item]) -> bool:
    """Returns whether `re` has few ways to try."""
    return _ways(tree) <= _FEW_REPEATS


def _ways(items: Iterable[_Item]) -> float:
    """Returns the number of repeats that follow each other; infinite where one is inside another, or around
    alternatives."""
    return sum(_ways_of(*item) for item in items)


def _ways_of(kind: Any, value: Any) -> float:
    if kind is _constants.SUBPATTERN:
        return _ways(value[3])
    if kind is _constants.BRANCH:
        return max(map(_ways, value[1]))
    if kind is _constants.ASSERT or kind is _constants.ASSERT_NOT:
        return _ways(value[1])
    if kind in _REPEATS or kind is getattr(_constants, "POSSESSIVE_REPEAT", None):
        _, most, inside = value
        if most == 1:
            return _ways(inside)
        return 1 if _is_one_character(inside) else float("inf")
    if kind is getattr(_constants, "ATOMIC_GROUP", None):
        return _ways(value)
    if kind is _constants.GROUPREF_EXISTS:
        return max(_ways(branch) for branch in value[1:] if branch is not None)
    return 0


def _is_one_character(items: Sequence[_Item]) -> bool:
    return len(items) == 1 and items[0][0] in _CHARACTERS
