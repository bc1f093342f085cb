"""Room for the bodies that arrive at a time, of each key its own: who sends many at once waits for oneself alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SMALL = 1 << 16
"""Bodies of as many bytes take no room, so that polls need not wait for what is larger."""


class ByteRoom:
    """Bytes that are taken; used by one event loop.

    Args:
        most: of each key at a time, or one body's that has more alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[str, int] = {}
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, owner: str, size: int) -> AsyncIterator[None]:
        """Waits for room, and takes it until the end of the block.

        Args:
            owner: whose body it is.
            size: of it, or the most that it may have.
        """
        if size <= _SMALL:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not (had := self._had(owner)) or had + size <= self._most)
            self._taken[owner] = self._had(owner) + size
        try:
            yield
        finally:
            async with self._changed:
                self._taken[owner] -= size
                self._changed.notify_all()

    def _had(self, owner: str) -> int:
        return self._taken.get(owner, 0)
