"""Numbers that are not finite are located inside transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adopted.proof import proof_batch, small_of
from engine.batch import Batch
from engine.distributed.mesh import single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.context import TensorLayout
from engine.objectives.language_modeling import LanguageModeling
from engine.training.stage import ModelStage
from tests.distributed.guarded_runs import OPTIONS, drive
from tests.distributed.sharded_runs import CPU, Layout, Run


class _AdoptedRun(Run):
    """A run that trains adapters of a small adopted GLM-4."""

    def _build_stages(self, stage_rank: Sequence[int], tensors: TensorLayout) -> dict[int, ModelStage]:
        from transformers import CONFIG_MAPPING

        (self.model,) = small_of({**CONFIG_MAPPING["glm4"]().to_dict(), "model_type": "glm4"}).parts()
        step = torch.zeros((), dtype=torch.int64)
        return {0: ModelStage(self.model, LanguageModeling(), CPU, trains=True, gives_gradient=False, step=step)}

    def batches(self, step: int) -> tuple[list[Batch], float]:
        batches = [proof_batch((5, 7), self.model.config.vocab_size)] * 2
        return batches, sum(float(batch.loss_weights_BS.sum()) for batch in batches)

    def module(self, name: str) -> Any:
        return self.model.layers[1].module.get_submodule(name)


def _overflow(run: _AdoptedRun) -> None:
    run.module("post_attention_layernorm").weight.data.fill_(3e38)


def _wrong_weight(run: _AdoptedRun) -> None:
    next(run.module("self_attn.o_proj").parameters()).data[0, 1] = torch.nan


def _wrong_gradient(run: _AdoptedRun) -> None:
    def spoil(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * torch.nan)

    run.module("post_mlp_layernorm").register_forward_hook(spoil)


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (_overflow, "the output of layers.1.module.post_attention_layernorm, in forward"),
        (_wrong_weight, "the output of layers.1.module.self_attn.o_proj, in forward"),
        (_wrong_gradient, "the gradient of the output of layers.1.module.post_mlp_layernorm, in backward"),
    ],
)
def test_the_first_that_is_not_finite(fault: Callable[[_AdoptedRun], None], place: str) -> None:
    run = _AdoptedRun(Layout(case="adapters", grid=RankGrid()), single_process_mesh(), "none")

    def at_step(_: Run, step: int) -> None:
        if step == 2:
            fault(run)

    said = drive(run, replace(OPTIONS, non_finite_policy="stop", replicas_every=0), steps=2, fault=at_step)
    assert len(said) == 1
    assert f"the first that is not finite is {place} of micro-batch 0, on rank 0" in said[0], said[0]
