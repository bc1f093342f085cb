"""An environment on an OpenEnv server, which is reset and stepped over a WebSocket by OpenEnv's own client.

What the server says of its actions becomes the tools of the model: one named step, whose arguments are the fields of
an action, or the tools of an environment that lists its own (MCP). A conversation is one episode. The client is
imported where it is used, since the package is an option of the user's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.request import urlopen

from engine.files.strict_json import ANSWER_LIMITS, JsonFlaw, parse_json
from engine.foreign.fields import is_number
from engine.rollouts.turns.schemas import NoSchema

STEP = "step"
"""The tool of an environment that lists none."""
_ANSWER_BYTES = 1 << 20
"""Maximum bytes of a description."""
_CONNECT_SECONDS = 10.0
_FOREVER = 1e6
"""Seconds: rollout.environment_timeout ends a process whose call takes too long."""
_OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action caused, by which the model may try another one; others end the session."""
_NOT_FOR_THE_MODEL = ("metadata", "done", "reward")
"""Fields of an observation that are not shown."""


class EpisodeLost(Exception):
    """Raised where an episode cannot be continued; its text is the reason."""


class ServerTool(NamedTuple):
    """A tool of a server.

    Args:
        schema: its description for the chat template.
        call: takes its arguments by name.
    """

    schema: dict[str, Any]
    call: Callable[..., str]


class OpenEnvironment:
    """One episode at a time on a server.

    Args:
        url: of the server, such as http://127.0.0.1:8000.

    Raises:
        NoSchema: the package is missing, no server answers, or it describes no actions.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._client = _client_of(self._url)
        self._began = self._ended = False
        self._rewards: list[float] = []
        self.tools = self._described()

    @property
    def ended(self) -> bool:
        """Whether the episode is done."""
        return self._ended

    def reset(self, columns: Mapping[str, Any]) -> str | None:
        """Begins an episode; returns what the environment shows first, or None.

        Args:
            columns: of the prompt's record, of which the server takes those that its reset names, such as seed.

        Raises:
            EpisodeLost: there is none.
        """
        self._began, self._ended, self._rewards = False, False, []
        found = self._asked(lambda: self._client.reset(**columns))
        self._began = True
        return _text(found) or None

    def reward(self) -> float | None:
        """Returns the sum of the episode's rewards; None where it is done and has none."""
        return None if self._ended and not self._rewards else float(sum(self._rewards))

    def _described(self) -> list[ServerTool]:
        schema = self._read("/schema")
        action = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(action, dict):
            raise NoSchema(f"{self._url} describes no actions, as an OpenEnv server does: give the address of one")
        fields = {name: one for name, one in action.get("properties", {}).items() if name != "metadata"}
        if not fields or {"tool_name", "arguments"} <= fields.keys():
            return self._listed()
        parameters = {"type": "object", "properties": fields}
        for name in ("required", "$defs"):
            if name in action:
                parameters[name] = action[name]
        words = str(action.get("description") or "Takes a step in the environment.")
        return [ServerTool(_tool(STEP, words, parameters), self._stepped)]

    def _listed(self) -> list[ServerTool]:
        """Returns the tools that an environment lists."""
        try:
            found = self._asked(lambda: self._client.step({"type": "list_tools"})).observation.get("tools")
        except EpisodeLost as lost:
            raise NoSchema(f"{self._url} does not list its tools ({lost})") from None
        if not isinstance(found, list) or not all(isinstance(one, dict) and "name" in one for one in found):
            raise NoSchema(f"{self._url} lists no tools")
        return [
            ServerTool(
                _tool(str(one["name"]), str(one.get("description") or ""), dict(one.get("input_schema") or {})),
                partial(self._called, str(one["name"])),
            )
            for one in found
        ]

    def _stepped(self, **action: Any) -> str:
        return _text(self._counted(action))

    def _called(self, name: str, /, **arguments: Any) -> str:
        found = self._counted({"type": "call_tool", "tool_name": name, "arguments": arguments})
        error = found.observation.get("error")
        if error is not None:
            raise ValueError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
        return _of_tool(found.observation.get("result"))

    def _counted(self, action: Mapping[str, Any]) -> Any:
        """Takes a step, and keeps its reward.

        Raises:
            EpisodeLost: there is no answer.
            ValueError: the server refuses the action.
        """
        found = self._asked(lambda: self._client.step(action))
        self._ended = bool(found.done)
        if found.reward is not None:
            reward = float(found.reward) if isinstance(found.reward, bool) else found.reward
            if not is_number(reward):
                raise EpisodeLost(f"{self._url} answered with a reward that is no finite number")
            self._rewards.append(float(reward))
        return found

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Returns the result of a request.

        Raises:
            EpisodeLost: there is none.
            ValueError: the server refuses the action.
        """
        self._client.within_episode = self._began
        try:
            found = ask()
        except RuntimeError as error:
            if self._began and any(f"code: {code}" in str(error) for code in _OF_THE_ACTION):
                raise ValueError(str(error)) from None
            raise EpisodeLost(f"{self._url} answered: {error}") from None
        except Exception as error:  # of the package's, and of the packages below it
            with suppress(Exception):
                self._client.close()
            raise EpisodeLost(f"{self._url} does not answer ({type(error).__name__}: {error})") from None
        if not isinstance(found.observation, dict):
            raise EpisodeLost(f"{self._url} answered with an observation that is no object")
        return found

    def _read(self, path: str) -> Any:
        """Returns the JSON at a path of the server.

        Raises:
            NoSchema: there is none.
        """
        try:
            with urlopen(self._url + path, timeout=_CONNECT_SECONDS) as answer:
                data = answer.read(_ANSWER_BYTES + 1)
            if len(data) > _ANSWER_BYTES:
                raise JsonFlaw(f"it has more than {_ANSWER_BYTES} bytes")
            return parse_json(data, ANSWER_LIMITS)
        except (OSError, HTTPException, ValueError, JsonFlaw) as error:
            raise NoSchema(
                f"no OpenEnv server answers at {self._url}{path} ({error}): start it, or give its address"
            ) from None


def _client_of(url: str) -> Any:
    """Returns a client, which refuses to continue an episode by a new connection, behind which there is another one."""
    try:
        from openenv import GenericEnvClient
    except ImportError as error:
        raise NoSchema(
            f"openenv:{url} needs the package openenv, which cannot be imported ({error}): pip install openenv"
        ) from None

    class Client(GenericEnvClient):
        within_episode = False

        async def _connect_async(self) -> Any:
            before = self._ws
            found = await super()._connect_async()
            if self.within_episode and self._ws is not before:
                raise ConnectionError("the connection was closed, and the episode with it")
            return found

    return Client(
        base_url=url, connect_timeout_s=_CONNECT_SECONDS, message_timeout_s=_FOREVER, websocket_ping_timeout_s=None
    )


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(result: Any) -> str:
    """Returns an observation as the model sees it: a single text as it is, anything else in JSON."""
    shown = {name: value for name, value in result.observation.items() if name not in _NOT_FOR_THE_MODEL}
    if not shown:
        return ""
    only = next(iter(shown.values())) if len(shown) == 1 else None
    return only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False)


def _of_tool(result: Any) -> str:
    """Returns the result of a tool as text: the texts among the parts of MCP's results, anything else in JSON."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        found = [part.get("text") for part in result["content"] if isinstance(part, dict)]
        texts = [text for text in found if isinstance(text, str)]
        if texts and len(texts) == len(found):
            return "\n".join(texts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
