"""Choice of tokens against transformers' processors, against the probabilities they stand for, and over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import padded_split_spec
from engine.errors import UserError
from engine.inference.options import Sampling
from engine.inference.sampling import Chooser
from tests.support.spawning import spawn

VOCABULARY = 23


def _chooser(settings: Sampling, slots: int = 1, tp: Axis | None = None) -> Chooser:
    tp = tp or Axis("tp")
    pieces = padded_split_spec((VOCABULARY, 1), 0, rank=tp.rank, size=tp.size).pieces
    first, num = (pieces[0].global_offset, pieces[0].length) if pieces else (VOCABULARY, 0)
    return Chooser(
        settings, tp=tp, first_id=first, num_ids=num, vocab_size=VOCABULARY, slots=slots, device=torch.device("cpu")
    )


def _logits(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


FILTERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({}, []),
    "top-k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top-k beyond the vocabulary": ({"top_k": 99}, [TopKLogitsWarper(99)]),
    "top-p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min-p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "all": (
        {"top_k": 9, "top_p": 0.8, "min_p": 0.1},
        [TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)],
    ),
    "top-p and min-p": ({"top_p": 0.9, "min_p": 0.3}, [TopPLogitsWarper(0.9), MinPLogitsWarper(0.3)]),
}


def _stock_scores(logits: Tensor, ids: Tensor, warpers: list[Any], temperature: float, penalty: float) -> Tensor:
    processors = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature), *warpers]
    for processor in processors:
        logits = processor(ids, logits)
    return logits


@pytest.mark.parametrize("name", FILTERS)
def test_the_distribution_is_transformers(name: str) -> None:
    """20,000 rows of the same logits: every token as often as its probability says, and none that was filtered out."""
    values, warpers = FILTERS[name]
    count = 20_000
    logits, ids = _logits(1), torch.tensor([[3, 3, 8]])
    chooser = _chooser(Sampling(temperature=0.8, repetition_penalty=1.3, seed=11, **values))
    chooser.start_row(0, ids[0])
    slots = torch.zeros(count, dtype=torch.int64)
    scores = chooser._bounded(chooser.scores(logits, slots[:1]))
    expected = _stock_scores(logits.clone(), ids, warpers, 0.8, 1.3)
    torch.testing.assert_close(scores, expected)
    tokens = chooser.choose(logits.expand(count, -1), slots, torch.arange(count), slots + 4)
    probabilities = expected[0].double().softmax(0)
    seen = torch.bincount(tokens, minlength=VOCABULARY) / count
    assert not seen[probabilities == 0].any()
    deviation = (probabilities * (1 - probabilities) / count).sqrt()
    # 23 tokens in 7 cases: 4.5 standard deviations come by chance once in a thousand runs of all
    assert ((seen - probabilities).abs() <= 4.5 * deviation + 1e-9).all()
    assert probabilities.gt(0).sum() > 1


def test_positions_and_seeds_draw_anew_and_the_same_again() -> None:
    count = 4000
    logits, rows = _logits(1).expand(count, -1), torch.arange(count)
    slots = torch.zeros_like(rows)

    def draw(seed: int, position: int) -> Tensor:
        chooser = _chooser(Sampling(temperature=1.0, seed=seed))
        return chooser.choose(logits, slots, rows, slots + position)

    first = draw(1, 5)
    assert torch.equal(first, draw(1, 5))
    chance = _logits(1)[0].softmax(0).square().sum().item()  # two independent draws agree this often
    for other in (draw(2, 5), draw(1, 6), first.roll(1)):
        agree = (first == other).double().mean().item()
        assert abs(agree - chance) < 5 * (chance / count) ** 0.5


def test_a_row_does_not_depend_on_the_others() -> None:
    chooser, logits = _chooser(Sampling(temperature=1.0)), _logits(6)
    rows, zeros = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    together = chooser.choose(logits, zeros, rows, zeros + 3)
    for row in range(6):
        alone = chooser.choose(logits[row : row + 1], zeros[:1], rows[row : row + 1], zeros[:1] + 3)
        assert alone.item() == together[row]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = _logits(3)
    logits[1, [4, 9]] = 50.0
    zeros = torch.zeros(3, dtype=torch.int64)
    assert _chooser(Sampling()).choose(logits, zeros, zeros, zeros).tolist() == logits.argmax(1).tolist()


def test_repetition_follows_the_row() -> None:
    """Tokens that were chosen count, and go with the row to another slot."""
    chooser = _chooser(Sampling(repetition_penalty=2.0), slots=3)
    logits = _logits(1)
    for slot in range(3):
        chooser.start_row(slot, torch.tensor([slot]))
    zero = torch.zeros(1, dtype=torch.int64)
    chosen = chooser.choose(logits, zero + 2, zero, zero)
    chooser.move_row(2, 0)
    expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[2, int(chosen)]]), logits.clone())
    torch.testing.assert_close(chooser.scores(logits, zero), expected)
    chooser.start_row(0, torch.tensor([5]))
    expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[5]]), logits.clone())
    torch.testing.assert_close(chooser.scores(logits, zero), expected)


def _on_ranks() -> dict[str, Tensor]:
    tp = build_mesh(RankGrid(tp=dist.get_world_size()), device_type="cpu", num_kv_heads=8).tp
    width = -(-VOCABULARY // tp.size)
    logits = torch.full((64, width * tp.size), 99.0)  # what padding holds must not matter
    logits[:, :VOCABULARY] = _logits(64)
    mine = logits[:, tp.rank * width : (tp.rank + 1) * width]
    rows = torch.arange(64)
    chosen = {}
    for name, values in _layout_cases().items():
        chooser = _chooser(Sampling(**values), slots=64, tp=tp)
        for row in range(64):
            chooser.start_row(row, torch.tensor([row % VOCABULARY]))
        chosen[name] = torch.stack([chooser.choose(mine, rows, rows, rows + step) for step in range(3)])
    return chosen


def _layout_cases() -> dict[str, dict[str, Any]]:
    sampled = {name: {"temperature": 0.9, **values} for name, (values, _) in FILTERS.items()}
    return {"greedy": {}, "penalty": {"temperature": 0.9, "repetition_penalty": 1.7}, **sampled}


@pytest.mark.distributed
def test_ranks_choose_what_one_process_does() -> None:
    """The same logits over 2 and 4 ranks, the last of which has padding."""
    (whole,) = spawn(_on_ranks, world=1)
    assert len({tuple(tokens.flatten().tolist()) for tokens in whole.values()}) == len(whole) - 1  # top-k of all
    for world in (2, 4):
        for found in spawn(_on_ranks, world=world):
            for name, tokens in whole.items():
                assert torch.equal(found[name], tokens), (world, name)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "--temperature is -1.0, but 0 or more was expected"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_k": 0, "temperature": 1.0}, "--top-k is 0, but at least 1"),
        ({"top_p": 0.0, "temperature": 1.0}, "--top-p is 0.0"),
        ({"min_p": 1.5, "temperature": 1.0}, "--min-p is 1.5"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty is 0.0"),
        ({"seed": 2**32}, "--seed is 4294967296"),
        ({"top_p": 0.9}, "--temperature is 0, which always takes"),
    ],
)
def test_refusals(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Sampling(**values)
