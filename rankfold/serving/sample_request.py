"""Requests for samples, read from their bodies. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from rankfold.serving.chunks import PlacesImages, read_json_chunks
from rankfold.serving.commands import flag_of, number_of, whole_of
from rankfold.serving.tensors import CELLS, read_json_tensor

_DRAWS = 1024
"""Tokens that are drawn at a position, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A request for completions of one prompt.

    Args:
        prompt: tokens.
        count: completions.
        max_tokens: of each; None for as many as the context takes.
        seed: of its random numbers; None where the server chooses.
        stop_ids, stop_texts: what ends a completion.
        ends: whether the model's own end tokens do, too.
        prompt_logprobs: whether the prompt is scored; `last` of its tokens, None for all.
        best_of_prompt, best_of_samples: how many of the most likely tokens are listed at each position.
        targets: int64 [tokens of the prompt - 1, K], further tokens that are scored at each position of the prompt
            after the first; -1 for none. None where there are none.
        targets_layout: fields of a sparse tensor, which the scores have too; empty where they are dense.
        images: of the prompt, with the places of their features.
        alternatives: tokens that are drawn at each position of the prompt after the first.
    """

    prompt: tuple[int, ...]
    count: int
    max_tokens: int | None
    seed: int | None
    temperature: float
    top_k: int | None
    top_p: float
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    ends: bool
    prompt_logprobs: bool
    last: int | None
    best_of_prompt: int = 0
    best_of_samples: int = 0
    targets: NDArray[np.int64] | None = None
    targets_layout: Mapping[str, list[int]] = field(default_factory=dict)
    alternatives: int = 0
    images: tuple[Any, ...] = ()


def read_sample(
    request: Mapping[str, Any], *, vocab_size: int, limit: int, images: PlacesImages | None = None
) -> Sample:
    """Returns an asample request.

    Args:
        request: its body.
        vocab_size: of the model.
        limit: tokens of its context.
        images: places those of the prompt; None where only text is read.

    Raises:
        UserError: what it asks for is not there, or does not fit the model.
    """
    if request.get("record_stability_info"):
        raise UserError(
            "record_stability_info is set for the loss stable_reinforce, which is not computed here: set loss_fn to "
            "importance_sampling, ppo or cispo."
        )
    prompt, placed = _prompt(request, vocab_size, images)
    settings = request.get("sampling_params")
    if not isinstance(settings, dict):
        raise UserError("sampling_params is missing: send it, {} for the defaults.")
    room = limit - len(prompt)
    if room < 1:
        raise UserError(f"the prompt has {len(prompt)} tokens, but the context is {limit}: shorten it.")
    max_tokens = None if settings.get("max_tokens") is None else whole_of(settings, "max_tokens", 1, 2**31)
    if max_tokens is not None and max_tokens > room:
        raise UserError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, but the context is {limit}: set "
            f"max_tokens to {room} or less."
        )
    top_k = settings.get("top_k", -1)
    stop_ids, stop_texts, ends = _stops(settings.get("stop"))
    scored = flag_of(request, "prompt_logprobs", False)
    last = request.get("prompt_logprobs_last_n")
    if last is not None and not scored:
        raise UserError(
            "prompt_logprobs_last_n is set, but prompt_logprobs is not, of which it says how many: set both, or "
            "neither."
        )
    targets, layout = _targets(request, len(prompt), vocab_size)
    found = Sample(
        prompt=prompt,
        count=whole_of({"num_samples": 1, **request}, "num_samples", 1, 1024),
        max_tokens=max_tokens,
        seed=None if settings.get("seed") is None else whole_of(settings, "seed", 0, 2**64 - 1),
        temperature=number_of(settings, "temperature", 1.0, 0.0, 1e6),
        top_k=None if top_k in (-1, None) else whole_of(settings, "top_k", 1, 2**31),
        top_p=number_of(settings, "top_p", 1.0, 1e-9, 1.0),
        stop_ids=stop_ids,
        stop_texts=stop_texts,
        ends=ends,
        prompt_logprobs=scored,
        last=None if last is None else whole_of(request, "prompt_logprobs_last_n", 1, max(1, len(prompt) - 1)),
        best_of_prompt=_width(request, "topk_prompt_logprobs", len(prompt), vocab_size),
        best_of_samples=_width(request, "topk_sample_logprobs", max_tokens or room, vocab_size),
        targets=targets,
        targets_layout=layout,
        alternatives=_width(request, "prompt_alt_tokens_k", len(prompt), _DRAWS, _DRAWS << 8),
        images=placed,
    )
    asked = scored or found.best_of_prompt or found.best_of_samples or found.alternatives or targets is not None
    if placed and asked and placed[-1].spans[-1][1] == len(prompt):
        raise UserError(
            "the prompt ends with an image, and log-probabilities are asked for: end it with a token of text, such as "
            "the one that the model's template has behind images."
        )
    return found


def _width(request: Mapping[str, Any], name: str, positions: int, most: int, cells: int = CELLS) -> int:
    """Returns how many tokens are asked for at each position."""
    found = 0 if request.get(name) is None else whole_of(request, name, 0, most)
    if found * positions > cells:
        raise UserError(
            f"{name} is {found}, for {positions} positions, but at most {cells} numbers are given together: set it to "
            f"{cells // positions} or less."
        )
    return found


def _targets(
    request: Mapping[str, Any], length: int, vocab_size: int
) -> tuple[NDArray[np.int64] | None, Mapping[str, list[int]]]:
    if request.get("target_prompt_logprobs") is None:
        return None, {}
    found, layout = read_json_tensor("target_prompt_logprobs", request["target_prompt_logprobs"])
    if len(found) != length - 1 or not (found >= 0).any():
        raise UserError(
            f"target_prompt_logprobs has shape {list(found.shape)}, but {length - 1} rows with at least one token id "
            "are expected, a row for each token of the prompt after the first: send these."
        )
    if found.min() < -1 or found.max() >= vocab_size:
        raise UserError(
            f"target_prompt_logprobs has {found.max() if found.min() >= -1 else found.min()}, but tokens are counted "
            f"from 0 to {vocab_size - 1}, and -1 is for none."
        )
    return found, layout


def _prompt(
    request: Mapping[str, Any], vocab_size: int, images: PlacesImages | None
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    prompt = request.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise UserError("prompt has no chunks: send {chunks: [{type: encoded_text, tokens: [...]}]}.")
    found, placed = read_json_chunks("prompt", chunks, images)
    if not len(found) or not 0 <= found.min() <= found.max() < vocab_size:
        raise UserError(f"prompt is to have at least one token, and all of them from 0 to {vocab_size - 1}.")
    return tuple(found.tolist()), placed


def _stops(stop: object) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """Returns token ids and texts that end a completion, and whether the model's own end tokens do."""
    if stop is None:
        return (), (), True
    given = [stop] if isinstance(stop, str) else stop
    if isinstance(given, list) and len(given) <= 64:
        if all(type(one) is int and one >= 0 for one in given):
            return tuple(given), (), bool(given)
        if all(isinstance(one, str) and 0 < len(one) <= 1000 for one in given):
            return (), tuple(given), True
    raise UserError("stop is to be a text, a list of at most 64 texts, or one of token ids.")
