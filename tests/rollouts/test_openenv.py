"""Environments on OpenEnv's servers: a stand-in of the package and a server, and with -m slow the real ones."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from engine.config.rollout import RolloutOptions
from engine.rollouts.source import RolloutSource
from engine.rollouts.turns.pool import Description, EnvironmentPool, Programs, Seat
from engine.rollouts.user_process import CallFailed
from tests.end_to_end.test_agent_tools import trained
from tests.support.commands import REPOSITORY
from tests.support.openenv_stand_in import OpenEnvStandIn, write_package
from tests.support.rollout_runs import prepared
from tests.support.tool_runs import tool_settings

HANDS = {"hand": {"type": "string", "description": "Which one."}}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of the package, in the processes that are started."""
    monkeypatch.setenv("PYTHONPATH", f"{write_package(tmp_path / 'package')}{os.pathsep}{REPOSITORY}")


@contextmanager
def opened(url: str, **changes: Any) -> Iterator[EnvironmentPool]:
    options = RolloutOptions(environment=f"openenv:{url}", environment_workers=2, **changes)
    with EnvironmentPool(options, Programs()) as pool:
        yield pool


def reset(seat: Seat, **columns: Any) -> Any:
    return seat.ask({"do": "reset", "columns": {"prompt": [], **columns}})["observation"]


def call(seat: Seat, name: str, **arguments: Any) -> Any:
    reply = seat.ask({"do": "call", "name": name, "arguments": arguments})
    return reply["result"], reply["failed"], reply["done"]


def reward(seat: Seat) -> Any:
    return seat.ask({"do": "reward"})["reward"]


@pytest.mark.usefixtures("package")
def test_an_action_is_one_tool_whose_arguments_are_its_fields() -> None:
    with OpenEnvStandIn(fields=HANDS, rewards=(0.5, None, True), opens_at=3) as server, opened(server.url) as pool:
        found = pool.describe()
        assert isinstance(found, Description) and found.rewards
        parameters = {"type": "object", "properties": HANDS, "required": ["hand"]}
        assert [one["function"] for one in found.schemas] == [
            {"name": "step", "description": "Acts.", "parameters": parameters}
        ]
        with pool.seat() as seat:
            assert reset(seat, shown="A door.", seed=3) == "A door." and reward(seat) == 0.0
            assert call(seat, "step", hand="left") == ("left", False, False)
            assert call(seat, "step", hand="left") == ("left", False, False)
            words, failed, done = call(seat, "step", hand="wrong")
            assert "no such hand" in words and failed and not done
            assert call(seat, "step", hand="right") == ("right", False, True)
            assert reward(seat) == 1.5
            assert reset(seat) is None and reward(seat) == 0.0
        asked = [one for one in server.asked if one["type"] == "reset"]
        assert asked[0]["data"] == {"shown": "A door.", "seed": 3} and asked[1]["data"] == {}


@pytest.mark.usefixtures("package")
def test_listed_tools_are_those_of_the_model() -> None:
    with OpenEnvStandIn(rewards=(None,), opens_at=2) as server, opened(server.url) as pool:
        found = pool.describe()
        assert isinstance(found, Description)
        assert [one["function"]["name"] for one in found.schemas] == ["open_door"]
        with pool.seat() as seat:
            reset(seat)
            assert call(seat, "open_door", hand=3) == ("3", False, False)
            assert call(seat, "close_door") == ("{'error': 'Tool close_door not found.'}", True, False)
            assert call(seat, "open_door", hand=4) == ("4", False, True)
            assert reward(seat) is None  # it is over, and nothing was scored


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("value", ["much", float("nan"), 1e9])
def test_a_reward_that_is_none_fails_the_conversation(value: object) -> None:
    with OpenEnvStandIn(fields=HANDS, rewards=(value,)) as server, opened(server.url) as pool, pool.seat() as seat:
        reset(seat)
        with pytest.raises(CallFailed, match="reward|get_reward"):
            call(seat, "step", hand="left")
            reward(seat)
        assert reset(seat) is None


@pytest.mark.usefixtures("package")
def test_an_episode_is_not_continued_behind_another_connection() -> None:
    with OpenEnvStandIn(fields=HANDS) as server, opened(server.url) as pool, pool.seat() as seat:
        reset(seat)
        with pytest.raises(CallFailed, match="the connection was closed, and the episode with it"):
            call(seat, "step", hand="lost")
        with pytest.raises(CallFailed, match="no door is there"):
            reset(seat, fault="reset")
        assert reset(seat, shown="A door.") == "A door."


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{write_package(tmp_path / 'a', 'raise ImportError(1)')}{os.pathsep}{REPOSITORY}")
    with OpenEnvStandIn() as server, opened(server.url) as pool:
        found = pool.describe()
        assert isinstance(found, str) and "needs the package openenv" in found and "pip install openenv" in found
    monkeypatch.setenv("PYTHONPATH", f"{write_package(tmp_path / 'b')}{os.pathsep}{REPOSITORY}")
    with opened(server.url) as pool:
        found = pool.describe()
        assert isinstance(found, str) and f"no OpenEnv server answers at {server.url}/schema" in found
        assert "Connection refused" in found and "\n" not in found


@pytest.mark.usefixtures("package")
def test_a_conversation_ends_where_the_environment_says_so(tmp_path: Path) -> None:
    """The call by which a door opens is the last of its completion, in a whole rollout, and its result is left out."""
    settings = tool_settings(tmp_path, train__steps=1, rollout__show=0)
    with OpenEnvStandIn(rewards=(0.0, 1.0), opens_at=2) as server, ExitStack() as stack:
        settings["rollout.environment"] = f"openenv:{server.url}"
        found = prepared(settings, stack)
        next(iter(found.source.stream(0, 0, 1)))
        assert isinstance(found.source, RolloutSource) and found.source.buffer is not None
        completions, rewards = found.source.buffer.completions, found.source.buffer.rewards_NF[:, 0]
    assert not np.isnan(rewards).any() and 0 < sum(rewards == 1.0) < len(rewards)
    for one, score in zip(completions, rewards, strict=True):
        assert one.written is not None and one.turns is not None
        assert (score == 1.0) == (one.turns.calls - one.turns.failed_calls == 2)
        if score == 1.0:
            assert not one.written[-1] and not one.truncated


# with the real package


def _port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def real(kind: str, port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of the package's in a process of its own."""
    port = port or _port()
    command = [sys.executable, "-m", "tests.support.openenv_doors", str(port), kind]
    with subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) as process:
        try:
            for _ in range(600):
                with closing(socket.socket()) as link:
                    if link.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


has_package = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="the package openenv is not installed"
)


@has_package
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_server_is_used_as_the_stand_in() -> None:
    with real("gym") as (url, _), opened(url) as pool:
        found = pool.describe()
        assert isinstance(found, Description)
        function = found.schemas[0]["function"]
        assert function["name"] == "step" and function["description"].startswith("Reads the note")
        assert set(function["parameters"]["properties"]) == {"do", "code"}
        with pool.seat() as one, pool.seat() as other:
            assert reset(one, code="12", shown="A door.") == "A door." and reset(other, code="34") is None
            assert call(one, "step", do="read", code="paid") == ("12", False, False)
            assert call(other, "step", do="read") == ("34", False, False)
            words, failed, done = call(one, "step", do="bite")
            assert "bite is no way to treat a door" in words and failed and not done
            assert call(one, "step", did="read")[1]
            assert call(one, "step", do="open", code="34") == ("It stays shut.", False, False)
            assert call(one, "step", do="open", code="12") == ("It opens.", False, True)
            assert reward(one) == 1.25 and reward(other) == 0.0
            with pytest.raises(CallFailed, match="no door is there"):
                reset(one, fault="reset")
            assert reset(one, code="56") is None and call(one, "step", do="read")[0] == "56"
    with real("mcp") as (url, _), opened(url) as pool, pool.seat() as seat:
        assert isinstance(pool.describe(), Description)
        reset(seat, code="78")
        assert call(seat, "read_note") == ("78", False, False)
        assert call(seat, "open_door", kode="78")[1]
        assert call(seat, "open_door", code="78") == ("It opens.", False, False) and reward(seat) == 1.0


@has_package
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_server_that_hangs_ends_or_starts_again_costs_its_episodes() -> None:
    port = _port()
    with real("gym", port) as (url, process), opened(url, environment_timeout=20.0) as pool, pool.seat() as seat:
        reset(seat, code="12")
        with pool.seat() as other:
            reset(other, code="12")
            with pytest.raises(CallFailed, match="did not come to an end within 20 s"):
                call(other, "step", do="hang")
            assert reset(other, code="13") is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(CallFailed, match="does not answer"):
            call(seat, "step", do="read")
        with real("gym", port):
            assert reset(seat, code="14") is None and call(seat, "step", do="read")[0] == "14"
    with real("gym", port) as (url, process), opened(url) as pool, pool.seat() as seat:
        reset(seat, code="15")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with real("gym", port), pytest.raises(CallFailed, match="the episode with it"):
            call(seat, "step", do="read")


@has_package
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_model_learns_on_a_real_server(tmp_path: Path) -> None:
    """The example's doors, behind tools that the server lists."""
    with real("mcp") as (url, _):
        found = [one["reward"] for one in trained(tmp_path, "Server", "--rollout.environment", f"openenv:{url}")]
    first, last = mean(found[:4]), mean(found[-4:])
    assert first < 0.45 and last > 0.75 and last - first > 0.35, found
