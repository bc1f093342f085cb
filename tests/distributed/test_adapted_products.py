"""Products that take their adapters along, under every way to split: gradients equal those by plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.kernels.native import product
from engine.kernels.native.loader import native_status
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, AdaptedProducts, Kernels
from tests.distributed.cases import relative_error
from tests.distributed.gradient_table import CASES
from tests.support.memory_models import gradients_on_two_ranks
from tests.support.spawning import spawn

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not (native_status().available and product.has_tiles()), reason="no AMX tiles"),
]

NAMES = (
    "adapters local", "adapters joint", "adapters sequence", "unfolded local", "unfolded joint", "unfolded sequence",
    "some trained, some adapted",
)  # fmt: skip


def _counting() -> tuple[Kernels, dict[str, int]]:
    """The native backend, and how often its products took adapters along: with an update of dX, and without."""
    products, seen = NATIVE.adapted, {"forward": 0, "updates": 0, "leaves": 0}
    assert products is not None

    def forward(*args: Any, **options: Any) -> Any:
        seen["forward"] += 1
        return products.forward(*args, **options)

    def backward(*args: Any, updates: bool, **options: Any) -> Any:
        seen["updates" if updates else "leaves"] += 1
        return products.backward(*args, updates=updates, **options)

    return replace(NATIVE, adapted=AdaptedProducts(fits=products.fits, forward=forward, backward=backward)), seen


def _compare(names: tuple[str, ...]) -> dict[str, tuple[dict[str, int], float]]:
    product.FEWEST = product.FEWEST_PRODUCTS = 1  # these matrices are too small for the tiles otherwise
    found = {}
    for name in names:
        kernels, seen = _counting()
        ours, theirs = gradients_on_two_ranks(CASES[name], kernels), gradients_on_two_ranks(CASES[name], REFERENCE)
        assert ours.keys() == theirs.keys()
        found[name] = seen, max(relative_error(value, theirs[key]) for key, value in ours.items())
    return found


def test_gradients_by_products_with_adapters() -> None:
    for rank in spawn(_compare, world=2, args=(NAMES,)):
        assert all(seen["forward"] and seen["updates"] for seen, _ in rank.values()), rank
        # where dH travels, what adapters add to dX waits for it
        for name, (seen, _) in rank.items():
            assert bool(seen["leaves"]) == ("local" not in name), (name, seen)
        assert all(error < 1e-5 for _, error in rank.values()), rank
