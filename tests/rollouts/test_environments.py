"""Tools and environments in processes of their own: each way to fail costs one conversation, and says why."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.rollout import RolloutOptions
from engine.rollouts.turns.pool import Description, EnvironmentPool, Programs, Seat, workers_note
from engine.rollouts.turns.worker import Host, host_of
from engine.rollouts.user_process import CallFailed

FILE = '''
import os, signal, sys, time


class Hostile:
    def __init__(self):
        self.count = 0

    def reset(self, how="well"):
        """Not a tool."""
        self.count = 0
        if how == "raises":
            raise RuntimeError("no world")
        return {"list": [1], "text": "seen", "half": "a\\ud800b"}.get(how)

    def adds(self, number: int) -> int:
        """Adds.

        Args:
            number: How much.
        """
        self.count += number
        return self.count

    def fails(self, how: str) -> str:
        """Fails.

        Args:
            how: The way.
        """
        if how == "hang":
            time.sleep(600)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise ValueError("wrong \\ud800 value")
        if how == "exit at once":
            os._exit(4)
        if how == "print":
            print("to standard output")
        if how == "fork" and os.fork() == 0:
            time.sleep(600)
        if how == "closes":
            os.closerange(3, 100)
        odd = {"long": "x" * 2**20, "longer": "y" * 2**22, "half": "a\\ud800b", "bytes": b"\\xff", "none": None}
        return odd.get(how, how)

    async def waits(self) -> str:
        """Waits."""
        return "waited"

    @property
    def trap(self):
        raise RuntimeError("a property was read")

    def _private(self):
        pass

    def get_reward(self):
        return {0: 0, 1: 1.5, 2: float("nan"), 3: "much", 4: None}.get(self.count, 1e9)


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: One.
        b: Other.
    """
    return a * b
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environment") / "env.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def options(file: Path, **changes: Any) -> RolloutOptions:
    given: dict[str, Any] = {"environment": f"{file}:Hostile", "tools": (f"{file}:multiply",), "environment_workers": 2}
    return RolloutOptions(**(given | {"environment_timeout": 20.0} | changes))


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[EnvironmentPool]:
    with EnvironmentPool(options(file), Programs()) as found:
        yield found


def call(seat: Seat, name: str, **arguments: Any) -> Any:
    reply = seat.ask({"do": "call", "name": name, "arguments": arguments})
    return reply["failed"], reply["result"]


def reset(seat: Seat, **columns: Any) -> Any:
    return seat.ask({"do": "reset", "columns": {"other": 1, **columns}})["observation"]


def test_tools_are_described(pool: EnvironmentPool) -> None:
    found = pool.describe()
    assert isinstance(found, Description) and found.rewards
    assert [one["function"]["name"] for one in found.schemas] == ["multiply", "adds", "fails", "waits"]


def test_slots_that_stay_empty_are_noted(file: Path) -> None:
    assert "30 of 32 rollout.slots stay empty" in str(workers_note(options(file)))
    for changes in ({"slots": 2}, {"environment_workers": None}, {"environment": None, "environment_workers": 1}):
        assert workers_note(options(file, **changes)) is None


def test_a_conversation_has_its_environment(pool: EnvironmentPool) -> None:
    with pool.seat() as one, pool.seat() as other:
        assert reset(one) is None and reset(other, how="text") == "seen"
        assert call(one, "adds", number=1) == (False, "1")
        assert call(other, "adds", number=5) == (False, "5")
        assert one.ask({"do": "reward"})["reward"] == 1.5
        assert call(one, "multiply", a=6, b=7) == (False, "42")
        assert call(one, "waits") == (False, "waited")
        reset(one)
        assert call(one, "adds", number=4) == (False, "4") and one.ask({"do": "reward"})["reward"] is None


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("adds", {"number": "x"}, "unsupported operand"),
        ("adds", {}, "missing 1 required"),
        ("adds", {"number": 1, "more": 2}, "unexpected keyword"),
        ("shoots", {}, "Tool shoots not found."),
        ("trap", {}, "not found"),
        ("_private", {}, "not found"),
        ("reset", {}, "not found"),
        ("fails", {"how": "raise"}, r"wrong \ud800 value"),
        ("fails", {"how": "exit"}, "3"),
    ],
)
def test_wrong_calls_are_told_to_the_model(
    pool: EnvironmentPool, name: str, arguments: dict[str, Any], result: str
) -> None:
    with pool.seat() as seat:
        reset(seat)
        failed, words = call(seat, name, **arguments)
    assert failed and words.startswith("{'error': ") and result in words


def test_strange_results_are_texts(pool: EnvironmentPool) -> None:
    with pool.seat() as seat:
        reset(seat)
        assert reset(seat, how="half") == "a\ufffdb"
        for how, length, begin in (
            ("long", 2**20, "x"), ("longer", 2**20, "y"), ("half", 3, "a\ufffdb"), ("bytes", 7, "b'\\xff'"),
            ("none", 4, "None"), ("print", 5, "print"),
        ):  # fmt: skip
            failed, result = call(seat, "fails", how=how)
            assert not failed and len(result) == length and result.startswith(begin), how


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"do": "reset", "columns": {"how": "raises"}}, "its reset raised RuntimeError: no world"),
        ({"do": "reset", "columns": {"how": "list"}}, "its reset returned a list, not a text or None"),
        ({"do": "call", "name": "fails", "arguments": {"how": "kill"}}, "its process ended by SIGKILL"),
        ({"do": "call", "name": "fails", "arguments": {"how": "exit at once"}}, "its process ended with status 4"),
        ({"do": "call", "name": "fails", "arguments": {"how": "closes"}}, "its process ended"),
    ],
)
def test_a_failure_is_one_sentence_and_the_next_conversation_works(
    pool: EnvironmentPool, request_: dict[str, Any], why: str
) -> None:
    with pool.seat() as seat:
        reset(seat)
        with pytest.raises(CallFailed, match=why):
            seat.ask(request_)
        assert reset(seat) is None and call(seat, "adds", number=1) == (False, "1")


@pytest.mark.parametrize(
    ("count", "why"), [(2, "get_reward returned nan"), (3, "get_reward returned a str"), (9, "returned 1e\\+09")]
)
def test_rewards_that_are_none(pool: EnvironmentPool, count: int, why: str) -> None:
    with pool.seat() as seat:
        reset(seat)
        call(seat, "adds", number=count)
        with pytest.raises(CallFailed, match=why):
            seat.ask({"do": "reward"})


@pytest.mark.parametrize("how", ["hang", "fork"])
def test_a_call_that_hangs_is_ended_with_what_it_started(file: Path, how: str) -> None:
    with EnvironmentPool(options(file, environment_timeout=1.0), Programs()) as pool, pool.seat() as seat:
        began = time.monotonic()
        if how == "fork":
            assert call(seat, "fails", how="fork") == (False, "fork")
        else:
            with pytest.raises(CallFailed, match="did not come to an end within 1 s") as failed:
                call(seat, "fails", how="hang")
            assert failed.value.hung and reset(seat) is None
        pid = seat._process.pid  # type: ignore[attr-defined]
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_memory_is_limited(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "greedy.py"
    path.write_text(
        'def greedy(size: int) -> int:\n    """Takes.\n\n    Args:\n        size: Bytes.\n    """\n'
        "    return len(bytearray(size))\n",
        encoding="utf-8",
    )
    given = options(file, environment=None, tools=(f"{path}:greedy",), environment_memory=1.0)
    with EnvironmentPool(given, Programs()) as pool, pool.seat() as seat:
        assert call(seat, "greedy", size=2**20) == (False, str(2**20))
        assert call(seat, "greedy", size=2**31)[0]


def test_tools_of_one_file_share_what_it_holds(tmp_path: Path) -> None:
    path, words = tmp_path / "shared.py", '"""Does.\n\n    Args:\n        text: It.\n    """'
    path.write_text(
        f"held = []\ndef put(text: str) -> None:\n    {words}\n    held.append(text)\n"
        f"def count(text: str) -> int:\n    {words}\n    return held.count(text)\n",
        encoding="utf-8",
    )
    given = options(path, environment=None, tools=(f"{path}:put", f"{path}:count"))
    with EnvironmentPool(given, Programs()) as pool, pool.seat() as seat:
        call(seat, "put", text="a")
        assert call(seat, "count", text="a") == (False, "1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def other(): pass", "there is no function Hostile"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("class Hostile: pass", "the environment has no method reset"),
        ("class Hostile:\n    def reset(self): pass\n    def f(self, a): 'F.'", "the tool f cannot be described"),
        ("class Hostile:\n    def __init__(self): 1 / 0", "cannot be made \\(ZeroDivisionError"),
        ("import os; os._exit(1)", "cannot be loaded \\(its process ended with status 1\\)"),
        ("def Hostile(): return 5", "the environment has no method reset"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, why: str) -> None:
    import re

    path = tmp_path / "env.py"
    path.write_text(text, encoding="utf-8")
    given = options(path, tools=())
    with EnvironmentPool(given, Programs(), seats=1) as pool:
        found = pool.describe()
    assert isinstance(found, str) and re.search(why, found), found


def test_programs_environments_are_called_in_this_process(file: Path) -> None:
    space: dict[str, Any] = {}
    exec(compile(FILE, "env", "exec"), space)
    programs = Programs(tools={"multiply": space["multiply"]}, environments={"Hostile": space["Hostile"]})
    given = options(
        file, environment="python:Hostile", tools=("python:multiply",), environment_timeout=0.5
    )  # fmt: skip
    with EnvironmentPool(given, programs) as pool, pool.seat() as seat:
        found = pool.describe()
        assert isinstance(found, Description) and len(found.schemas) == 4
        assert reset(seat, how="text") == "seen" and call(seat, "adds", number=1) == (False, "1")
        assert call(seat, "multiply", a=2, b=3) == (False, "6") and seat.ask({"do": "reward"})["reward"] == 1.5
        with pytest.raises(CallFailed, match="its reset raised"):
            reset(seat, how="raises")


def test_the_tools_of_the_documentation_work() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, space)
    host = host_of([space["multiply"]], space["Door"])
    assert isinstance(host, Host) and len(host.description()["schemas"]) == 2
    assert host.answer({"do": "reset", "columns": {"code": "42", "prompt": []}}) == {"observation": "The code is 42."}
    found = host.answer({"do": "call", "name": "open", "arguments": {"digits": "42"}})
    assert found == {"result": "It opens.", "failed": False, "done": False}
    assert host.answer({"do": "reward"}) == {"reward": 1.0}


def test_who_waits_for_a_seat_ends_with_the_run(file: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    pool = EnvironmentPool(options(file), Programs(), seats=1)
    pool.take()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take)
        pool.close()
        with pytest.raises(CallFailed, match="the run ended"):
            waiting.result(10)
