"""What is minimised: losses of answers against TRL's own functions and arithmetic by hand, gradients by finite
differences, rows in which answers lie mixed with padding, and the warning of a loss that does not move.

TRL's functions are called on a stand-in for their trainer that holds the constants they read.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.config.model import ModelOptions
from engine.config.objective import ObjectiveOptions
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.objectives.build import build_objective
from engine.objectives.language_modeling import LanguageModeling
from engine.objectives.objective import Objective
from engine.objectives.stuck import REPORTS, StuckLoss
from engine.preferences.batch_parts import Answers
from engine.preferences.objectives.kto import Kto
from engine.preferences.objectives.preference import Preference

ALONE = Axis("cp")
LOSSES = ("sigmoid", "ipo", "hinge", "orpo", "simpo")
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")

LENGTHS = (3, 5, 1, 4)
"""Target tokens of the answers of two pairs, which lie in two rows."""
ROWS = (((2, 3), (1, 5)), ((4, 1), (2, 4)))
"""Rows of answers: tokens of the question, tokens of the answer."""
WIDTH = 14


def make_batch(*, dtype: torch.dtype = torch.float32, reference: bool = True) -> tuple[Tensor, Batch]:
    """Token losses, none of them 0, also where there is no target; the batch of two rows with padding behind."""
    generator = torch.Generator().manual_seed(5)
    ids, weights = torch.zeros(2, WIDTH, dtype=torch.int64), torch.zeros(2, WIDTH)
    number = 0
    for row, answers in enumerate(ROWS):
        column = 0
        for question, answer in answers:
            ids[row, column : column + question + answer] = number
            weights[row, column + question - 1 : column + question + answer - 1] = 1.0
            column += question + answer
            number += 1
    losses = torch.rand(2 * WIDTH, generator=generator, dtype=dtype) * 2 + 0.05
    logps = -torch.rand(4, generator=generator, dtype=dtype) * 5
    nothing = torch.zeros(2, WIDTH, dtype=torch.int64)
    answers = Answers(
        ids_BS=ids,
        signs=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        lengths=torch.tensor(LENGTHS, dtype=torch.float32),
        documents=(0, 1, 2, 3),
        reference_logps=logps if reference else None,
    )
    batch = Batch(
        tokens_BS=nothing, labels_BS=nothing, positions_BS=nothing, token_index_BS=nothing, loss_weights_BS=weights,
        document_offsets=torch.tensor([0, WIDTH, 2 * WIDTH]), document_lengths=(WIDTH, WIDTH), parts=(answers,),
    )  # fmt: skip
    return losses, batch


def logps_by_hand(losses: Tensor) -> Tensor:
    """[4], the spans of the answers written down."""
    second = losses[WIDTH:]
    spans = (losses[1:4], losses[5:10], second[3:4], second[6:10])
    assert tuple(map(len, spans)) == LENGTHS
    return torch.stack([-span.sum() for span in spans])


def preference(loss: str, **settings: Any) -> Preference:
    name: Any = "dpo" if loss == "sigmoid" else loss
    return Preference(ObjectiveOptions(name=name, **settings), cp=ALONE)


def kto(**settings: Any) -> Kto:
    return Kto(ObjectiveOptions(name="kto", **settings), cp=ALONE, dp=ALONE)


def sums_of(objective: Objective, losses: Tensor, batch: Batch, baseline: Tensor | None = None) -> tuple[Tensor, dict]:
    found = objective.sums(losses, batch, None, baseline)
    figures = found.figures.tolist()
    count = 4 if isinstance(objective, Kto) else 2
    assert figures[0] == pytest.approx(found.loss.item())
    return found.loss, objective.named([value / count for value in figures[1:]])


def test_log_likelihoods_are_those_of_the_answers_tokens() -> None:
    losses, batch = make_batch()
    torch.testing.assert_close(preference("sigmoid").reference(losses, batch), logps_by_hand(losses))


def by_hand(loss: str, logps: Tensor, reference: Tensor, beta: float, e: float, margin: float, mean: bool) -> Tensor:
    """[2], the formulas of the papers, without what makes them stable."""
    lengths = torch.tensor(LENGTHS)
    ratios = logps - reference
    if mean or loss == "ipo":
        ratios = ratios / lengths
    d = ratios[::2] - ratios[1::2]
    p = (logps / lengths).exp()
    odds = p / (1 - p)
    sigmoid = torch.sigmoid
    if loss == "sigmoid":
        return -(1 - e) * sigmoid(beta * d).log() - e * sigmoid(-beta * d).log()
    if loss == "ipo":
        return (d - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        return (1 - beta * d).clamp(min=0)
    if loss == "orpo":
        return -p[::2].log() - beta * sigmoid((odds[::2] / odds[1::2]).log()).log()
    m = beta * (p[::2].log() - p[1::2].log()) - margin
    return -(1 - e) * sigmoid(m).log() - e * sigmoid(-m).log()


VARIANTS: list[dict[str, Any]] = [
    {"loss": "sigmoid", "beta": 0.3},
    {"loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.2},
    {"loss": "sigmoid", "beta": 2.0, "length_normalised": True},
    {"loss": "ipo", "beta": 0.4},
    {"loss": "hinge", "beta": 0.7},
    {"loss": "hinge", "beta": 0.7, "length_normalised": True},
    {"loss": "orpo", "beta": 0.3},
    {"loss": "simpo", "beta": 2.0, "margin": 0.5},
    {"loss": "simpo", "beta": 2.0, "margin": 0.5, "label_smoothing": 0.1},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_losses_and_rewards_by_hand(settings: dict[str, Any]) -> None:
    losses, batch = make_batch()
    assert batch.part(Answers) is not None and batch.part(Answers).reference_logps is not None
    reference, logps = batch.part(Answers).reference_logps, logps_by_hand(losses)
    loss, figures = sums_of(preference(**settings), losses, batch)
    name, beta, mean = settings["loss"], settings["beta"], settings.get("length_normalised", False)
    smoothing, margin = settings.get("label_smoothing", 0.0), settings.get("margin", 0.0)
    expected = by_hand(name, logps, reference, beta, smoothing, margin, mean)
    torch.testing.assert_close(loss, expected.sum(), rtol=1e-5, atol=1e-6)
    scores = logps if name in ("orpo", "simpo") else logps - reference
    if mean or name in ("ipo", "orpo", "simpo"):
        scores = scores / torch.tensor(LENGTHS)
    rewards = beta * scores
    assert figures["reward_chosen"] == pytest.approx(rewards[::2].mean().item(), rel=1e-5)
    assert figures["reward_rejected"] == pytest.approx(rewards[1::2].mean().item(), rel=1e-5)
    assert figures["margin"] == pytest.approx((rewards[::2] - rewards[1::2]).mean().item(), rel=1e-4)
    assert figures["accuracy"] == (rewards[::2] > rewards[1::2]).float().mean().item()
    assert figures["logp_rejected"] == pytest.approx(logps[1::2].mean().item(), rel=1e-5)


@needs_trl
def test_odds_ratios_are_those_of_trl() -> None:
    from trl.experimental.orpo import ORPOTrainer

    losses, batch = make_batch()
    means = logps_by_hand(losses) / torch.tensor(LENGTHS)
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    ratios, chosen, rejected, *_ = ORPOTrainer.odds_ratio_loss(trainer, means[::2], means[1::2])
    loss, figures = sums_of(preference("orpo", beta=0.3), losses, batch)
    torch.testing.assert_close(loss, (-means[::2] - ratios).sum())
    assert figures["reward_chosen"] == pytest.approx(chosen.mean().item(), rel=1e-5)
    assert figures["reward_rejected"] == pytest.approx(rejected.mean().item(), rel=1e-5)


@needs_trl
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_is_that_of_trl(smoothing: float) -> None:
    from trl.experimental.cpo import CPOTrainer

    losses, batch = make_batch()
    means = logps_by_hand(losses) / torch.tensor(LENGTHS)
    trainer = SimpleNamespace(
        beta=2.0, simpo_gamma=0.5, label_smoothing=smoothing, alpha=0.0, loss_type="simpo",
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    expected, chosen, rejected = CPOTrainer.cpo_loss(trainer, means[::2], means[1::2])
    loss, figures = sums_of(preference("simpo", beta=2.0, margin=0.5, label_smoothing=smoothing), losses, batch)
    torch.testing.assert_close(loss, expected.sum())
    assert figures["margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-5)


def test_kto_by_hand() -> None:
    losses, batch = make_batch()
    assert batch.part(Answers) is not None and batch.part(Answers).reference_logps is not None
    objective = kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    logps = logps_by_hand(losses)
    ratios = logps - batch.part(Answers).reference_logps
    policy = torch.tensor([-3.0, -2.0, -4.0, -1.0])
    sums = objective.baseline.sums(batch, policy, torch.tensor([-4.0, -3.0, -3.0, -3.0]))
    baseline = objective.baseline.of(sums)
    assert baseline.item() == pytest.approx((1 + 1 - 1 + 2) / 4)
    loss, figures = sums_of(objective, losses, batch, baseline)
    liked = 1.5 * (1 - torch.sigmoid(0.3 * (ratios[::2] - 0.75)))
    disliked = 0.5 * (1 - torch.sigmoid(0.3 * (0.75 - ratios[1::2])))
    torch.testing.assert_close(loss, liked.sum() + disliked.sum())
    assert figures["kl"] == pytest.approx(0.75) and figures["desirable"] == 0.5
    assert figures["reward_desirable"] == pytest.approx(0.3 * ratios[::2].mean().item(), rel=1e-5)
    assert figures["logp_undesirable"] == pytest.approx(logps[1::2].mean().item(), rel=1e-5)
    assert figures["margin"] == pytest.approx(figures["reward_desirable"] - figures["reward_undesirable"])


def test_a_model_that_moved_away_from_all_answers_has_no_divergence() -> None:
    objective = kto()
    _, batch = make_batch()
    assert objective.baseline.of(objective.baseline.sums(batch, torch.zeros(4) - 9, torch.zeros(4))).item() == 0.0


def test_a_kind_that_does_not_occur_is_not_reported() -> None:
    objective = kto()
    found = objective.named([1.0, 2.0, 0.0, -3.0, 0.0, 0.1])
    assert found == {"reward_desirable": 2.0, "logp_desirable": -3.0, "desirable": 1.0, "kl": 0.1}


GRADIENTS = [*VARIANTS, {"loss": "kto", "beta": 0.3}]


@pytest.mark.parametrize("settings", GRADIENTS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_gradients_by_finite_differences(settings: dict[str, Any]) -> None:
    losses, batch = make_batch(dtype=torch.float64)
    baseline = torch.tensor(0.2, dtype=torch.float64)
    if settings["loss"] == "kto":
        objective: Objective = kto(beta=0.3)
    else:
        objective = preference(**settings)
    losses.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: objective.sums(x, batch, None, baseline).loss, losses)
    objective.sums(losses, batch, None, baseline).loss.backward()
    assert losses.grad is not None
    assert not losses.grad[~batch.loss_weights_BS.flatten().bool()].any(), "questions and padding have no gradient"


@pytest.mark.parametrize("loss", LOSSES)
def test_a_reference_that_is_computed_counts_before_the_one_of_the_batch(loss: str) -> None:
    losses, batch = make_batch()
    same = preference(loss, beta=0.3)
    reference = same.reference(losses, batch)
    loss_sum = same.sums(losses, batch, reference).loss.item()
    at_chance = {"sigmoid": 2 * math.log(2), "ipo": 2 * (1 / 0.6) ** 2, "hinge": 2.0}
    if loss in at_chance:
        assert loss_sum == pytest.approx(at_chance[loss], rel=1e-6)
    else:
        assert loss_sum == same.sums(losses, batch, None).loss.item()


def test_very_unlikely_and_nearly_certain_answers_stay_finite() -> None:
    for size in (1e-12, 1e4):
        losses, batch = make_batch()
        losses = (losses * size).requires_grad_()
        for loss in LOSSES:
            (gradient,) = torch.autograd.grad(preference(loss, beta=0.3).sums(losses, batch, None).loss, losses)
            assert torch.isfinite(gradient).all(), (loss, size)


@pytest.mark.parametrize("loss", [*LOSSES, "kto"])
def test_a_batch_of_fillers_adds_nothing(loss: str) -> None:
    losses, batch = make_batch()
    assert batch.part(Answers) is not None
    empty = Answers(
        ids_BS=torch.zeros_like(batch.part(Answers).ids_BS), signs=torch.zeros(0), lengths=torch.zeros(0), documents=(),
        reference_logps=torch.zeros(0),
    )  # fmt: skip
    fillers = Batch(
        tokens_BS=batch.tokens_BS, labels_BS=batch.labels_BS, positions_BS=batch.positions_BS,
        token_index_BS=batch.token_index_BS, loss_weights_BS=torch.zeros(2, WIDTH),
        document_offsets=batch.document_offsets, document_lengths=batch.document_lengths, parts=(empty,),
    )  # fmt: skip
    objective = _built(name="dpo" if loss == "sigmoid" else loss)
    losses.requires_grad_()
    found = objective.sums(losses, fillers, torch.zeros(0), torch.zeros(()))
    assert found.figures.tolist() == [0.0] * (1 + len(objective.metrics))
    (gradient,) = torch.autograd.grad(found.loss, losses)
    assert not gradient.any()


def _built(**options: Any) -> Objective:
    """The objective of a run with these options."""
    config = RunConfig(model=ModelOptions(path="x"), objective=ObjectiveOptions(**options))
    return build_objective(config, cp=ALONE, dp=ALONE)


def test_options_become_the_objective() -> None:
    assert isinstance(_built(), LanguageModeling)
    built = _built(name="dpo", beta=0.15)
    assert isinstance(built, Preference) and built.compares_with_base
    assert (built.options.name, built.options.preference_strength) == ("dpo", 0.15)
    assert not _built(name="simpo").compares_with_base
    kept = _built(name="kto", reference="initial")
    assert isinstance(kept, Kto) and not kept.compares_with_base and kept.loss_at_chance == 0.5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "ppo"}, "objective.name"),
        ({"name": "ipo", "label_smoothing": 0.1}, "label_smoothing is 0.1 .* belongs to dpo and simpo"),
        ({"name": "dpo", "label_smoothing": 0.5}, "from 0 to below 0.5"),
        ({"name": "dpo", "margin": 0.5}, "margin is 0.5 .* belongs to simpo"),
        ({"name": "dpo", "undesirable_weight": 2.0}, "undesirable_weight is 2.0 .* belongs to kto"),
        ({"name": "kto", "desirable_weight": 0.0}, "desirable_weight"),
        ({"name": "dpo", "beta": 0.0}, "objective.beta"),
        ({"name": "dpo", "reference": "old"}, "objective.reference"),
    ],
)
def test_refused_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ObjectiveOptions(**options)


def test_a_stuck_loss_is_spoken_of_once() -> None:
    stuck = StuckLoss(math.log(2))
    said = [stuck.seen(math.log(2) + 1e-5) for _ in range(2 * REPORTS)]
    assert [index for index, sentence in enumerate(said) if sentence] == [REPORTS - 1]
    assert "optim.lr may be too small" in (said[REPORTS - 1] or "") and "0.693" in (said[REPORTS - 1] or "")


def test_a_loss_that_moves_is_not_spoken_of() -> None:
    stuck, other = StuckLoss(math.log(2)), StuckLoss(None)
    for step in range(4 * REPORTS):
        assert stuck.seen(0.6 if step % REPORTS == REPORTS - 1 else math.log(2)) is None
        assert other.seen(math.log(2)) is None


def test_smoothing_by_hand() -> None:
    """One pair whose reference says nothing: d = -2 + 5 = 3."""
    losses, batch = make_batch(reference=False)
    logps = torch.tensor([-2.0, -5.0, -2.0, -5.0])
    reference = preference("sigmoid").reference(losses, batch) - logps
    found = preference("sigmoid", beta=0.5, label_smoothing=0.1).sums(losses, batch, reference).loss.item()
    one = -0.9 * F.logsigmoid(torch.tensor(1.5)).item() - 0.1 * F.logsigmoid(torch.tensor(-1.5)).item()
    assert found == pytest.approx(2 * one, rel=1e-5)
    assert one == pytest.approx(0.9 * math.log(1 + math.exp(-1.5)) + 0.1 * math.log(1 + math.exp(1.5)), rel=1e-6)
