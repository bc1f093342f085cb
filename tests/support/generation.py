"""What tests of generation share: prompts, stock transformers' greedy tokens, and the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine.inference.generate import Answer, Generator, Request
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation

if TYPE_CHECKING:
    from torch import nn

Prompts = Sequence[Sequence[int]]
STORIES = ([1, 403, 407, 261, 378], [1, 291], [1, 424, 338, 263, 399, 302, 267, 281, 270, 263, 385, 327, 285, 286], [1])
"""Token ids of four lengths, for the real model of 512 tokens."""


class Ids:
    """A tokenizer that writes ids, for models that have none."""

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(one) for one in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {token}" for token in ids)


def random_prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """The same every time."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def stock_greedy(model: nn.Module, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
    """What transformers' generate continues each prompt with, alone, without an end token."""
    made: Any = model
    made.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = made.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def engine_answers(
    folder: Path | str,
    prompts: Prompts,
    limits: Limits,
    *,
    sampling: Sampling | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    group: int = 1,
    **choice: Any,
) -> list[Answer]:
    """The engine's answers; where there are ranks, all of them call it.

    Args:
        group: rows that continue one prompt may share it.
    """
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    launch = Launch(rank=ranks[0], world_size=ranks[1], device=torch.device("cpu"))
    log = Log(1)  # silent
    wanted = ModelChoice(path=Path(folder), tensor=tensor, pipeline=pipeline, **choice)
    opened = open_for_generation(wanted, launch, log)
    stage = InferenceStage(
        opened.decoder,
        tp=opened.mesh.tp,
        pp=opened.mesh.pp,
        sampling=sampling or Sampling(),
        slots=limits.slots,
        length=max(map(len, prompts)) + limits.max_new_tokens,
        new=limits.max_new_tokens,
        group=group,
        device=launch.device,
    )
    requests = [Request(row=row, ids=tuple(ids)) for row, ids in enumerate(prompts)]
    return Generator(stage, limits, Ids()).run(requests)


def engine_tokens(folder: Path | str, prompts: Prompts, max_new_tokens: int, **more: Any) -> list[list[int]]:
    """Ids that the engine continues each prompt with; three rows at a time, so that they come and go."""
    limits = Limits(max_new_tokens=max_new_tokens, slots=more.pop("slots", 3))
    return [list(answer.ids) for answer in engine_answers(folder, prompts, limits, **more)]
