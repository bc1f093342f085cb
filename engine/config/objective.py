"""Objective options: which loss is minimised."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from engine.choices import EntropyUse, ImportanceCorrection, PolicyLoss, RatioLevel, RewardAggregation, RewardScale
from engine.config.checks import require, require_at_least, require_choices, require_not_negative, require_positive
from engine.config.option import IGNORED, REPORTED, changed, option

Name = Literal["language_modeling", "dpo", "ipo", "hinge", "orpo", "simpo", "kto", "reward", "grpo", "distillation"]
Reference = Literal["base", "initial"]
SEQUENCE_RATIOS = ("gspo", "luspo")
"""Losses that are defined with one importance ratio for each completion."""
POLICY_GRADIENT = ("grpo",)
WITHOUT_LIMITS = ("sapo", "vespo")
"""Losses that weigh ratios smoothly instead of clipping them."""
_LIMITS = ("epsilon", "epsilon_high", "delta")
"""The options that limit importance ratios."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveKind:
    """The parts of an objective, as "module:NAME" for `engine.seams.resolve`, and the structure of its rows.

    Args:
        loss: builds it; see `engine.objectives.build.build_objective`.
        data: reads it; see `engine.training.run_data.DataReader`.
        records: the `engine.data.build.RecordReader` of its records; None for texts and conversations whose every
            answer is learned.
        references: gives rows their log-likelihoods under the model that the run starts from, see
            `engine.training.row_data.ReferenceLoader`; None where answers are compared with no model.
        head: an object that gives the model the head that the objective trains, a
            `engine.checkpoint.heads.HeadChange`; None for the head of tokens that language models have.
        rules: refuses options that cannot be combined with the objective, given the RunConfig; None without such
            options.
        group: documents that belong together, side by side in one row.
        answers: how many of these are answers that are judged.
        samples: whether completions of prompts are sampled, whose prefill has many of them in a row.
        synthetic: whether made-up tokens can stand in for its data.
        predictor: predicts the memory and time of sampling, a `engine.planning.rank_layout.SamplesPredictor`; None
            where nothing is sampled.
        companions: returns the frozen models that lie on the devices beside the trained one, given the RunConfig; see
            `engine.planning.rank_layout.Companion`. None where there are none.
        neighbour: returns what processes that are no ranks hold on a device, given the RolloutOptions; see
            `engine.planning.rank_layout.Neighbour`. None where there are no such processes.
        sections: sections of the configuration that belong to this objective.
    """

    loss: str
    data: str = "engine.training.row_data:read_rows"
    records: str | None = None
    references: str | None = None
    head: str | None = None
    rules: str | None = None
    group: int = 1
    answers: int = 0
    samples: bool = False
    synthetic: bool = False
    predictor: str | None = None
    companions: str | None = None
    neighbour: str | None = None
    sections: tuple[str, ...] = ()


_PAIRS = ObjectiveKind(
    loss="engine.preferences.objectives.preference:build_preference",
    records="engine.preferences.data.preference_pairs:PairReader",
    references="engine.preferences.reference_logps:load_references",
    rules="engine.preferences.rules:check_preferences",
    group=2,
    answers=2,
)
OBJECTIVES: dict[Name, ObjectiveKind] = {
    "language_modeling": ObjectiveKind(
        loss="engine.objectives.language_modeling:build_language_modeling", synthetic=True
    ),
    "dpo": _PAIRS,
    "ipo": _PAIRS,
    "hinge": _PAIRS,
    "orpo": replace(_PAIRS, references=None),
    "simpo": replace(_PAIRS, references=None),
    "kto": ObjectiveKind(
        loss="engine.preferences.objectives.kto:build_kto",
        records="engine.preferences.data.judged:JudgedReader",
        references="engine.preferences.reference_logps:load_references",
        rules="engine.preferences.rules:check_preferences",
        answers=1,
    ),
    "reward": ObjectiveKind(
        loss="engine.judges.bradley_terry:build_bradley_terry",
        records="engine.judges.pairs:ScoredPairReader",
        head="engine.judges.model:SCORE_HEAD",
        rules="engine.judges.rules:check_judges",
        group=2,
        answers=2,
    ),
    "grpo": ObjectiveKind(
        loss="engine.rollouts.objective.policy:build_policy_gradient",
        data="engine.rollouts.run_data:read_prompt_data",
        rules="engine.rollouts.rules:check_rollouts",
        samples=True,
        predictor="engine.rollouts.planned_rollouts:predict_rollout",
        companions="engine.distillation.teacher_model:companions",
        neighbour="engine.rollouts.planned_judges:judges_on_device",
        sections=("rollout", "distillation"),
    ),
    "distillation": ObjectiveKind(
        loss="engine.distillation.objective:build_distillation",
        data="engine.distillation.run_data:read_taught",
        records="engine.distillation.records:TaughtReader",
        rules="engine.distillation.rules:check_distillation",
        companions="engine.distillation.teacher_model:companions",
        sections=("distillation",),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveOptions:
    """Objective: which loss is minimised.

    Args:
        name: "language_modeling" predicts the next token (pretraining, supervised fine-tuning). The others learn from
            pairs of answers, of which one was preferred: "dpo" (arXiv 2305.18290), "ipo" (2310.12036), "hinge"
            (2305.10425), and without a reference "orpo" (2403.07691) and "simpo" (2405.14734). "kto" (2402.01306)
            learns from single answers, each with a label that says whether it was liked. "reward" trains a reward
            model on such pairs, which scores answers (docs/reward-models.md). "grpo" (2402.03300) samples completions
            of prompts and learns from their rewards. "distillation" learns a teacher's distributions at the target
            tokens (docs/distillation.md).
        beta: How strongly the preference counts against staying near the reference; for orpo the weight of the odds
            ratio, for grpo that of the divergence from the reference, which is not computed where it is 0. null is 0
            for grpo and 0.1 for the others.
        label_smoothing: Share of pairs that are assumed to be labelled the wrong way round, for dpo and simpo.
        length_normalised: Compare means over an answer's tokens instead of sums, for dpo and hinge.
        margin: Target margin between the two answers, for simpo.
        center_rewards_coefficient: Weight of the squared sum of a pair's two scores, which keeps scores around 0
            (2312.09244), for reward; 0 for none.
        desirable_weight: Weight of liked answers, for kto.
        undesirable_weight: Weight of disliked answers, for kto. Give the rarer kind the larger weight.
        reference: The model that the trained one is compared with. "base" is the model without its adapters, computed
            with each step, without a second copy. "initial" is the model as the run starts (with the adapter of
            lora.init_from, or when more than adapters is trained): its log-likelihoods are computed once, before the
            first step, and kept in the run's folder.
        reference_sync_steps: Steps between moves of the reference towards the trained model, for grpo with
            objective.beta above 0 (2404.09656); null leaves it where it is. A reference that moves begins as the model
            with which the run begins, and takes another fp32 copy of all trained numbers.
        reference_mixup_alpha: Share of the trained model in the reference that moves, of each number, for grpo. With
            adapters their factors are mixed, so that only 1, a copy, is a mean of weights.
        loss_type: Normalisation of token losses, and the surrogate, for grpo. "dapo" (2503.14476) by the target tokens
            of the global batch; "grpo" by those of the completion, and then by the completions; "bnpo" by the target
            tokens of the micro-batch, so that train.micro_batch_size counts; "dr_grpo" (2503.20783) by
            rollout.max_completion_length and the completions. "cispo" (2506.13585) divides as dapo does, and clips the
            importance ratio alone. "gspo" (2507.18071) divides as grpo does, with one importance ratio for each
            completion; "luspo" (2602.05261) has that ratio too, and divides by the completions alone. "sapo"
            (2511.20347) divides as grpo does, with a smooth gate instead of clipping. "vespo" (2602.10693) divides as
            dapo does, and weighs each completion by a smooth function of its importance ratio instead of clipping.
        ratio_level: Level of the importance ratio, for grpo: each "token", or a completion as a whole ("sequence"),
            with the mean of its tokens' logarithms. null is sequence for objective.loss_type gspo and luspo, which
            are that, and token for the others.
        sapo_temperature_pos: SAPO temperature for positive advantages: larger values make the gate steeper.
        sapo_temperature_neg: SAPO temperature for negative advantages.
        vespo_k_pos: VESPO exponent k for completions with non-negative advantage: larger values down-weight completions
            whose likelihood dropped. With a sequence ratio w the weight is w^k exp(lambda (1 - w)).
        vespo_lambda_pos: VESPO lambda for non-negative advantages: larger values down-weight completions whose
            likelihood rose.
        vespo_k_neg: VESPO exponent k for negative advantages.
        vespo_lambda_neg: VESPO lambda for negative advantages.
        epsilon: Lower clip range of the importance ratio, 1 - epsilon, for grpo.
        epsilon_high: Upper clip range, 1 + epsilon_high; null is objective.epsilon. For cispo, which needs it, the
            largest ratio itself.
        delta: Upper limit of the ratio for negative advantages, where clipping does not reach (2505.07291); null for
            none.
        kl_bias_correction: Multiply the divergence by the importance ratio, which makes its gradient unbiased
            (2512.02556), for grpo.
        scale_rewards: Divisor of the difference between a reward and its group's mean, for grpo: the standard deviation
            of the "group", that of the generation "batch", or "none".
        reward_aggregation: Aggregation of several rewards, for grpo. "sum_then_normalize" compares their weighted sums
            within a group. "normalize_then_sum" (2601.05242) compares each reward within the group first, and adds up
            the weighted results, which it scales by their mean and standard deviation in the generation batch.
        mask_truncated: Exclude truncated completions from the loss, for grpo (2503.14476). Their rewards still count in
            their group, and they in the number of completions.
        num_iterations: Passes over each generation batch, for grpo.
        top_entropy_quantile: Share of the tokens of a micro-batch, over all data-parallel ranks, that count in the
            loss: those of the highest entropy (2506.01939), for grpo.
        entropy_coefficient: Weight of the entropy of the model at the tokens of completions, which is subtracted from
            their losses, so that sampling stays varied, for grpo; summed as objective.loss_type sums losses. 0 for
            none.
        report_entropy: Report the mean entropy of the model at the tokens of completions, for grpo; false saves a pass
            over the logits.
        off_policy_threshold: Mask completions with negative advantage whose mean drop in log-probability per token
            since they were sampled exceeds this, for grpo (2512.02556). null masks none.
        importance_correction: Correction for a mismatch between the trained model and the sampler, for grpo: the loss
            is weighted by the ratio of their probabilities, of each "token" or of a completion as a whole
            ("sequence"), clipped to its limits ("truncate") or 0 outside of them ("mask").
        importance_max: Upper limit of that ratio; null for none.
        importance_min: Lower limit of that ratio; null for none.
    """

    name: Name = option("language_modeling", REPORTED)
    beta: float | None = option(None, REPORTED)
    label_smoothing: float = option(0.0, REPORTED, ("dpo", "simpo"))
    length_normalised: bool = option(False, REPORTED, ("dpo", "hinge"))
    margin: float = option(0.0, REPORTED, ("simpo",))
    center_rewards_coefficient: float = option(0.0, REPORTED, ("reward",))
    desirable_weight: float = option(1.0, REPORTED, ("kto",))
    undesirable_weight: float = option(1.0, REPORTED, ("kto",))
    reference: Reference = option("base", REPORTED)
    reference_sync_steps: int | None = option(None, REPORTED, POLICY_GRADIENT)
    reference_mixup_alpha: float = option(0.6, REPORTED, POLICY_GRADIENT)
    loss_type: PolicyLoss = option("dapo", REPORTED, POLICY_GRADIENT)
    epsilon: float = option(0.2, REPORTED, POLICY_GRADIENT)
    epsilon_high: float | None = option(None, REPORTED, POLICY_GRADIENT)
    delta: float | None = option(None, REPORTED, POLICY_GRADIENT)
    kl_bias_correction: bool = option(True, REPORTED, POLICY_GRADIENT)
    ratio_level: RatioLevel | None = option(None, REPORTED, POLICY_GRADIENT)
    sapo_temperature_pos: float = option(1.0, REPORTED, POLICY_GRADIENT)
    sapo_temperature_neg: float = option(1.05, REPORTED, POLICY_GRADIENT)
    vespo_k_pos: float = option(2.0, REPORTED, POLICY_GRADIENT)
    vespo_lambda_pos: float = option(3.0, REPORTED, POLICY_GRADIENT)
    vespo_k_neg: float = option(3.0, REPORTED, POLICY_GRADIENT)
    vespo_lambda_neg: float = option(2.0, REPORTED, POLICY_GRADIENT)
    scale_rewards: RewardScale = option("group", REPORTED, POLICY_GRADIENT)
    reward_aggregation: RewardAggregation = option("sum_then_normalize", REPORTED, POLICY_GRADIENT)
    mask_truncated: bool = option(False, REPORTED, POLICY_GRADIENT)
    num_iterations: int = option(1, REPORTED, POLICY_GRADIENT)
    top_entropy_quantile: float = option(1.0, REPORTED, POLICY_GRADIENT)
    entropy_coefficient: float = option(0.0, REPORTED, POLICY_GRADIENT)
    report_entropy: bool = option(True, IGNORED, POLICY_GRADIENT)  # a figure
    off_policy_threshold: float | None = option(None, REPORTED, POLICY_GRADIENT)
    importance_correction: ImportanceCorrection = option("none", REPORTED, POLICY_GRADIENT)
    importance_max: float | None = option(3.0, REPORTED, POLICY_GRADIENT)
    importance_min: float | None = option(None, REPORTED, POLICY_GRADIENT)

    def __post_init__(self) -> None:
        require_choices("objective", self)
        if self.name in POLICY_GRADIENT:
            require_not_negative("objective.beta", self.divergence_weight, "use for example 0.04, or 0 for none")
            require(
                self.kl_bias_correction or self.divergence_weight > 0,
                "objective.kl_bias_correction is false and objective.beta is 0, so that there is no divergence to "
                "correct: set objective.beta to for example 0.04, or remove objective.kl_bias_correction.",
            )
        else:
            require_positive("objective.beta", self.preference_strength, "use for example 0.1")
        require(
            0 <= self.label_smoothing < 0.5,
            f"objective.label_smoothing is {self.label_smoothing}, but a share from 0 to below 0.5 is expected: use "
            "for example 0.1, or 0 for none.",
        )
        require_not_negative(
            "objective.center_rewards_coefficient",
            self.center_rewards_coefficient,
            "use for example 0.01, or 0 for none",
        )
        require_positive("objective.desirable_weight", self.desirable_weight, "use for example 1.0")
        require_positive("objective.undesirable_weight", self.undesirable_weight, "use for example 1.0")
        for field in changed(self):
            names = field.metadata["objectives"] or (self.name,)
            require(
                self.name in names,
                f"objective.{field.name} is {getattr(self, field.name)} and objective.name is {self.name}, but it "
                f"belongs to {' and '.join(names)}: remove it, or choose one of these.",
            )
        self._check_reference()
        self._check_clipping()
        self._check_importance()
        self._check_rewards()
        require_at_least("objective.num_iterations", self.num_iterations, 1, "use for example 1")
        require_not_negative(
            "objective.entropy_coefficient", self.entropy_coefficient, "use for example 0.001, or 0 for none"
        )
        require(
            0 <= self.top_entropy_quantile <= 1,
            f"objective.top_entropy_quantile is {self.top_entropy_quantile}, but a share from 0 to 1 is expected: use "
            "for example 0.2, or 1 for all tokens.",
        )

    def _check_reference(self) -> None:
        """Refuses a reference that moves where there is none, or nowhere."""
        require_at_least("objective.reference_sync_steps", self.reference_sync_steps, 1, "use for example 512")
        require(
            0 < self.reference_mixup_alpha <= 1,
            f"objective.reference_mixup_alpha is {self.reference_mixup_alpha}, but a share above 0 and up to 1 is "
            "expected: use for example 0.6, or 1 for a copy.",
        )
        require(
            self.reference_sync_steps is None or self.divergence_weight > 0,
            f"objective.reference_sync_steps is {self.reference_sync_steps} and objective.beta is 0, so that there is "
            "no reference: set objective.beta to for example 0.04, or remove objective.reference_sync_steps.",
        )
        require(
            self.reference_sync_steps is not None or self.reference_mixup_alpha == 0.6,
            f"objective.reference_mixup_alpha is {self.reference_mixup_alpha} and objective.reference_sync_steps is "
            "null, so that the reference never moves: set objective.reference_sync_steps to for example 512, or remove "
            "objective.reference_mixup_alpha.",
        )

    def _check_clipping(self) -> None:
        require_not_negative("objective.epsilon", self.epsilon, "use for example 0.2")
        if self.epsilon_high is not None:
            wanted = require_positive if self.loss_type == "cispo" else require_not_negative
            wanted("objective.epsilon_high", self.epsilon_high, "use for example 0.28")
        self._check_sapo()
        self._check_vespo()
        require(
            self.loss_type not in WITHOUT_LIMITS or not self._has_limits,
            f"objective.loss_type is {self.loss_type}, which has no limits: remove objective.epsilon, "
            "objective.epsilon_high and objective.delta.",
        )
        clips_alone = self.loss_type == "cispo"
        require(
            not clips_alone or self.epsilon_high is not None,
            "objective.loss_type is cispo and objective.epsilon_high is null, but it is the largest importance ratio "
            "of this loss: set objective.epsilon_high to for example 5.0.",
        )
        require(
            not clips_alone or self.epsilon == 0.2,
            f"objective.loss_type is cispo and objective.epsilon is {self.epsilon}, but this loss has no lower limit: "
            "remove it.",
        )
        if self.delta is None:
            return
        require(
            not clips_alone,
            f"objective.loss_type is cispo and objective.delta is {self.delta}, but this loss has one limit, "
            "objective.epsilon_high: remove objective.delta.",
        )
        largest = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        require(
            largest < self.delta,
            f"objective.delta is {self.delta} and importance ratios are clipped at {largest:g}, above which it must "
            f"lie: set objective.delta to for example {2 * largest:g}.",
        )

    def _check_sapo(self) -> None:
        is_sapo, temperatures = self.loss_type == "sapo", (self.sapo_temperature_pos, self.sapo_temperature_neg)
        for name, temperature in zip(("pos", "neg"), temperatures, strict=True):
            require_positive(f"objective.sapo_temperature_{name}", temperature, "use for example 1.0")
        require(
            is_sapo or temperatures == (1.0, 1.05),
            f"objective.loss_type is {self.loss_type} and objective.sapo_temperature_pos and sapo_temperature_neg are "
            f"{temperatures[0]:g} and {temperatures[1]:g}, but they belong to sapo: remove them.",
        )

    @property
    def _has_limits(self) -> bool:
        return any(field.name in _LIMITS for field in changed(self))

    def _check_vespo(self) -> None:
        for field in fields(self):
            if field.name.startswith("vespo_"):
                wanted = require_not_negative if "_k_" in field.name else require_positive
                name, value = f"objective.{field.name}", getattr(self, field.name)
                wanted(name, value, f"use for example {field.default:g}")
                require(
                    self.loss_type == "vespo" or value == field.default,
                    f"{name} is set and objective.loss_type is {self.loss_type}, but it belongs to vespo: remove it.",
                )
        require(
            self.loss_type != "vespo" or not self.importance_correction.startswith("sequence"),
            f"objective.loss_type is vespo and objective.importance_correction is {self.importance_correction}, but "
            "this loss multiplies corrections of single tokens: use token_truncate or token_mask.",
        )

    def _check_rewards(self) -> None:
        require(
            self.reward_aggregation == "sum_then_normalize" or self.scale_rewards == "group",
            f"objective.scale_rewards is {self.scale_rewards} and objective.reward_aggregation is "
            f"{self.reward_aggregation}, which scales each reward by its group's standard deviation: remove one of "
            "them.",
        )
        require_positive("objective.off_policy_threshold", self.off_policy_threshold, "use for example 0.5")

    def _check_importance(self) -> None:
        require(
            self.ratio_level != "token" or self.loss_type not in SEQUENCE_RATIOS,
            f"objective.ratio_level is token and objective.loss_type is {self.loss_type}, whose ratios are of whole "
            "completions: remove it, or set objective.loss_type to grpo.",
        )
        low, high = self.importance_min, self.importance_max
        for name, limit in (("importance_min", low), ("importance_max", high)):
            if limit is not None:
                require_positive(f"objective.{name}", limit, "use for example 3.0, or null for no limit")
        require(
            low is None or high is None or low < high,
            f"objective.importance_min is {low} and objective.importance_max is {high}, which leaves no ratio between "
            "them: set objective.importance_min lower, or to null.",
        )
        require(
            not self.importance_correction.endswith("truncate") or (low, high) != (None, None),
            f"objective.importance_correction is {self.importance_correction} without a limit to truncate at: set "
            "objective.importance_max to for example 3.0.",
        )

    @property
    def preference_strength(self) -> float:
        """objective.beta of the losses of judged answers."""
        return 0.1 if self.beta is None else self.beta

    @property
    def divergence_weight(self) -> float:
        """objective.beta of grpo."""
        return 0.0 if self.beta is None else self.beta

    @property
    def entropy_use(self) -> EntropyUse:
        """What policy gradients take of the entropies of the tokens' distributions."""
        if self.entropy_coefficient > 0:
            return "gradient"
        return "values" if self.report_entropy or self.top_entropy_quantile < 1 else "none"

    @property
    def importance_level(self) -> RatioLevel:
        """objective.ratio_level, or that of the loss."""
        return self.ratio_level or ("sequence" if self.loss_type in SEQUENCE_RATIOS else "token")

    @property
    def limits_ratios(self) -> bool:
        """Whether a limit of the importance ratio was chosen, which matters where old completions are trained on."""
        return self.name in POLICY_GRADIENT and self.loss_type != "cispo" and self._has_limits

    @property
    def kind(self) -> ObjectiveKind:
        """The parts of this objective."""
        return OBJECTIVES[self.name]

    @property
    def compared_with(self) -> Reference | None:
        """The model that the trained one is compared with; None where there is no such model."""
        if self.name in POLICY_GRADIENT:
            has_reference = self.divergence_weight > 0
        else:
            has_reference = self.kind.references is not None
        return self.reference if has_reference else None
