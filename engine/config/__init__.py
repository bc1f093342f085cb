"""The configuration of a run: frozen records per concern, and rules between them.

Nothing here imports torch, so that `--help` and a refusal are quick. `engine.config.load` reads YAML and command lines;
it is not imported here, because its packages are needed by training's command line alone.
"""

from engine.config.checkpoint import CheckpointOptions
from engine.config.data import DataOptions
from engine.config.guards import GuardOptions
from engine.config.log import LogOptions
from engine.config.lora import LoraOptions
from engine.config.matching import BLOCK_LINEARS, matches_target, matches_trainable, require_matched, unmatched_patterns
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.optim import OptimOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import (
    check_config,
    check_files,
    check_world,
    data_parallel_size,
    gradient_accumulation_steps,
)
from engine.config.run import RunConfig
from engine.config.train import TrainOptions

__all__ = [
    "BLOCK_LINEARS",
    "CheckpointOptions",
    "DataOptions",
    "GuardOptions",
    "LogOptions",
    "LoraOptions",
    "MemoryOptions",
    "ModelOptions",
    "OptimOptions",
    "ParallelOptions",
    "RunConfig",
    "TrainOptions",
    "check_config",
    "check_files",
    "check_world",
    "data_parallel_size",
    "gradient_accumulation_steps",
    "matches_target",
    "matches_trainable",
    "require_matched",
    "unmatched_patterns",
]
