"""Parts of lists, as clients ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from engine.errors import UserError

_Entry = TypeVar("_Entry")
_MOST = 1000


def page_of(request: Request, default: int) -> tuple[int, int]:
    """Returns offset and limit of a request for a list.

    Args:
        default: the limit where it gives none.

    Raises:
        UserError: one is no number, or out of its range.
    """
    found = []
    for name, missing, low, high in (("offset", 0, 0, 2**31), ("limit", default, 0, 2**31)):
        text = request.query_params.get(name, str(missing))
        if not (text.isascii() and text.isdigit() and len(text) < 11 and low <= int(text) <= high):
            raise UserError(f"{name} is {text[:40]!r}, but a whole number of {low} or more is expected.")
        found.append(int(text))
    return found[0], min(found[1], _MOST)


def cut(entries: Sequence[_Entry], offset: int, limit: int) -> tuple[list[_Entry], dict[str, int]]:
    """Returns a part of a list, and the protocol's description of which."""
    page = list(entries[offset : offset + limit])
    return page, {"offset": offset, "limit": limit, "total_count": len(entries)}
