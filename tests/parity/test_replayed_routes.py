"""Gradients where routers are given their experts, against transformers whose routers take the same ones: of every
weight, and of adapters whose B is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.batch import IGNORE_LABEL, Batch, Routes
from engine.experts.layers.given_routes import LayerRoutes
from engine.experts.ops.routing import RoutingRule, choose
from tests.distributed.cases import SCALE, make_batch
from tests.support.family_models import engine_model, gradient_errors, make_model, stock_gradient
from tests.support.stock_routers import choose_by, routers

ROWS = ((9, 1, 22), (32,), (5, 5, 14), (30, 2))
"""Lengths of the documents in each row; the third has padding."""
CASES = {
    "all weights": {"trained": ".*"},
    "adapters": {"trained": "", "adapters": r".*\.(q_proj|v_proj|router|experts\..*)"},
}
LIMIT = 1e-5


def _drawn(num_layers: int, num_experts: int, per_token: int) -> Tensor:
    """Experts [M, K, B, S] that a router would hardly choose, of every token but the last one of each document."""
    torch.manual_seed(2)
    shape = (num_layers, len(ROWS), 32, num_experts)
    experts = torch.rand(shape).argsort(dim=-1)[..., :per_token].permute(0, 3, 1, 2).to(torch.uint8).contiguous()
    for row, lengths in enumerate(ROWS):
        ends = torch.tensor(lengths).cumsum(0) - 1
        experts[:, :, row, ends] = 255
        experts[:, :, row, sum(lengths) :] = 255
    return experts


def _stock_loss(stock: nn.Module, batch: Batch, experts_MKBS: Tensor) -> Tensor:
    """The sum of the losses of all documents, each by itself, with the experts that are known."""
    of_document: list[Tensor] = []

    def chosen(number: int, logits: Tensor) -> Tensor:
        own, given = logits.topk(experts_MKBS.shape[1], dim=-1).indices, of_document[0][number].t().long()
        return torch.where(given == 255, own, given)

    choose_by(stock, chosen)
    total = torch.zeros(())
    experts_MKT, tokens, labels = experts_MKBS.flatten(2), batch.tokens_BS.flatten(), batch.labels_BS.flatten()
    for span in _spans(batch):
        of_document[:] = [experts_MKT[:, :, span]]
        logits = stock(input_ids=tokens[None, span], use_cache=False).logits[0]
        total = total + nn.functional.cross_entropy(logits, labels[span], reduction="sum", ignore_index=IGNORE_LABEL)
    return total


def _spans(batch: Batch) -> Iterator[slice]:
    offsets = batch.document_offsets.tolist()
    return (slice(first, last) for first, last in pairwise(offsets))


def _add_adapters(stock: nn.Module, folder: Path, parameters: dict[str, Tensor]) -> None:
    """Adds B A to the matrices of the stock model."""
    for one in stock.parameters():
        one.grad = one.data
    for name, a in parameters.items():
        if name.endswith(".lora_A"):
            module = name.removesuffix(".lora_A")
            stock_gradient(stock, folder, f"{module}.weight").add_(parameters[f"{module}.lora_B"] @ a, alpha=SCALE)
    for one in stock.parameters():
        one.grad = None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_gradients(name: str, case: str, tmp_path: Path) -> None:
    """With the routers' own choice the loss is off by 3e-2."""
    folder = tmp_path / "hf"
    stock = make_model(name, folder)
    layers = tuple(number for number, one in enumerate(stock.model.layers) if routers(one))  # type: ignore[union-attr, arg-type]
    first = routers(stock)[0]
    experts = _drawn(len(layers), int(first.num_experts), int(first.top_k))  # type: ignore[arg-type]
    plain = make_batch(enumerate(ROWS), row_length=32, seq_length=32, vocab_size=67, seed=3)
    batch = plain.with_parts(Routes(experts_MKBS=experts, layers=layers))
    built = engine_model(folder, **CASES[case])  # type: ignore[arg-type]
    parameters = built.parameters()
    _add_adapters(stock, folder, parameters)
    expected_loss = _stock_loss(stock, batch, experts)
    expected_loss.backward()
    count = float(batch.loss_weights_BS.sum())
    loss = built.step.gradients([batch], count)
    assert loss.item() * count == pytest.approx(expected_loss.item(), rel=1e-6)
    expected = {}
    for key in built.gradients():
        module, _, leaf = key.rpartition(".")
        if leaf == "lora_A":
            expected[key] = (
                SCALE * parameters[f"{module}.lora_B"].t() @ stock_gradient(stock, folder, f"{module}.weight")
            )
        elif leaf == "lora_B":
            expected[key] = (
                SCALE * stock_gradient(stock, folder, f"{module}.weight") @ parameters[f"{module}.lora_A"].t()
            )
        else:
            expected[key] = stock_gradient(stock, folder, key)
    found = {key: value * count for key, value in built.gradients().items()}
    errors = gradient_errors(found, expected)
    assert any(".router." in key for key in errors)
    assert max(errors.values()) < LIMIT, {key: error for key, error in errors.items() if error >= LIMIT}


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax of chosen"])
def test_weights_of_given_experts(scores: str) -> None:
    """They come from the router's own logits, by the family's rule."""
    torch.manual_seed(0)
    rule = RoutingRule(num_experts=6, per_token=2, renormalises=scores == "sigmoid", rounds=False, scores=scores)  # type: ignore[arg-type]
    logits = torch.randn(5, 6, requires_grad=True)
    experts = torch.tensor([[0, 1], [5, 2], [3, 4], [4, 0], [255, 255]], dtype=torch.uint8)
    counts = torch.zeros(2, dtype=torch.int64)
    weights, ids = choose(logits, rule, given=LayerRoutes(experts, counts).instead_of)
    own = logits.topk(2).indices
    assert ids[:4].tolist() == experts[:4].tolist() and ids[4].tolist() == own[4].tolist()
    chosen = logits.gather(1, ids)
    expected = {
        "softmax": logits.softmax(-1).gather(1, ids),
        "sigmoid": chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True),
        "softmax of chosen": chosen.softmax(-1),
    }[scores]
    torch.testing.assert_close(weights, expected)
    differing = sum(set(one) != set(two) for one, two in zip(experts[:4].tolist(), own[:4].tolist(), strict=True))
    assert counts.tolist() == [differing, 4] and differing > 0
    # the same set in another order is the same choice
    counts.zero_()
    choose(logits, replace(rule), given=LayerRoutes(own.flip(1).to(torch.int16), counts).instead_of)
    assert counts.tolist() == [0, 5]


def test_the_reference_chooses_for_itself(tmp_path: Path) -> None:
    """Without adapters, experts that are given change nothing."""
    make_model("mixtral", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", **CASES["adapters"])  # type: ignore[arg-type]
    plain = make_batch(enumerate(ROWS), row_length=32, seq_length=32, vocab_size=67, seed=3)
    layers = tuple(range(built.model.config.num_layers))
    given = plain.with_parts(Routes(experts_MKBS=_drawn(len(layers), 5, 2), layers=layers))
    found = {}
    with torch.no_grad():
        for name, batch, adapters in (("plain", plain, False), ("given", given, False), ("adapted", given, True)):
            context = built.model.context(batch, built.stage.step, training=False, adapters=adapters)
            found[name] = built.model.run_layers(built.model.embed(batch, adapters=adapters), context)
    assert torch.equal(found["plain"], found["given"]) and not torch.equal(found["plain"], found["adapted"])
