"""Steps on made-up tokens before any data is read: kernels are compiled, memory is reserved, ranks are connected.

A vision model runs on a tile of the usual size in each row. Tiles of other sizes have their first step with the data.

They leave no trace. Masters, moments, counters and torch's generators are restored, and dropout and the
data order are functions of the step and the sample, so that the run's first step has the bits it would have had.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from engine.batch import Batch
from engine.config.rules import data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.data.columns import contiguous
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.format import counted, format_duration
from engine.telemetry.log import Log
from engine.training.build import Training
from engine.training.row_shape import shape_of_launch


def warm_up(config: RunConfig, launch: Launch, training: Training, log: Log) -> None:
    """Takes train.synthetic_steps steps and as many evaluations of one group. Collective."""
    steps = config.train.synthetic_steps
    if not steps:
        return
    begin = time.monotonic()
    loader = _synthetic_loader(config, launch, vocabulary=training.source.model.decoder.vocab_size)
    before = _State(training)
    take_step = training.step if training.graphs is None else training.graphs
    for number in range(steps):
        consumed = number * loader.order.batch
        batches = [_with_made_up_parts(training, batch) for batch in loader.batches(consumed)]
        take_step(batches, loader.target_count(consumed), config.optim.lr)
        training.stages.figures(batches)
    before.put_back()
    if launch.device.type == "cuda":
        torch.cuda.synchronize(launch.device)
    log.info(
        f"warm-up: {counted(steps, 'step')} on synthetic tokens in {format_duration(time.monotonic() - begin)}, undone"
    )


def _with_made_up_parts(training: Training, batch: Batch) -> Batch:
    """Returns the batch with the further inputs of the model's fronts and layers."""
    decoder, cp = training.source.model.decoder, training.mesh.cp
    if not decoder.fronts:
        return batch
    made_up = resolve("engine.vision.made_up_images:with_made_up_images")
    found: Batch = made_up(batch, decoder, context_size=cp.size, context_rank=cp.rank)
    return found


def _synthetic_loader(config: RunConfig, launch: Launch, *, vocabulary: int) -> DataLoader:
    """Makes full rows of one document each, of meaningless tokens, as this rank would get them."""
    length = config.data.seq_length
    rows = gradient_accumulation_steps(config, launch.world_size) * config.train.micro_batch_size
    rows *= data_parallel_size(config, launch.world_size)
    tokens = np.random.Philox(key=config.train.seed).random_raw(rows * length) % vocabulary
    targets = np.ones(rows * length, dtype=bool)
    targets[::length] = False
    offsets = np.arange(rows + 1, dtype=np.int64) * length
    filled = config.data.fills_rows
    dataset = TokenDataset(contiguous(tokens.astype(np.int32), targets, offsets), seq_length=length, packing=filled)
    return DataLoader(
        dataset,
        shape_of_launch(config, launch),
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        num_workers=0,
        pin_memory=launch.device.type == "cuda",
    )


class _State:
    """A copy of the state that steps change, on this rank."""

    def __init__(self, training: Training) -> None:
        optimizer = training.optimizer
        self._training = training
        self._tensors = [
            *(shard.tensor for shard in optimizer.state_shards()),
            optimizer.lr,
            optimizer.step_count,
            optimizer.skipped,
            optimizer.skip,
            training.stages.step,
            *([] if optimizer.loss_scale is None else optimizer.loss_scale.tensors()),
        ]
        self._copies = [tensor.clone() for tensor in self._tensors]
        self._generator = torch.get_rng_state()
        self._device_generators = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back(self) -> None:
        host = self._training.optimizer.flat.host
        if host is not None:
            host.settle()  # the last step's transfers have arrived
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)
        self._training.optimizer.flat.publish()
        torch.set_rng_state(self._generator)
        if self._device_generators:
            torch.cuda.set_rng_state_all(self._device_generators)
