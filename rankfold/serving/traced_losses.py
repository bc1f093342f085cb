"""The losses that clients have traced: created, kept in files, and made ready for a request."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import UserError
from engine.files.documents import read_bytes
from engine.files.durable import sync_folder, write_durably
from rankfold.serving.commands import read_json
from rankfold.serving.exchange import Outcome, Task, success
from rankfold.serving.folder import ServerFolder
from rankfold.serving.loss_graph import read_loss, session_of
from rankfold.serving.loss_program import REQUEST_ELEMENTS, REQUEST_OPERATIONS, LossProgram
from rankfold.serving.loss_request import CUSTOM, Datum, ForwardBackward
from rankfold.serving.ranks import Ranks

_KEPT = 64
"""Programs in memory."""


class TracedLosses:
    """The losses of a server, on this rank.

    Args:
        folder: of the server.
        ranks: of the server; rank 0 has the files.
    """

    def __init__(self, folder: ServerFolder, ranks: Ranks) -> None:
        self._folder, self._ranks = folder, ranks
        self._programs: OrderedDict[str, LossProgram] = OrderedDict()

    def create(self, task: Task) -> Outcome:
        """Executes a create_custom_loss. Collective.

        Raises:
            UserError: the graph is none that is computed here, or the disk does not take it.
        """
        self._programs[task.target] = LossProgram(read_loss(read_json(task.body)))
        path = self._folder.loss(task.target)

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            write_durably(path, task.body)
            sync_folder(path.parent)

        self._ranks.decided(write)
        return success(task.request, {"loss_id": task.target, "type": "create_custom_loss"})

    def bound(self, model: str, request: ForwardBackward) -> ForwardBackward:
        """Returns a request with the program of its loss, checked on its data; unchanged where its loss is not traced.
        Collective.

        Args:
            model: that it is for.

        Raises:
            UserError: the session of the model has no such loss, or the loss cannot be computed on the data.
        """
        if request.loss != CUSTOM:
            return request
        if session_of(request.loss_id) != model.partition(":train:")[0]:
            raise UserError(f"loss_id is {request.loss_id}, of another session: create it in that of the model.")
        program = self._program(request.loss_id)
        data = tuple(_with_ranks(number, datum, program) for number, datum in enumerate(request.data))
        if len(data) * len(program.graph.nodes) > REQUEST_OPERATIONS:
            raise UserError(
                f"the loss has {len(program.graph.nodes)} operations and the request {len(data)} data, more than "
                f"{REQUEST_OPERATIONS} together: send the data in several requests."
            )
        total, known = 0, dict[tuple[object, ...], int]()
        for number, datum in enumerate(data):
            inputs = _inputs(datum, program)
            shape = (datum.targets.shape, *((one.shape, one.dtype) for one in inputs))
            if shape not in known or program.values_matter:
                known[shape] = program.check(number, _made_up(datum.targets), inputs)
            total += known[shape]
            if total > REQUEST_ELEMENTS:
                raise UserError(
                    f"the loss computes more than {REQUEST_ELEMENTS} numbers for the request: send the data in several "
                    "requests."
                )
        return replace(request, data=data, program=program)

    def _program(self, loss: str) -> LossProgram:
        if loss not in self._programs:
            path = self._folder.loss(loss)
            self._programs[loss] = LossProgram(read_loss(read_json(self._ranks.decided(lambda: _read(path, loss)))))
        self._programs.move_to_end(loss)
        while len(self._programs) > _KEPT:
            self._programs.popitem(last=False)
        return self._programs[loss]


def metrics_of(request: ForwardBackward, sums: Tensor | None) -> dict[str, float]:
    """Returns the metrics of a loss by name.

    Args:
        request: whose loss it is.
        sums: fp64 [metrics] over its data; None where it has none.
    """
    if request.program is None or sums is None:
        return {}
    named = zip(request.program.metrics, sums.tolist(), strict=True)
    return {name: value / len(request.data) if name.endswith(":mean") else value for name, value in named}


def _read(path: Path, loss: str) -> bytes:
    if not path.is_file():
        raise UserError(f"there is no loss {loss}: create it with create_custom_loss.")
    return read_bytes(path)


def _with_ranks(number: int, datum: Datum, program: LossProgram) -> Datum:
    """Returns a datum whose inputs have the dimensions that the loss takes."""
    found, wanted = {}, dict(program.graph.inputs)
    rank = wanted.pop("logprobs")
    if datum.targets.ndim != rank:
        raise UserError(
            f"datum {number} has target_tokens of {datum.targets.ndim} dimensions, but the loss takes {rank}: send "
            "as many as the logprobs that it was created for have."
        )
    for name, rank in wanted.items():
        if name not in datum.inputs:
            raise UserError(f"datum {number} has no {name} in loss_fn_inputs, which the loss takes: send it.")
        values = datum.inputs[name]
        if rank == 0 and values.size == 1:
            values = values.reshape(())  # the wire has no difference between one number and a list of it
        if values.ndim != rank:
            raise UserError(
                f"datum {number} has {name} of {values.ndim} dimensions, but the loss takes {rank}: send as many as "
                "the loss was created for."
            )
        found[name] = values
    return replace(datum, inputs=found)


def _inputs(datum: Datum, program: LossProgram) -> list[Tensor]:
    return [torch.from_numpy(datum.inputs[name]) for name in [*program.graph.inputs][1:]]


def _made_up(targets: NDArray[np.int64]) -> Tensor:
    """Returns log-probabilities for a check."""
    return -torch.linspace(0.1, 5.0, targets.size).reshape(targets.shape)
