"""A run that fails in this process leaves nothing open, and can be started again in the same process and folder."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.config.run_files import LOCK
from engine.distributed.transfer_meter import METER
from engine.errors import UserError
from engine.runtime.preemption import SIGNALS
from engine.telemetry.listener import EvaluationEvent, RunListener, RunStatus, StepEvent
from engine.telemetry.trackers import Ending, Trackers
from engine.training.trainer import train
from tests.wrong_inputs.workplace import Workplace, make_place

STEPS = 8


class Defect(Exception):
    """What nobody expects."""


class FailingListener(RunListener):
    """Fails in one of its calls, as the code around that call might.

    Args:
        call: the name of a method.
        error: what it raises.
        number: in which call of that method, from 1.
    """

    def __init__(self, call: str, error: BaseException, number: int = 1) -> None:
        self._call, self._error, self._left = call, error, number

    def _fail(self, call: str) -> None:
        self._left -= call == self._call
        if not self._left:
            raise self._error

    def run_started(self) -> None:
        self._fail("run_started")

    def data_read(self, *, train_samples: int, eval_samples: int, total_steps: int, accumulation: int) -> None:
        self._fail("data_read")

    def reported(self, event: StepEvent) -> None:
        self._fail("reported")

    def evaluated(self, event: EvaluationEvent) -> None:
        self._fail("evaluated")

    def run_stopped(self, samples: int, status: RunStatus) -> None:
        self._fail("run_stopped")


def open_files(folder: Path) -> list[str]:
    """Files in `folder` that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the listing's own
            continue
    return [name for name in found if name.startswith(str(folder))]


def losses(folder: Path) -> dict[int, str]:
    """The reported losses of a run, by step, exactly."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"].hex() for record in records if "loss" in record}


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[Ending]:
    """How trackers were told that the run ended; each time that any were still open."""
    told: list[Ending] = []
    close = Trackers.close

    def closed(trackers: Trackers, ending: Ending) -> None:
        if not getattr(trackers, "told", False):
            told.append(ending)
        trackers.told = True  # type: ignore[attr-defined]
        close(trackers, ending)

    monkeypatch.setattr(Trackers, "close", closed)
    return told


def make_run(folder: Path) -> Workplace:
    """A run that evaluates, saves beside training, reads data ahead and measures what it sends."""
    place = make_place(folder / "place")
    place.set(train__steps=STEPS, train__eval_every=3, checkpoint__every=3, checkpoint__dir=folder / "run")
    place.set(data__validation=place.train, data__num_workers=2, log__communication="true", log__peak_tflops=0)
    place.set(lora__dropout=0.1)
    return place


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return make_run(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of the run where nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(load_config(make_run(folder).arguments()))
    return losses(folder / "run")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are read from /proc")
@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("run_started", 1, Defect),
        ("data_read", 1, UserError),
        ("evaluated", 2, UserError),
        ("reported", 5, UserError),
        ("reported", 5, Defect),
        ("reported", 3, KeyboardInterrupt),
        ("run_stopped", 1, Defect),
    ],
)
def test_nothing_stays_open(
    call: str,
    number: int,
    kind: type[BaseException],
    place: Workplace,
    endings: list[Ending],
    undisturbed: dict[int, str],
) -> None:
    folder = Path(place.options["checkpoint.dir"])
    before = set(threading.enumerate())
    handlers = [signal.getsignal(number) for number in SIGNALS]
    error = kind("asked to fail")
    with pytest.raises(kind) as caught:
        train(load_config(place.arguments()), FailingListener(call, error, number))
    assert caught.value is error  # which keeps the frames of the run alive, as it would for a caller who looks at it
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("fingerprint"):  # it reads the base to the end
            thread.join(10.0)
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()
    assert not (folder / LOCK).exists()
    assert open_files(folder) == []
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert not METER.on
    assert endings == ["failed"]

    again = train(load_config(place.arguments()))
    assert again.steps == STEPS and again.stopped is None
    assert endings == ["failed", "finished"]
    assert set(threading.enumerate()) == before and open_files(folder) == [] and not (folder / LOCK).exists()
    assert losses(folder) == undisturbed


def test_a_run_that_is_complete_leaves_nothing_open(place: Workplace, endings: list[Ending]) -> None:
    place.set(train__synthetic_steps=1)
    before = set(threading.enumerate())
    folder = Path(place.options["checkpoint.dir"])
    for _ in range(2):
        assert train(load_config(place.arguments())).steps == STEPS
        assert set(threading.enumerate()) == before and not (folder / LOCK).exists() and not open_files(folder)
    assert endings == ["finished", "finished"]
