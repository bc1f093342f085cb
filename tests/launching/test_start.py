"""`--nproc`: ranks started by the command itself, their statuses, their one sentence, signals and restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import UserError
from rankfold.starting.options import StartOptions, take_start_options
from tests.support.commands import REPOSITORY, losses
from tests.support.warm_python import WarmProcess, warm_python

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def test_its_options_are_taken_out() -> None:
    """The others keep their order, whichever way a value is written."""
    words = ["--config", "run.yaml", "--nproc=4", "--lora.rank", "8", "--max-restarts", "2", "--parallel.tensor", "2"]
    options, others = take_start_options("train", words, {})
    assert options == StartOptions(nproc="4", max_restarts=2)
    assert others == ["--config", "run.yaml", "--lora.rank", "8", "--parallel.tensor", "2"]
    assert take_start_options("train", others, {}) == (None, others)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--nproc 0", "--nproc is '0', but a number from 1, gpu or auto is expected"),
        ("--nproc many", "--nproc is 'many', but a number from 1"),
        ("--nproc", "--nproc has no value"),
        ("--max-restarts 1", "--max-restarts belongs to --nproc, which is not given"),
        ("--nproc 2 --nnodes 2", "--rdzv-endpoint is not given"),
        ("--nproc 2 --nnodes 0", "--nnodes is 0"),
        ("--nproc 2 --max-restarts -1", "--max-restarts is -1"),
        ("--nproc 2 --nnodes 2 --rdzv-endpoint head", "but HOST:PORT is expected"),
        ("--nproc 2 --nnodes 2 --rdzv-endpoint head:0", "but HOST:PORT is expected"),
        ("--nproc 2 --nnodes 2 --rdzv-endpoint head:1 --node-rank 2", "--node-rank is 2, but with --nnodes 2"),
        ("--nproc 2 --shutdown-timeout soon", "--shutdown-timeout is 'soon'"),
    ],
)
def test_what_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        take_start_options("train", words.split(), {})
    assert sentence in str(refused.value)


def test_refused_under_torchrun() -> None:
    with pytest.raises(UserError, match="torchrun has started this process already"):
        take_start_options("train", ["--nproc", "2"], {"TORCHELASTIC_RUN_ID": "1"})


def test_each_meeting_has_the_address_of_the_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second one, to which a machine may come that was not at the first."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    from rankfold.starting.ranks import _Agent

    parameters = RendezvousParameters("c10d", "localhost:0", "test", min_nodes=1, max_nodes=1, local_addr="localhost")
    handler = registry.get_rendezvous_handler(parameters)
    stores = []
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda *_: stores.append(handler.next_rendezvous().store))
    for _ in range(2):
        _Agent._rendezvous(object.__new__(_Agent), SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler)))
    assert [store.check(["MASTER_ADDR"]) for store in stores] == [True, True]
    handler.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    """A folder with a run file."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text.txt").write_text("All the world's a stage, and all the men and women merely players. " * 20)
    (folder / "run.yaml").write_text(
        f"model: {{path: {stories_dir}}}\nlora: {{rank: 2}}\ndata: {{train: text.txt, seq_length: 32}}\n"
        "train: {global_batch_size: 2}\nlog: {peak_tflops: 0}\ncheckpoint: {dir: run}\n"
    )
    return folder


def command(*words: object) -> list[str]:
    return ["-m", "rankfold", "train", "--nproc", "2", "--config", "run.yaml", *map(str, words)]


def test_a_mistake_is_refused_before_a_rank_starts(folder: Path) -> None:
    """Quickly, because nothing of torch is imported."""
    script = "import sys; from rankfold.__main__ import main; sys.argv = ['rankfold', *sys.argv[1:]]; sys.excepthook = "
    script += "lambda kind, error, trace: print(error, 'torch' in sys.modules); main()"
    words = ["train", "--nproc", "2", "--config", "run.yaml", "--parallel.tensor", "3"]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=folder, env=ENVIRONMENT, capture_output=True,
                          text=True)  # fmt: skip
    assert "needs a multiple of 3: start it with --nproc 3" in done.stdout and done.stdout.endswith("False\n")


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_stopped_and_resumed(folder: Path) -> None:
    """SIGTERM to the command stops both ranks after one step, with status 75; the same command resumes there."""
    output = folder / "output.txt"
    metrics = folder / "run" / "metrics.jsonl"
    with output.open("w") as file:
        run = WarmProcess(command("--parallel.tensor", 2, "--train.steps", 5000), ENVIRONMENT, file, folder)
        deadline = time.monotonic() + 150
        while not metrics.is_file() or metrics.read_text().count("\n") < 2:
            assert time.monotonic() < deadline and run.poll() is None, output.read_text()
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(100) == 75, output.read_text()
    text, last = output.read_text(), max(losses(folder / "run"))
    assert f"stopped after step {last}, SIGTERM" in text and "Traceback" not in text and "torch" not in text
    again = subprocess.run([warm_python(), *command("--train.steps", last + 2, "--parallel.tensor", 2)], cwd=folder,
                           env=ENVIRONMENT, capture_output=True, text=True)  # fmt: skip
    assert again.returncode == 0 and f"after step {last}, " in again.stderr, again.stderr
    assert sorted(losses(folder / "run")) == list(range(1, last + 3))


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_a_killed_rank_and_a_refusal(folder: Path) -> None:
    """A rank's refusal is printed once and last and is not tried again; a rank that is killed is named."""
    (folder / "empty.txt").write_text("")
    words = command("--max-restarts", 3, "--data.train", "empty.txt", "--checkpoint.dir", "none")
    refused = subprocess.run([warm_python(), *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    lines = refused.stderr.splitlines()
    assert refused.returncode == 2, refused.stderr
    assert lines[-1].startswith("error: ") and sum(line.startswith("error: ") for line in lines) == 1, lines
    with (folder / "killed.txt").open("w") as file:
        run = WarmProcess(command("--train.steps", 5000, "--checkpoint.dir", "killed"), ENVIRONMENT, file, folder)
        metrics = folder / "killed" / "metrics.jsonl"
        deadline = time.monotonic() + 150
        while not metrics.is_file():
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.1)
        ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert len(ranks) == 2
        os.kill(int(ranks[1]), signal.SIGKILL)
        assert run.wait(100) == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by SIGKILL" in (folder / "killed.txt").read_text().splitlines()[-1]


@pytest.mark.distributed
def test_text_from_two_ranks(folder: Path, stories_dir: Path) -> None:
    """`generate` takes the same option, and gives the text of one rank."""
    words = ["-m", "rankfold", "generate", "--model", stories_dir, "--prompt", "Once", "--max-new-tokens", "8"]
    texts = [
        subprocess.run([warm_python(), *words, *more], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
        for more in ((), ("--nproc", "2"))
    ]
    assert texts[0].stdout == texts[1].stdout != "" and texts[1].returncode == 0, texts[1].stderr
