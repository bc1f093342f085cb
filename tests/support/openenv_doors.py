"""Environments on a real OpenEnv server, for tests: `python -m tests.support.openenv_doors PORT KIND`.

KIND is "gym" for a door whose actions have fields, and "mcp" for one that lists tools. The number of digits, and what
the note says, come from `reset`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

SESSIONS = 16


class DoorAction(Action):
    """Reads the note (do is read), or types a code (do is open)."""

    do: str = Field(description="read or open")
    code: str = Field(default="", description="Digits")


class DoorObservation(Observation):
    text: str = ""


class GymDoor(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> DoorObservation:
        self._state = State(episode_id=str(given), step_count=0)
        self._code, self._note = given.get("code", "??"), given.get("note") or given.get("code", "??")
        if given.get("fault") == "reset":
            raise RuntimeError("no door is there")
        return DoorObservation(text=given.get("shown", ""))

    def step(self, action: DoorAction, timeout_s: float | None = None, **more: Any) -> DoorObservation:
        self._state.step_count += 1
        if action.do == "hang":
            time.sleep(60)
        if action.do == "crash":
            os._exit(3)
        if action.do == "read":
            return DoorObservation(text=self._note, reward=0.25 if action.code == "paid" else None)
        if action.do != "open":
            raise ValueError(f"{action.do} is no way to treat a door")
        opens = action.code == self._code
        return DoorObservation(text="It opens." if opens else "It stays shut.", reward=float(opens), done=opens)

    @property
    def state(self) -> State:
        return self._state


class McpDoor(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("door")
        self._code, self._opened, self._state = "??", False, State(episode_id="", step_count=0)

        @server.tool
        def open_door(code: str) -> str:
            """Types a code."""
            self._opened = self._opened or code == self._code
            return "It opens." if code == self._code else "It stays shut."

        @server.tool
        def read_note() -> str:
            """Reads the note beside the door."""
            return self._code

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Observation:
        self._code, self._opened, self._state = given.get("code", "??"), False, State(episode_id="", step_count=0)
        return Observation()

    def _scored(self, found: Observation) -> Observation:
        if isinstance(found, CallToolObservation) and found.tool_name == "open_door":
            found.reward = float(self._opened)
        return found

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return self._scored(super().step(action, timeout_s, **more))

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return self._scored(await super().step_async(action, timeout_s, **more))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        raise ValueError("only tools can be called")

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    PORT, KIND = int(sys.argv[1]), sys.argv[2]
    if KIND == "gym":
        app = create_fastapi_app(GymDoor, DoorAction, DoorObservation, max_concurrent_envs=SESSIONS)
    else:
        app = create_fastapi_app(McpDoor, CallToolAction, CallToolObservation, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
