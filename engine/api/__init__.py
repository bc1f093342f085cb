"""The functions for Python programs: make a configuration, train, export, generate. Only stable ones are here.

    from engine.api import export, generate, load_config, train

In one process it needs no launcher, and can be called again and again. A script that torchrun starts is one rank of as
many as there are, and each rank calls the same functions in the same order. The output of the command `rankfold` is
printed here too. Impossible requests raise `UserError`, whose message is one sentence.
"""

from engine.api.configuration import load_config
from engine.api.exporting import export
from engine.api.model import Completion, GenerationOptions, Model, Score, generate, load_model
from engine.api.session import Session
from engine.api.training import train
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.telemetry.listener import CheckpointEvent, EvaluationEvent, RunListener, StepEvent, TasksEvent
from engine.training.reports.summary import RunSummary

__all__ = [
    "CheckpointEvent",
    "Completion",
    "EvaluationEvent",
    "GenerationOptions",
    "Model",
    "RunConfig",
    "RunListener",
    "RunSummary",
    "Score",
    "Session",
    "StepEvent",
    "TasksEvent",
    "UserError",
    "export",
    "generate",
    "load_config",
    "load_model",
    "train",
]
