"""Runs whose completions have several turns: ranks, environments and servers are killed at moments drawn at random.

A moment is the number of an event in all of a training, of any kind: a pass of the model, a call of an environment, a
step, a save, or a call of the server. The whole run says how many there are.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine.checkpoint.run import commit
from engine.errors import UserError
from engine.inference.model_part import InferenceStage
from engine.rollouts.turns.pool import _ProcessSeat
from engine.training.step import TrainStep
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import final_state, records, run_here
from tests.support.served_runs import save_weights
from tests.support.spawning import RankFailure, fork_context, spawn
from tests.support.sweeps import sampled
from tests.support.tool_runs import tool_settings

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="kills by process id"),
]

STEPS = 4
EVENTS = ((InferenceStage, "decode"), (_ProcessSeat, "ask"), (TrainStep, "__call__"), (commit, "write_manifest"))
DRAWN = random.Random(29)
MOMENTS = [DRAWN.random() for _ in range(10)]
"""Of each kind of process, as parts of a training."""
QUICK = MOMENTS[:1]


def settings_of(folder: Path, **changes: object) -> dict[str, object]:
    """Two steps with prompts of their own a buffer; a checkpoint after every step."""
    return tool_settings(
        folder, **{"train__steps": STEPS, "train__global_batch_size": 16, "rollout__steps_per_generation": 2,
        "objective__num_iterations": 2, "checkpoint__every": 1, "lora__dropout": 0.1,
        "rollout__environment_workers": 2, **changes},
    )  # fmt: skip


@contextmanager
def counted(act: Callable[[int, Any], None]) -> Iterator[None]:
    """Calls `act` with the number of each event, from 1, and the object that it is an event of."""
    lock, count = threading.Lock(), [0]

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def other(*arguments: Any, **more: Any) -> Any:
            with lock:
                count[0] += 1
                number = count[0]
            act(number, arguments[0] if arguments else None)
            return call(*arguments, **more)

        return other

    with ExitStack() as patched:
        for owner, name in EVENTS:
            patched.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name))))
        yield


def on_ranks(call: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Calls a function on ranks that can meet at a store, as torchrun's do."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return spawn(_met, world=world, args=(store.port, call, arguments), timeout=300)


def _met(port: int, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return call(*arguments)


def counting_run(settings: dict[str, object]) -> int:
    """A whole run; returns the number of its events on this rank."""
    found = [0]

    def note(number: int, owner: Any) -> None:
        found[0] = number

    with counted(note):
        run_here(settings)
    return found[0]


def killed_run(settings: dict[str, object], number: int, rank: int) -> None:
    """A run one of whose ranks is killed at an event."""

    def kill(count: int, owner: Any) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    own = dist.get_rank() if dist.is_initialized() else 0
    with counted(kill if own == rank else lambda count, owner: None):
        run_here(settings)


def same(one: Path, other: Path) -> None:
    """Checks that two runs ended with the same bits, and reported the same."""
    expected, found = final_state(one, STEPS), final_state(other, STEPS)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    names = ("loss", "reward", "turns/mean", "tools/call_frequency", "completions/mean_length")
    reported = [[[record[name] for name in names] for record in records(run)] for run in (one, other)]
    assert reported[0] == reported[1] and len(reported[0]) == STEPS


Whole = tuple[int, Path, list[int]]
"""The number of ranks, the folder of a run that was not disturbed, and the events of its ranks."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory.mktemp("both"), 2)


def _whole(folder: Path, world: int) -> Whole:
    return world, folder / "run", on_ranks(counting_run, world, settings_of(folder, parallel__tensor=world))


@pytest.mark.parametrize("moment", sampled(MOMENTS, QUICK))
def test_a_killed_rank_loses_nothing(moment: float, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The run has one rank, or two, of which first one is killed and then the other."""
    place = MOMENTS.index(moment)
    count, expected, events = request.getfixturevalue("both" if place % 2 else "alone")
    rank = place // 2 % count
    settings = settings_of(tmp_path, parallel__tensor=count, train__collective_timeout=20)
    number = 1 + int(moment * events[rank])
    with pytest.raises(RankFailure, match=r"died with exit code -9|Connection closed|connection"):
        on_ranks(killed_run, count, settings, number, rank)
    on_ranks(run_here, count, settings)
    same(expected, tmp_path / "run")


def _below(process: int) -> int:
    """Returns the child of a process that has one: the environment's own, below its supervisor."""
    while True:
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(entry.read_text().rpartition(")")[2].split()[1]) == process:
                    return int(entry.parent.name)
        time.sleep(0.01)


def run_without_environment(settings: dict[str, object], number: int) -> tuple[str, int]:
    """A run one of whose environments' processes is killed at an event; returns what it said, and how often that
    process, or its successor, was called from then on."""
    seats: list[Any] = []
    killed: list[Any] = []
    later = [0]

    def kill(count: int, owner: Any) -> None:
        if isinstance(owner, _ProcessSeat) and owner not in seats:
            seats.append(owner)
        alive = [seat for seat in seats if seat._process.pid is not None]
        if count >= number and alive and not killed:
            killed.append(alive[number % len(alive)])
            os.kill(_below(killed[0]._process.pid), signal.SIGKILL)
        later[0] += bool(killed) and owner is killed[0]

    with counted(kill), redirect_stderr(StringIO()) as said:
        run_here(settings)
    assert len(killed) == 1
    return said.getvalue(), later[0]


@pytest.mark.parametrize("moment", sampled(MOMENTS, QUICK))
def test_a_killed_environment_costs_its_conversation_and_is_reported(
    moment: float, alone: Whole, tmp_path: Path
) -> None:
    """A process that is idle when it is killed costs the next conversation that it was to have."""
    number = 1 + int(moment * alone[2][0])
    [(said, later)] = on_ranks(run_without_environment, 1, settings_of(tmp_path), number)
    found = records(tmp_path / "run")
    assert len(found) == STEPS and final_state(tmp_path / "run", STEPS)
    reported = said.count("its process ended by SIGKILL")
    # the completions of a step are trained on twice
    assert sum(record["unscored"] * 16 for record in found) == 2 * reported
    assert reported == 1 or (reported == later == 0), said
    before = next((place for place, record in enumerate(found) if record["unscored"]), STEPS)
    whole = records(alone[1])
    assert [one["reward"] for one in found[:before]] == [one["reward"] for one in whole[:before]]


class _Served:
    """A server in a process of its own, which ends itself at a call."""

    def __init__(self, model: Path, port: int, ends_at: int | None) -> None:
        context = fork_context()
        self._pipe, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(str(model), port, ends_at, sender), daemon=True)
        self.process.start()
        sender.close()
        self.port = int(self._pipe.recv())

    def calls(self) -> int:
        """Ends the server; returns how often it was called."""
        os.kill(self.process.pid or 0, signal.SIGTERM)
        return int(self._pipe.recv())


def _serve(model: str, port: int, ends_at: int | None, pipe: Any) -> None:
    count = [0]

    def fault(path: str, body: dict[str, Any], times: int) -> None:
        count[0] += 1
        if count[0] == ends_at:
            os.kill(os.getpid(), signal.SIGKILL)

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    torch.set_num_threads(1)
    with StandIn(Path(model), fault=fault, port=port) as server:
        pipe.send(server.url.rpartition(":")[2])
        ended.wait()
        pipe.send(count[0])


def served_settings(folder: Path, model: Path | None, port: int) -> dict[str, object]:
    settings = settings_of(folder, rollout__slots=2)
    if model is None:
        save_weights(folder / "model")
    del settings["model.init"]
    changes = {"rollout.server": f"http://127.0.0.1:{port}", "rollout.server_timeout": 20}
    return settings | changes | ({} if model is None else {"model.path": model})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """The model, a run that was not disturbed, and the calls of its server."""
    folder = tmp_path_factory.mktemp("served")
    served_settings(folder, None, 1)
    server = _Served(folder / "model", 0, None)
    on_ranks(run_here, 1, served_settings(folder, folder / "model", server.port))
    return folder / "model", folder / "run", server.calls()


def refused_run(settings: dict[str, object]) -> str:
    """A run that ends with a sentence, which is returned."""
    try:
        run_here(settings)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("moment", sampled(MOMENTS, ()))
def test_a_killed_server_loses_nothing(moment: float, served: tuple[Path, Path, int], tmp_path: Path) -> None:
    """The run ends with a sentence, and is started again with a server that knows nothing."""
    model, expected, calls = served
    server = _Served(model, 0, 1 + int(moment * calls))
    settings = served_settings(tmp_path, model, server.port)
    [sentence] = on_ranks(refused_run, 1, settings)
    if sentence:
        assert f"http://127.0.0.1:{server.port}" in sentence and "\n" not in sentence, sentence
    else:  # the adapters were to be given up, and the run had all that it needed
        assert moment == max(MOMENTS)
        server.process.kill()
    server.process.join(10)
    assert server.process.exitcode == -signal.SIGKILL
    again = _Served(model, server.port, None)
    on_ranks(run_here, 1, settings)
    again.calls()
    same(expected, tmp_path / "run")
