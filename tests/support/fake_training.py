"""The whole training of one rank of a large world, alone in this process: built from a configuration, and one step run.

The batches are random tokens of the lengths that the configuration asks for; there is no data file and no tokenizer.
"""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.config.rules import check_config, check_world, data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.data.collate import context_part
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import Training, build_training
from engine.training.start_model import check_model, model_source
from tests.distributed.cases import make_batch


def build_rank(config: RunConfig, rank: int, world_size: int) -> Training:
    """What `rank` builds on a CPU. Call it, and what is built, inside `fake_world(rank, world_size)`."""
    check_config(config)
    check_world(config, world_size)
    source = model_source(config)
    plan = check_model(config, source.model, world_size)
    launch = Launch(rank=rank, world_size=world_size, device=torch.device("cpu"))
    return build_training(config, launch, source, plan, Log(rank=1))


def rank_batches(config: RunConfig, training: Training) -> tuple[list[Batch], float]:
    """This rank's micro-batches of a step, one document a row, and the number of targets in the global batch."""
    mesh, rows, length = training.mesh, config.train.micro_batch_size, config.data.seq_length
    world_size = mesh.grid.world_size
    batches, targets = [], 0.0
    for number in range(gradient_accumulation_steps(config, world_size)):
        whole = make_batch(
            [(slot, (length,)) for slot in range(number * rows, (number + 1) * rows)],
            row_length=length,
            seq_length=length,
            vocab_size=training.source.model.decoder.vocab_size,
            seed=1,
        )
        targets += float(whole.loss_weights_BS.sum())
        batches.append(context_part(whole, size=mesh.cp.size, rank=mesh.cp.rank))
    return batches, targets * data_parallel_size(config, world_size)
