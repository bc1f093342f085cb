"""What layers keep for backward: the same losses and gradients at every level, the bytes kept, the work done again.

All levels give the same bits on a CPU: what is made again is made by the same operations from the same numbers, and no
order of a sum changes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.rules import check_config
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.kernels.native.loader import native_status
from engine.layers.recompute import Level, MemoryPlan
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, Kernels
from tests.distributed.cases import RANK, Case, make_batch, relative_error, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.distributed.stock_models import decoder_config, stock_model, stock_parameter, stock_token_losses
from tests.support.memory_models import build_with, num_targets, packed_batches, same_bits, two_alive
from tests.support.sweeps import sampled

CONFIG = small_config(num_layers=3)
CASES = {
    "adapters": Case(config=CONFIG, adapters=EVERY_LINEAR),
    "adapters unfolded": Case(config=CONFIG, adapters=EVERY_LINEAR, fold=False),
    "adapters and norms": Case(config=CONFIG, adapters=EVERY_LINEAR, trained=".*norm"),
    "adapters on the last layer": Case(config=CONFIG, adapters=r"layers\.2\..*_proj"),
    "query and key norm, biases": Case(
        config=replace(CONFIG, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True),
        adapters=EVERY_LINEAR,
        trained=".*norm",
    ),
    "everything": Case(config=CONFIG, trained=".*"),
    "everything tied": Case(config=replace(CONFIG, tied_embeddings=True), trained=".*"),
}
LEVELS: tuple[Level, ...] = ("none", "attention", "full")
# folded alike, so that one formula of bytes serves both
BACKENDS = {kernels.name: replace(kernels, folds=REFERENCE.folds) for kernels in (REFERENCE, NATIVE)}

needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)
every_backend = pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])


@functools.cache
def _results(case: str, level: Level, backend: str, layers: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    memory = MemoryPlan(recompute=level, recompute_layers=layers)
    built = build_with(CASES[case], memory, kernels=BACKENDS[backend])
    return two_alive(built, packed_batches(CONFIG.vocab_size))


@every_backend
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES)
def test_levels_give_thesame_bits(case: str, level: Level, backend: str) -> None:
    """With dropout 0.1 and two micro-batches alive."""
    same_bits(_results(case, level, backend), _results(case, "selective", backend))


@pytest.mark.parametrize("level", ["attention", "full"])
def test_some_layers_give_thesame_bits(level: Level) -> None:
    same_bits(_results("adapters", level, "reference", 2), _results("adapters", "selective", "reference"))


@pytest.mark.parametrize("level", ["selective", *LEVELS])
@pytest.mark.parametrize("name", ["biases", "query and key norm"])
def test_gradients_of_stock_transformers(name: str, level: Level) -> None:
    """Everything trained; gradients that were added twice, or not at all, would be far off."""
    case = Case(config=decoder_config(name), trained=".*")
    batches = packed_batches(case.config.vocab_size)
    loss_sum, gradients = two_alive(build_with(case, MemoryPlan(recompute=level)), batches)
    model = stock_model(name, case)
    expected = torch.stack([stock_token_losses(model, batch).sum() for batch in batches]).sum()
    (expected / num_targets(batches)).backward()
    torch.testing.assert_close(loss_sum, expected.detach(), rtol=1e-5, atol=0)
    errors = {key: relative_error(found, stock_parameter(model, key).grad) for key, found in gradients.items()}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("level", ["selective", *LEVELS])
def test_a_graph_that_is_kept_goes_backward_twice(level: Level) -> None:
    built = build_with(CASES["adapters"], MemoryPlan(recompute=level))
    batch = packed_batches(CONFIG.vocab_size)[0]
    context = built.model.context(batch, built.stage.step, training=True)
    loss = built.model.run_layers(built.model.embed(batch), context).square().sum()
    loss.backward(retain_graph=True)
    once = built.gradients()
    built.flat.gradient.zero_()
    loss.backward()
    assert any(gradient.any() for gradient in once.values())
    for name, gradient in built.gradients().items():
        assert torch.equal(gradient, once[name]), name


@pytest.mark.parametrize("level", LEVELS)
def test_without_gradients_nothing_is_made_again(level: Level) -> None:
    def evaluated(level: Level) -> tuple[Tensor, int]:
        built = build_with(CASES["adapters"], MemoryPlan(recompute=level))
        batch = packed_batches(CONFIG.vocab_size)[0]
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            losses = built.model(batch, built.stage.step, training=False)
        return losses, counter.get_total_flops()

    losses, flops = evaluated(level)
    assert not losses.requires_grad
    expected, expected_flops = evaluated("selective")
    assert torch.equal(losses, expected) and flops == expected_flops


WIDE = small_config(hidden=96, intermediate=160, num_heads=6, head_dim=16, vocab_size=50)
HIDDEN, WIDTH, KV_WIDTH, MLP, HEADS, TOKENS = 96, 6 * 16, 2 * 16, 160, 6, 48
FOLDED = {1: 8, 2: 8, 3: 16}
"""Columns that one, two or three adapters of rank 3 add to a weight: a multiple of 8."""


def _forward(layers: int, memory: MemoryPlan, kernels: Kernels, dropout: float) -> Callable[[], Tensor]:
    case = Case(config=replace(WIDE, num_layers=layers), adapters=EVERY_LINEAR, dropout=dropout)
    built = build_with(case, memory, kernels=kernels)
    rows = [(0, (12, 12)), (1, (12, 12))]
    batch = make_batch(rows, row_length=24, seq_length=24, vocab_size=WIDE.vocab_size, seed=0)
    return lambda: built.model(batch, built.stage.step).sum()


def _kept_bytes(
    layers: int, memory: MemoryPlan, kernels: Kernels, dropout: float, *, and_backward: bool = False
) -> int:
    """What torch's allocator gave out during a forward and did not get back while its graph lives."""
    forward = _forward(layers, memory, kernels, dropout)
    gc.collect()  # so that nothing of an earlier test is given back meanwhile
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            loss = forward()
            if and_backward:
                loss.backward()
    finally:
        gc.enable()
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in trace.events())


def _layer_bytes(level: Level, backend: str, dropout: float) -> int:
    memory, kernels = MemoryPlan(recompute=level), BACKENDS[backend]
    return _kept_bytes(4, memory, kernels, dropout) - _kept_bytes(3, memory, kernels, dropout)


@pytest.mark.parametrize(
    "backend", [pytest.param("reference", marks=pytest.mark.slow), pytest.param("native", marks=needs_native)]
)
@pytest.mark.parametrize("dropout", sampled([0.0, 0.1], [0.1]))
def test_bytes_kept_of_a_layer(dropout: float, backend: str) -> None:
    # a mask is a byte each, or bits in rows of whole 8 bytes
    mask = {"reference": lambda size: size, "native": lambda size: -(-size // 64) * 8}[backend]
    masks = {level: [HIDDEN, WIDTH, HIDDEN, MLP] for level in ("none", "selective")}
    masks |= {"attention": [HIDDEN, MLP], "full": []}
    inputs = HIDDEN + FOLDED[3] + HIDDEN + FOLDED[2] + MLP + FOLDED[1]
    selective = 2 * HIDDEN + 2 * WIDTH + 2 * KV_WIDTH + 2 * MLP + 7 * RANK + 2 + HEADS
    numbers = {
        "none": selective + inputs,
        "selective": selective,
        "attention": 2 * HIDDEN + 2 * MLP + 3 * RANK + 1,
        "full": HIDDEN,
    }
    expected = {
        level: TOKENS * (4 * numbers[level] + bool(dropout) * sum(map(mask, masks[level]))) for level in numbers
    }
    assert {level: _layer_bytes(level, backend, dropout) for level in expected} == expected
    assert expected["none"] > expected["selective"] > expected["attention"] > expected["full"]


@every_backend
@pytest.mark.parametrize("level", sampled(["selective", *LEVELS], ["full"]))
def test_backward_gives_everything_back(level: Level, backend: str) -> None:
    """Layer by layer, while the loss and with it the graph's nodes are still alive."""
    kept = [
        _kept_bytes(layers, MemoryPlan(recompute=level), BACKENDS[backend], 0.1, and_backward=True) for layers in (3, 4)
    ]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_bytes_kept_where_only_some_layers_are_made_again() -> None:
    full = _layer_bytes("full", "reference", 0.0)
    selective = _layer_bytes("selective", "reference", 0.0)
    some, none = (
        _kept_bytes(4, MemoryPlan(recompute="full", recompute_layers=layers), REFERENCE, 0.0) for layers in (3, 1)
    )
    assert none - some == 2 * (selective - full)


def _products(memory: MemoryPlan) -> int:
    """Multiply-add operations of the matrix products of forward and backward, as torch counts them, halved."""
    forward = _forward(4, memory, REFERENCE, 0.1)
    with FlopCounterMode(display=False) as counter:
        forward().backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if name in (torch.ops.aten.mm, torch.ops.aten.addmm)) // 2


def test_products_done_again() -> None:
    """A recomputed layer repeats all but its last product; its attention block all but the output projection."""
    qkv = (HIDDEN + FOLDED[3]) * (WIDTH + 2 * KV_WIDTH) + HIDDEN * 3 * RANK
    out, out_projection = (WIDTH + FOLDED[1]) * HIDDEN, WIDTH * RANK
    gate_up = (HIDDEN + FOLDED[2]) * 2 * MLP + HIDDEN * 2 * RANK
    down_projection = MLP * RANK
    again = {
        "none": 0,
        "attention": qkv + out_projection,
        "full": qkv + out + out_projection + gate_up + down_projection,
    }
    selective = _products(MemoryPlan())
    for level, expected in again.items():
        assert _products(MemoryPlan(recompute=level)) - selective == 4 * TOKENS * expected, level
    some = _products(MemoryPlan(recompute="full", recompute_layers=3))
    assert some - selective == 3 * TOKENS * again["full"]


def test_more_layers_than_the_model_has() -> None:
    with pytest.raises(UserError, match=r"memory.recompute_layers is 4, but the model has 3 layers: use 3 or less"):
        build_with(CASES["adapters"], MemoryPlan(recompute="full", recompute_layers=4))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_layers_to_make_again_need_a_level_that_does(recompute: Level) -> None:
    with pytest.raises(UserError, match=f"memory.recompute_layers is 2 and memory.recompute is {recompute}"):
        MemoryOptions(recompute=recompute, recompute_layers=2)
    with pytest.raises(UserError, match="memory.recompute_layers is 0, but it must be 1 or more"):
        MemoryOptions(recompute="full", recompute_layers=0)
    assert MemoryOptions(recompute="full", recompute_layers=2).recompute_layers == 2


def test_activations_in_the_dtype_they_are_computed_in() -> None:
    memory = MemoryOptions(activation_dtype="bfloat16")
    with pytest.raises(UserError, match=r"memory.activation_dtype is bfloat16 and model.dtype is bfloat16"):
        check_config(RunConfig(model=ModelOptions(path="x", dtype="bfloat16"), memory=memory))
    check_config(RunConfig(model=ModelOptions(path="x", dtype="float32"), memory=memory))
    check_config(
        RunConfig(model=ModelOptions(path="x", dtype="bfloat16"), memory=MemoryOptions(activation_dtype="float8"))
    )
