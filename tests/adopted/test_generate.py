"""Adopted models continue prompts as transformers' generate does, token by token, with its log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.adopted.proof import Small, proven_attention, small_of
from engine.distributed.mesh import Axis
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage, Parts
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Answer, Request
from tests.support.generation import random_prompts, stock_greedy
from tests.support.sweeps import sampled

NEW = 10
_FIVE, _ONE, _LONG, _NINE = random_prompts(256, (5, 1, 13, 9))
PROMPTS = [_FIVE, _ONE, _LONG, _LONG, _LONG, _NINE]
"""Some longer than the windows of small models, which are 8; one is continued by several rows."""
CACHED = ["glm4", "olmo3", "gemma2", "cohere2", "deepseek_v3", "ernie4_5_moe", "gpt_oss"]
"""Models whose keys and values the engine's cache keeps."""
RERUN = ["qwen3_next", "bamba", "falcon_mamba", "bloom"]
"""Models whose rows run again for each token."""
NO_STOCK_CACHE = ["bamba"]
"""transformers' own cache refuses small ones, whose layers are all of one kind."""


def _small(model_type: str) -> Small:
    """Returns a small model with adapters, and weights large enough that a token depends on all before it."""
    from transformers import CONFIG_MAPPING

    small = small_of({**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type})
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in small.model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    attention = proven_attention(small.config.hf_config)
    assert attention == ("engine" if model_type in CACHED else "own")
    return replace(small, config=replace(small.config, attention=attention))


def _answers(small: Small, parts: tuple[int, ...]) -> list[Answer]:
    stage = InferenceStage(
        Parts(dict(enumerate(small.parts(parts))), [0] * len(parts)),
        tp=Axis("tp"),
        pp=Axis("pp"),
        sampling=Sampling(),
        slots=3,
        length=max(map(len, PROMPTS)) + NEW,
        new=NEW,
        group=2,
        device=torch.device("cpu"),
        with_logps=True,
    )
    requests = [Request(row=row, ids=tuple(ids)) for row, ids in enumerate(PROMPTS)]
    return Generator(stage, Limits(max_new_tokens=NEW, slots=3), None).run(requests)


@torch.no_grad()
def _logps(model: nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(
    "model_type", sampled([*CACHED, *RERUN], ["gemma2", "deepseek_v3", "gpt_oss", "qwen3_next", "bloom"])
)
def test_tokens_and_their_log_probabilities_are_those_of_transformers(model_type: str) -> None:
    small = _small(model_type)
    small.model.eval().generation_config.use_cache = model_type not in NO_STOCK_CACHE
    expected = stock_greedy(small.model, PROMPTS, NEW)
    layers = small.config.num_layers
    for parts in ((layers,), (1, layers - 1)):
        for prompt, answer, tokens in zip(PROMPTS, _answers(small, parts), expected, strict=True):
            assert list(answer.ids) == tokens
            assert (torch.tensor(answer.logps) - _logps(small.model, prompt, tokens)).abs().max() < 1e-4
