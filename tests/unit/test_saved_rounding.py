"""Activations kept in fewer bits: how they are rounded, which ones, what it does to gradients, and what is reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.layers import rounding
from engine.layers.recompute import Level, MemoryPlan
from engine.layers.rounding import FLOAT8, RoundingReport, restored, round_rows
from engine.layers.saved import ActivationShapes
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, Kernels
from engine.telemetry.format import format_bytes
from tests.distributed.cases import Built
from tests.support.four_layers import CASE, CONFIG, TOKENS, every_level, needs_native, results
from tests.support.memory_models import (
    Recorded,
    build_with,
    long_batch,
    num_targets,
    packed_batches,
    same_bits,
    total_error,
    two_alive,
)
from tests.support.sweeps import sampled


def test_float8_by_hand() -> None:
    """e4m3 has 4 significant bits: between 1 and 2 a step is 1/8, between 2 and 4 it is 1/4; a tie goes to the even
    one. A scale is the least power of two by which the largest element becomes 448 or less."""
    x = torch.tensor(
        [[448.0, 1.0625, 3.3, -1.2], [449.0, 2.125, 6.6, -2.4], [0.875, 2.0**-9, 0.01, 0.0], [0.0, 0.0, 0.0, 0.0]]
    )
    rounded = round_rows(x, FLOAT8)
    assert rounded.scales is not None
    assert rounded.scales.flatten().tolist()[:3] == [1.0, 2.0, 2.0**-9]
    expected = [[448.0, 1.0, 3.25, -1.25], [448.0, 2.0, 6.5, -2.5], [0.875, 2.0**-9, 5 * 2.0**-9, 0.0], [0.0] * 4]
    assert restored(rounded, torch.float32).tolist() == expected
    narrow = x[1:].bfloat16()  # 449 becomes 448 there, whose scale is 1
    expected[1] = [448.0, 2.0, 6.5, -2.5]
    assert restored(round_rows(narrow, FLOAT8), torch.bfloat16).tolist() == expected[1:]


@pytest.mark.parametrize("power", [-80, -40, 0, 40, 120])
def test_float8_keeps_four_significant_bits_of_any_size(power: int) -> None:
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 2.0**power
    error = (restored(round_rows(x, FLOAT8), torch.float32) - x).abs()
    normal = x.abs() > x.abs().amax(1, keepdim=True) / 14336
    assert normal.sum() > 6000 and (error[normal] <= 2**-4 * x.abs()[normal]).all()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = bad
    found = restored(round_rows(x, FLOAT8), torch.float32)
    assert not found[1].isfinite().any() and torch.equal(found[[0, 2]], x[[0, 2]])


def _direct_error(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    squares = sum(float(((rounded - exact) ** 2).sum()) for rounded, exact in pairs)
    return float(np.sqrt(squares / sum(float((exact**2).sum()) for _, exact in pairs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8])
def test_reported_error_of_given_tensors(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_BLOCK_ELEMENTS", 700)
    report, pairs = RoundingReport(dtype), []
    for number, shape in enumerate([(33, 100), (7, 1000), (2, 5)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 10**number
        rounded = round_rows(x, dtype)
        report.add(x, rounded)
        pairs.append((restored(rounded, torch.float32).double().numpy(), x.double().numpy()))
    assert report.error() == pytest.approx(_direct_error(pairs), rel=1e-6)
    assert RoundingReport(dtype).error() == 0.0


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8])
def test_reported_error_of_a_model(dtype: torch.dtype) -> None:
    """Against the activations as autograd keeps them without rounding: what is as wide as one, and a storage once."""
    batch = long_batch(CONFIG.vocab_size)
    exact: dict[int, Tensor] = {}
    hidden, width, kv_width = CONFIG.hidden, CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    widths = {hidden, width, kv_width, 2 * CONFIG.intermediate}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel() // TOKENS in widths and tensor.numel() % TOKENS == 0:
            exact[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    plain = build_with(CASE, MemoryPlan(), kernels=NATIVE)
    context = plain.model.context(batch, plain.stage.step, training=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        plain.model.run_layers(plain.model.embed(batch), context)
    assert len(exact) == CONFIG.num_layers * 7  # residual stream twice, q, k, v, attention's output, [gate | up]
    pairs = []
    for tensor in exact.values():
        x = tensor.reshape(TOKENS, -1)
        scale = 1.0
        if dtype == FLOAT8:
            scale = 2.0 ** np.ceil(np.log2(x.abs().amax(1, keepdim=True).double().numpy() / 448))
        rounded = torch.from_numpy(x.double().numpy() / scale).to(torch.float32).to(dtype).double().numpy() * scale
        pairs.append((rounded, x.double().numpy()))
    rounds = build_with(CASE, MemoryPlan(stored_dtype=dtype), kernels=NATIVE)
    assert rounds.model.saved.take_report() is None
    rounds.stage.load([batch, long_batch(CONFIG.vocab_size, 1)], 1.0)
    rounds.stage.forward(0)
    rounds.stage.forward(1)  # not measured any more
    report = rounds.model.saved.take_report()
    assert report is not None and rounds.model.saved.take_report() is None
    assert report.error() == pytest.approx(_direct_error(pairs), rel=1e-6)
    # 4 bytes an element before; 2 after, or 1 and a scale of 4 bytes for each token of each tensor
    before = sum(tensor.numel() for tensor in exact.values()) * 4
    after = before // 2 if dtype == torch.bfloat16 else before // 4 + 4 * TOKENS * len(exact)
    name = {torch.bfloat16: "bfloat16", FLOAT8: "float8_e4m3fn"}[dtype]
    assert report.line() == (
        f"activations kept as {name}: {format_bytes(after)} in place of {format_bytes(before)} a micro-batch, "
        f"rms relative error {_direct_error(pairs):.2e}"
    )


SHAPES = ActivationShapes(dtype=torch.float32, head_dims=(16,), min_width=64)


@pytest.mark.parametrize(
    ("shape", "dtype", "rounded"),
    [
        ((512, 64), torch.float32, True),
        ((8, 64), torch.float32, False),  # too little to be worth it
        ((512, 64), torch.bfloat16, False),
        ((512, 64), torch.uint8, False),
        ((512, 1), torch.float32, False),  # 1 / rms
        ((512, 12), torch.float32, False),  # H, or log sum exp as [T, heads]
        ((512, 4, 16), torch.float32, True),
        ((512, 4, 1), torch.float32, False),  # 1 / rms of each head
        ((2, 4, 256), torch.float32, False),  # log sum exp as [rows, heads, length]
        ((32, 4, 16), torch.float32, False),  # the same, where documents are as long as a head is wide
        ((2, 4, 256, 16), torch.float32, True),
        ((2, 4, 256, 1), torch.float32, False),
        ((8192,), torch.float32, False),  # a norm's weight
    ],
    ids=str,
)
def test_what_counts_as_an_activation(shape: tuple[int, ...], dtype: torch.dtype, rounded: bool) -> None:
    assert SHAPES.is_activation(torch.empty(shape, dtype=dtype), 512) is rounded


@pytest.mark.parametrize("kernels", [REFERENCE, pytest.param(NATIVE, marks=needs_native)], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, FLOAT8], [FLOAT8]), ids=str)
@every_level
def test_gradients_are_off_by_the_rounding(level: Level, dtype: torch.dtype, kernels: Kernels) -> None:
    """Forward is untouched. A gradient is a product of a few things that were rounded, so it is off by a few times as
    much, and never by nothing."""
    expected = results(MemoryPlan(recompute=level), kernels)
    built = build_with(CASE, MemoryPlan(recompute=level, stored_dtype=dtype), kernels=kernels)
    loss_sum, gradients = two_alive(built, [long_batch(CONFIG.vocab_size), long_batch(CONFIG.vocab_size, 1)])
    assert torch.equal(loss_sum, expected[0])
    report = built.model.saved.take_report()
    assert report is not None
    error = report.error()
    assert error == pytest.approx({torch.bfloat16: 1.65e-3, FLOAT8: 2.64e-2}[dtype], rel=0.05)
    assert error < total_error(gradients, expected[1]) < 5 * error


@every_level
def test_rounded_and_away(level: Level) -> None:
    """Codes travel; the bits are those of rounding alone."""
    transfer = Recorded()
    memory = MemoryPlan(recompute=level, stored_dtype=torch.bfloat16)
    same_bits(results(replace(memory, offload=True), transfer=transfer), results(memory))
    assert transfer.shapes and transfer.events.count("wait 0") == 1


def _curve(memory: MemoryPlan, dtype: torch.dtype) -> tuple[Tensor, Built]:
    built = build_with(CASE, memory, dtype=dtype)
    losses = []
    for _ in range(20):
        batches = packed_batches(CONFIG.vocab_size)
        losses.append(built.step(batches, num_targets(batches), 3e-3).loss)
    return torch.stack(losses), built


@pytest.mark.parametrize(
    ("level", "stored", "computed"),
    sampled(
        [
            (level, *dtypes)
            for level in ("selective", "full")
            for dtypes in ((torch.bfloat16, torch.float32), (FLOAT8, torch.float32), (FLOAT8, torch.bfloat16))
        ],
        [("selective", FLOAT8, torch.float32)],
    ),
    ids=str,
)
def test_a_training_follows_the_exact_one(level: Level, stored: torch.dtype, computed: torch.dtype) -> None:
    """An update is off by a few times the rounding, so what 20 of them take from the loss is too; in bf16 arithmetic
    its own rounding, 2^-8 of the loss, comes on top."""
    exact, _ = _curve(MemoryPlan(recompute=level), computed)
    losses, built = _curve(MemoryPlan(recompute=level, stored_dtype=stored), computed)
    report = built.model.saved.take_report()
    assert report is not None and exact[0] - exact[-1] > 1.0
    bound = 5 * report.error() * float(exact[0] - exact[-1])
    if computed == torch.bfloat16:
        bound += 2**-8 * float(exact[0])
    assert losses[0] == exact[0] and not torch.equal(losses, exact)
    assert float((losses - exact).abs().max()) < bound
