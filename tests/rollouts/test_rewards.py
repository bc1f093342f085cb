"""Reward functions in processes of their own: what they are given, and what becomes of those that misbehave."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config.rollout import RewardSource, RolloutOptions
from engine.errors import UserError
from engine.rollouts.figures import OVERLONG
from engine.rollouts.objective.advantages import overlong_penalties, total_rewards
from engine.rollouts.rewards.pool import RewardPool, Sample, Scores
from engine.rollouts.user_process import CallFailed

FUNCTIONS = """
import asyncio, os, signal, sys, time
import numpy as np

def told(prompts, completions, completion_ids, **columns):
    print("what a function prints goes nowhere near the rewards")
    with open(columns["log"][0], "a") as file:
        file.write(repr((prompts, completions, completion_ids, sorted(columns))) + chr(10))
    return [float(len(ids)) for ids in completion_ids]

def named(completions, answer):
    return np.array([completion == right for completion, right in zip(completions, answer)])

async def waits(completions, **columns):
    await asyncio.sleep(0.01)
    return [0.5 for _ in completions]

def misbehaves(completions, **columns):
    if "raises" in completions:
        raise ValueError("no such thing")
    if "hangs" in completions:
        time.sleep(60)
    if "dies" in completions:
        os._exit(3)
    if "crashes" in completions:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "forks" in completions:
        if os.fork() == 0:
            return [99.0] * len(completions)
        os.wait()
    if "huge" in completions:
        return [10**400 if completion == "huge" else 1.0 for completion in completions]
    if "two" in completions:
        return [np.ones(2) if completion == "two" else 1.0 for completion in completions]
    if "twice" in completions:
        return [1.0] * (len(completions) + 1)
    if "text" in completions:
        return "1.0"
    odd = {"nan": float("nan"), "inf": float("inf"), "word": "high", "none": None}
    return [odd.get(completion, 1.0) for completion in completions]

def starts_another(completions, pids):
    import subprocess
    child = subprocess.Popen(["sleep", "300"])
    with open(pids[0], "w") as file:
        file.write(str(child.pid))
    time.sleep(300)

def terminates_another(completions):
    import subprocess
    child = subprocess.Popen(["sleep", "300"])
    child.terminate()
    return [float(child.wait(5))] * len(completions)

def knows(completions):
    return [float(name in os.environ) for name in completions]

def one_number(completions, **columns):
    return [1.0]

def raises_about(completions):
    raise ValueError(completions[0])

def slow(completions):
    time.sleep(sum(map(float, completions)))
    return [1.0] * len(completions)

def wants(completions, difficulty):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


def samples(completions: Sequence[Any], **columns: Sequence[Any]) -> list[Sample]:
    return [
        Sample(
            place=f"data line {number + 1}",
            prompt=f"Q{number}",
            completion=completion,
            completion_ids=list(range(number + 1)),
            columns={name: values[number] for name, values in columns.items()},
        )
        for number, completion in enumerate(completions)
    ]


def score(entries: Sequence[str], given: list[Sample], *, workers: int = 1, timeout: float = 10.0) -> Scores:
    sources = [RewardSource.parse(entry) for entry in entries]
    with RewardPool(sources, workers=workers, timeout=timeout, columns=list(given[0].columns)) as pool:
        assert pool.check() is None
        scoring = pool.begin(given)
        assert scoring.wait(60)
        return scoring.result()


def unscored(found: Scores) -> int:
    """Returns how many completions have no reward."""
    return int(np.isnan(found.rewards).all(axis=1).sum())


def is_alive(path: Path) -> bool:
    """Whether the process runs whose number the file has, within five seconds from now."""
    state = Path(f"/proc/{path.read_text(encoding='utf-8')}/stat")
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        try:
            if state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX":
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.01)
    return True


def test_functions_get_what_trl_gives_them(file: Path, tmp_path: Path) -> None:
    """Keywords, lists of one length, columns by name; those that a function does not name are kept from it."""
    log = tmp_path / "log"
    given = samples(["a", "b", "c"], answer=["a", "x", "c"], log=[str(log)] * 3)
    found = score([f"{file}:told", f"{file}:named", f"{file}:waits"], given)
    assert found.rewards.tolist() == [[1.0, 1.0, 0.5], [2.0, 0.0, 0.5], [3.0, 1.0, 0.5]] and not found.problems
    calls = log.read_text(encoding="utf-8").splitlines()
    assert calls == [repr((["Q0", "Q1", "Q2"], ["a", "b", "c"], [[0], [0, 1], [0, 1, 2]], ["answer", "log"]))]


def test_rewards_do_not_depend_on_the_number_of_processes(file: Path, tmp_path: Path) -> None:
    given = samples(list("abcdefg"), answer=list("axcxexg"), log=[str(tmp_path / "log")] * 7)
    entries = [f"{file}:told", f"{file}:named"]
    assert np.array_equal(score(entries, given, workers=3).rewards, score(entries, given).rewards)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("raises", "it raised ValueError: no such thing"),
        ("dies", "its process ended with status 3"),
        ("crashes", "its process ended by SIGSEGV"),
        ("hangs", "it did not come to an end within 1 s"),
        ("twice", "it returned 2 rewards for 1 completion"),
        ("text", "it returned a str, not a list of rewards"),
        ("nan", "it returned nan, not a finite number"),
        ("inf", "it returned inf, not a finite number"),
        ("word", "it returned a str, not a number"),
        ("huge", "it returned a number that is too large for a float"),
        ("two", "it raised ValueError: can only convert an array of size 1 to a Python scalar"),
    ],
)
def test_a_bad_completion_costs_itself(bad: str, words: str, file: Path) -> None:
    """With the whole call repeated one by one left out, "fine" and "also" lose their rewards as well."""
    found = score([f"{file}:misbehaves"], samples(["fine", bad, "also"]), timeout=1.0)
    assert np.array_equal(found.rewards[:, 0], [1.0, np.nan, 1.0], equal_nan=True)
    assert found.problems == (f"misbehaves gave no reward for a completion of data line 2: {words}",)
    assert unscored(found) == 1


def test_a_copy_that_a_function_forks_answers_nobody(file: Path) -> None:
    """Its 99 came first, and the function's own rewards were taken for those of the next call."""
    sources = [RewardSource.parse(f"{file}:misbehaves")]
    with RewardPool(sources, workers=1, timeout=10, columns=[]) as pool:
        for completions in (["forks", "fine"], ["fine", "fine", "none"]):
            scoring = pool.begin(samples(completions))
            assert scoring.wait(30)
            found = scoring.result()
            expected = [np.nan if one == "none" else 1.0 for one in completions]
            assert np.array_equal(found.rewards[:, 0], expected, equal_nan=True) and not found.problems


def test_none_is_no_failure(file: Path) -> None:
    found = score([f"{file}:misbehaves", "exact_match"], samples(["none", "a"], answer=["none", "b"]))
    assert np.array_equal(found.rewards, [[np.nan, 1.0], [1.0, 0.0]], equal_nan=True)
    assert not found.problems


def test_a_function_that_always_hangs_is_given_up(file: Path) -> None:
    """Three completions are waited for, not six; all of them are named in two sentences."""
    found = score([f"{file}:misbehaves"], samples(["hangs"] * 6), timeout=0.3)
    assert unscored(found) == 6
    assert found.problems == (
        "misbehaves gave no reward for a completion of data line 1 and 2 more: it did not come to an end within 0.3 s",
        "misbehaves gave no reward for a completion of data line 4 and 2 more: it was not called, as 3 others hung",
    )


def test_no_process_outlives_the_pool(file: Path) -> None:
    pool = RewardPool([RewardSource.parse(f"{file}:waits")], workers=2, timeout=5, columns=[])
    with pool:
        assert pool.begin(samples(["a", "b"])).wait(30)
        pids = [pid for worker in pool._workers if (pid := worker._process.pid) is not None]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_hung_function_started_ends_with_it(file: Path, tmp_path: Path) -> None:
    """With the process alone killed, what it started sleeps on for five minutes."""
    path = tmp_path / "pid"
    found = score([f"{file}:starts_another"], samples(["a"], pids=[str(path)]), timeout=1.0)
    assert unscored(found) == 1 and not is_alive(path)


def test_signals_that_stop_a_run_stop_no_process(file: Path) -> None:
    """A scheduler sends them to all processes. What a function starts can still be terminated."""
    sources = [RewardSource.parse(f"{file}:{name}") for name in ("waits", "terminates_another")]
    with RewardPool(sources, workers=1, timeout=10, columns=[]) as pool:
        assert pool.check() is None
        process = pool._workers[0]._process.pid
        assert process is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.killpg(process, number)
        scoring = pool.begin(samples(["a"]))
        assert scoring.wait(30) and scoring.result().rewards.tolist() == [[0.5, -signal.SIGTERM]]
        assert pool._workers[0]._process.pid == process


def test_a_closed_pool_starts_nothing(file: Path) -> None:
    with RewardPool([RewardSource.parse(f"{file}:waits")], workers=1, timeout=5, columns=[]) as pool:
        assert pool.check() is None
    with pytest.raises(CallFailed):
        pool._workers[0].start()
    assert pool._workers[0]._process.pid is None


def test_a_call_has_whole_groups(file: Path, tmp_path: Path) -> None:
    """Cut at equal shares, three processes would get three, three and two of two groups of four."""
    log = tmp_path / "log"
    sources = [RewardSource.parse(f"{file}:told")]
    with RewardPool(sources, workers=3, timeout=10, columns=["log"], group=4) as pool:
        assert pool.begin(samples(list("abcdefgh"), log=[str(log)] * 8)).wait(30)
    assert sorted(eval(line)[1] for line in log.read_text(encoding="utf-8").splitlines()) == [[*"abcd"], [*"efgh"]]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("missing.py:f", "missing.py:f cannot be loaded (FileNotFoundError"),
        ("{file}:absent", "cannot be loaded (ValueError: there is no function absent)"),
        ("{file}:wants", "it wants difficulty, but is given prompts, completions, completion_ids and the columns log"),
        ("{broken}:f", "cannot be loaded (SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_said_before(entry: str, words: str, file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n", encoding="utf-8")
    source = RewardSource.parse(entry.format(file=file, broken=broken))
    with RewardPool([source], workers=1, timeout=5, columns=["log"]) as pool:
        problem = pool.check()
    assert problem is not None and words in problem and problem.endswith("correct the file, or the entry.")


def test_built_in_rewards() -> None:
    completions = [" 42 ", "so 1,042.0 it is", "7", "#### 42", [{"role": "assistant", "content": "42"}], "none"]
    given = samples(completions, answer=["42", "x = 1042", "8", "42", "42", "3"], other=["7"] * 6)
    found = score(["exact_match", "numeric_answer", r"regex:^\d+$"], given).rewards
    assert found[:, 0].tolist() == [1, 0, 0, 0, 1, 0]
    assert found[:, 1].tolist() == [1, 1, 0, 1, 1, 0]
    assert found[:, 2].tolist() == [0, 0, 1, 0, 1, 0]
    assert score(["exact_match:other"], given).rewards[:, 0].tolist() == [0, 0, 1, 0, 0, 0]


def test_a_process_is_no_rank(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables of torchrun, accelerate in a reward would join the ranks. Devices are those of the run."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    given = samples(["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"])
    assert score([f"{file}:knows"], given).rewards[:, 0].tolist() == [0, 0, 0, 0, 0, 1]


def test_signals_that_a_thread_blocks_are_not_blocked_in_a_process(file: Path) -> None:
    """A blocked signal is inherited: what a function starts and terminates would run on for five minutes."""
    found: list[Scores] = []

    def scoring() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        found.append(score([f"{file}:terminates_another"], samples(["a"])))

    thread = threading.Thread(target=scoring)
    thread.start()
    thread.join()
    assert found[0].rewards.tolist() == [[-signal.SIGTERM]]


def test_kinds_of_failures_are_counted_and_few(file: Path) -> None:
    """Eight reasons were eight sentences."""
    given = samples(["odd0"] + [f"odd{number}" for number in range(8)])
    found = score([f"{file}:raises_about"], given)
    assert unscored(found) == 9 and len(found.problems) == 6
    assert found.problems[0] == (
        "raises_about gave no reward for a completion of data line 1 and 1 more: it raised ValueError: odd0"
    )
    assert found.problems[-1] == "raises_about gave no reward for 3 other completions, for 3 other reasons"


def test_a_call_that_is_too_large_is_said(file: Path) -> None:
    """A second for four completions, of which each takes a third: all are scored, late, and the log says why."""
    found = score([f"{file}:slow"], samples(["0.4"] * 4), timeout=1.0)
    assert found.rewards.tolist() == [[1.0]] * 4
    assert found.problems == (
        "slow was given 4 completions at once, and it did not come to an end within 1 s, but it scored each by itself: "
        "raise rollout.reward_timeout, or rollout.reward_workers, among which they are shared out",
    )


def test_a_function_that_fails_on_several_is_said(file: Path) -> None:
    """It returns one number whatever it is given: each completion is scored, at the price of a call."""
    found = score([f"{file}:one_number"], samples(["a"] * 4))
    assert found.rewards.tolist() == [[1.0]] * 4
    (problem,) = found.problems
    assert problem.startswith("one_number was given 4 completions at once, and it returned 1 ")
    assert problem.endswith("but it scored each by itself: correct it, as each completion now costs a call of its own")


def test_tries_one_by_one_come_to_an_end(file: Path) -> None:
    """Every second completion hangs, so that no three do in a row: all six would be waited for."""
    found = score([f"{file}:misbehaves"], samples(["hangs", "fine"] * 6), timeout=0.3)
    assert 5 + 2 <= np.isnan(found.rewards).sum() < 12
    assert any("it was not called, as others took more than 1.2 s" in problem for problem in found.problems)


def test_a_missing_column_is_said() -> None:
    found = score(["numeric_answer:result"], samples(["1"], answer=["1"]))
    assert "it raised KeyError: 'the records have no column result'" in found.problems[0]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a/b.py:f", RewardSource(file="a/b.py", function="f", name="f")),
        ("exact_match", RewardSource(file=None, function="exact_match", name="exact_match")),
        (
            "numeric_answer:gold",
            RewardSource(file=None, function="numeric_answer", argument="gold", name="numeric_answer/gold"),
        ),
        ("regex:a=b", RewardSource(file=None, function="regex", argument="a=b", name="regex")),
        ("regex:x=5", RewardSource(file=None, function="regex", argument="x=5", name="regex")),
    ],
)
def test_entries(text: str, parsed: RewardSource) -> None:
    assert RewardSource.parse(text) == parsed


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (("rewards.py",), "but FILE.py:NAME, or one of exact_match, numeric_answer, regex, model, is expected"),
        (("b.py:not a name",), "but FILE.py:NAME"),
        (("regex",), "which lacks its pattern"),
        (("regex:(",), "whose pattern is none"),
        (("exact_match=0.5",), "write exact_match, and its weight 0.5 in rollout.reward_weights"),
        (("b.py:f=-1e-1",), "write b.py:f, and its weight -1e-1 in rollout.reward_weights"),
        (("a.py:f", "a.py:f"), "has a.py:f twice"),
    ],
)
def test_wrong_entries(entries: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as error:
        RolloutOptions(rewards=entries)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((1.0,), "rollout.reward_weights has 1 numbers and rollout.rewards 2 functions"),
        ((1.0, math.inf), "rollout.reward_weights has inf, but finite numbers are expected"),
        ((1.0, -1e9), "rollout.reward_weights has -1000000000.0, but weights from -1e+06 to 1e+06 are expected"),
        ((0.0, 0.0), "so that no completion is better than another"),
    ],
)
def test_wrong_weights(weights: tuple[float, ...], words: str) -> None:
    with pytest.raises(UserError) as error:
        RolloutOptions(rewards=("a.py:f", "exact_match"), reward_weights=weights)
    assert words in str(error.value)


def test_names_of_figures_are_different() -> None:
    """The functions' names alone would be f, f, exact_match twice, regex twice, and overlong as the penalty's was."""
    entries = ("a.py:f", "b.py:f", "a.py:overlong", "exact_match", "exact_match:b", "regex:x", "regex:y", "a.py:g")
    sources = RolloutOptions(rewards=entries, reward_weights=(1, 2, 3, 4, 5, 6, 7, 8)).reward_sources
    names = [source.name for source in sources]
    assert names == ["f/1", "f/2", "overlong", "exact_match", "exact_match/b", "regex/1", "regex/2", "g"]
    assert [source.weight for source in sources] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert OVERLONG not in names and not OVERLONG.isidentifier()


def test_overlong_penalty_is_trls() -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(1, 21))
    expected = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=6)([[0] * n for n in lengths])
    assert overlong_penalties(np.array(lengths), longest=20, buffer=6) == pytest.approx(expected)


def test_totals_by_hand() -> None:
    rewards = np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]])
    assert np.array_equal(total_rewards(rewards, [1.0, 0.5]), [2.0, 1.5, np.nan], equal_nan=True)


def test_the_example_reward() -> None:
    from examples.grpo_arithmetic.rewards import short

    assert short(completions=["12", "1+", ""], prompts=[], completion_ids=[]) == [1.0, 0.0, 0.0]
