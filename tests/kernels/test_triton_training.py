"""Trainings with the Triton backend follow those with the reference.

On a GPU: python -m pytest -m gpu tests/kernels/test_triton_training.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.choices import RECOMPUTE_LEVELS
from engine.layers.recompute import MemoryPlan
from engine.ops.kernels import backend, shape_backend
from tests.distributed.cases import Case, make_batch
from tests.kernels.comparing import interpreted_only, long_places
from tests.support.broken_backends import BROKEN
from tests.support.following import CONFIG, WRONG_GRADIENT, assert_follows_the_reference, tiny_training
from tests.support.memory_models import build_with

TRITON = backend("triton")

FP8_CONFIG = replace(CONFIG, hidden=32, intermediate=48, num_heads=2, head_dim=16)
"""Sizes that divide by 16: FP8 products on a GPU want them."""
PATHS = {
    "folded": {},
    "unfolded": {"fold": False},
    "norms and head train": {"trained": ("norm", "lm_head")},
    "queries and keys normalised": {"config": replace(CONFIG, qk_norm=True), "trained": ("k_norm",)},
}
INTERPRETED_QUICKLY = (("unfolded", 0.0), ("queries and keys normalised", 0.1))


def _trainings() -> list[Any]:
    """Every place, path and dropout; most are interpreted only where slow tests are asked for."""
    found = []
    for place, path, dropout in product(long_places.args[1], PATHS, (0.0, 0.1)):
        is_slow = place.values[0][0] == "cpu" and (path, dropout) not in INTERPRETED_QUICKLY
        marks = [*place.marks, *([pytest.mark.slow] if is_slow else [])]
        found.append(pytest.param(*place.values, path, dropout, marks=marks, id=f"{dropout}-{path}-{place.id}"))
    return found


@pytest.mark.parametrize(("place", "path", "dropout"), _trainings())
def test_training_follows_the_reference(place, path: str, dropout: float) -> None:
    steps = 0 if place[0] == "cpu" and place[1] != torch.float32 else 4  # four steps more take five times as long
    assert_follows_the_reference(
        tiny_training(dropout, **PATHS[path]), TRITON, torch.device(place[0]), place[1], steps=steps
    )


@pytest.mark.parametrize("place", [pytest.param(("cpu", torch.bfloat16), marks=interpreted_only, id="cpu-bfloat16")])
def test_one_training_in_bfloat16(place) -> None:
    """The shortest of those above, which are slow."""
    assert_follows_the_reference(tiny_training(0.1), TRITON, torch.device(place[0]), place[1], steps=0)


@pytest.mark.slow
@long_places
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_backend_does_not_follow(place, broken: str) -> None:
    """As with the plain backend, in tests/unit/test_broken_backends.py, where it takes no time."""
    with pytest.raises(AssertionError, match=WRONG_GRADIENT):
        assert_follows_the_reference(
            tiny_training(0.1), BROKEN[broken](TRITON), torch.device(place[0]), place[1], steps=0
        )


@long_places
def test_inputs_quantised_where_they_are_made(place) -> None:
    """An FP8 base by row: the same bits as where norms and SwiGLU are quantised in passes of their own."""
    device = torch.device(place[0])
    config = CONFIG if place[0] == "cpu" else FP8_CONFIG
    case = Case(config=config, adapters=r"layers\..*_proj", base="fp8_row", dropout=0.1)
    batch = make_batch([(0, (9, 4)), (1, (13,))], row_length=13, seq_length=13, vocab_size=41, seed=0)
    found = []
    for kernels in (TRITON, replace(TRITON, row_codes=None)):
        built = build_with(case, MemoryPlan(), kernels=kernels, dtype=place[1], device=device)
        built.stage.load([batch.to(device)], float(batch.loss_weights_BS.sum()))
        built.stage.forward(0)
        built.stage.backward(0)
        found.append(built.gradients())
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


@pytest.mark.slow
@long_places
def test_every_level_of_recomputation_has_the_same_bits(place) -> None:
    """Inputs that are kept, recomputed, or made with H in one pass; folded, and over an FP8 base not."""
    device = torch.device(place[0])
    batch = make_batch([(0, (9, 4)), (1, (13,))], row_length=13, seq_length=13, vocab_size=41, seed=0)
    for base in (None, "fp8"):
        config = CONFIG if place[0] == "cpu" else FP8_CONFIG
        case = Case(config=replace(config, num_layers=1), adapters=r"layers\..*_proj", base=base, dropout=0.1)
        found = []
        for level in RECOMPUTE_LEVELS:
            built = build_with(case, MemoryPlan(recompute=level), kernels=TRITON, dtype=place[1], device=device)
            built.stage.load([batch.to(device)], float(batch.loss_weights_BS.sum()))
            built.stage.forward(0)
            built.stage.backward(0)
            found.append(built.gradients())
        for level, gradients in zip(RECOMPUTE_LEVELS[1:], found[1:], strict=True):
            assert all(torch.equal(one, found[0][name]) for name, one in gradients.items()), (base, level)


def test_the_planner_knows_how_far_folded_rows_lie_apart() -> None:
    assert shape_backend("triton").fold_multiple == TRITON.fold_multiple
