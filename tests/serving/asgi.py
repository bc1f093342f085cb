"""Requests to an application, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

KEY = "tml-a-key-of-the-tests-1"
OTHER_KEY = "tml-a-key-of-the-tests-2"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any,
    path: str,
    body: bytes | dict[str, Any] | Sequence[bytes] | None = None,
    *,
    key: str = KEY,
    headers: dict[str, str] | None = None,
    method: str | None = None,
    root: str = "/api/v1/",
    stays: bool = False,
) -> Answer:
    """Sends a GET without a body, else a POST, unless `method` says another; a body of several parts arrives in
    these. The client is gone then, unless it `stays` for an answer in several parts."""
    path, _, query = path.partition("?")
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    parts = [b""] if data is None else [data] if isinstance(data, bytes) else [*data]
    waiting = [{"type": "http.request", "body": one, "more_body": n + 1 < len(parts)} for n, one in enumerate(parts)]
    given = {"x-api-key": key, **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "raw_path": b"",
        "method": method or ("GET" if data is None else "POST"), "path": f"{root}{path}", "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if stays and not waiting:
            await asyncio.sleep(60)
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(one.get("body", b"") for one in sent[1:]))
