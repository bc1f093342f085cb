"""Objective options: which loss is minimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.config.checks import require, require_choice, require_positive

Name = Literal["language_modeling", "dpo", "ipo", "hinge", "orpo", "simpo", "kto"]
Reference = Literal["base", "initial"]
REFERENCE_FREE = ("orpo", "simpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveOptions:
    """Objective: which loss is minimised.

    Args:
        name: "language_modeling" predicts the next token (pretraining, supervised fine-tuning). The others learn from
            pairs of answers, of which one was preferred: "dpo" (arXiv 2305.18290), "ipo" (2310.12036), "hinge"
            (2305.10425), and without a reference "orpo" (2403.07691) and "simpo" (2405.14734). "kto" (2402.01306)
            learns from single answers, each with a label that says whether it was liked.
        beta: How strongly the preference counts against staying near the reference; for orpo the weight of the odds
            ratio.
        label_smoothing: Share of pairs that are assumed to be labelled the wrong way round, for dpo and simpo.
        length_normalised: Compare means over an answer's tokens instead of sums, for dpo and hinge.
        margin: By how much simpo wants the preferred answer to be better.
        desirable_weight: How much a liked answer counts for kto.
        undesirable_weight: How much a disliked answer counts for kto. Give the rarer kind the larger weight.
        reference: What the trained model is compared with. "base" is the model without its adapters, computed with each
            step, without a second copy. "initial" is the model as the run starts (with the adapter of lora.init_from,
            or when more than adapters is trained): its log-likelihoods are computed once, before the first step, and
            kept in the run's folder.
    """

    name: Name = "language_modeling"
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalised: bool = False
    margin: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: Reference = "base"

    def __post_init__(self) -> None:
        require_choice("objective.name", self.name, get_args(Name))
        require_choice("objective.reference", self.reference, get_args(Reference))
        require_positive("objective.beta", self.beta, "use for example 0.1")
        require(
            0 <= self.label_smoothing < 0.5,
            f"objective.label_smoothing is {self.label_smoothing}, but a share from 0 to below 0.5 is expected: use "
            "for example 0.1, or 0 for none.",
        )
        require_positive("objective.desirable_weight", self.desirable_weight, "use for example 1.0")
        require_positive("objective.undesirable_weight", self.undesirable_weight, "use for example 1.0")
        for option, value, default, names in (
            ("label_smoothing", self.label_smoothing, 0.0, ("dpo", "simpo")),
            ("length_normalised", self.length_normalised, False, ("dpo", "hinge")),
            ("margin", self.margin, 0.0, ("simpo",)),
            ("desirable_weight", self.desirable_weight, 1.0, ("kto",)),
            ("undesirable_weight", self.undesirable_weight, 1.0, ("kto",)),
        ):
            require(
                value == default or self.name in names,
                f"objective.{option} is {value} and objective.name is {self.name}, but it belongs to "
                f"{' and '.join(names)}: remove it, or choose one of these.",
            )

    @property
    def compares_answers(self) -> bool:
        """Whether samples are answers that were judged, in pairs or one by one."""
        return self.name != "language_modeling"

    @property
    def compares_pairs(self) -> bool:
        """Whether samples are pairs of answers."""
        return self.compares_answers and self.name != "kto"

    @property
    def has_reference(self) -> bool:
        return self.compares_answers and self.name not in REFERENCE_FREE
