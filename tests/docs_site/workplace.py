"""The folder in which the commands of the guides are executed: what a reader has, but tiny.

It has a model with drawn weights, my-model, records made of the language reference that ships with Python, the run file
of the README, the run that this file gives, runs/mine, and the adapter exported from it, my-adapter; and every other
file that a command of the guides names. What a guide shows in a block is taken from there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from tests.docs_site.guides import ROOT, block_with
from tests.support.megatron_data import write_megatron
from tests.support.warm_python import warm_python

TRAIN, VALIDATION = 40, 8
"""Records."""
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_AXOLOTL = """\
base_model: my-model
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 512
datasets: [{path: train.jsonl, type: alpaca}]
num_epochs: 1
micro_batch_size: 2
learning_rate: 0.0002
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended: its exit status, and what it printed on both streams."""

    status: int
    printed: str


def make_text_place(folder: Path) -> None:
    """Makes the folder, with the README's own commands for run and adapter."""
    python = warm_python()
    for made in ("make_text", "make_questions"):
        _must(f"{python} -m rankfold.quickstarting.{made} --out .", folder)
    (folder / "model").rename(folder / "my-model")
    _finish_model(folder / "my-model")
    _cut(folder / "train.jsonl", folder / "train.jsonl", TRAIN)
    _cut(folder / "validation.jsonl", folder / "valid.jsonl", VALIDATION)
    for name in ("validation.jsonl", "text.txt"):
        (folder / name).unlink()
    run = block_with("README.md", "# run.yaml").replace("seq_length: 4096", "seq_length: 512")  # for the time it takes
    (folder / "run.yaml").write_text(run, encoding="utf-8")
    _write_data(folder)
    _write_files_of_guides(folder)
    _must("rankfold train --config run.yaml --train.epochs 3 --checkpoint.keep_best true", folder)
    _must("rankfold convert export --source runs/mine --out my-adapter --format peft", folder)


def make_image_place(folder: Path) -> None:
    """Makes the folder of the guide about images: a tiny MiniCPM-V 2.0, its records and its run file."""
    folder.rmdir()
    _must(f"{warm_python()} {ROOT}/examples/minicpm_v/make_small.py --out {folder}", folder.parent)
    (folder / "model").rename(folder / "MiniCPM-V-2")
    (folder / "my-model").symlink_to("MiniCPM-V-2")
    run = block_with("docs/vision.md", "# MiniCPM-V as its own")
    (folder / "run.yaml").write_text(run.replace("bfloat16", "float32").replace("seq_length: 2048", "seq_length: 96"))
    _cut_json(folder / "train.json", 8)
    shutil.copy(next((folder / "images").iterdir()), folder / "photo.jpg")


def execute(
    command: str, folder: Path, *, given: str = "", until: str | None = None, programs: Path, limit: float
) -> Ended:
    """Executes a line of a shell in a folder, and returns what came of it.

    Args:
        given: what is typed.
        until: a pattern; when what is printed matches, Ctrl-C ends the command, which is one that ends no other way.
        programs: folder with the programs that are installed with the product, as `write_programs` makes it.
        limit: seconds.
    """
    log = folder.with_name(f"{folder.name}.printed")
    with log.open("wb") as printed:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=_environment(programs), stdin=subprocess.PIPE, stdout=printed,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            if until is None:
                process.communicate(given.encode(), timeout=limit)
            else:
                _interrupt_at(until, process, log, limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Ended(process.returncode, log.read_text(encoding="utf-8", errors="replace"))


def write_programs(folder: Path, *, cold: bool = False) -> None:
    """Writes the programs that commands call.

    Args:
        folder: for them.
        cold: whether with Python itself; otherwise with one that is warm, which starts at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    python = sys.executable if cold else warm_python()
    # --standalone: two tests at a time would meet on torchrun's usual port
    lines = {"rankfold": "-m rankfold", "torchrun": "-m torch.distributed.run --standalone", "python": ""}
    for name, words in lines.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n', encoding="utf-8")
        program.chmod(0o755)


def free_port() -> int:
    """Returns a port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(programs: Path) -> dict[str, str]:
    # a conversation's history stays out of the home of the user who tests
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "HOME": str(programs.parent), "COLUMNS": "120"}


def _interrupt_at(pattern: str, process: subprocess.Popen[bytes], log: Path, limit: float) -> None:
    deadline = time.monotonic() + limit
    while process.poll() is None:
        assert time.monotonic() < deadline, f"{pattern!r} was not printed within {limit:.0f} s:\n{log.read_text()}"
        if re.search(pattern, log.read_text(encoding="utf-8", errors="replace")):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=limit)
        time.sleep(0.2)


def _must(command: str, folder: Path) -> None:
    programs = folder.parent / "programs"
    write_programs(programs)
    ended = execute(command, folder, programs=programs, limit=240)
    assert ended.status == 0, f"{command}\n{ended.printed}"


def _finish_model(folder: Path) -> None:
    """Draws the weights, and gives the tokenizer a chat template, which needs its form as tokenizer.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, max_position_embeddings=8192)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.model").unlink()


def _cut(source: Path, target: Path, count: int) -> None:
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)[:count]
    target.write_text("".join(lines), encoding="utf-8")


def _cut_json(path: Path, count: int) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))[:count]), encoding="utf-8")


def _write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _write_data(folder: Path) -> None:
    """Writes the records of other forms that commands name, all of the same questions."""
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("a.jsonl", "b.jsonl", "data/one.jsonl", "data/two.jsonl"):
        _write_lines(folder / name, records[:6])
    pairs = [
        {"prompt": one["prompt"], "chosen": one["completion"], "rejected": other["completion"]}
        for one, other in pairwise(records)
    ]
    _write_lines(folder / "pairs.jsonl", pairs[:8])
    turns = [{"role": role, "content": one[key]} for one in records[:2] for role, key in
             (("user", "prompt"), ("assistant", "completion"))]  # fmt: skip
    _write_lines(folder / "messages.jsonl", [{"messages": turns}] * 4)
    sums = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(8)]
    _write_lines(folder / "prompts.jsonl", sums)
    _write_lines(folder / "in.jsonl", [{"prompt": one["prompt"]} for one in sums[:3]])
    ids = [list(np.random.default_rng(0).integers(3, 900, 40)) for _ in range(4)]
    write_megatron(folder / "wiki_text_document", ids, [0, 1, 2, 3, 4], 4, np.int32)


def _write_files_of_guides(folder: Path) -> None:
    """Writes the files that the guides show, and small ones of those that they only name."""
    (folder / "rewards.py").write_text(block_with("docs/rollouts.md", "def accuracy("), encoding="utf-8")
    (folder / "grpo.yaml").write_text(block_with("docs/rollouts.md", "# grpo.yaml"), encoding="utf-8")
    task = folder / "my_tasks" / "capitals.yaml"
    task.parent.mkdir()
    task.write_text(block_with("docs/evaluation.md", "task: capitals"), encoding="utf-8")
    for name, countries in (("examples", ("Peru", "Chad")), ("capitals", ("Fiji", "Oman", "Togo"))):
        asked = [{"question": f"What is the capital of {one}?", "options": ["Lima", "Suva"], "gold": 0}
                 for one in countries]  # fmt: skip
        _write_lines(folder / f"{name}.jsonl", [dict(one) for one in asked])
    (folder / "program.py").write_text(
        "from engine.api import load_config, train\ntrain(load_config('run.yaml'))\n", encoding="utf-8"
    )
    (folder / "axolotl.yml").write_text(_AXOLOTL, encoding="utf-8")
    (folder / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n")
    (folder / "trl.yaml").write_text("model_name_or_path: my-model\ndataset_name: org/chats\nuse_peft: true\n")
    (folder / "train.sh").write_text("trl sft --model_name_or_path my-model --dataset_name train.jsonl --use_peft\n")
