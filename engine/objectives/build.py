"""Builds the objective of a configuration."""

from __future__ import annotations

from engine.config.objective import ObjectiveOptions
from engine.distributed.mesh import Axis
from engine.objectives.kto import Kto, KtoSettings
from engine.objectives.language_modeling import LanguageModeling
from engine.objectives.objective import Objective
from engine.objectives.preference import Preference, PreferenceSettings


def build_objective(options: ObjectiveOptions, *, cp: Axis, dp: Axis) -> Objective:
    """Returns the objective that the last stage minimises.

    Args:
        options: of the run.
        cp: over whose ranks the tokens of each row are split.
        dp: over whose ranks the global batch is split.
    """
    if not options.compares_answers:
        return LanguageModeling()
    compares_with_base = options.has_reference and options.reference == "base"
    if options.name == "kto":
        constants = KtoSettings(
            beta=options.beta,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )
        return Kto(constants, cp=cp, dp=dp, compares_with_base=compares_with_base)
    settings = PreferenceSettings(
        loss="sigmoid" if options.name == "dpo" else options.name,
        beta=options.beta,
        label_smoothing=options.label_smoothing,
        length_normalised=options.length_normalised,
        margin=options.margin,
    )
    return Preference(settings, cp=cp, compares_with_base=compares_with_base)
