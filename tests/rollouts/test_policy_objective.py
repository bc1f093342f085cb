"""Parts of policy gradients by themselves: advantages, quantiles over ranks, entropies, and options that clash.

Whole losses and gradients are compared with TRL's in `tests/parity/test_trl_grpo.py`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config.lora import LoraOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.objective import ObjectiveOptions
from engine.config.resume_rules import changes
from engine.config.rollout import RolloutOptions
from engine.config.rules import check_config
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.kernels.linear_cross_entropy import LossKernels, Statistics, combine_statistics, linear_cross_entropy
from engine.models.ropes import Rope
from engine.objectives.build import build_objective
from engine.ops.capped_loss import capped_loss
from engine.ops.cross_entropy import cross_entropy
from engine.ops.kernels import REFERENCE
from engine.rollouts.objective.advantages import advantages
from engine.rollouts.objective.policy import PolicyGradient
from engine.rollouts.objective.quantile import quantile

ALONE = Axis("cp")
SMALL: dict[str, Any] = {
    "family": "llama", "hidden": 24, "intermediate": 36, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1,
    "head_dim": 6, "vocab_size": 41, "norm_eps": 1e-5, "ropes": (Rope(theta=1e4),),
}  # fmt: skip


def test_advantages_are_differences_from_the_group() -> None:
    """By hand: two groups of three, in one of which one could not be judged, and one without variance."""
    rewards = [1.0, 2.0, 6.0, 0.5, float("nan"), 1.5, 4.0, 4.0, 4.0]
    deviation = float(np.std([1.0, 2.0, 6.0], ddof=1)), float(np.std([0.5, 1.5], ddof=1))
    found = advantages(rewards, group=3, scale="group")
    expected = [(x - 3) / (deviation[0] + 1e-4) for x in (1, 2, 6)]
    expected += [-0.5 / (deviation[1] + 1e-4), 0.0, 0.5 / (deviation[1] + 1e-4), 0, 0, 0]
    np.testing.assert_allclose(found.of_completions, expected, rtol=1e-6)
    assert found.varies.tolist() == [True, True, False]
    differences = [-2, -1, 3, -0.5, 0, 0.5, 0, 0, 0]
    np.testing.assert_allclose(advantages(rewards, group=3, scale="none").of_completions, differences, rtol=1e-6)
    whole = np.std([x for x in rewards if x == x], ddof=1) + 1e-4
    scaled = advantages(rewards, group=3, scale="batch").of_completions
    np.testing.assert_allclose(scaled, np.array(differences) / whole, rtol=1e-6)
    equal = advantages([0.7 * 1.1 - 0.1] * 3, group=3, scale="group").of_completions  # whose mean is rounded
    assert equal.tolist() == [0, 0, 0]
    nobody = advantages([float("nan")] * 2, group=2, scale="group")
    assert nobody.of_completions.tolist() == [0, 0] and nobody.varies.tolist() == [False]


class Together:
    """A sum over threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self._barrier, self._parts = threading.Barrier(size, timeout=30), [torch.empty(0)] * size

    def of(self, rank: int) -> Any:
        def add(tensor: Tensor) -> Tensor:
            self._parts[rank] = tensor
            self._barrier.wait()
            total = torch.stack(list(self._parts)).sum(dim=0)
            self._barrier.wait()
            return total

        return add


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.83, 1.0])
@pytest.mark.parametrize("sizes", [(1,), (7,), (40, 1, 300), (5, 0)])
def test_quantiles_over_ranks_are_torchs_of_all_numbers(share: float, sizes: tuple[int, ...]) -> None:
    """Bits are compared. Leaving out the last digit, or taking one neighbour for both, fails."""
    generator = torch.Generator().manual_seed(len(sizes))
    parts = [torch.rand(size + 3, generator=generator).pow(6) * 9 for size in sizes]
    for part in parts:
        part[3:6] = part[3:4]  # equal numbers
        part[:3] = 50.0  # padding
    counted = [torch.arange(len(part)) >= 3 for part in parts]
    together, found = Together(len(sizes)), [torch.empty(())] * len(sizes)

    def run(rank: int) -> None:
        found[rank] = quantile(parts[rank], counted[rank], share, together.of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.quantile(torch.cat([part[3:] for part in parts]), share)
    assert all(torch.equal(one, expected) for one in found), (found, expected)


def entropies(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits.double()).entropy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_entropies_are_those_of_the_distribution(dtype: torch.dtype, cap: float | None) -> None:
    """One rank, and two that hold unequal parts of the vocabulary beside one that holds padding alone."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((11, 8), (37, 8)))
    labels = torch.randint(0, 37, (11,), generator=generator)
    labels[4] = -100
    kernels = REFERENCE.loss if cap is None else capped_loss(cap, 1, temperature=0.5)
    logits = (hidden @ weight.t()).double()
    logits = logits if cap is None else cap * torch.tanh(logits.to(dtype).double() / cap) / 0.5
    found = torch.empty(11)
    linear_cross_entropy(hidden, weight, labels, None, kernels, chunk_tokens=4, entropies_T=found)
    tolerance = 1e-5 if dtype == torch.float32 or cap is None else 3e-2  # the cap is taken in the logits' dtype
    torch.testing.assert_close(found.double(), entropies(logits), rtol=tolerance, atol=tolerance)
    again = torch.empty(11)
    cross_entropy(
        hidden @ weight.t(), labels, first_id=0, num_ids=37, axis=ALONE, kernels=_with_loss(kernels), entropies_T=again
    )
    torch.testing.assert_close(again, found)
    torch.testing.assert_close(_of_parts((hidden @ weight.t()), labels, kernels), found, rtol=1e-5, atol=1e-5)


def _with_loss(loss: LossKernels) -> Any:
    return replace(REFERENCE, loss=loss)


def _of_parts(logits: Tensor, labels: Tensor, kernels: LossKernels) -> Tensor:
    """The entropies where the vocabulary is cut in three, one part of which is padding."""
    bounds = (0, 30, 37, 37)
    together, found = [Together(3) for _ in range(2)], [torch.empty(0)] * 3

    def run(rank: int) -> None:
        first, stop = bounds[rank : rank + 2]
        targets = torch.where((labels >= first) & (labels < stop), labels - first, -1)
        local = kernels.shard_statistics(logits[:, first:stop].clone(), targets, with_moment=True)
        assert isinstance(local, Statistics)
        add = together[1].of(rank)

        def largest(maxima: Tensor) -> Tensor:
            parts = together[0]
            parts._parts[rank] = maxima
            parts._barrier.wait()
            return torch.stack(list(parts._parts)).amax(dim=0)

        found[rank] = combine_statistics(local, combine_max=largest, combine_sum=add).entropies()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    return found[0]


def policy_gradient(**options: Any) -> PolicyGradient:
    return PolicyGradient(ObjectiveOptions(name="grpo", **options), RolloutOptions(), cp=ALONE, dp=ALONE)


def test_figures_are_means_over_what_they_are_of() -> None:
    """tokens, completions, clipped low and high, entropy, kl, ratio, difference, weight, g: as a step divides them."""
    sums = [24.0, 4.0, 6.0, 3.0, 48.0, 12.0, 36.0, 2.4, 18.0, 3.0]
    token_level = policy_gradient(beta=0.1, importance_correction="token_mask")
    expected = {
        "clip_low": 0.25, "clip_high": 0.125, "clip_region": 0.375, "entropy": 2.0, "kl": 0.5, "sampler_ratio": 1.5,
        "sampler_difference": 0.1, "importance_weight": 0.75, "length": 6.0, "sampler_ratio_max": 9.0,
        "sampler_difference_max": 2.0,
    }  # fmt: skip
    for count in (24.0, 4.0):
        found = token_level.named([*(one / count for one in sums), 9.0, 2.0])
        assert found == pytest.approx(expected)
    sequences = policy_gradient(loss_type="gspo")
    found = sequences.named([one / 4 for one in [24.0, 4.0, 1.0, 2.0, *sums[4:]]])
    assert (found["clip_low"], found["clip_high"], found["entropy"]) == (0.25, 0.5, 2.0)
    vespo = policy_gradient(loss_type="vespo").named(sums)
    assert vespo["gamma_weight"] == 0.75 and "clip_high" not in vespo and "gamma_weight" not in found
    assert "kl" not in found and "importance_weight" not in found
    assert "clip_low" not in policy_gradient(loss_type="cispo", epsilon_high=5.0).named(sums)
    assert token_level.named([0.0] * len(sums)) == {}


def test_options_reach_the_objective() -> None:
    options = ObjectiveOptions(
        name="grpo", loss_type="gspo", epsilon=3e-4, beta=0.04, importance_correction="token_mask"
    )
    rollout = RolloutOptions(temperature=0.7, max_completion_length=9)
    config = RunConfig(model=ModelOptions(path="x"), objective=options, rollout=rollout)
    built = build_objective(config, cp=ALONE, dp=ALONE)
    assert isinstance(built, PolicyGradient) and built.compares_with_base and built.temperature == 0.7
    assert built.options is options and (options.importance_level, options.divergence_weight) == ("sequence", 0.04)
    assert (built.epsilon_high, built.max_completion_length) == (3e-4, 9)
    assert (built.samples_elsewhere, built.correction) == (True, "token_mask")
    plain = replace(config, objective=ObjectiveOptions(name="grpo"))
    assert not build_objective(plain, cp=ALONE, dp=ALONE).compares_with_base
    assert plain.objective.compared_with is None
    assert ObjectiveOptions(name="dpo").preference_strength == 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": -0.1}, "objective.beta is -0.1"),
        ({"epsilon": -0.1}, "objective.epsilon is -0.1"),
        ({"epsilon_high": -0.1}, "objective.epsilon_high is -0.1"),
        ({"loss_type": "cispo", "epsilon_high": 0.0}, "objective.epsilon_high is 0.0"),
        ({"loss_type": "vespo", "epsilon": 0.3}, "objective.loss_type is vespo, which has no limits"),
        ({"vespo_k_pos": 1.0}, "objective.vespo_k_pos is set and objective.loss_type is dapo"),
        ({"loss_type": "vespo", "vespo_lambda_neg": 0.0}, "objective.vespo_lambda_neg is 0.0"),
        ({"loss_type": "vespo", "importance_correction": "sequence_mask"}, "use token_truncate or token_mask"),
        ({"name": "dpo", "vespo_k_pos": 1.0}, "belongs to grpo"),
        ({"loss_type": "cispo"}, "set objective.epsilon_high to for example 5.0"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, "has no lower limit"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 9.0}, "remove objective.delta"),
        ({"delta": 1.2}, "clipped at 1.2"),
        ({"loss_type": "ppo"}, "objective.loss_type is 'ppo'"),
        ({"num_iterations": 0}, "objective.num_iterations is 0"),
        ({"top_entropy_quantile": 1.5}, "objective.top_entropy_quantile is 1.5"),
        ({"importance_min": 3.0}, "leaves no ratio"),
        ({"importance_max": -1.0}, "objective.importance_max is -1.0"),
        ({"importance_correction": "token_truncate", "importance_max": None}, "without a limit"),
        ({"name": "dpo", "loss_type": "grpo"}, "belongs to grpo"),
        ({"name": "dpo", "num_iterations": 2}, "belongs to grpo"),
        ({"margin": 1.0}, "belongs to simpo"),
    ],
)
def test_options_that_clash_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        ObjectiveOptions(**{"name": "grpo", **options})
    assert words in str(caught.value) and str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("beta", "sections", "words"),
    [
        (0.1, {"trainable": ("*",)}, "would change with training"),
        (0.1, {"lora": LoraOptions(rank=4, init_from="adapter")}, "merge it into the model first"),
        (0.1, {"lora": LoraOptions(rank=0), "trainable": ("*",)}, "trainable is"),
        (0.0, {"memory": MemoryOptions(cuda_graph="layer")}, "memory.cuda_graph"),
    ],
)
def test_runs_that_clash_are_refused(beta: float, sections: dict[str, Any], words: str) -> None:
    config = RunConfig(model=ModelOptions(path="x"), objective=ObjectiveOptions(name="grpo", beta=beta), **sections)
    with pytest.raises(UserError) as caught:
        check_config(config)
    assert words in str(caught.value)


def test_a_beta_that_was_the_default_is_no_change() -> None:
    """Runs from before beta had two defaults wrote 0.1 down."""
    assert changes("objective:\n  beta: 0.1\n", "objective:\n  beta: null\n") == []
    assert [str(one) for one in changes("objective:\n  beta: 0.2\n", "objective:\n  beta: null\n")] == [
        "objective.beta 0.2 -> null"
    ]
