"""Products that take their adapters along, under every way to split: gradients equal those by plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.recompute import MemoryPlan
from engine.ops.kernels import REFERENCE, AdaptedProducts, Kernels
from engine.ops.native import product
from engine.ops.native.backend import NATIVE
from engine.ops.native.loader import native_status
from tests.distributed.cases import make_batch, relative_error
from tests.distributed.gradient_table import CASES
from tests.memory_models import build_with
from tests.spawning import spawn

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


def _gradients(name: str, kernels: Kernels) -> dict[str, Any]:
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=CASES[name].config.num_kv_heads)
    built = build_with(CASES[name], MemoryPlan(), mesh, kernels=kernels)
    batch = make_batch([(0, (9, 1, 14)), (1, (24,))], row_length=24, seq_length=24, vocab_size=131, seed=1)
    built.stage.load([batch], float(batch.loss_weights_BS.sum()))
    built.stage.forward(0)
    built.stage.backward(0)
    return built.gradients()


def _compare(names: tuple[str, ...]) -> dict[str, tuple[dict[str, int], float]]:
    product.FEWEST = product.FEWEST_PRODUCTS = 1  # these matrices are too small for the tiles otherwise
    found = {}
    for name in names:
        kernels, seen = _counting()
        ours, theirs = _gradients(name, kernels), _gradients(name, REFERENCE)
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
