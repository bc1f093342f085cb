"""What the front asks of the process that has the model, and what it gets; records that both sides pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.choices import BaseDType
from engine.config.model import DType, Kernels
from engine.config.parallel import ParallelOptions
from rankfold.serving.commands import Adapter

JSON, PROTOBUF = "application/json", "application/x-protobuf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """Which model is served, and how it is computed.

    Args:
        path: folder of the checkpoint.
        name: of the base, as clients give it; "" for the folder.
        dtype: of weights and arithmetic.
        base_dtype: storage of the frozen linears; None for `dtype`.
        kernels: backend of the ops.
        tokens: of a micro-batch, at most, unless one document alone has more.
        slots: completions at a time.
        parallel: how the model is divided.
        ranks: processes that compute.
        resident: GiB of adapters with their optimizers on the device, each counted whole; None for a quarter of what
            is free there beside the base.
    """

    path: Path
    name: str = ""
    dtype: DType
    base_dtype: BaseDType | None = None
    kernels: Kernels = "auto"
    tokens: int = 4096
    slots: int = 16
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    ranks: int = 1
    resident: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A command to execute.

    Args:
        request, kind, seq, body: of the command.
        target: the model; of an asample the path of the sampler's weights, "" for the base.
    """

    request: str
    kind: str
    target: str
    seq: int
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedWeights:
    """Weights that a task saved under a name.

    Args:
        path: tinker://MODEL/KIND/NAME.
        num_bytes: of their files.
        expires: when they are deleted, in seconds since 1970; None for never.
        metadata: what the client keeps with them, as JSON.
    """

    path: str
    num_bytes: int
    expires: float | None
    metadata: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a task.

    Args:
        request: of the task.
        good: whether it was executed.
        type, body: content type and bytes of the answer to the client; where it was not executed the error in JSON.
        adapter: of a model that the task made.
        keeps: whether a restart has to execute the task again, because the gradient that it made is on no disk.
        saved: what the task saved.
        tokens: of its rows, or that were sampled.
    """

    request: str
    good: bool
    type: str
    body: bytes
    adapter: Adapter | None = None
    keeps: bool = False
    saved: SavedWeights | None = None
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A model that was made again from its file.

    Args:
        seq: of the last command that its weights have.
        outcome: of that command.
    """

    seq: int
    outcome: Outcome


class Backend(Protocol):
    """The model with its adapters. Calls come one at a time; a lost backend raises `BackendLost`."""

    @property
    def context(self) -> int:
        """Tokens of the longest row."""
        ...

    def restore(self, model: str) -> Restored | None:
        """Makes a model again from its file; None where there is none."""
        ...

    def execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Executes tasks that may be executed together, and returns an outcome of each in their order. Of several, all
        are forward_backward of different models, or asample of the same weights."""
        ...


class BackendLost(Exception):
    """The process that has the model has ended; the message is a sentence."""


def failure(request: str, sentence: str, category: str = "user") -> Outcome:
    """Returns the outcome of a task that was not executed.

    Args:
        sentence: for the client.
        category: "user" where the client can change it, else "server".
    """
    error = json.dumps({"error": sentence, "category": category}).encode()
    return Outcome(request=request, good=False, type=JSON, body=error)


def success(request: str, answer: Mapping[str, object], adapter: Adapter | None = None) -> Outcome:
    """Returns the outcome of a task whose answer is JSON."""
    return Outcome(request=request, good=True, type=JSON, body=json.dumps(dict(answer)).encode(), adapter=adapter)
