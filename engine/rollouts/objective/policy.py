"""Policy gradients from groups of completions (GRPO, arXiv 2402.03300), and the losses that grew out of it.

With p the log-probability of a completion's token under the model that is trained, p_old that under the model which the
generation batch began with, and A the advantage of the completion, to which teachers add one of the token, the ratio r
and the loss of a token are

    r = exp(p - p_old),   l = -min(min(r, d) A, clip(r, 1 - e, 1 + e_high) A) + b k,
    k = (exp(p_ref - p) - (p_ref - p) - 1) r

with e, e_high, d and b the options' epsilon, epsilon_high, delta and beta. From l is subtracted a multiple of the
entropy of the whole distribution at the token, where the option says so, of those tokens that the first term counts
at whose entropies are among the highest. k estimates the divergence from the
reference (k3 of http://joschu.net/blog/kl-approx.html); its ratio is the bias correction. Where the batch brings no
p_old it is p itself, without gradient. With n the target tokens of a completion, and sums over the global batch:

| loss    | of the step                                                         | paper            |
|---------|---------------------------------------------------------------------|------------------|
| dapo    | sum l / sum n                                                       | arXiv 2503.14476 |
| grpo    | sum (l / n) / completions                                           | arXiv 2402.03300 |
| bnpo    | mean over completions of (sum l / sum n) of their micro-batch       | TRL              |
| dr_grpo | sum l / (completions * maximum length)                              | arXiv 2503.20783 |
| cispo   | as dapo, with l = -min(r, e_high) A p + b k, no gradient through r  | arXiv 2506.13585 |
| gspo    | as grpo, with r = exp(mean of p - p_old over the completion)        | arXiv 2507.18071 |
| luspo   | sum l / completions, with the ratio of gspo                         | arXiv 2602.05261 |
| sapo    | as grpo, with l = -4 s(t (r - 1)) A / t + b k, s the sigmoid        | arXiv 2511.20347 |
| vespo   | as dapo, with l = -g A p + b k, no gradient through g               | arXiv 2602.10693 |

t is the option's temperature for A > 0, or the other. g = u^c exp(a (1 - u)) for the ratio u = exp(sum of p - p_old)
of the whole completion, with c and a the options' pair for A >= 0, or the other. Any loss may have the ratio of gspo.
The first term of l may count only where the entropy of the distribution is among the highest (2506.01939), and in
completions with A >= 0 or from which the model is not far (the mean of p_old - p is at most the threshold, 2512.02556;
of p_sampled - p where another program samples). It may be weighed with w = exp(p_old - p_sampled), which corrects for a
sampler that is not the trainer: of each token or of the whole completion, cut off at limits, or 0 outside of them
(fengyao.notion.site/off-policy-rl). vespo has w in u instead.

Legend: T tokens held here, N completions of the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.choices import PolicyLoss
from engine.config.objective import ObjectiveOptions
from engine.config.rollout import RolloutOptions
from engine.config.run import RunConfig
from engine.distillation.objective import Distillation
from engine.distributed.collectives import all_reduce
from engine.distributed.differentiable import reduce_from_all
from engine.distributed.mesh import Axis
from engine.objectives.objective import Objective, ObjectiveSums
from engine.rollouts.batch_parts import Completions
from engine.rollouts.data.completions import RowWeight
from engine.rollouts.objective.quantile import quantile

DIVIDED_BY_TOKENS: tuple[PolicyLoss, ...] = ("dapo", "cispo", "vespo")
_FARTHEST, _NEVER = 20.0, math.log(1e-8)
"""Limits of the logarithm of a ratio of vespo: of each token, and of the factors that are multiplied together."""


def row_weight(loss: PolicyLoss) -> RowWeight:
    """Returns the weight of a row of completions in the loss: the divisor of the sums of `PolicyGradient`."""
    return "tokens" if loss in DIVIDED_BY_TOKENS else "completions"


class _Spread(torch.autograd.Function):
    """A number of each completion at its tokens; its gradient is summed over the tokens of all context ranks."""

    @staticmethod
    def forward(ctx: Any, of_N: Tensor, tokens: _Tokens) -> Tensor:
        ctx.tokens, ctx.count = tokens, of_N.shape[0]
        return tokens.each(of_N)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None]:
        tokens: _Tokens = ctx.tokens
        return all_reduce(tokens.held_sums(gradient_T, ctx.count), tokens.cp), None


class _Tokens(NamedTuple):
    """The completion that each token belongs to.

    Args:
        ids_T: int64 number of the completion.
        weights_T: fp32, 1 where the token has a target and 0 elsewhere.
        lengths: fp32 [N], target tokens of each, at least 1.
        cp: over whose ranks the tokens of each row are split.
    """

    ids_T: Tensor
    weights_T: Tensor
    lengths: Tensor
    cp: Axis

    @classmethod
    def of(cls, batch: Batch, completions: Completions, cp: Axis) -> _Tokens:
        ids_T, weights_T = completions.ids_BS.flatten(), batch.loss_weights_BS.flatten()
        return cls(ids_T, weights_T, completions.lengths.clamp(min=1.0), cp)

    def each(self, of_N: Tensor) -> Tensor:
        """Returns at each token the value of its completion, without gradient; 0 where there are no completions."""
        return of_N[self.ids_T] if len(of_N) else torch.zeros_like(self.weights_T)

    def held_sums(self, values_T: Tensor, count: int) -> Tensor:
        """Returns the sum over each completion's tokens that are held here, [N]."""
        numbers = torch.arange(count, device=values_T.device)
        # no atomic additions: the same bits in every run
        return torch.where(self.ids_T == numbers[:, None], values_T, 0.0).sum(dim=1)

    def sums(self, values_T: Tensor) -> Tensor:
        """Returns the sum over each completion's target tokens in the whole row, [N]; differentiable."""
        return reduce_from_all(self.held_sums(values_T * self.weights_T, len(self.lengths)), self.cp)

    def mean_of_each(self, values_T: Tensor) -> Tensor:
        """Returns at each token the mean over its completion's target tokens; differentiable."""
        spread: Tensor = _Spread.apply(self.sums(values_T) / self.lengths, self)
        return spread


class PolicyGradient:
    """A policy-gradient objective.

    Args:
        options: the loss and its constants.
        rollout: how the completions were sampled.
        cp: over whose ranks the tokens of each row are split.
        dp: over whose ranks the global batch is split.
    """

    metrics: tuple[str, ...] = (
        "tokens",
        "completions",
        "clip_low",
        "clip_high",
        "entropy",
        "kl",
        "sampler_ratio",
        "sampler_difference",
        "importance_weight",
        "gamma_weight",
    )
    """Sums over target tokens; sums over completions for their number, for clipped ratios of whole completions and
    for g; see `named`."""
    maxima: tuple[str, ...] = ("sampler_ratio_max", "sampler_difference_max")
    shown: tuple[str, ...] = ("kl", "entropy", "length")
    loss_at_chance: float | None = None
    baseline = None
    head_loss = None

    def __init__(self, options: ObjectiveOptions, rollout: RolloutOptions, *, cp: Axis, dp: Axis) -> None:
        self.options, self.temperature = options, rollout.temperature
        self.epsilon_high = options.epsilon if options.epsilon_high is None else options.epsilon_high
        self.correction = options.importance_correction
        """The kind of w."""
        if self.correction == "none" and rollout.corrects_sampler:
            self.correction = "token_truncate"
        self.samples_elsewhere = rollout.server is not None or self.correction != "none"
        """Whether p_sampled, not p_old, measures the distance of the model from a completion."""
        self.max_completion_length = rollout.max_completion_length
        self.entropy_use = options.entropy_use
        self._by_sequence = options.importance_level == "sequence"
        self._cp, self._dp = cp, dp

    @property
    def compares_with_base(self) -> bool:
        """Whether there is a divergence from the model without adapters."""
        return self.options.divergence_weight > 0

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns the log-probability of each label, fp32 [T]."""
        return -token_losses_T

    def sums(
        self,
        token_losses_T: Tensor,
        batch: Batch,
        reference: Tensor | None,
        baseline: Tensor | None = None,
        entropies_T: Tensor | None = None,
    ) -> ObjectiveSums:
        """Returns a micro-batch's sums; see engine.objectives.objective.Objective."""
        options, completions = self.options, batch.part(Completions)
        assert completions is not None and (entropies_T is None) == (self.entropy_use == "none"), "see entropy_use"
        bonus_T, entropies_T = entropies_T, None if entropies_T is None else entropies_T.detach()
        tokens, logps_T = _Tokens.of(batch, completions, self._cp), -token_losses_T
        old_T = logps_T.detach() if completions.old_logps_BS is None else completions.old_logps_BS.flatten()
        log_ratio_T = (logps_T - old_T) * tokens.weights_T
        ratio_T = (tokens.mean_of_each(log_ratio_T) if self._by_sequence else log_ratio_T).exp()
        advantages_T = tokens.each(completions.advantages)
        if completions.token_advantages_BS is not None:
            advantages_T = advantages_T + completions.token_advantages_BS.flatten()

        sampled_T = completions.sampled_logps_BS.flatten()
        # a sampler may not have reported a token's log-probability
        difference_T = (old_T - sampled_T).nan_to_num(nan=0.0) * tokens.weights_T
        weight_T = self._importance_weight(difference_T, tokens)
        gammas = None
        if options.loss_type == "vespo":
            gammas = self._gammas(log_ratio_T.detach(), weight_T, completions.advantages, tokens)
            losses_T = -tokens.each(gammas) * advantages_T * logps_T
        else:
            losses_T = self._surrogate(ratio_T, logps_T, advantages_T)
        if entropies_T is not None and options.top_entropy_quantile < 1.0:
            least_sure_T = self._least_sure(entropies_T, tokens.weights_T > 0)
            losses_T = losses_T * least_sure_T
            bonus_T = None if bonus_T is None else bonus_T * least_sure_T
        if options.off_policy_threshold is not None:
            before_T = sampled_T if self.samples_elsewhere else old_T
            away_T = (before_T - logps_T.detach()).nan_to_num(nan=0.0)
            losses_T = losses_T * self._on_policy(away_T, advantages_T, tokens)
        if weight_T is not None and gammas is None:
            losses_T = losses_T * weight_T
        divergence_T = None
        if options.divergence_weight:
            known = completions.reference_logps_BS
            reference = known.flatten() if reference is None and known is not None else reference
            assert reference is not None, "an objective with a reference got none"
            away_T = (reference - logps_T) * tokens.weights_T
            divergence_T = away_T.exp() - away_T - 1.0
            if options.kl_bias_correction:
                divergence_T = divergence_T * ratio_T
            losses_T = losses_T + options.divergence_weight * divergence_T
        if bonus_T is not None and options.entropy_coefficient:
            losses_T = losses_T - options.entropy_coefficient * bonus_T

        loss = (losses_T * self._shares(tokens, completions)).sum()
        figures = self._figures(
            tokens, ratio_T, advantages_T, entropies_T, divergence_T, difference_T, weight_T, gammas
        )
        held = tokens.weights_T > 0
        outliers = (difference_T.exp(), difference_T.abs())
        maxima = torch.stack([torch.where(held, one_T, -torch.inf).max() for one_T in outliers])
        return ObjectiveSums(loss, torch.cat((loss[None], figures)).detach(), maxima)

    def _surrogate(self, ratio_T: Tensor, logps_T: Tensor, advantages_T: Tensor) -> Tensor:
        """Returns the first term of l."""
        options = self.options
        if options.loss_type == "cispo":
            return -ratio_T.detach().clamp(max=self.epsilon_high) * advantages_T * logps_T
        if options.loss_type == "sapo":
            temperatures_T = torch.where(advantages_T > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
            return -(temperatures_T * (ratio_T - 1)).sigmoid() * 4 / temperatures_T * advantages_T
        clipped_T = ratio_T.clamp(1 - options.epsilon, 1 + self.epsilon_high)
        if options.delta is not None:
            ratio_T = ratio_T.clamp(max=options.delta)
        return -torch.min(ratio_T * advantages_T, clipped_T * advantages_T)

    def _gammas(self, log_ratio_T: Tensor, weight_T: Tensor | None, advantages: Tensor, tokens: _Tokens) -> Tensor:
        """Returns g of each completion, fp32 [N] without gradient.

        Args:
            log_ratio_T: p - p_old.
            weight_T: w, of each token; None where nothing is corrected.
            advantages: of the completions.
        """
        logs_T = log_ratio_T.clamp(-_FARTHEST, _FARTHEST)
        if weight_T is not None:
            logs_T = logs_T + weight_T.log().clamp(_NEVER, _FARTHEST)
        sums = all_reduce(tokens.held_sums(logs_T * tokens.weights_T, len(tokens.lengths)), self._cp)
        log_ratios = sums.clamp(_NEVER, _FARTHEST)
        options = self.options
        powers = torch.where(advantages >= 0, options.vespo_k_pos, options.vespo_k_neg)
        decays = torch.where(advantages >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg)
        # as in TRL, values too large for fp32 count as nothing
        return (powers * log_ratios + decays * (1 - log_ratios.exp())).exp().nan_to_num(posinf=0.0)

    def _least_sure(self, entropies_T: Tensor, held_T: Tensor) -> Tensor:
        """Returns a mask of the tokens with the highest entropies of this micro-batch on all data-parallel ranks."""

        def add(tensor: Tensor) -> Tensor:
            return all_reduce(all_reduce(tensor.contiguous(), self._cp), self._dp)

        return entropies_T >= quantile(entropies_T, held_T, 1 - self.options.top_entropy_quantile, add)

    def _on_policy(self, away_T: Tensor, advantages_T: Tensor, tokens: _Tokens) -> Tensor:
        """Returns a mask of the tokens of completions that are not worse than their group, or near the model.

        Args:
            away_T: log-probability of a token when it was sampled, minus the current one.
        """
        sums = all_reduce(tokens.held_sums(away_T * tokens.weights_T, len(tokens.lengths)), self._cp)
        assert self.options.off_policy_threshold is not None
        near = sums / tokens.lengths <= self.options.off_policy_threshold
        return (advantages_T >= 0) | (tokens.each(near.float()) > 0)

    def _importance_weight(self, difference_T: Tensor, tokens: _Tokens) -> Tensor | None:
        """Returns w for `difference_T`, p_old - p_sampled; None where nothing is corrected."""
        if self.correction == "none":
            return None
        level, kind = self.correction.split("_")
        differences = difference_T
        if level == "sequence":
            differences = all_reduce(tokens.held_sums(difference_T, len(tokens.lengths)), self._cp)
        low, high = self.options.importance_min, self.options.importance_max
        weights = differences.exp()
        if kind == "truncate":
            weights = weights.clamp(low, high)
        else:
            outside = torch.zeros_like(weights, dtype=torch.bool)
            if low is not None:
                outside |= weights < low
            if high is not None:
                outside |= weights > high
            weights = weights.masked_fill(outside, 0.0)
        return tokens.each(weights) if level == "sequence" else weights

    def _shares(self, tokens: _Tokens, completions: Completions) -> Tensor:
        """Returns the factor of each token's loss, before the sum is divided as `row_weight` says."""
        weights_T, options = tokens.weights_T, self.options
        if options.loss_type in ("grpo", "gspo", "sapo"):
            # padding has any number; its weight is 0
            return weights_T / tokens.each(tokens.lengths).clamp(min=1.0)
        if options.loss_type == "bnpo":
            return weights_T * (len(tokens.lengths) / completions.lengths.sum().clamp(min=1.0))
        return weights_T / self.max_completion_length if options.loss_type == "dr_grpo" else weights_T

    @torch.no_grad()
    def _figures(
        self,
        tokens: _Tokens,
        ratio_T: Tensor,
        advantages_T: Tensor,
        entropies_T: Tensor | None,
        divergence_T: Tensor | None,
        difference_T: Tensor,
        weight_T: Tensor | None,
        gammas: Tensor | None,
    ) -> Tensor:
        """Returns fp32 [metrics], in their order."""
        options, weights_T = self.options, tokens.weights_T
        low_T = (ratio_T < 1 - options.epsilon) & (advantages_T < 0)
        high_T = (ratio_T > (0 if options.loss_type == "cispo" else 1) + self.epsilon_high) & (advantages_T > 0)
        ratios_T = weights_T
        if self._by_sequence:
            ratios_T = weights_T / tokens.each(tokens.lengths).clamp(min=1.0)
        nothing_T = torch.zeros_like(weights_T)
        columns = (
            weights_T,
            low_T * ratios_T,
            high_T * ratios_T,
            nothing_T if entropies_T is None else entropies_T * weights_T,
            nothing_T if divergence_T is None else divergence_T * weights_T,
            difference_T.exp() * weights_T,
            difference_T.abs(),
            nothing_T if weight_T is None else weight_T * weights_T,
        )
        found = torch.stack(columns).sum(dim=1)
        # all ranks of a row have the same completions
        completions = torch.full_like(found[:1], len(tokens.lengths) / self._cp.size)
        gamma = torch.zeros_like(completions) if gammas is None else gammas.sum()[None] / self._cp.size
        return torch.cat((found[:1], completions, found[1:], gamma))

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Returns the figures to report: means over the target tokens of the global batch, and the largest of them.

        Args:
            means: of each of `metrics`, over the global batch, and behind them each of `maxima`.
        """
        tokens, completions, *sums = means[: len(self.metrics)]
        if not tokens:
            return {}
        figures = dict(zip(self.metrics[2:], (one / tokens for one in sums), strict=True))
        if self._by_sequence:
            figures |= {name: figures[name] * tokens / completions for name in ("clip_low", "clip_high")}
        figures["clip_region"] = figures["clip_low"] + figures["clip_high"]
        figures["gamma_weight"] *= tokens / completions
        if self.options.loss_type in ("cispo", "sapo", "vespo"):
            del figures["clip_low"], figures["clip_region"]
        if self.options.loss_type in ("sapo", "vespo"):
            del figures["clip_high"]
        if self.options.loss_type != "vespo":
            del figures["gamma_weight"]
        if not self.options.report_entropy:
            del figures["entropy"]
        if not self.options.divergence_weight:
            del figures["kl"]
        if self.correction == "none":
            del figures["importance_weight"]
        largest = dict(zip(self.maxima, means[len(self.metrics) :], strict=False))
        return {**figures, **largest, "length": tokens / completions}


def build_policy_gradient(config: RunConfig, *, cp: Axis, dp: Axis) -> Objective:
    """Returns the objective of a configuration, a policy gradient or the divergence from whole distributions; see
    `engine.objectives.build.build_objective`."""
    if config.distillation.whole:
        return Distillation(config.distillation)
    return PolicyGradient(config.objective, config.rollout, cp=cp, dp=dp)
