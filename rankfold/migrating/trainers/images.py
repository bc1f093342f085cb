"""Rules that trainers of vision-language models share, for images and for the trained parts."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, truth
from rankfold.migrating.given import Given

LANGUAGE_MODEL = ["embed_tokens", "layers", "norm", "lm_head"]
"""All modules of a language model, with a vision model beside it or without."""
PROCESSOR = "the model's own config.json and processor say how images are cut"
SIZES = "images are read in the size that they have, and cut as the model's own processor does"
VIDEOS = "videos are not read"


def switch(fact: str, became: str) -> Rule:
    """Returns the rule of a switch that selects the trained part of the model."""

    def rule(conversion: Conversion, given: Given) -> None:
        conversion.add_fact(given, fact, truth(given), f"{became}: {'yes' if truth(given) else 'no'}")

    return Rule(rule, ("trainable",))
