"""What layers leave for backward, moved away and back, and rounded: order, counts, bits, and the error that is said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.batch import Batch
from engine.errors import UserError
from engine.layers import rounding
from engine.layers.recompute import Level, MemoryPlan
from engine.layers.rounding import FLOAT8, RoundingReport, restored, round_rows
from engine.layers.saved import ActivationShapes, SavedTensors
from engine.ops.context import TokenContext
from engine.ops.kernels import REFERENCE, Kernels
from engine.ops.native.backend import NATIVE
from engine.ops.native.loader import native_status
from engine.telemetry.format import format_bytes
from tests.distributed.cases import Built, Case, make_batch, relative_error, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.memory_models import build_with, num_targets, packed_batches, two_alive

CPU = torch.device("cpu")
CONFIG = small_config(num_layers=4)
CASE = Case(config=CONFIG, adapters=EVERY_LINEAR, trained=".*norm")
LENGTH = 256
TOKENS = 2 * LENGTH
LEVELS: tuple[Level, ...] = ("none", "selective", "attention", "full")

every_level = pytest.mark.parametrize("level", LEVELS)
needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)


def _long_batch(seed: int = 0) -> Batch:
    """Rows so long that activations are worth moving."""
    rows = [(0, (LENGTH // 2, LENGTH // 2)), (1, (LENGTH // 2, LENGTH // 2))]
    return make_batch(rows, row_length=LENGTH, seq_length=LENGTH, vocab_size=CONFIG.vocab_size, seed=seed)


class Recorded:
    """A transfer that writes down what it is asked for, keeps tensors where torch does not see them, and insists that
    each is fetched before it is waited for, once."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.shapes: list[torch.Size] = []

    def send(self, tensor: Tensor) -> tuple[int, np.ndarray, torch.dtype]:
        self.events.append(f"send {len(self.shapes)}")
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1, tensor.view(torch.uint8).numpy().copy(), tensor.dtype

    def fetch(self, sent: tuple[int, np.ndarray, torch.dtype]) -> tuple[int, Tensor]:
        number, array, dtype = sent
        assert f"fetch {number}" not in self.events
        self.events.append(f"fetch {number}")
        return number, torch.from_numpy(array).view(dtype).clone()

    def wait(self, fetched: tuple[int, Tensor]) -> Tensor:
        self.events.append(f"wait {fetched[0]}")
        return fetched[1]


def _run(memory: MemoryPlan, kernels: Kernels = REFERENCE, transfer: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    built = build_with(CASE, memory, kernels=kernels, transfer=transfer)
    return two_alive(built, [_long_batch(0), _long_batch(1)])


def _same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(found[0], expected[0])
    assert not [name for name, gradient in expected[1].items() if not torch.equal(found[1][name], gradient)]


# -- moved away and back ----------------------------------------------------------------------------------------------


@every_level
def test_what_was_away_comes_back_as_it_was(level: Level) -> None:
    transfer = Recorded()
    _same(_run(MemoryPlan(recompute=level, offload=True), transfer=transfer), _run(MemoryPlan(recompute=level)))
    for what in ("fetch", "wait"):
        asked = [int(event.split()[1]) for event in transfer.events if event.startswith(what)]
        assert sorted(asked) == list(range(len(transfer.shapes))), "each comes back once"


def test_order_of_one_tensor_a_layer() -> None:
    """Of 4 layers the last one's input stays; each other's is on its way while the layer after it is worked on."""
    transfer = Recorded()
    built = build_with(CASE, MemoryPlan(recompute="full", offload=True), transfer=transfer)
    built.stage.load([_long_batch()], 1.0)
    built.stage.forward(0)
    assert transfer.events == ["send 0", "send 1", "send 2"]
    assert {tuple(shape) for shape in transfer.shapes} == {(TOKENS * CONFIG.hidden,)}
    built.stage.backward(0)
    assert transfer.events[3:] == ["fetch 2", "fetch 1", "wait 2", "fetch 0", "wait 1", "wait 0"]


@needs_native
def test_which_tensors_of_a_layer_move() -> None:
    """The residual stream twice, q, attention's output (saved by two operations) and [gate | up], which have 64 KiB or
    more. k, v, H, statistics and masks are smaller here."""
    transfer = Recorded()
    built = build_with(CASE, MemoryPlan(offload=True), kernels=NATIVE, transfer=transfer)
    built.stage.load([_long_batch()], 1.0)
    built.stage.forward(0)
    hidden, width = CONFIG.hidden, CONFIG.num_heads * CONFIG.head_dim
    sizes = [size * TOKENS for size in (hidden, width, width, hidden, 2 * CONFIG.intermediate)]
    assert [shape.numel() for shape in transfer.shapes] == 3 * sizes


def _context(tokens: int, cos: Tensor | None = None) -> TokenContext:
    index = torch.arange(tokens)
    table = torch.ones(tokens, 4) if cos is None else cos
    return TokenContext(
        num_rows=1, row_length=tokens, document_lengths=(tokens,), context_plan=None, cos=table, sin=table,
        token_index=index, local_token_index=index, step=torch.zeros((), dtype=torch.int64), training=True,
    )  # fmt: skip


def _saved(memory: MemoryPlan, transfer: Any = None, min_width: int = 1) -> SavedTensors:
    shapes = ActivationShapes(dtype=torch.float32, head_dim=16, min_width=min_width)
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
    assert _total_error(gradients, expected) < 1e-6
    assert kept < plain / 2


# -- rounded ----------------------------------------------------------------------------------------------------------


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
    batch = _long_batch()
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
    rounds.stage.load([batch, _long_batch(1)], 1.0)
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


SHAPES = ActivationShapes(dtype=torch.float32, head_dim=16, min_width=64)


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


def _total_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    names = sorted(expected)
    return relative_error(*(torch.cat([each[name].flatten() for name in names]) for each in (found, expected)))


@pytest.mark.parametrize("kernels", [REFERENCE, pytest.param(NATIVE, marks=needs_native)], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8], ids=str)
@every_level
def test_gradients_are_off_by_the_rounding(level: Level, dtype: torch.dtype, kernels: Kernels) -> None:
    """Forward is untouched. A gradient is a product of a few things that were rounded, so it is off by a few times as
    much, and never by nothing."""
    expected = _run(MemoryPlan(recompute=level), kernels)
    built = build_with(CASE, MemoryPlan(recompute=level, stored_dtype=dtype), kernels=kernels)
    loss_sum, gradients = two_alive(built, [_long_batch(0), _long_batch(1)])
    assert torch.equal(loss_sum, expected[0])
    report = built.model.saved.take_report()
    assert report is not None
    error = report.error()
    assert error == pytest.approx({torch.bfloat16: 1.65e-3, FLOAT8: 2.64e-2}[dtype], rel=0.05)
    assert error < _total_error(gradients, expected[1]) < 5 * error


@every_level
def test_rounded_and_away(level: Level) -> None:
    """Codes travel; the bits are those of rounding alone."""
    transfer = Recorded()
    memory = MemoryPlan(recompute=level, stored_dtype=torch.bfloat16)
    _same(_run(replace(memory, offload=True), transfer=transfer), _run(memory))
    assert transfer.shapes and transfer.events.count("wait 0") == 1


def _curve(memory: MemoryPlan, dtype: torch.dtype) -> tuple[Tensor, Built]:
    built = build_with(CASE, memory, dtype=dtype)
    losses = []
    for _ in range(20):
        batches = packed_batches(CONFIG.vocab_size)
        losses.append(built.step(batches, num_targets(batches), 3e-3).loss)
    return torch.stack(losses), built


@pytest.mark.parametrize(
    ("stored", "computed"),
    [(torch.bfloat16, torch.float32), (FLOAT8, torch.float32), (FLOAT8, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("level", ["selective", "full"])
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
