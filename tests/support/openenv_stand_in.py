"""A stand-in for a package and a server of OpenEnv, where the package is not installed.

The package has of `GenericEnvClient` what is used of it, and asks the server by plain posts. The server has one door
for each client, which lists its tools or, with `fields`, describes an action; it is told by its records how to fail.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

PACKAGE = """
import asyncio
import json
import uuid
from types import SimpleNamespace
from urllib.request import Request, urlopen


class GenericEnvClient:
    def __init__(self, base_url, **options):
        self._url, self._ws = base_url, None

    async def _connect_async(self):
        self._ws = self._ws or uuid.uuid4().hex
        return self

    def _ask(self, kind, data):
        asyncio.run(self._connect_async())
        body = json.dumps({"session": self._ws, "type": kind, "data": data}).encode()
        answer = json.load(urlopen(Request(self._url + "/ask", body)))
        if answer.get("lost"):
            self._ws = None
            return self._ask(kind, data)
        if "error" in answer:
            raise RuntimeError("Server error: " + answer["error"])
        return SimpleNamespace(**answer)

    def reset(self, **columns):
        return self._ask("reset", columns)

    def step(self, action):
        return self._ask("step", action)

    def close(self):
        pass
"""
_OPEN = {
    "name": "open_door",
    "description": "Opens the door.",
    "input_schema": {"type": "object", "properties": {"hand": {"type": "integer"}}, "required": ["hand"]},
}


def write_package(folder: Path, text: str = PACKAGE) -> str:
    """Writes the package; returns the value of PYTHONPATH with which it is found."""
    (folder / "openenv").mkdir(parents=True)
    (folder / "openenv" / "__init__.py").write_text(text, encoding="utf-8")
    return str(folder)


@dataclass
class OpenEnvStandIn:
    """A server; to be entered.

    Args:
        fields: of an action, where the environment lists no tools.
        rewards: of the steps of an episode, one after the other; the last is repeated.
        opens_at: the step by which the episode is done.
    """

    fields: dict[str, Any] | None = None
    rewards: tuple[object, ...] = (1.0,)
    opens_at: int = 1
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        outer = self
        self._steps: dict[str, int] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                own = {"metadata": {"type": "object"}, **(outer.fields or {})}
                schema = {"action": {"description": "Acts.", "properties": own, "required": list(outer.fields or ())}}
                self._answer(schema if self.path == "/schema" else {})

            def do_POST(self) -> None:
                self._answer(outer.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def _answer(self, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        session, data = request["session"], request["data"]
        if data.get("type") == "list_tools":
            return self._found({"tools": [_OPEN]})
        if request["type"] == "reset":
            self._steps[session] = 0
            if data.get("fault") == "reset":
                return {"error": "no door is there (code: EXECUTION_ERROR)"}
            return self._found({"text": data.get("shown", ""), "metadata": {"secret": 1}})
        if session not in self._steps:
            return {"error": "no episode (code: SESSION_ERROR)"}
        arguments = data.get("arguments", data)
        if arguments.get("hand") == "lost":
            self._steps.pop(session)
            return {"lost": True}
        if arguments.get("hand") == "wrong":
            return {"error": "no such hand (code: VALIDATION_ERROR)"}
        self._steps[session] += 1
        step = self._steps[session]
        reward = self.rewards[min(step, len(self.rewards)) - 1]
        shown = {"text": str(arguments.get("hand"))}
        if data.get("type") == "call_tool":
            shown = {"tool_name": data["tool_name"], "error": None, "result": {"content": [shown]}}
        return self._found(shown, reward, done=step >= self.opens_at)

    @staticmethod
    def _found(observation: dict[str, Any], reward: object = None, *, done: bool = False) -> dict[str, Any]:
        return {"observation": observation, "reward": reward, "done": done}
