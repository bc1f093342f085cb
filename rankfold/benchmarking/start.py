"""Section `start`: seconds from a command to its first training step, and until a command has printed its help.

Every figure is that of new processes, from the moment at which they are started to the moment at which the line of the
first step, or the end of the help, is read. The sides take turns. All records are the same text and factors B start at
zero, so that both sides' first losses must agree whatever order, mask or factor A they draw.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import UserError
from rankfold.__main__ import COMMANDS
from rankfold.benchmarking.machine import describe
from rankfold.benchmarking.sections import StartOptions
from rankfold.benchmarking.small_run import write_small_run
from rankfold.benchmarking.table import Report, Table, progress
from rankfold.benchmarking.timing import Summary, paired_ratio, summarise, take_turns

ENGINE, PEER = "rankfold train", "transformers + PEFT"
_LOSS = {ENGINE: re.compile(r"step 1/1  loss ([\d.]+)"), PEER: re.compile(r"loss ([\d.]+)")}
_WORDS = 200
"""Of a record."""


class Start(NamedTuple):
    """The start of one command.

    Args:
        seconds: until the step or the whole help was read.
        processor: seconds of all its processes, from their start to their end; 0 where the system does not tell.
        loss: of the first step; 0 for a help.
    """

    seconds: float
    processor: float
    loss: float


def run(options: StartOptions) -> Report:
    """Starts everything in turns.

    Raises:
        UserError: a command failed, or the sides do not compute the same.
    """
    with tempfile.TemporaryDirectory(prefix="start-") as kept:
        folder = Path(kept)
        write_model(folder, options)
        trainings = {
            (side, ranks): partial(_training, side, ranks, folder)
            for ranks in sorted({1, options.ranks})
            for side in (ENGINE, PEER)
        }
        found = _turns(trainings, options.repeats, "trainings")
        helps: dict[str, Callable[[], Start]] = {"": partial(_help, "")}
        helps |= {name: partial(_help, name) for name in COMMANDS}
        shown = _turns(helps, options.repeats, "helps")
    difference = _check(found)
    data = {
        "options": asdict(options),
        "trainings": {f"{side}, {_ranks(ranks)}": samples for (side, ranks), samples in found.items()},
        "helps": shown,
    }
    return Report(
        title="From a command to its first step",
        tables=(_table_of_trainings(found, options), _table_of_helps(shown)),
        findings=(f"Same computation: the losses of the first steps agree to {difference:.1e}.",),
        machine=describe(torch.device("cpu"), ("transformers", "peft")),
        data=data,
    )


def write_model(folder: Path, options: StartOptions) -> None:
    """Writes a Llama with drawn weights, its tokenizer, and records of one text."""
    sizes = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": options.hidden,
        "intermediate_size": 2 * options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 2048, "bos_token_id": 0,
        "eos_token_id": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    write_small_run(folder, sizes)
    text = " ".join(f"w{3 + 37 * number % 1000}" for number in range(_WORDS))
    (folder / "train.jsonl").write_text(f"{json.dumps({'text': text})}\n" * options.records, encoding="utf-8")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def _training(side: str, ranks: int, folder: Path) -> Start:
    module = "rankfold.benchmarking.start_script"
    if side == PEER:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module]
        return _start([*(torchrun if ranks > 1 else ["-m", module]), str(folder)], _LOSS[PEER])
    with tempfile.TemporaryDirectory(dir=folder, prefix="run-") as run_folder:
        options = {
            "model.path": folder, "data.train": folder / "train.jsonl", "data.format": "text", "data.seq_length": 256,
            "lora.rank": 8, "lora.alpha": 16, "optim.lr": 1e-4, "train.steps": 1, "train.micro_batch_size": 1,
            "train.global_batch_size": ranks, "checkpoint.dir": run_folder,
        }  # fmt: skip
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        return _start(
            ["-m", "rankfold", "train", *(["--nproc", str(ranks)] if ranks > 1 else []), *words], _LOSS[ENGINE]
        )


def _help(command: str) -> Start:
    return _start(["-m", "rankfold", *([command] if command else []), "--help"], None)


def _start(arguments: list[str], wanted: re.Pattern[str] | None) -> Start:
    """Runs Python to its end, and times the first line in which `wanted` is found; the last one where it is None.

    Raises:
        UserError: it failed, or there was no such line.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before, begin, seconds, loss, lines = os.times(), time.perf_counter(), None, 0.0, list[str]()
    with subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            match = None if wanted is None or seconds is not None else wanted.search(line)
            if match is not None:
                seconds, loss = time.perf_counter() - begin, float(match.group(1))
        if wanted is None:
            seconds = time.perf_counter() - begin
    if process.returncode or seconds is None:
        raise UserError(f"`python {' '.join(arguments)}` did not work: {''.join(lines[-20:])}")
    after = os.times()
    taken = after.children_user + after.children_system - before.children_user - before.children_system
    return Start(seconds, taken, loss)


def _turns(runs: dict, repeats: int, what: str) -> dict:
    """Returns the samples of each, after one run of each that fills the disk's cache."""
    return take_turns(
        runs, repeats=repeats, warmup=1, turn=lambda done: progress("start", f"{what}: {done} of {repeats}")
    )


def _check(found: dict[tuple[str, int], list[Start]]) -> float:
    """Returns the largest difference of losses.

    Raises:
        UserError: the sides compute something else.
    """
    losses = [sample.loss for samples in found.values() for sample in samples]
    difference = max(losses) - min(losses)
    if difference > 1e-3:  # of about 7, which the log gives with four digits behind the point
        raise UserError(
            f"the sides compute something else: losses of the first steps from {min(losses)} to {max(losses)}."
        )
    return difference


def _table_of_trainings(found: dict[tuple[str, int], list[Start]], options: StartOptions) -> Table:
    rows = []
    for (side, ranks), samples in found.items():
        seconds = [sample.seconds for sample in samples]
        ratio = ""
        if side == ENGINE:
            ratio = _shown(paired_ratio([sample.seconds for sample in found[PEER, ranks]], seconds))
        processor = summarise([sample.processor for sample in samples]).median
        rows.append((f"{side}, {_ranks(ranks)}", _shown(summarise(seconds)), f"{processor:.2f}", ratio))
    return Table(
        title=f"To the first step: hidden {options.hidden}, {options.layers} layers, {options.records:,} records",
        columns=("", "seconds to the step", "processor seconds to the end", "PEFT's seconds over ours"),
        rows=tuple(rows),
        findings=(
            "A training of Rankfold also predicts its memory, checks and locks its folder, and saves a checkpoint at "
            "its end, which the last but one column counts.",
        ),
    )


def _table_of_helps(shown: dict[str, list[Start]]) -> Table:
    rows = []
    for name, samples in shown.items():
        processor = summarise([sample.processor for sample in samples]).median
        command = " ".join(filter(None, ("rankfold", name, "--help")))
        rows.append((command, _shown(summarise([sample.seconds for sample in samples])), f"{processor:.2f}"))
    return Table(
        title="Seconds of every command's help", columns=("", "seconds", "processor seconds"), rows=tuple(rows)
    )


def _ranks(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} ranks"


def _shown(figures: Summary) -> str:
    return f"{figures.median:.2f} ({figures.low:.2f} to {figures.high:.2f})"
