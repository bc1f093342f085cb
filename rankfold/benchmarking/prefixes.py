"""Section `prefixes`: training steps on rows that compute common beginnings once against rows that compute each.

One model, whose adapters move, takes both kinds of steps in turn, in one process and by the engine's own way from
documents to updates: rows that share or do not, batches, the step of the run. Of completions rows are made in every
step, as a run makes them; of pairs before the first. Before anything is timed, loss and gradients of both must agree.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.branches import levels
from engine.config.data import SharePrefixes
from engine.config.run import RunConfig
from engine.data.columns import Columns
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.loader import DataLoader
from engine.data.record_files import Place
from engine.data.row_shape import round_up
from engine.preferences.data.answer_columns import Judgement
from engine.rollouts.data.completions import Completion, completion_columns
from engine.rollouts.objective.policy import row_weight
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import build_training
from engine.training.prefixes import choose_sharing
from engine.training.row_shape import shape_on_mesh
from engine.training.step import StepResult
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.model import ADAMW, CLIP_GRAD_NORM, LEARNING_RATE, LORA_ALPHA_OVER_RANK, TARGETS, hf_config
from rankfold.benchmarking.peak_memory import peak_above_now
from rankfold.benchmarking.processes import in_new_process
from rankfold.benchmarking.sections import PrefixesOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import Sample, interleave, paired_ratio, summarise

COMPLETIONS, PAIRS, ALONE = PrefixesOptions.CASES
EACH, ONCE = "each", "once"
_LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 5e-2)}
"""Relative limits of losses and of gradients; see section `step`."""


class Demand(NamedTuple):
    """What a step's rows ask for.

    Args:
        tokens: placed in rows.
        pairs: of a token and one that it sees.
        operations: floating-point operations of a step, see `demand_of`.
    """

    tokens: int
    pairs: int
    operations: int


class Case:
    """A model, and documents that it trains on in two kinds of rows.

    Args:
        name: one of `PrefixesOptions.CASES`.
        options: of the section.
        device: where it runs.
        folder: has the model.
    """

    def __init__(self, name: str, options: PrefixesOptions, device: torch.device, folder: Path) -> None:
        from engine.training.start import refuse_early  # packages that images with a GPU often lack

        self.name, self.options, self._device = name, options, device
        self._config = _config(name, options, folder)
        launch = Launch(rank=0, world_size=1, device=device)
        source, plan = refuse_early(self._config, launch)
        self._training = build_training(self._config, launch, source, plan, Log(1))
        _draw_adapters(self._training.optimizer.flat)
        self._documents = _answers(options) if name == PAIRS else _completions(options, alike=name == COMPLETIONS)
        self._rows: dict[str, TokenDataset] = {}

    def rows(self, kind: str) -> TokenDataset:
        """Returns the rows of a kind, `EACH` or `ONCE`; of completions new ones."""
        if kind in self._rows:
            return self._rows[kind]
        shares: SharePrefixes = False if kind == EACH else "auto"
        config = replace(self._config, data=replace(self._config.data, share_prefixes=shares))
        if self.name == PAIRS:
            columns = Columns.of_documents(self._documents, group=2)
        else:
            columns = completion_columns(self._documents, row_weight(config.objective.loss_type))
        dataset = TokenDataset(columns, seq_length=config.row_length, packing=config.data.packing is True)
        found = choose_sharing(config, self._training.source.model.decoder).rows(dataset)
        if self.name == PAIRS:
            self._rows[kind] = found
        return found

    def loader(self, kind: str) -> DataLoader:
        """Returns the loader of a step on all rows of a kind."""
        dataset = self.rows(kind)
        shape = shape_on_mesh(self._config, self._device, self._training.mesh)
        # micro-batches of about as much work: rows that share hold several documents
        micro = 1 if dataset.rows.reused is not None or self.name == PAIRS else self.options.group
        return DataLoader(
            dataset,
            replace(shape, micro_batch_size=micro),
            global_batch_size=round_up(len(dataset), micro),
            seed=0,
            shuffle=False,
            num_workers=0,
        )

    def step(self, kind: str) -> StepResult:
        """Takes a step, from documents to update."""
        loader = self.loader(kind)
        return self._training.step(loader.batches(0), loader.target_count(0), LEARNING_RATE)

    def outcome(self, kind: str) -> tuple[float, Tensor]:
        """Returns the loss, and the gradient of all adapters, of the step that would come next."""
        loader = self.loader(kind)
        loss = self._training.step.gradients(loader.batches(0), loader.target_count(0))
        gradient = self._training.optimizer.flat.gradient
        found = float(loss), gradient.clone()
        gradient.zero_()  # as an update leaves it
        return found

    def demand(self, kind: str) -> Demand:
        """Returns what a step on rows of a kind asks for."""
        batches = self.loader(kind).batches(0)
        passes = 3 if self.name == PAIRS else 2
        return demand_of(self.options, [(one.document_lengths, one.document_parents) for one in batches], passes)


def demand_of(options: PrefixesOptions, batches: list[tuple[tuple[int, ...], tuple[int, ...]]], passes: int) -> Demand:
    """Counts tokens, pairs of tokens in attention, and operations of a step without adapters' own.

    Linears and head take 2 operations for each weight and token in a forward pass and in the input's gradient,
    attention 4 for each feature and pair of tokens forward and 10 backward.

    Args:
        options: sizes of the model.
        batches: lengths of documents and their parents, of each micro-batch.
        passes: 2 for forward and backward, 3 with a pass of the reference before them.
    """
    tokens = pairs = 0
    for lengths, parents in batches:
        tokens += sum(lengths)
        pairs += sum(length * (length + 1) // 2 for length in lengths)
        pairs += sum(one.query.length * one.key.length for level in levels(lengths, parents) for one in level)
    layer = options.hidden * (2 * options.hidden + 2 * options.kv_width) + 3 * options.hidden * options.intermediate
    weights = options.layers * layer + options.hidden * options.vocab
    attention = options.layers * options.hidden * (10 + 4 * (passes - 1))
    return Demand(tokens, pairs, 2 * passes * tokens * weights + attention * pairs)


def _config(name: str, options: PrefixesOptions, folder: Path) -> RunConfig:
    from engine.config.load import parse_config

    if name == PAIRS:
        objective = {"objective.name": "dpo", "data.seq_length": options.question + options.answer}
    else:
        room = options.prompt + options.group * (options.completion + 1)
        objective = {
            "objective.name": "grpo", "rollout.num_generations": options.group, "data.seq_length": room,
            "rollout.max_completion_length": options.completion,
        }  # fmt: skip
    settings: dict[str, object] = {
        "model.path": folder, "model.init": "random", "model.dtype": options.dtype, "model.kernels": options.kernels,
        "data.train": "none", "lora.rank": options.rank, "lora.alpha": options.rank * LORA_ALPHA_OVER_RANK,
        "lora.dropout": options.dropout, "lora.targets": json.dumps(TARGETS), "optim.lr": LEARNING_RATE,
        "optim.schedule": "constant", "optim.clip_grad_norm": CLIP_GRAD_NORM,
        "optim.weight_decay": ADAMW["weight_decay"], "train.steps": 1000, "train.micro_batch_size": 1,
        "train.global_batch_size": options.prompts * options.group if name != PAIRS else options.pairs, **objective,
    }  # fmt: skip
    return parse_config([part for key, value in settings.items() for part in (f"--{key}", str(value))])


@torch.no_grad()
def _draw_adapters(flat: Any) -> None:
    """Draws the factors B, which begin as zero: with them gradients of A would be zero too."""
    generator = torch.Generator().manual_seed(1)
    for shard in flat.master_shards():
        if shard.name.endswith("lora_B"):
            shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator) * 0.01)
    flat.publish()


def _ids(draw: random.Random, options: PrefixesOptions, count: int) -> list[int]:
    return [draw.randrange(options.vocab) for _ in range(count)]


def _completions(options: PrefixesOptions, *, alike: bool) -> list[Completion]:
    """Returns groups of completions of one length.

    Args:
        alike: whether those of a group have one prompt.
    """
    draw, found = random.Random(0), []
    for _ in range(options.prompts):
        common = _ids(draw, options, options.prompt)
        for _ in range(options.group):
            prompt = common if alike else _ids(draw, options, options.prompt)
            found.append(
                Completion(
                    prompt=prompt,
                    tokens=_ids(draw, options, options.completion),
                    sampled_logps=[-10.0] * options.completion,
                    advantage=draw.gauss(0.0, 1.0),
                )
            )
    return found


def _answers(options: PrefixesOptions) -> list[Document]:
    """Returns the two answers to each question, of half the tokens of the longest to all of them."""
    draw, found = random.Random(0), []
    for _ in range(options.pairs):
        question = _ids(draw, options, options.question)
        for sign in (1, -1):
            answer = _ids(draw, options, draw.randint(-(-options.answer // 2), options.answer))
            tokens = np.array([*question, *answer], dtype=np.int32)
            targets = np.arange(len(tokens)) >= len(question)
            found.append(Document(Place(Path("drawn"), "index", len(found)), tokens, targets, (Judgement(sign),)))
    return found


def _write_model(options: PrefixesOptions, folder: Path) -> None:
    longest = max(options.prompt + options.completion, options.question + options.answer)
    (folder / "config.json").write_text(json.dumps(hf_config(replace(options, length=longest))), encoding="utf-8")


def check(case: Case) -> tuple[float, float]:
    """Returns how far the losses and the gradients of both kinds of rows are apart, relative.

    Raises:
        RuntimeError: further than rounding explains.
    """
    (loss, gradient), (expected, wanted) = case.outcome(ONCE), case.outcome(EACH)
    errors = abs(loss - expected) / abs(expected), float((gradient - wanted).norm() / wanted.norm())
    # written so that a NaN fails
    if not all(error <= limit for error, limit in zip(errors, _LIMITS[case.options.dtype], strict=True)):
        raise RuntimeError(
            f"{case.name}: rows that share compute something else: the losses differ by {errors[0]:.1e} and the "
            f"gradients by {errors[1]:.1e}, relative."
        )
    return errors


def peak(name: str, kind: str, options: PrefixesOptions, folder: Path) -> int | None:
    """Returns the bytes of a step above those before it, in this process; None where they cannot be measured."""
    device = set_up(options, keeps_freed_memory=False)
    case = Case(name, options, device, folder)
    case.step(kind)  # makes what is kept from step to step
    return peak_above_now(lambda: case.step(kind), device)


class Measured(NamedTuple):
    """The figures of a case, by kind of rows.

    Args:
        samples: times of steps.
        demands: what a step asks for.
        errors: of loss and gradients.
        peaks: bytes; None where they are not measured.
    """

    samples: Mapping[str, list[Sample]]
    demands: Mapping[str, Demand]
    errors: tuple[float, float]
    peaks: Mapping[str, int | None]


def run(options: PrefixesOptions) -> Table:
    """Measures all cases.

    Raises:
        UserError: a missing device.
        RuntimeError: rows that share compute something else.
    """
    device = set_up(options)
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(options, folder)
        for one in options.case_names():
            peaks = {}
            if not options.times_only:
                peaks = {kind: in_new_process(peak, one, kind, options, folder) for kind in (EACH, ONCE)}
            found[one] = _measure(Case(one, options, device, folder), device, peaks)
    return _table(options, found, describe(device, ()))


def _measure(case: Case, device: torch.device, peaks: Mapping[str, int | None]) -> Measured:
    errors, options = check(case), case.options
    runs: dict[str, Callable[[], object]] = {kind: partial(_taken, case, kind) for kind in (EACH, ONCE)}
    samples = interleave(
        runs,
        repeats=options.repeats,
        warmup=options.warmup,
        device=device,
        turn=lambda done: progress("prefixes", f"{case.name}: {done} of {options.repeats}"),
    )
    return Measured(samples, {kind: case.demand(kind) for kind in runs}, errors, peaks)


def _taken(case: Case, kind: str) -> float:
    return float(case.step(kind).loss)


def _table(options: PrefixesOptions, found: Mapping[str, Measured], machine: dict[str, str]) -> Table:
    rows, findings = [], []
    for name, one in found.items():
        for kind, samples in one.samples.items():
            seconds, demand, held = [each.seconds for each in samples], one.demands[kind], one.peaks.get(kind)
            rows.append((
                f"{name}, {kind}", f"{summarise(seconds).median:.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}",
                f"{demand.tokens:,}", f"{demand.operations / 1e9:,.0f}", f"{demand.pairs / 1e6:.2f}",
                "" if held is None else f"{held / 2**20:,.0f}",
            ))  # fmt: skip
        each, once = one.demands[EACH], one.demands[ONCE]
        clock, processor = (
            paired_ratio(*([sample[place] for sample in one.samples[kind]] for kind in (EACH, ONCE)))
            for place in (0, 1)
        )
        by_processor = f", by processor time {processor.median:.2f}" if processor.low > 0 else ""
        findings.append(
            f"{name}: steps are {clock.median:.2f} times as fast ({clock.low:.2f} to {clock.high:.2f}, "
            f"{options.repeats} turns{by_processor}); {each.operations / once.operations:.2f} by operations, of "
            f"{each.tokens / once.tokens:.2f} times fewer tokens and {each.pairs / once.pairs:.2f} times fewer pairs "
            f"in attention. Loss and gradients agree within {one.errors[0]:.1e} and {one.errors[1]:.1e}."
        )
    return Table(
        title=f"Beginnings computed once: {options.prompts} x {options.group} completions, prompts of {options.prompt} "
        f"and completions of {options.completion} tokens; {options.pairs} pairs, questions of {options.question} and "
        f"answers of up to {options.answer}: hidden {options.hidden}, {options.layers} layers, {options.heads}/"
        f"{options.kv_heads} heads, MLP {options.intermediate}, vocabulary {options.vocab}, rank {options.rank}, "
        f"{options.dtype}",
        columns=("", "seconds", "extremes", "tokens", "GFLOP", "million pairs", "peak, MiB"),
        rows=tuple(rows),
        findings=tuple(findings),
        machine=machine,
        data={
            "section": "prefixes", "options": asdict(options),
            "cases": {
                name: {
                    "seconds": {kind: [each.seconds for each in taken] for kind, taken in one.samples.items()},
                    "processor_seconds": {
                        kind: [each.cpu_seconds for each in taken] for kind, taken in one.samples.items()
                    },
                    "demands": {kind: demand._asdict() for kind, demand in one.demands.items()},
                    "errors": one.errors, "peak_bytes": one.peaks,
                }
                for name, one in found.items()
            },
        },
    )  # fmt: skip
