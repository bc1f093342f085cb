"""Finds the layers of a model that are alike, by building the first of each kind.

A layer depends on its index through its kind and mixture in the model's config and through what the training plan says
of its modules, and through nothing else that a shape or a trace could show. The modules are not listed here: the plan
that the first layer of a kind is built with notes what it is asked, and a later layer is alike if the answers are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from engine.layers.context import TensorLayout, TrainingPlan
from engine.models.decoder import Part, build_decoder
from engine.models.decoder_config import DecoderConfig

_Answers = dict[tuple[str, str], object]
"""Method of the plan, and name of a module within its layer -> the answer."""


@lru_cache(maxsize=64)
def layer_kinds(
    config: DecoderConfig, plan: TrainingPlan, formats: Callable[[str], object] | None = None
) -> tuple[int, ...]:
    """Returns for each layer the index of the first one that is like it.

    Args:
        config, plan: of the model.
        formats: name of a weight -> how it is stored while it does not train; None where that does not depend on it.

    Raises:
        UserError: the plan asks of a layer what it cannot have.
    """
    kinds: list[int] = []
    known: dict[int, _Answers] = {}
    for index in range(config.num_layers):
        like = next(
            (
                kind
                for kind, answers in known.items()
                if _alike(config, plan, kind, answers, index) and _stored_alike(formats, kind, answers, index)
            ),
            index,
        )
        if like == index:
            known[index] = _answers_to(config, plan, index)
        kinds.append(like)
    return tuple(kinds)


def _answers_to(config: DecoderConfig, plan: TrainingPlan, index: int) -> _Answers:
    """Builds a layer with all of its parts on one rank, and returns the plan's answers meanwhile."""
    answers: _Answers = {}
    prefix = _prefix(index)

    def noting(method: str) -> Callable[[str], Any]:
        ask = getattr(plan, method)

        def noted(module: str) -> Any:
            answer = ask(module)
            if module.startswith(prefix):  # else of what an adopted body has around its layers
                answers[method, module.removeprefix(prefix)] = answer
            return answer

        return noted

    listening = replace(plan, trains=noting("trains"), adapter=noting("adapter"), fused=noting("fused"))
    build_decoder(
        config,
        layout=TensorLayout(),
        plan=listening,
        device=torch.device("meta"),
        dtype=torch.get_default_dtype(),
        part=Part(first=index, last=index + 1, embedding=False, head=False),
    )
    return answers


def _alike(config: DecoderConfig, plan: TrainingPlan, kind: int, answers: _Answers, index: int) -> bool:
    if config.layer_kind(kind) != config.layer_kind(index) or config.variants_at(kind) != config.variants_at(index):
        return False
    prefix = _prefix(index)
    return all(getattr(plan, method)(prefix + module) == answer for (method, module), answer in answers.items())


def _stored_alike(formats: Callable[[str], object] | None, kind: int, answers: _Answers, index: int) -> bool:
    if formats is None:
        return True
    weights = [f"{module}.weight" for method, module in answers if method == "trains"]
    return all(formats(_prefix(kind) + name) == formats(_prefix(index) + name) for name in weights)


def _prefix(index: int) -> str:
    return f"layers.{index}."
