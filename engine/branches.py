"""Documents that continue others: the trees of documents that begin with the same tokens. No tensors.

Documents with a common beginning are computed as a tree: the beginning is a document, and each way in which it
continues is another, its branch. A token sees the tokens before it in its own document, and all tokens of the document
that this one continues, of the one that that continues, and so on up to the root. Positions continue too, so that every
token has the keys, and the positions, that it would have if its whole text were one document.

Documents lie in depth-first order: a document before its branches, and all that continue it, directly or not, side by
side right behind it. So the queries that see a document whole are one span.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add

from engine.spans import Block, Span

Parents = tuple[int, ...]
"""The number of the document that each document continues, -1 for none; () where none continues another."""


def check_parents(parents: Parents, count: int) -> None:
    """Asserts that these are the parents of `count` documents in depth-first order."""
    assert len(parents) in (0, count), (parents, count)
    path: list[int] = []
    for number, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        assert parent == (path[-1] if path else -1), (number, parents)
        path.append(number)


def shifted(parents: Parents, count: int, first: int) -> Parents:
    """Returns the parents of `count` documents that are numbered from `first` on.

    Args:
        parents: of these documents, numbered from 0; () where none continues another.
    """
    return tuple(-1 if parent < 0 else parent + first for parent in parents or (-1,) * count)


def depths(parents: Parents) -> tuple[int, ...]:
    """Returns how many documents each document continues, directly or not."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return tuple(found)


def paths(parents: Parents, count: int) -> tuple[tuple[int, ...], ...]:
    """Returns, for each of `count` documents, those that it continues, directly or not, from the root on.

    Args:
        parents: of each of them; () where none continues another.
    """
    found: list[tuple[int, ...]] = []
    for parent in parents or (-1,) * count:
        found.append(() if parent < 0 else (*found[parent], parent))
    return tuple(found)


def first_positions(lengths: tuple[int, ...], parents: Parents) -> tuple[int, ...]:
    """Returns the position of each document's first token: how many tokens lie before it in the documents that it
    continues.

    Args:
        lengths: tokens of the documents, which lie one after the other.
        parents: of each of them; () where none continues another.
    """
    found: list[int] = []
    for parent in parents or (-1,) * len(lengths):
        found.append(0 if parent < 0 else found[parent] + lengths[parent])
    return tuple(found)


def longest_path(lengths: tuple[int, ...], parents: Parents) -> int:
    """Returns the most tokens that a token may see, itself included: of a document and all that it continues.

    Args:
        lengths: tokens of the documents, at least one, which lie one after the other.
        parents: of each of them; () where none continues another.
    """
    return max(map(add, first_positions(lengths, parents), lengths))


def continuations(lengths: tuple[int, ...], parents: Parents) -> tuple[Span, ...]:
    """Returns the tokens of all documents that continue each document, directly or not: a span behind it, maybe empty.

    Args:
        lengths: tokens of the documents, which lie one after the other.
        parents: of each of them.
    """
    ends = list(accumulate(lengths))
    last = list(ends)
    for number in reversed(range(len(parents))):
        if parents[number] >= 0:
            last[parents[number]] = max(last[parents[number]], last[number])
    return tuple(Span(end, stop) for end, stop in zip(ends, last, strict=True))


def levels(lengths: tuple[int, ...], parents: Parents) -> tuple[tuple[Block, ...], ...]:
    """Returns the attention to tokens of the documents that are continued, beside each document's causal attention to
    itself.

    Blocks of one level share neither queries nor keys: those of level n have the documents that continue n others as
    keys, and as queries all tokens that continue them.

    Args:
        lengths: tokens of the documents, which lie one after the other.
        parents: of each of them; () where none continues another.
    """
    if not parents:
        return ()
    starts = [0, *accumulate(lengths)]
    found: list[list[Block]] = [[] for _ in range(max(depths(parents)))]
    spans = continuations(lengths, parents)
    for number, (depth, span) in enumerate(zip(depths(parents), spans, strict=True)):
        if span.length and lengths[number]:
            found[depth].append(Block(span, Span(starts[number], starts[number + 1]), causal=False))
    return tuple(tuple(level) for level in found if level)
