"""Peers in tools/benchmark.py are as fast as in a script of twenty lines that knows nothing of this repository."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="the peers are transformers and PEFT")

from engine.ops.backends import choose_kernels
from engine.runtime.launch import keep_freed_memory
from rankfold.benchmarking.generate import PEER as GENERATING_PEER
from rankfold.benchmarking.generate import offer, write_model
from rankfold.benchmarking.lora_layers import make_layer, peft
from rankfold.benchmarking.options import Shape, StepOptions
from rankfold.benchmarking.processes import Offer, Worker
from rankfold.benchmarking.remote import RemoteSide
from rankfold.benchmarking.sections import GenerateOptions
from rankfold.benchmarking.sides import ENGINE, PEER, PEER_KINDS
from rankfold.benchmarking.timing import measure

PLAIN = Path(__file__).parent / "plain"
SIZES = {"hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 8, "intermediate": 2816}
SMALL = {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 512, "vocab": 16000}
LIMIT = 0.05
"""Largest distance of the median ratio from 1: this machine's spells leave two equal processes within 3 % over this
many turns."""
PAIRS = 5
"""Pairs of processes for one linear: where its operands happen to lie in memory is settled when a process starts, and
sets two equal scripts apart by up to 14 %."""


@contextmanager
def plain(script: str, *arguments: object) -> Iterator[Callable[[], list[float]]]:
    """Starts a script and gives what asks it for its next line of figures."""
    command = [sys.executable, str(PLAIN / f"{script}.py"), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask() -> list[float]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return [float(word) for word in process.stdout.readline().split()]

        try:
            yield ask
        finally:
            process.stdin.close()


def ratio(peer: Callable[[], float], script: Callable[[], list[float]], turns: int) -> float:
    """The median of the peer's seconds over the script's, in turns of alternating order; the first is left out."""
    ratios = []
    for turn in range(turns + 1):
        theirs = script()[0] if turn % 2 else None
        ours = peer()
        ratios.append(ours / (script()[0] if theirs is None else theirs))
    return shown(ratios[1:])


def shown(ratios: list[float]) -> float:
    middle = statistics.median(ratios)
    print(f"peer over script: {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return middle


def step_arguments(options: StepOptions) -> list[object]:
    return [
        options.hidden, options.intermediate, options.layers, options.heads, options.kv_heads, options.vocab,
        options.rows, options.length, options.rank, options.dropout,
    ]  # fmt: skip


def faults(side: RemoteSide) -> int:
    """Page faults of a side's next step, by the kernel's count."""
    stat = Path(f"/proc/{side._worker._process.pid}/stat")
    before = int(stat.read_text().rpartition(")")[2].split()[7])
    side.timed("a step")()
    return int(stat.read_text().rpartition(")")[2].split()[7]) - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peer_has_the_allocator_of_a_plain_script() -> None:
    """Settings of the C allocator show as page faults, which are alike where seconds are not."""
    options = StepOptions(**SMALL)
    kept = PEER_KINDS["peft-kept-memory"].name
    with plain("step", *step_arguments(options)) as script, ExitStack() as sides:
        counts = {}
        for name in (PEER, kept):
            side = sides.enter_context(closing(RemoteSide(name, options)))
            side.prepare()
            counts[name] = [faults(side) for _ in range(5)][-3:]
        expected = statistics.median([script()[1] for _ in range(5)][-3:])
    assert expected > 10_000
    assert statistics.median(counts[PEER]) == pytest.approx(expected, rel=0.25)
    assert statistics.median(counts[kept]) < expected / 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("others", [(), (ENGINE,)], ids=["alone", "beside the engine"])
def test_a_step(dropout: float, others: tuple[str, ...]) -> None:
    options = StepOptions(**SIZES, dropout=dropout)
    with plain("step", *step_arguments(options)) as script, ExitStack() as closed:
        sides = [closed.enter_context(closing(RemoteSide(name, options))) for name in (*others, PEER)]
        for side in sides:
            side.prepare()

        def peer() -> float:
            return [side.timed("a step")().seconds for side in sides][-1]

        assert ratio(peer, script, 12) == pytest.approx(1, abs=LIMIT)


def _linear(shape: Shape, rank: int, dropout: float) -> Offer:
    """PEFT's linear as the section lora-tax has it, in a process that keeps freed memory."""
    keep_freed_memory()
    device = torch.device("cpu")
    contestant = peft(make_layer(shape, rank, dropout, device, torch.float32))
    choose_kernels("auto", device=device, dtype=torch.float32)
    return {"seconds": lambda: measure(contestant.run, device).seconds}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sizes", [(1024, 1024, 2816), (1024, 2816, 1024), (1024, 1024, 1024)])
def test_a_linear(sizes: tuple[int, int, int], dropout: float) -> None:
    shape = Shape(kind="column", tokens=sizes[0], inputs=sizes[1], outputs=sizes[2:])
    ratios = []
    for _ in range(PAIRS):
        with plain("linear", *sizes, 16, dropout) as script, closing(Worker(_linear, shape, 16, dropout)) as worker:
            ratios.append(ratio(partial(worker.ask, "seconds"), script, 24))
    assert shown(ratios) == pytest.approx(1, abs=LIMIT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generation(tmp_path: Path) -> None:
    options = GenerateOptions(hidden=512, layers=4, heads=8, kv_heads=4, intermediate=1408, prompt=64, new=24)
    write_model(options, tmp_path)
    prompts = torch.randint(options.vocab, (8, options.prompt)).tolist()
    with (
        plain("generate", tmp_path, 8, options.prompt, options.new) as script,
        closing(Worker(offer, GENERATING_PEER, tmp_path, options)) as worker,
    ):
        assert ratio(partial(worker.ask, "seconds", prompts, options.new), script, 20) == pytest.approx(1, abs=LIMIT)
