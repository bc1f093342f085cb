"""Proofs of the pipeline stages that a search tries, for models whose kind has one: what a run's start would refuse is
left out.

Tensor ranks are not proven: they compute together, and a search is one process. Those for which the model cannot be
built are left out with the reason anyway.
"""

from __future__ import annotations

import torch

from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.layers.module import shard_entries
from engine.models.describe import meta_model
from engine.models.run_proof import AskedOfModel
from engine.planning.pipeline_parts import pipeline_plan
from engine.planning.rank_layout import Layout, Workload
from engine.planning.traces import rank_model
from engine.seams import resolve


class StageProofs:
    """Refuses layouts whose stages are not the model; each way to cut the layers is tried once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._refusals: dict[tuple[int, ...], str | None] = {}
        self._trained: tuple[str, ...] | None = None

    def check(self, layout: Layout) -> None:
        """Raises UserError where the stages of a layout are not the model."""
        workload, parallel = self._workload.on(layout), layout.parallel
        decoder = workload.decoder
        if parallel.pipeline == 1 or decoder.proof is None:
            return
        shape = rank_model(workload, parallel).shape
        layers = pipeline_plan(decoder, shape, parallel, workload.num_microbatches(layout)).layers
        if self._refusal((1,) * decoder.num_layers) is None:
            return  # cut anywhere
        if (refusal := self._refusal(layers)) is not None:
            raise UserError(refusal)

    def _refusal(self, layers: tuple[int, ...]) -> str | None:
        if layers not in self._refusals:
            self._refusals[layers] = None
            try:
                self._prove(layers)
            except UserError as error:
                self._refusals[layers] = str(error)
        return self._refusals[layers]

    def _prove(self, layers: tuple[int, ...]) -> None:
        workload = self._workload
        if self._trained is None:
            model = meta_model(workload.decoder, plan=workload.plan)
            self._trained = tuple(entry.name for entry in shard_entries(model) if entry.sink is not None)
        asked = AskedOfModel(trained=self._trained, layers=layers)
        assert workload.decoder.proof is not None
        prove = resolve(workload.decoder.proof)
        prove(workload.decoder, asked, mesh=None, world=Axis("world"), device=torch.device("cpu"))
