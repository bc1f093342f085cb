"""Completions that a hybrid samples: their log-probabilities are those of the trainer, and a step of GRPO is taken."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.rollouts.test_sampler import of_trainer, prompts_of, sampled
from tests.support.family_models import make_model
from tests.support.rollout_runs import prepared, rollout_settings

BOUND = 4e-5
"""Of a log-probability in fp32: decoding takes a state from token to token, and training from chunk to chunk."""


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3 next", pytest.param("falcon h1", marks=pytest.mark.slow)])
def test_log_probabilities_are_the_trainers(name: str, tmp_path: Path) -> None:
    """Decoding begins with the prompt's states: with fresh ones, or another tail of the convolution, they differ by
    tenths."""
    settings = rollout_settings(tmp_path, lora__rank=3, rollout__temperature=0.7)
    place = tmp_path / "model" / "config.json"
    vocabulary = json.loads(place.read_text(encoding="utf-8"))["vocab_size"]
    make_model(name, tmp_path / "hybrid", vocab_size=vocabulary, max_position_embeddings=128)
    for file in (tmp_path / "model").iterdir():
        if file.name.startswith(("tokenizer", "special")):
            (tmp_path / "hybrid" / file.name).write_bytes(file.read_bytes())
    settings |= {"model.path": tmp_path / "hybrid", "model.init": "checkpoint", "model.dtype": "float32"}
    with ExitStack() as opened:
        run = prepared(settings, opened)
        generator = torch.Generator().manual_seed(3)
        for shard in run.training.optimizer.flat.master_shards():
            if shard.name.endswith("lora_B"):
                shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator) * 0.1)
        run.training.optimizer.flat.publish()
        prompts = prompts_of(run, 4)
        found = sampled(run, prompts)
        own = [float(one) for completion in found for one in completion.logps]
        assert len(own) > 16
        for packing in (True, False):
            assert own == pytest.approx(of_trainer(run, prompts, found, packing=packing), abs=BOUND)
        (rows,) = run.source.stream(0, 0, 1)
        result = run.training.step(rows.batches, rows.targets, 1e-3)
        assert torch.isfinite(result.loss) and float(result.grad_norm) > 0
