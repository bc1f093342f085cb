"""Rules that trainers of vision-language models share, for images and for the trained parts."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, truth
from rankfold.migrating.given import Given

LANGUAGE_MODEL = ["embed_tokens", "layers", "norm", "lm_head"]
"""All modules of a language model, with a vision model beside it or without."""


def switch(fact: str, became: str) -> Rule:
    """Returns the rule of a switch that selects the trained part of the model."""

    def rule(conversion: Conversion, given: Given) -> None:
        conversion.add_fact(given, fact, truth(given), f"{became}: {'yes' if truth(given) else 'no'}")

    return Rule(rule, ("trainable",))
