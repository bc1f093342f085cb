"""What layers leave for backward moves away and comes back: which tensors, in what order, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.errors import UserError
from engine.layers.recompute import Level, MemoryPlan
from engine.layers.saved import ActivationShapes, SavedTensors
from engine.ops.attention.token_context import TokenContext
from engine.ops.backends import NATIVE
from tests.distributed.cases import Case, make_batch, small_config
from tests.support.four_layers import CASE, CONFIG, CPU, TOKENS, every_level, needs_native, results
from tests.support.memory_models import Recorded, build_with, long_batch, num_targets, same_bits, total_error


@every_level
def test_what_was_away_comes_back_as_it_was(level: Level) -> None:
    transfer = Recorded()
    same_bits(
        results(MemoryPlan(recompute=level, offload=True), transfer=transfer), results(MemoryPlan(recompute=level))
    )
    for what in ("fetch", "wait"):
        asked = [int(event.split()[1]) for event in transfer.events if event.startswith(what)]
        assert sorted(asked) == list(range(len(transfer.shapes))), "each comes back once"


def test_order_of_one_tensor_a_layer() -> None:
    """The last of 4 layers keeps its input; each other's is in flight while the layer after it computes."""
    transfer = Recorded()
    built = build_with(CASE, MemoryPlan(recompute="full", offload=True), transfer=transfer)
    built.stage.load([long_batch(CONFIG.vocab_size)], 1.0)
    built.stage.forward(0)
    assert transfer.events == ["send 0", "send 1", "send 2"]
    assert {tuple(shape) for shape in transfer.shapes} == {(TOKENS * CONFIG.hidden,)}
    built.stage.backward(0)
    assert transfer.events[3:] == ["fetch 2", "fetch 1", "wait 2", "fetch 0", "wait 1", "wait 0"]


@needs_native
@pytest.mark.parametrize("level", ["selective", "none"])
def test_which_tensors_of_a_layer_move(level: Level) -> None:
    """The residual stream twice, q, attention's output (saved by two operations) and [gate | up], which have 64 KiB or
    more, and under none the inputs made from them. k, v, H, statistics and masks are smaller here."""
    transfer = Recorded()
    built = build_with(CASE, MemoryPlan(recompute=level, offload=True), kernels=NATIVE, transfer=transfer)
    built.stage.load([long_batch(CONFIG.vocab_size)], 1.0)
    built.stage.forward(0)
    hidden, width, mlp = CONFIG.hidden, CONFIG.num_heads * CONFIG.head_dim, CONFIG.intermediate
    kept = [hidden, width, width, hidden, 2 * mlp]
    if level == "none":
        kept = [hidden, hidden, width, width, hidden, hidden, 2 * mlp, mlp]
    assert [shape.numel() for shape in transfer.shapes] == 3 * [size * TOKENS for size in kept]


def _context(tokens: int, cos: Tensor | None = None) -> TokenContext:
    """Returns the context of a model, with another number of tokens and other tables."""
    built = build_with(CASE, MemoryPlan())
    context = built.model.context(long_batch(CONFIG.vocab_size), built.stage.step, training=True)
    index = torch.arange(tokens)
    table = torch.ones(tokens, 4) if cos is None else cos
    return replace(context, cos=table, sin=table, token_index=index, local_token_index=index)


def _saved(memory: MemoryPlan, transfer: Any = None, min_width: int = 1) -> SavedTensors:
    shapes = ActivationShapes(dtype=torch.float32, head_dims=(16,), min_width=min_width)
    return SavedTensors(memory, CPU, shapes, transfer)


@contextmanager
def _first_of_two(saved: SavedTensors, context: TokenContext, parameters: list[Tensor]) -> Iterator[None]:
    layers = saved.layers(2, context, parameters)
    with next(layers):
        yield
    with next(layers):
        pass
    assert next(layers, None) is None


def test_parameters_and_what_layers_share_stay() -> None:
    x = torch.randn(512, 64, requires_grad=True)
    weight = nn.Parameter(torch.randn(256, 64))
    table = torch.randn(512, 64)
    transfer = Recorded()
    with _first_of_two(_saved(MemoryPlan(offload=True), transfer), _context(512, table), [weight]):
        # saves x and the weight; then the table, once as it is and once as a view
        y = linear(x, weight)[:, :64] * table + table.view(-1, 64) * x
    assert transfer.shapes == [torch.Size([512 * 64])]
    y.sum().backward()
    assert x.grad is not None and transfer.events == ["send 0", "fetch 0", "wait 0"]


def test_views_of_one_storage_move_once() -> None:
    """As attention's output does, which attention and the projection after it save in different shapes."""
    x = torch.randn(512, 64, requires_grad=True)
    transfer = Recorded()
    with _first_of_two(_saved(MemoryPlan(offload=True), transfer), _context(512), []):
        y = x.exp()  # saves y
        z = (y.view(4, 128, 64).transpose(1, 2).sin() * 3).sum() + y.cos().sum()
    assert len(transfer.shapes) == 1
    z.backward()
    expected = x.detach().exp() * (3 * x.detach().exp().cos() - x.detach().exp().sin())
    torch.testing.assert_close(x.grad, expected)


def test_a_part_of_a_storage_moves_alone() -> None:
    x = torch.randn(512, 200, requires_grad=True)
    transfer = Recorded()
    with _first_of_two(_saved(MemoryPlan(offload=True), transfer), _context(512), []):
        y = x[:, :64].sin()
    assert transfer.shapes == [torch.Size([512 * 64])]
    y.sum().backward()
    torch.testing.assert_close(x.grad[:, :64], x.detach()[:, :64].cos())


def test_a_tensor_changed_between_two_uses_is_two() -> None:
    x = torch.randn(512, 64)
    weight = torch.ones((), requires_grad=True)
    transfer = Recorded()
    with _first_of_two(_saved(MemoryPlan(offload=True), transfer), _context(512), []):
        y = x * weight
        with torch.no_grad():
            before = x.sum()
            x.mul_(2)
        z = x * weight
    assert len(transfer.shapes) == 2
    (y.sum() + z.sum()).backward()
    torch.testing.assert_close(weight.grad, 3 * before)


def test_nothing_to_gain_on_a_cpu() -> None:
    with pytest.raises(
        UserError, match=r"memory.offload_activations is true and the device is cpu, .* set .* to false"
    ):
        build_with(CASE, MemoryPlan(offload=True))


@pytest.mark.gpu
@every_level
def test_offload_on_a_gpu(level: Level) -> None:
    """The same gradients, and less memory at the end of forward: that of each layer but the last one's. A GPU does not
    fix the order of all sums in attention's backward, hence 1e-6."""
    device, config = torch.device("cuda"), small_config(num_layers=6, hidden=512, intermediate=1024, head_dim=64)
    case = Case(config=config, adapters=r"layers\..*_proj")
    rows = [(0, (1024, 1024)), (1, (2048,))]
    batch = make_batch(rows, row_length=2048, seq_length=2048, vocab_size=config.vocab_size, seed=0).to(device)

    def run(offload: bool) -> tuple[Tensor, dict[str, Tensor], int]:
        built = build_with(case, MemoryPlan(recompute=level, offload=offload), device=device)
        for _ in range(2):  # the second goes through memory that the first has given back
            built.flat.gradient.zero_()
            built.stage.load([batch], num_targets([batch]))
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            built.stage.forward(0)
            torch.cuda.synchronize()
            kept = torch.cuda.memory_allocated() - before
            built.stage.backward(0)
        return built.stage.loss_sum, built.gradients(), kept

    (loss, gradients, kept), (expected_loss, expected, plain) = run(True), run(False)
    assert torch.equal(loss, expected_loss)
    assert total_error(gradients, expected) < 1e-6
    assert kept < plain / 2
