"""Completions of prompts, by the engine's generation; copies of the model complete different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.distributed.collectives import all_reduce
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Request
from engine.inference.text import TokenDecoder
from rankfold.evaluating.model import EvaluatedModel
from rankfold.evaluating.watch import Watch


def completions(
    model: EvaluatedModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    limits: Limits,
    sampling: Sampling,
    decoder: TokenDecoder,
    watch: Watch,
) -> list[list[int]]:
    """Returns the new tokens of each prompt, the one that ended it included; the same on all ranks. Collective.

    Args:
        prompts: token ids, at least one each; a prompt's place among them is a coordinate of its random numbers.
        limits: when they end, and how many run at a time.
        sampling: the choice of tokens.
        decoder: the tokenizer that finds stop texts.
        watch: told of the completions of all copies, by those of this one.
    """
    if not prompts:
        return []
    copies, found = model.mesh.dp_cp, dict[int, list[int]]()
    # the longest first: neighbours are of a size, and the cache is as large at the start as it will ever be
    order = sorted(range(len(prompts)), key=lambda place: (-len(prompts[place]), place))
    generator = _generator(model, limits, sampling, decoder, length=max(map(len, prompts)) + limits.max_new_tokens)
    size = watch.share(limits.slots * copies.size) or len(order)
    for first in range(0, len(order), size):
        own = order[first : first + size][copies.rank :: copies.size]
        requests = [Request(row=place, ids=tuple(prompts[place])) for place in own]
        model.prepare()
        answers = generator.run(requests, on_answer=lambda _: watch.advance(copies.size))
        found |= {answer.request.row: list(answer.ids) for answer in answers}
        watch.passed()
    return _gathered(found, len(prompts), limits.max_new_tokens, model)


def _generator(
    model: EvaluatedModel, limits: Limits, sampling: Sampling, decoder: TokenDecoder, *, length: int
) -> Generator:
    """Makes the generator; its cache takes memory as long as it lives."""
    stage = InferenceStage(
        model.parts,
        tp=model.mesh.tp,
        pp=model.mesh.pp,
        sampling=sampling,
        slots=limits.slots,
        length=length,
        new=limits.max_new_tokens,
        device=model.device,
        capture=decode_capture("auto", model.device),
    )
    return Generator(stage, limits, decoder, in_step_with=model.in_step_with)


def _gathered(found: Mapping[int, list[int]], count: int, width: int, model: EvaluatedModel) -> list[list[int]]:
    """Returns the tokens of all prompts in their order. Collective.

    Args:
        found: those of this rank, by the prompt's place.
        count: prompts.
        width: most tokens of one.
    """
    copies = model.mesh.dp_cp
    if copies.size == 1:
        return [found[place] for place in range(count)]
    tokens = torch.zeros(count, width, dtype=torch.int32)
    lengths = torch.zeros(count, dtype=torch.int32)
    for place, ids in found.items():  # each rank has zeros for the prompts of others
        lengths[place] = len(ids)
        tokens[place, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    tokens, lengths = (all_reduce(one.to(model.device), copies).cpu() for one in (tokens, lengths))
    return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
