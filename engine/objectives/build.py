"""Builds the objective of a configuration."""

from __future__ import annotations

from engine.config.objective import ObjectiveOptions
from engine.config.rollout import RolloutOptions
from engine.distributed.mesh import Axis
from engine.objectives.language_modeling import LanguageModeling
from engine.objectives.objective import Objective
from engine.preferences.objectives.kto import Kto, KtoSettings
from engine.preferences.objectives.preference import Preference, PreferenceSettings
from engine.rollouts.objective.policy import PolicyGradient, PolicySettings


def build_objective(
    options: ObjectiveOptions, *, cp: Axis, dp: Axis, rollout: RolloutOptions | None = None
) -> Objective:
    """Returns the objective that the last stage minimises.

    Args:
        options: of the run.
        cp: over whose ranks the tokens of each row are split.
        dp: over whose ranks the global batch is split.
        rollout: how completions are sampled, where the objective is made of them; None for the defaults.
    """
    if options.samples_completions:
        return PolicyGradient(_policy(options, rollout or RolloutOptions()), cp=cp, dp=dp)
    if not options.compares_answers:
        return LanguageModeling()
    compares_with_base = options.has_reference and options.reference == "base"
    if options.name == "kto":
        constants = KtoSettings(
            beta=options.preference_strength,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )
        return Kto(constants, cp=cp, dp=dp, compares_with_base=compares_with_base)
    settings = PreferenceSettings(
        loss="sigmoid" if options.name == "dpo" else options.name,
        beta=options.preference_strength,
        label_smoothing=options.label_smoothing,
        length_normalised=options.length_normalised,
        margin=options.margin,
    )
    return Preference(settings, cp=cp, compares_with_base=compares_with_base)


def _policy(options: ObjectiveOptions, rollout: RolloutOptions) -> PolicySettings:
    correction = options.importance_correction
    if correction == "none" and rollout.corrects_sampler:
        correction = "token_truncate"
    return PolicySettings(
        loss=options.loss_type,
        level=options.importance_level,
        epsilon=options.epsilon,
        epsilon_high=options.epsilon if options.epsilon_high is None else options.epsilon_high,
        delta=options.delta,
        temperature_pos=options.sapo_temperature_pos,
        temperature_neg=options.sapo_temperature_neg,
        gamma_pos=(options.vespo_k_pos, options.vespo_lambda_pos),
        gamma_neg=(options.vespo_k_neg, options.vespo_lambda_neg),
        beta=options.divergence_weight,
        kl_bias_correction=options.kl_bias_correction,
        temperature=rollout.temperature,
        max_completion_length=rollout.max_completion_length,
        top_entropy_quantile=options.top_entropy_quantile,
        reports_entropy=options.report_entropy,
        off_policy_threshold=options.off_policy_threshold,
        samples_elsewhere=rollout.server is not None or correction != "none",
        correction=correction,
        importance_min=options.importance_min,
        importance_max=options.importance_max,
    )
