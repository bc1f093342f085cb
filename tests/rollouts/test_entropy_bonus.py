"""The gradient of entropies against torch's autograd, and the bonus as each loss sums it.

Whole trainings with it are compared with TRL's in tests/parity/test_trl_grpo.py.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config.objective import ObjectiveOptions
from engine.config.rollout import RolloutOptions
from engine.distributed.mesh import Axis
from engine.kernels.linear_cross_entropy import LossKernels, linear_cross_entropy
from engine.ops.capped_loss import capped_loss
from engine.ops.cross_entropy import losses_and_entropies
from engine.ops.kernels import REFERENCE
from engine.rollouts.batch_parts import Completions
from engine.rollouts.objective.policy import PolicyGradient

ALONE = Axis("tp")
VOCABULARY = 37
CAP, TEMPERATURE = 3.0, 0.5


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight, and labels; one token has none. One logit is so low that it has no part."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((11, 8), (VOCABULARY, 8)))
    labels = torch.randint(0, VOCABULARY, (11,), generator=generator)
    labels[4] = -100
    return hidden, weight, labels


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, factors: Tensor, capped: bool) -> tuple[Tensor, Tensor]:
    """The gradients of sum(factor * H) and of the sum of losses, by autograd in fp64."""
    x = hidden.double().requires_grad_()
    logits = x @ weight.double().t()
    logits = CAP * torch.tanh(logits / CAP) / TEMPERATURE if capped else logits
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return (
        torch.autograd.grad((factors.double() * entropies).sum(), x, retain_graph=True)[0],
        torch.autograd.grad(losses, x)[0],
    )


def kernels_of(capped: bool) -> LossKernels:
    return capped_loss(CAP, 1, temperature=TEMPERATURE) if capped else REFERENCE.loss


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_under_a_frozen_head(dtype: torch.dtype, capped: bool) -> None:
    hidden, weight, labels = drawn(dtype)
    entropies, gradient = torch.empty(11), torch.full_like(hidden, float("nan"))
    _, own = linear_cross_entropy(
        hidden, weight, labels, torch.ones(11), kernels_of(capped), chunk_tokens=4, entropies_T=entropies,
        entropy_dhidden_TH=gradient,
    )  # fmt: skip
    wanted, losses = expected(hidden, weight, labels, torch.ones(11), capped)
    tolerance = 2e-6 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(gradient.double(), wanted, rtol=tolerance, atol=tolerance * 4)
    assert own is not None
    torch.testing.assert_close(own.double(), losses, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("capped", [False, True])
def test_parts_of_the_vocabulary_add_up(capped: bool) -> None:
    """Two ranks that hold unequal parts, beside one that holds padding alone."""
    hidden, weight, labels = drawn(torch.float32)
    parts, barrier, results = ((0, 20), (20, 17), (37, 0)), threading.Barrier(3), {}
    shared: dict[int, Tensor] = {}

    def combine(rank: int, largest: bool, values: Tensor) -> Tensor:
        shared[rank] = values
        barrier.wait()
        found = torch.stack([shared[place] for place in range(3)])
        whole = found.amax(0) if largest else found.sum(0)
        barrier.wait()
        return whole

    def run(rank: int) -> None:
        first, count = parts[rank]
        gradient = torch.full_like(hidden, float("nan"))
        linear_cross_entropy(
            hidden, weight[first : first + count], labels, None, kernels_of(capped), first_id=first, chunk_tokens=4,
            combine_max=partial(combine, rank, True), combine_sum=partial(combine, rank, False),
            entropies_T=torch.empty(11), entropy_dhidden_TH=gradient,
        )  # fmt: skip
        results[rank] = gradient

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted, _ = expected(hidden, weight, labels, torch.ones(11), capped)
    torch.testing.assert_close(sum(results.values()).double(), wanted, rtol=2e-6, atol=8e-6)


@pytest.mark.parametrize("capped", [False, True])
def test_the_gradient_of_logits_that_are_kept(capped: bool) -> None:
    """As of a head that trains: losses and entropies together, with padding behind the vocabulary."""
    hidden, weight, labels = drawn(torch.float32)
    factors = torch.linspace(-1, 2, 11)
    x = hidden.clone().requires_grad_()
    logits = torch.nn.functional.pad(x @ weight.t(), (0, 3), value=5.0)
    kernels: Any = replace(REFERENCE, loss=kernels_of(capped))
    losses, entropies = losses_and_entropies(
        logits, labels, first_id=0, num_ids=VOCABULARY, axis=ALONE, kernels=kernels
    )
    (losses.sum() + (factors * entropies).sum()).backward()
    wanted = sum(expected(hidden, weight, labels, factors, capped))
    assert x.grad is not None and isinstance(wanted, Tensor)
    torch.testing.assert_close(x.grad.double(), wanted, rtol=2e-6, atol=8e-6)


def test_a_token_without_part_in_the_distribution() -> None:
    """Logits of -inf, and those so low that their probability is 0, have the gradient 0 and not NaN."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -3e4]])
    maximum, total = logits.amax(-1), (logits - logits.amax(-1, keepdim=True)).exp().sum(-1)
    entropy = torch.distributions.Categorical(logits=logits[:, :2]).entropy()
    found = REFERENCE.loss.entropy_gradient(logits, maximum, total, entropy, torch.ones(1))
    assert found[0, 2:].tolist() == [0.0, 0.0] and torch.isfinite(found).all()


SHARES = {
    "dapo": lambda lengths: torch.ones_like(lengths),
    "grpo": lambda lengths: 1 / lengths,
    "dr_grpo": lambda lengths: torch.full_like(lengths, 1 / 9),
    "luspo": lambda lengths: torch.ones_like(lengths),
    "bnpo": lambda lengths: torch.full_like(lengths, len(lengths) / float(lengths.sum())),
}


def micro_batch() -> tuple[Any, Tensor, Tensor]:
    """Two completions of three and of two tokens between tokens without a target; their lengths, and the completion of
    each token, -1 for none."""
    completion_of = torch.tensor([-1, 0, 0, 0, -1, -1, 1, 1, -1])
    lengths = torch.tensor([3.0, 2.0])
    part = Completions(
        ids_BS=completion_of.clamp(min=0)[None], advantages=torch.tensor([1.0, -1.0]), lengths=lengths,
        documents=(0, 1), sampled_logps_BS=torch.zeros(1, 9),
    )  # fmt: skip
    batch = SimpleNamespace(loss_weights_BS=(completion_of >= 0).float()[None], part=lambda kind: part)
    return batch, lengths, completion_of


@pytest.mark.parametrize("loss_type", SHARES)
def test_each_loss_sums_the_bonus_as_its_own_terms(loss_type: str) -> None:
    """The difference that a coefficient makes, and its gradient, from the lengths of the completions alone."""
    batch, lengths, completion_of = micro_batch()
    rollout = RolloutOptions(max_completion_length=9)
    losses = torch.linspace(1, 3, len(completion_of))
    entropies = torch.linspace(0.5, 2.5, len(completion_of)).requires_grad_()
    found = {}
    for coefficient in (0.0, 0.3):
        options: Any = {"loss_type": loss_type, "entropy_coefficient": coefficient}
        objective = PolicyGradient(ObjectiveOptions(name="grpo", **options), rollout, cp=ALONE, dp=ALONE)
        given = entropies if coefficient else entropies.detach()
        found[coefficient] = objective.sums(losses, batch, None, None, given).loss
    share = SHARES[loss_type](lengths)
    factors = torch.where(completion_of >= 0, share[completion_of.clamp(min=0)], 0.0)
    bonus = float((factors * entropies).sum().detach())
    assert float((found[0.3] - found[0.0]).detach()) == pytest.approx(-0.3 * bonus, rel=1e-5)
    found[0.3].backward()
    torch.testing.assert_close(entropies.grad, -0.3 * factors)
