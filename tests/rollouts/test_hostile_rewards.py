"""Processes of reward functions that mean harm: what they answer costs their completions, and what they start ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config.rollout import RewardSource
from engine.rollouts.rewards.pool import RewardPool, Scores
from tests.rollouts.test_rewards import is_alive, samples, score

HOSTILE = """
import json, os, sys, time

def frame(value):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(text).to_bytes(8, "big") + text

FRAMES = {
    "half a header": lambda call: bytes(3),
    "half a frame": lambda call: frame([1, 2, 3])[:-1],
    "2^64 bytes": lambda call: bytes([255] * 8),
    "2^40 bytes": lambda call: (2**40).to_bytes(8, "big") + b" " * 1000,
    "spaces": lambda call: frame(b" " * (1 << 17)),
    "nothing": lambda call: frame(b""),
    "no json": lambda call: frame(b"rewards"),
    "no utf-8": lambda call: frame(bytes([255])),
    "half of it": lambda call: frame(b'{"call": 1, "rewards": [1.0'),
    "deep": lambda call: frame(b"[" * 60_000),
    "deep objects": lambda call: frame(b'{"a":' * 13_000),
    "a list": lambda call: frame([1.0]),
    "a number": lambda call: frame(1.0),
    "true": lambda call: frame(True),
    "no call": lambda call: frame({"rewards": [1.0]}),
    "another call": lambda call: frame({"call": call + 1, "rewards": [1.0]}),
    "the call before": lambda call: frame({"call": call - 1, "rewards": [1.0]}),
    "a call of text": lambda call: frame({"call": str(call), "rewards": [1.0]}),
    "no rewards": lambda call: frame({"call": call}),
    "rewards of null": lambda call: frame({"call": call, "rewards": None}),
    "rewards of text": lambda call: frame({"call": call, "rewards": "1"}),
    "rewards by name": lambda call: frame({"call": call, "rewards": {"0": 1.0}}),
    "too few": lambda call: frame({"call": call, "rewards": []}),
    "too many": lambda call: frame({"call": call, "rewards": [1.0, 1.0]}),
    "true for a reward": lambda call: frame({"call": call, "rewards": [True]}),
    "a list for a reward": lambda call: frame({"call": call, "rewards": [[1.0]]}),
    "an object for a reward": lambda call: frame({"call": call, "rewards": [{}]}),
    "1e7": lambda call: frame({"call": call, "rewards": [1e7]}),
    "-1e200": lambda call: frame({"call": call, "rewards": [-1e200]}),
    "1e400": lambda call: frame(b'{"call": %d, "rewards": [1e400]}' % call),
    "10^400": lambda call: frame(b'{"call": %d, "rewards": [1%s]}' % (call, b"0" * 400)),
    "infinity": lambda call: frame({"call": call, "rewards": [float("inf")]}),
    "-infinity": lambda call: frame({"call": call, "rewards": [-float("inf")]}),
    "nan": lambda call: frame({"call": call, "rewards": [float("nan")]}),
    "rewards twice": lambda call: frame(b'{"call": %d, "rewards": [1], "rewards": [2]}' % call),
    "a problem of 5": lambda call: frame({"call": call, "problem": 5}),
    "a long sentence": lambda call: frame({"call": call, "rewards": ["x" * 100_000]}),
    "lines": lambda call: frame({"call": call, "rewards": ["a\\nstep 1/6  loss 0" + "x" * 5000]}),
    "a problem in lines": lambda call: frame({"call": call, "problem": "a\\nstep 1/6  loss 0" + "x" * 9000}),
}

def hostile(completions, **columns):
    socket, call = int(sys.argv[3]), sys._getframe(1).f_locals["request"]["call"]
    for one in completions:
        if one in FRAMES:
            os.write(socket, FRAMES[one](call))
            if one.startswith("half a"):
                os._exit(0)
            time.sleep(60)
        if one == "byte by byte":
            for byte in frame({"call": call, "rewards": [1.0]}):
                os.write(socket, bytes([byte]))
                time.sleep(0.2)
        if one == "twice":
            os.write(socket, frame({"call": call, "rewards": [1.0] * len(completions)}))
        if one == "closes":
            os.close(socket)
            time.sleep(60)
    return [1.0] * len(completions)

class Unspeakable(Exception):
    def __str__(self):
        raise KeyboardInterrupt

RAISED = {
    "exits": SystemExit(3),
    "is interrupted": KeyboardInterrupt(),
    "says nothing of itself": Unspeakable(),
    "half a character": ValueError(chr(0xD800)),
}

def raises(completions):
    if completions[0] in RAISED:
        raise RAISED[completions[0]]
    if completions[0] == "a real-time signal":
        os.kill(os.getpid(), 40)
    if completions[0] == "stops what is above":
        os.kill(os.getppid(), 19)
        time.sleep(60)
    return [1.0] * len(completions)

def starts_another(completions, pids):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(pids[0] + ".partial", "w") as file:
                file.write(str(os.getpid()))
            os.rename(pids[0] + ".partial", pids[0])
            time.sleep(300)
        os._exit(0)
    while not os.path.exists(pids[0]):
        time.sleep(0.01)
    if completions[0] == "hangs":
        time.sleep(300)
    if completions[0] == "dies":
        os._exit(3)
    return [1.0]
"""

REFUSED = {
    "half a header": "its process ended with status 0",
    "half a frame": "its process ended with status 0",
    "2^64 bytes": "what cannot be read (it has more than ",
    "2^40 bytes": "what cannot be read (it has more than ",
    "spaces": "what cannot be read (it has more than ",
    "nothing": "what cannot be read (Expecting value",
    "no json": "what cannot be read (Expecting value",
    "no utf-8": "what cannot be read ('utf-8' codec",
    "half of it": "what cannot be read (Expecting",
    "deep": "what cannot be read (it nests too deeply",
    "deep objects": "what cannot be read (it nests too deeply",
    "a list": "a list of 1 to another call",
    "a number": "1 to another call",
    "true": "true to another call",
    "no call": "an object to another call",
    "another call": "an object to another call",
    "the call before": "an object to another call",
    "a call of text": "an object to another call",
    "no rewards": "null, where a list of 1 rewards was expected",
    "rewards of null": "null, where a list of 1 rewards was expected",
    "rewards of text": "a text, where a list of 1 rewards was expected",
    "rewards by name": "an object, where a list of 1 rewards was expected",
    "too few": "a list of 0, where a list of 1 rewards was expected",
    "too many": "a list of 2, where a list of 1 rewards was expected",
    "true for a reward": "true for a reward",
    "a list for a reward": "a list of 1 for a reward",
    "an object for a reward": "an object for a reward",
    "1e7": "1e+07 for a reward",
    "-1e200": "-1e+200 for a reward",
    "1e400": "what cannot be read (it has '1e400' where a finite number was expected)",
    "10^400": "what cannot be read (it has an integer of 401 digits",
    "infinity": "what cannot be read (it has 'Infinity' where",
    "-infinity": "what cannot be read (it has '-Infinity' where",
    "nan": "what cannot be read (it has 'NaN' where",
    "rewards twice": "what cannot be read ('rewards' is given twice)",
    "a problem of 5": "null, where a list of 1 rewards was expected",
    "a long sentence": "what cannot be read (it has more than ",
    "byte by byte": "it did not come to an end within 1 s",
    "closes": "its process ended its connection",
}


@pytest.fixture(scope="module")
def hostile_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    path = tmp_path_factory.mktemp("hostile") / "hostile.py"
    path.write_text(HOSTILE, encoding="utf-8")
    with RewardPool([RewardSource.parse(f"{path}:hostile")], workers=1, timeout=1.0, columns=[]) as pool:
        yield pool


def scored(pool: RewardPool, completions: Sequence[str]) -> Scores:
    scoring = pool.begin(samples(completions))
    assert scoring.wait(30)
    return scoring.result()


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_that_is_none_costs_its_completion(case: str, hostile_pool: RewardPool) -> None:
    begin = time.monotonic()
    found = scored(hostile_pool, [case])
    assert np.isnan(found.rewards).all() and REFUSED[case] in found.problems[0], found
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("exits", "it raised SystemExit: 3"),
        ("is interrupted", "it raised KeyboardInterrupt"),
        ("says nothing of itself", "it raised an exception that cannot be told"),
        ("half a character", r"it raised ValueError: \ud800"),
        ("a real-time signal", "its process ended by signal 40"),
        ("stops what is above", "it did not come to an end within 1 s"),
    ],
)
def test_what_is_raised_is_said(case: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE, encoding="utf-8")
    begin = time.monotonic()
    (problem,) = score([f"{tmp_path / 'hostile.py'}:raises"], samples([case]), timeout=1.0).problems
    assert problem.endswith(words) and time.monotonic() - begin < 5


def test_a_file_that_forks_answers_once(tmp_path: Path) -> None:
    """A copy answered too, which was taken for the answer to the first call."""
    path = tmp_path / "forks.py"
    path.write_text("import os, time\nos.fork()\ndef one(completions):\n    time.sleep(0.2)\n    return [1.0]\n")
    assert score([f"{path}:one"], samples(["a"])).rewards.tolist() == [[1.0]]


@pytest.mark.parametrize("case", ["lines", "a problem in lines"])
def test_a_sentence_is_no_line_of_the_log(case: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE, encoding="utf-8")
    (problem,) = score([f"{tmp_path / 'hostile.py'}:hostile"], samples([case])).problems
    assert "data line 1: a step 1/6 loss 0xxx" in problem and "\n" not in problem and len(problem) < 1200


@pytest.mark.parametrize("case", ["nan", "too many", "twice"])
def test_such_an_answer_costs_no_other_completion(case: str, hostile_pool: RewardPool) -> None:
    """A second answer to one call would be taken for that to the next."""
    for completions in (["fine", case, "also"], ["fine", "also", "this"]):
        rewards = scored(hostile_pool, completions).rewards[:, 0]
        expected = [np.nan if one == case != "twice" else 1.0 for one in completions]
        assert np.array_equal(rewards, expected, equal_nan=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux, where orphans have a process above them")
@pytest.mark.parametrize("how", ["hangs", "dies", "returns"])
def test_what_left_its_session_ends_too(how: str, tmp_path: Path) -> None:
    """A daemon, whose parent is gone and whose session is its own, slept on for five minutes."""
    (tmp_path / "hostile.py").write_text(HOSTILE, encoding="utf-8")
    score([f"{tmp_path / 'hostile.py'}:starts_another"], samples([how], pids=[str(tmp_path / "pid")]), timeout=1.0)
    assert not is_alive(tmp_path / "pid")


KILLED = """
import os, signal, sys
from engine.config.rollout import RewardSource
from engine.rollouts.rewards.pool import RewardPool, Sample

sample = Sample(place="", prompt="", completion="hangs", completion_ids=[], columns={"pids": sys.argv[2]})
pool = RewardPool([RewardSource.parse(sys.argv[1] + ":starts_another")], workers=1, timeout=60, columns=["pids"])
pool.begin([sample])
while not os.path.exists(sys.argv[2]):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux, where orphans have a process above them")
def test_what_left_its_session_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE, encoding="utf-8")
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "hostile.py"), str(tmp_path / "pid")]
    assert subprocess.run(arguments, check=False, timeout=60).returncode == -signal.SIGKILL
    assert not is_alive(tmp_path / "pid")


@pytest.mark.parametrize("reward", [1e7, -1e200, 10**30])
def test_a_reward_without_meaning_is_refused(reward: float, tmp_path: Path) -> None:
    """1e200 has no square, so that a step's loss and gradient were 0."""
    path = tmp_path / "large.py"
    path.write_text(f"def large(completions):\n    return [{reward} for _ in completions]\n", encoding="utf-8")
    found = score([f"{path}:large"], samples(["a"]))
    assert np.isnan(found.rewards).all()
    assert f"it returned {reward:g}, and rewards are from -1e+06 to 1e+06" in found.problems[0]
