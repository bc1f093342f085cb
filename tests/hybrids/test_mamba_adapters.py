"""Gradients of adapters of Mamba2 hybrids against transformers' autograd, as PEFT refuses adapters on `out_proj`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from engine.checkpoint.model_weights import open_source
from tests.distributed.cases import SCALE, relative_error, uncut
from tests.support.family_models import batch_of, engine_model, losses_and_gradients, make_model, stock_losses
from tests.support.sweeps import sampled

EVERY_LINEAR = r"layers\..*_proj"
NOT_EXPERTS = r"layers\..*\.(in_proj|out_proj|[qkvo]_proj)"


class _LowRank(nn.Module):
    """Adds a product of two factors to a weight, or to its last rows, where two matrices are stored as one."""

    def __init__(self, a: Tensor, b: Tensor, *, last: bool) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Parameter(a.clone()), nn.Parameter(b.clone()), last

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the weight with the product added."""
        product = SCALE * (self.b @ self.a)
        rest = product.new_zeros(weight.shape[0] - product.shape[0], product.shape[1])
        return weight + torch.cat([rest, product] if self.last else [product, rest])


@pytest.mark.parametrize(
    ("name", "adapters", "count"),
    sampled(
        [
            ("bamba", EVERY_LINEAR, 22),
            ("granite hybrid", EVERY_LINEAR, 22),
            ("nemotron h", NOT_EXPERTS, 6),
            ("falcon h1", EVERY_LINEAR, 36),
            ("falcon h1 with norms", EVERY_LINEAR, 36),
        ],
        [("nemotron h", NOT_EXPERTS, 6), ("falcon h1", EVERY_LINEAR, 36)],
    ),
)
def test_gradients_of_adapters_are_autograds(name: str, adapters: str, count: int, tmp_path: Path) -> None:
    stock = make_model(name, tmp_path)
    names = open_source(tmp_path).model.names
    built = engine_model(tmp_path, trained="", adapters=adapters)
    specs = built.specs()
    factors = {key: uncut(value, specs[key]) for key, value in built.parameters().items()}
    modules, added = dict(stock.named_modules()), {}
    for linear in [key.removesuffix(".lora_A") for key in factors if key.endswith(".lora_A")]:
        place = names.module_to_hf(linear).replace("backbone.", "model.")
        last = linear.endswith("up_proj")
        added[linear] = _LowRank(factors[f"{linear}.lora_A"], factors[f"{linear}.lora_B"], last=last)
        parametrize.register_parametrization(modules[place], "weight", added[linear])
    assert len(added) == count
    batch = batch_of()
    losses, found = losses_and_gradients(built, batch)
    expected = stock_losses(stock, batch)[1]
    torch.testing.assert_close(losses.flatten(), expected, rtol=0, atol=1e-5)
    (expected * batch.loss_weights_BS.flatten()).sum().backward()
    for linear, product in added.items():
        for leaf, factor in (("lora_A", product.a), ("lora_B", product.b)):
            assert factor.grad is not None and factor.grad.any(), linear
            assert relative_error(found[f"{linear}.{leaf}"], factor.grad) < 1e-5, f"{linear}.{leaf}"
