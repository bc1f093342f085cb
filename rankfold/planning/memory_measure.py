"""Measures bytes and seconds of real steps of a configuration on this device, with random weights and tokens.

On a GPU the bytes are torch's count of allocations. On a CPU every storage that an operation makes is counted
until it is freed; allocations within an operation, as of a compiled kernel, are not seen.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from engine.batch import Batch, BatchPart
from engine.config.rules import data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.data.collate import context_part
from engine.judges.batch_parts import ScoredAnswers
from engine.planning.recording import EagerMode
from engine.planning.stored_formats import stored_formats
from engine.preferences.batch_parts import Answers
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import Training, build_training
from engine.training.start_model import check_model, model_source
from engine.vision.made_up_images import with_made_up_images
from rankfold.planning.memory_question import read_config


class LiveStorages(EagerMode):
    """Counts the bytes of all storages that operations have made and that are still alive.

    Attributes:
        live: bytes now.
        peak: most bytes since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._lasting: tuple[int, ...] = ()

    def reset(self) -> None:
        """Starts a new peak. Storages that exist now may change their size from now on."""
        self._look_again(self._known)
        self._lasting = tuple(self._known)
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self._see(value)
        self._look_again(self._lasting)
        return out

    def _look_again(self, keys: Iterable[int]) -> None:
        """Counts storages again that were resized while alive, which no operation reports."""
        for key in tuple(keys):
            reference, before = self._known.get(key, (_nothing, 0))
            storage = reference()
            if storage is not None and (nbytes := storage.nbytes()) != before:
                self._known[key] = reference, nbytes
                self.live += nbytes - before
        self.peak = max(self.peak, self.live)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage), nbytes
        weakref.finalize(storage, self._gone, key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]


def _nothing() -> None:
    """Replaces a reference to a dead object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One rank's figures.

    Args:
        static: bytes held between steps, batches included.
        load: the most bytes while the model was built.
        step: the most bytes in the last step.
        seconds: of a step.
    """

    static: int
    load: int
    step: int
    seconds: float


def measure(config: RunConfig, launch: Launch, *, steps: int = 2) -> Measured:
    """Builds the configuration's model on this rank and takes steps on rows of data.seq_length tokens.

    The first step allocates buffers that later ones reuse, so the last one counts. On a CPU one more is timed.

    Raises:
        UserError: the configuration does not fit the model or the ranks.
    """
    if launch.device.type == "cuda":
        return _measure_cuda(config, launch, steps)
    with LiveStorages() as live:
        training = build(config, launch)
        batches = draw_batches(config, training, launch)
        load = live.peak
        live.reset()
        static = live.live
        for _ in range(steps):
            live.reset()
            _step(training, batches)
    # counting slows a step down
    return Measured(static=static, load=load, step=live.peak, seconds=_step(training, batches))


def _measure_cuda(config: RunConfig, launch: Launch, steps: int) -> Measured:
    torch.cuda.reset_peak_memory_stats(launch.device)
    before = torch.cuda.memory_allocated(launch.device)
    training = build(config, launch)
    batches = draw_batches(config, training, launch)
    static, load = (
        read(launch.device) - before for read in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)
    )
    seconds = 0.0
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats(launch.device)
        seconds = _step(training, batches)
    peak = torch.cuda.max_memory_allocated(launch.device) - before
    return Measured(static=static, load=load, step=peak, seconds=seconds)


def build(config: RunConfig, launch: Launch) -> Training:
    """Builds the configuration's model on this rank, with random weights if model.init asks for them, in the formats
    that config.json says where they are to stay as they are stored.

    Raises:
        UserError: the configuration does not fit the model or the ranks.
    """
    source = model_source(config)
    if config.model.init == "random":
        hf_config, _ = read_config(config.model.path)
        source = replace(source, drawn_formats=stored_formats(config.model.base_dtype, hf_config, source.model.names))
    plan = check_model(config, source.model, launch.world_size, source.weights, source.drawn_formats)
    return build_training(config, launch, source, plan, Log(rank=1))


def _step(training: Training, batches: list[Batch]) -> float:
    begin = time.monotonic()
    result = training.step(batches, float(sum(batch.num_tokens for batch in batches)), 1e-4)
    float(result.loss)  # waits for the device
    return time.monotonic() - begin


def draw_batches(config: RunConfig, training: Training, launch: Launch) -> list[Batch]:
    """Draws this rank's micro-batches of a step: full rows of one document each, or of two answers to compare; every
    token is a target."""
    rows, length = config.train.micro_batch_size, config.row_length
    count = gradient_accumulation_steps(config, launch.world_size)
    assert count * rows * data_parallel_size(config, launch.world_size) == config.train.global_batch_size
    generator = torch.Generator().manual_seed(config.train.seed)
    document = config.data.seq_length
    columns = torch.arange(length).expand(rows, length)
    batches = []
    for number in range(count):
        tokens = torch.randint(0, training.source.model.decoder.vocab_size, (rows, length), generator=generator)
        batch = Batch(
            tokens_BS=tokens,
            labels_BS=tokens.roll(-1, 1),
            positions_BS=(columns % document).contiguous(),
            token_index_BS=columns + length * (torch.arange(rows)[:, None] + number * rows),
            loss_weights_BS=torch.ones(rows, length),
            document_offsets=torch.arange(rows * length // document + 1, dtype=torch.int32) * document,
            document_lengths=(document,) * (rows * length // document),
        ).with_parts(_pairs(config, rows) if config.objective.kind.answers else None)
        axis, decoder = training.mesh.cp, training.source.model.decoder
        batch = context_part(batch, size=axis.size, rank=axis.rank)
        batch = with_made_up_images(batch, decoder, context_size=axis.size, context_rank=axis.rank)
        batches.append(batch.to(launch.device))
    return batches


def _pairs(config: RunConfig, rows: int) -> BatchPart:
    """Returns two answers per row, of which the first was preferred."""
    length, count = config.data.seq_length, 2 * rows
    if config.objective.kind.head is not None:
        numbers = torch.full((rows, 2 * length), -1)
        numbers[:, [length - 1, 2 * length - 1]] = torch.arange(count).view(rows, 2)
        return ScoredAnswers(numbers_BS=numbers, margins=torch.zeros(rows))
    known = config.objective.compared_with == "initial"
    return Answers(
        ids_BS=torch.arange(count).repeat_interleave(length).view(rows, 2 * length),
        signs=torch.tensor([1.0, -1.0]).repeat(rows),
        lengths=torch.full((count,), float(length)),
        documents=tuple(range(count)),
        reference_logps=torch.zeros(count) if known else None,
    )
