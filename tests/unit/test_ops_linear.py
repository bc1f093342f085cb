"""The parallel linears, the embedding and the loss on one rank: gradients against torch's autograd, sinks, dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.batch import IGNORE_LABEL
from engine.distributed.mesh import Axis
from engine.kernels.native import product
from engine.kernels.native.loader import native_status
from engine.kernels.philox import dropout_mask
from engine.kernels.records import AdapterSection, Documents, DropoutKey
from engine.ops.activations import SwiGLUInput
from engine.ops.adapters import Adapter, LowRank
from engine.ops.attention.token_context import TokenContext
from engine.ops.backends import NATIVE
from engine.ops.cross_entropy import cross_entropy
from engine.ops.dropout import DropoutSite
from engine.ops.embedding import EmbeddingOperands, embedding
from engine.ops.gradients import GradientSink
from engine.ops.inputs import GivenInput, LinearInput, NormInput
from engine.ops.kernels import REFERENCE, AdaptedProducts, Folds, Kernels
from engine.ops.operands import LinearOperands, OutputGradient, RowsSink, Update
from engine.ops.parallel_linear import column_linear, row_linear
from engine.ops.products import FOLDED, JOINED, SEPARATE
from tests.support.projection_norm import norms_by_projection

TOKENS, IN, RANK = 5, 12, 3
ROWS = (8, 6)
"""Output rows of the two sections, each with an adapter of its own scale."""
SCALES = (1.7, 0.6)
ALONE = Axis("tp")


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _context(step: int = 4, *, training: bool = True) -> TokenContext:
    index = torch.arange(TOKENS) + 2**32 - 2
    empty = torch.zeros(0)
    return TokenContext(
        documents=Documents.of_rows((TOKENS,), row_length=TOKENS), context_plan=None, cos=empty, sin=empty,
        token_index=index, local_token_index=index, step=torch.tensor(step), training=training,
    )  # fmt: skip


NOT_FOLDED = Folds(forward=False, backward=False)
DIRECTIONS = [Folds(forward=forward, backward=backward) for forward in (False, True) for backward in (False, True)]


class _Linear:
    """Operands with two sections, and the same mathematics in plain autograd."""

    def __init__(
        self,
        *,
        probability: float = 0.25,
        dtype: torch.dtype = torch.float64,
        trains: bool = True,
        folded: Folds = NOT_FOLDED,
    ) -> None:
        self.weight = _random(sum(ROWS), IN, seed=1, dtype=dtype)
        self.bias = _random(sum(ROWS), seed=2, dtype=dtype)
        self.a = _random(2 * RANK, IN, seed=3, dtype=dtype)
        self.b = [_random(rows, RANK, seed=4 + place, dtype=dtype) for place, rows in enumerate(ROWS)]
        extended = self.weight
        if any(folded):  # [W | B], each section's B beside its own rows, and two columns of padding
            extended = torch.nn.functional.pad(torch.cat((self.weight, torch.block_diag(*self.b)), 1), (0, 2))
        device = torch.device("cpu")
        self.sinks_a = [GradientSink(torch.Size((RANK, IN)), device) for _ in ROWS]
        self.sinks_b = [GradientSink(b.shape, device) for b in self.b]
        self.sink_weight = GradientSink(torch.Size((ROWS[1], IN)), device)
        self.sink_bias = GradientSink(torch.Size((ROWS[1],)), device)
        self.probability = probability
        site = DropoutSite(probability=probability, seed=5, site=6) if probability else None
        adapters = tuple(
            Adapter(
                b_OR=self.b[place], first_column=8 * place, num_columns=ROWS[place],
                first_row=RANK * place, num_ranks=RANK,
                scale=SCALES[place], sink_a=self.sinks_a[place], sink_b=self.sinks_b[place],
            )
            for place in range(2)
        )  # fmt: skip
        trained = (RowsSink(first=8, count=ROWS[1], weight=self.sink_weight, bias=self.sink_bias),)
        self.operands = LinearOperands(
            extended_OE=extended, in_features=IN, bias_O=self.bias,
            low_rank=LowRank(a_RI=self.a, adapters=adapters, dropout=site),
            forward_way=FOLDED if folded.forward else SEPARATE, backward_way=FOLDED if folded.backward else SEPARATE,
            sinks=trained if trains else (), axis=ALONE, sequence_parallel=False, joint=False, kernels=REFERENCE,
        )  # fmt: skip

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: list[Tensor]) -> Tensor:
        dropped = x
        if self.probability:
            tokens = _context().token_index
            key = DropoutKey(token_index=tokens, step=4, seed=5, site=6, probability=self.probability, num_features=IN)
            kept = dropout_mask(key)
            dropped = x * kept / (1 - self.probability)
        low_rank = [SCALES[place] * dropped @ a[RANK * place : RANK * (place + 1)].T @ b[place].T for place in range(2)]
        return x @ weight.T + bias + torch.cat(low_rank, 1)


def _leaf() -> Tensor:
    """Stands for the trained parameters, so that autograd runs backward."""
    return torch.zeros((), requires_grad=True)


NORM_WEIGHT = _random(IN, seed=12)
SOURCES: dict[str, tuple[LinearInput, int, Callable[[Tensor], Tensor]]] = {
    "given": (GivenInput(), IN, lambda u: u),
    "norm": (
        NormInput(weight=NORM_WEIGHT, eps=1e-5, sink=None),
        IN,
        lambda u: F.rms_norm(u, (IN,), NORM_WEIGHT, 1e-5),
    ),
    "swiglu": (SwiGLUInput(), 2 * IN, lambda u: F.silu(u[:, :IN]) * u[:, IN:]),
}
"""How x is made, the width of what it is made from, and the same in torch."""


class _PlainProducts:
    """A linear and its adapters as one product each way, in plain torch: in place of the compiled kernels, which need
    AMX. H has other bits than `Kernels.project` gives it.

    Args:
        fewest: it takes matrices of so many elements, weights that is, or more.
    """

    def __init__(self, fewest: int = 1) -> None:
        self.fewest = fewest
        self.calls: list[str] = []
        self.kernels = replace(
            REFERENCE, adapted=AdaptedProducts(fits=self._fits, forward=self._forward, backward=self._backward)
        )

    def _fits(self, left: Tensor, right: Tensor) -> bool:
        assert left.shape[1] in (right.shape[0], 0), "not the operands of one product"
        return right.numel() >= self.fewest

    def _forward(
        self, x: Tensor, weight_OI: Tensor, a_RI: Tensor, sections: Sequence[AdapterSection], *, mask: Tensor | None,
        keep_scale: float, h_TR: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls.append("forward" if h_TR is None else "forward, given H")
        if h_TR is None:
            dropped = x if mask is None else x * mask * keep_scale
            h_TR = torch.stack([dropped[:, place, None] * a_RI[:, place] for place in range(IN)]).sum(0)
            for one in sections:
                one.ranks(h_TR).mul_(one.scale)
        y = x @ weight_OI.t()
        for one in sections:
            assert one.b is not None
            one.columns(y).add_(one.ranks(h_TR) @ one.b[: one.num_columns].t())
        return y, h_TR

    def _backward(
        self, dy: Tensor, weight_OI: Tensor, a_RI: Tensor, sections: Sequence[AdapterSection], *, h_TR: Tensor,
        mask: Tensor | None, keep_scale: float, updates: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls.append("backward" if updates else "backward, no update")
        dh = torch.empty_like(h_TR)
        for one in sections:
            assert one.b is not None and one.db is not None
            one.ranks(dh).copy_(one.columns(dy) @ one.b * one.scale)
            one.db.add_(one.columns(dy).t() @ one.ranks(h_TR))
        dx = dy @ weight_OI
        if updates:
            dx += dh @ a_RI if mask is None else (dh @ a_RI) * mask * keep_scale
        return dx, dh


WITH_AMX = pytest.mark.skipif(not product.has_tiles(), reason="no AMX tiles")


@pytest.mark.parametrize("kernels", ["plain", pytest.param("native", marks=WITH_AMX)])
@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_h_has_the_same_bits_without_the_product(
    probability: float, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a region needs it that is recomputed but for its last product. Which kernel makes H depends on the weight's
    size, which is that of the whole."""
    monkeypatch.setattr(product, "FEWEST", 1)
    monkeypatch.setattr(product, "FEWEST_PRODUCTS", 1)
    linear, plain = _Linear(probability=probability, dtype=torch.float32), _PlainProducts(fewest=sum(ROWS) * IN)
    backend = NATIVE if kernels == "native" else plain.kernels
    whole = replace(linear.operands, kernels=backend, forward_way=JOINED, backward_way=JOINED, bias_O=None)
    u, context = _random(TOKENS, IN, seed=8, dtype=torch.float32), _context()
    found = []
    for operands in (whole, whole.without_rows()):
        mask = operands.mask(context, context.token_index)
        made = JOINED.inputs(operands, u, GivenInput(), mask, gathers=False)
        found.append(JOINED.outputs(operands, made, mask))
    (y, h), (nothing, again) = found
    assert y.shape == (TOKENS, sum(ROWS)) and nothing.shape == (TOKENS, 0)
    assert h is not None and again is not None and torch.equal(h, again)
    assert h.abs().min() > 0
    if kernels == "plain":
        assert plain.calls == ["forward", "forward"]
        by_itself = SEPARATE.inputs(whole, u, GivenInput(), whole.mask(context, context.token_index), gathers=False).h
        assert by_itself is not None and not torch.equal(h, by_itself), "the other way to make H shows in no bit"


def test_joined_product_takes_the_h_that_other_ranks_need_too() -> None:
    """H is made before the product where it is gathered, and the product does not make it again."""
    linear, plain = _Linear(), _PlainProducts()
    operands = replace(linear.operands, kernels=plain.kernels, forward_way=JOINED, backward_way=JOINED)
    x, context = _random(TOKENS, IN, seed=8), _context()
    mask = operands.mask(context, context.token_index)
    made = JOINED.inputs(operands, x, GivenInput(), mask, gathers=True)
    assert made.h is not None and plain.calls == []
    y, h = JOINED.outputs(operands, made._replace(h=2 * made.h), mask)
    assert h is not None and torch.equal(h, 2 * made.h) and plain.calls == ["forward, given H"]
    torch.testing.assert_close(y, x @ linear.weight.T + h @ torch.block_diag(*linear.b).T)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("update", ["now", "any time", "later"])
@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_gradients_of_joined_products(probability: float, update: Update, needs_dx: bool, fits: bool) -> None:
    """dX, dH and dB by hand, and the flags of what they contain; products that do not fit are made one by one."""
    linear, plain = _Linear(probability=probability), _PlainProducts(fewest=1 if fits else 2**20)
    operands = replace(linear.operands, kernels=plain.kernels, forward_way=JOINED, backward_way=JOINED)
    low_rank, reports = operands.low_rank, []
    assert low_rank is not None
    for sink in linear.sinks_b:
        sink.bind(torch.full(sink.shape, 0.5), lambda: reports.append(1))
    dy, h = _random(TOKENS, sum(ROWS), seed=9), _random(TOKENS, 2 * RANK, seed=10)
    mask = operands.mask(_context(), _context().token_index)
    made = JOINED.gradients(operands, OutputGradient(dy, h, mask, needs_dx, update))
    joined = fits and needs_dx
    assert plain.calls == ([("backward, no update" if update == "later" else "backward")] if joined else [])
    # one by one, dX is completed only where it must be
    assert made.has_update == (needs_dx and (update == "now" or (joined and update == "any time")))
    assert made.added_db == (joined or update != "later")
    assert len(reports) == (2 if made.added_db else 0)

    b = torch.block_diag(*linear.b)
    scales = torch.tensor(SCALES, dtype=torch.float64).repeat_interleave(RANK)
    dh = dy @ b * scales
    dx = dy @ linear.weight
    if made.has_update:
        dx = dx + (dh @ linear.a if mask is None else (dh @ linear.a) * mask / (1 - probability))
    assert len(made.parts) == (2 if needs_dx else 1)
    torch.testing.assert_close(made.parts[0], dh)
    if needs_dx:
        torch.testing.assert_close(made.parts[1], dx)
    for place, sink in enumerate(linear.sinks_b):
        columns, ranks = slice(8 * place, 8 * place + ROWS[place]), slice(RANK * place, RANK * (place + 1))
        expected = dy[:, columns].T @ h[:, ranks] if made.added_db else torch.zeros(sink.shape)
        torch.testing.assert_close(sink.buffer.double(), 0.5 + expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [column_linear, row_linear])
@pytest.mark.parametrize("probability", [0.0, 0.25])
@pytest.mark.parametrize("made_by", ["given", "norm", "swiglu"])
def test_joined_linear_against_autograd(function, probability: float, made_by: str) -> None:
    source, width, make = SOURCES[made_by]
    linear, plain = _Linear(probability=probability), _PlainProducts()
    operands = replace(linear.operands, kernels=plain.kernels, forward_way=JOINED, backward_way=JOINED)
    _compare_with_autograd(function, linear, operands, source, width, make)
    assert plain.calls == ["forward", "backward"]


@pytest.mark.parametrize("function", [column_linear, row_linear])
def test_rows_may_be_columns_in_memory(function) -> None:
    """As where a module transposes a tensor of one row, or what it is given."""
    linear = _Linear(dtype=torch.float32)
    operands = replace(linear.operands, kernels=NATIVE if native_status().available else REFERENCE)
    found = []
    for turned in (True, False):
        u, dy = (_random(TOKENS, size, seed=seed, dtype=torch.float32) for size, seed in ((IN, 7), (sum(ROWS), 8)))
        u, dy = (one.t().contiguous().t() if turned else one for one in (u, dy))
        u.requires_grad_()
        y = function(u, GivenInput(), operands, _context(), (_leaf(),))
        y.backward(dy)
        found.append((y.detach(), u.grad))
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


@pytest.mark.parametrize("function", [column_linear, row_linear])
@pytest.mark.parametrize("probability", [0.0, 0.25])
@pytest.mark.parametrize("folded", DIRECTIONS, ids=str)
@pytest.mark.parametrize("made_by", SOURCES)
def test_linear_against_autograd(function, probability: float, folded: Folds, made_by: str):
    source, width, make = SOURCES[made_by]
    linear = _Linear(probability=probability, folded=folded)
    _compare_with_autograd(function, linear, linear.operands, source, width, make)


def _compare_with_autograd(
    function, linear: _Linear, operands: LinearOperands, source: LinearInput, width: int, make: Callable
) -> None:
    u, dy = _random(TOKENS, width, seed=8).requires_grad_(), _random(TOKENS, sum(ROWS), seed=9)
    leaves = [value.clone().requires_grad_() for value in (linear.weight, linear.bias, linear.a, *linear.b)]
    expected = linear.plain(make(u), leaves[0], leaves[1], leaves[2], leaves[3:])
    du, dweight, dbias, da, *db = torch.autograd.grad(expected, (u, *leaves), dy)
    y = function(u, source, operands, _context(), (_leaf(),))
    # the statistics of the norm are kept in the input's own dtype, fp64 here
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, u, dy)[0], du)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(linear.sink_weight.buffer.double(), dweight[8:], **close)
    torch.testing.assert_close(linear.sink_bias.buffer.double(), dbias[8:], **close)
    for place in range(2):
        rows = slice(RANK * place, RANK * (place + 1))
        torch.testing.assert_close(linear.sinks_a[place].buffer.double(), da[rows], **close)
        torch.testing.assert_close(linear.sinks_b[place].buffer.double(), db[place], **close)


@pytest.mark.parametrize("probability", [0.0, 0.25])
@pytest.mark.parametrize("folded", DIRECTIONS, ids=str)
def test_norms_may_take_the_updates_share_from_the_projection(probability: float, folded: Folds):
    """The norm is handed H without the adapters' scales, which differ here; a kernel that fuses the update wants it."""
    source, _, make = SOURCES["norm"]
    linear, (kernels, seen) = _Linear(probability=probability, folded=folded), norms_by_projection()
    u, dy = _random(TOKENS, IN, seed=8).requires_grad_(), _random(TOKENS, sum(ROWS), seed=9)
    expected = linear.plain(make(u), linear.weight, linear.bias, linear.a, linear.b)
    (du,) = torch.autograd.grad(expected, u, dy)
    y = column_linear(u, source, replace(linear.operands, kernels=kernels), _context(), (_leaf(),))
    torch.testing.assert_close(torch.autograd.grad(y, u, dy)[0], du)
    assert seen() == 1


@pytest.mark.parametrize("function", [column_linear, row_linear])
def test_input_gradcheck(function):
    operands = _Linear().operands
    x = _random(TOKENS, IN, seed=8).requires_grad_()
    assert torch.autograd.gradcheck(lambda value: function(value, GivenInput(), operands, _context(), ()), (x,))


def test_evaluation_turns_dropout_off():
    x = _random(TOKENS, IN, seed=8)
    evaluated = column_linear(x, GivenInput(), _Linear(probability=0.25).operands, _context(training=False), ())
    torch.testing.assert_close(
        evaluated, column_linear(x, GivenInput(), _Linear(probability=0.0).operands, _context(), ())
    )


def test_frozen_linear_leaves_no_gradient():
    linear = _Linear(trains=False)
    x = _random(TOKENS, IN, seed=8).requires_grad_()
    column_linear(x, GivenInput(), linear.operands, _context(), ()).sum().backward()
    assert linear.sink_weight.buffer.abs().sum() == 0
    assert linear.sinks_b[0].buffer.abs().sum() > 0


def test_gradients_of_two_backward_passes_add_up_in_fp32():
    linear = _Linear(dtype=torch.bfloat16, probability=0.0)
    x = _random(TOKENS, IN, seed=8, dtype=torch.bfloat16).requires_grad_()
    dy = _random(TOKENS, sum(ROWS), seed=9, dtype=torch.bfloat16)
    column_linear(x, GivenInput(), linear.operands, _context(), ()).backward(dy)
    once = linear.sinks_a[0].buffer.clone()
    column_linear(x, GivenInput(), linear.operands, _context(), ()).backward(dy)
    assert linear.sinks_a[0].buffer.dtype == torch.float32
    assert torch.equal(linear.sinks_a[0].buffer, 2 * once)


def test_sink_reports_each_addition():
    sink, reports = GradientSink(torch.Size((4, 3)), torch.device("cpu")), []
    buffer = torch.ones(4, 3)
    sink.bind(buffer, lambda: reports.append(buffer.sum().item()))
    sink.add(torch.ones(4, 3))
    sink.add_product(torch.ones(4, 2), torch.ones(2, 3), 0.5)
    sink.add_rows(torch.tensor([1, 1]), torch.ones(2, 3))
    sink.add_columns(torch.tensor([2, 0, 2]), torch.ones(4, 3))
    assert reports == [24.0, 36.0, 42.0, 54.0]
    assert buffer[:, 0].tolist() == [4.0, 6.0, 4.0, 4.0]
    assert buffer[:, 2].tolist() == [5.0, 7.0, 5.0, 5.0]


def _embedding_operands(vocabulary: int, *, sinks: bool, kernels: Kernels = REFERENCE) -> EmbeddingOperands:
    device = torch.device("cpu")
    return EmbeddingOperands(
        weight_VH=_random(vocabulary, 6, seed=1, dtype=torch.float32), first_id=0, num_ids=vocabulary,
        sink=GradientSink(torch.Size((vocabulary, 6)), device) if sinks else None,
        a_RV=_random(RANK, vocabulary, seed=2, dtype=torch.float32), b_HR=_random(6, RANK, seed=3, dtype=torch.float32),
        scale=1.3, sink_a=GradientSink(torch.Size((RANK, vocabulary)), device),
        sink_b=GradientSink(torch.Size((6, RANK)), device), axis=ALONE, sequence_parallel=False, kernels=kernels,
    )  # fmt: skip


@pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=lambda kernels: kernels.name)
def test_embedding_against_autograd(kernels: Kernels):
    if kernels is NATIVE and not native_status().available:
        pytest.skip(native_status().reason)
    operands, ids = _embedding_operands(11, sinks=True, kernels=kernels), torch.tensor([0, 10, 3, 3, 3, 7])
    weight, a, b = (value.clone().requires_grad_() for value in (operands.weight_VH, operands.a_RV, operands.b_HR))
    dy = _random(6, 6, seed=4, dtype=torch.float32)
    expected = F.embedding(ids, weight) + 1.3 * F.embedding(ids, a.T) @ b.T
    expected.backward(dy)
    before = operands.weight_VH.clone()
    y = embedding(ids, operands, (_leaf(),))
    torch.testing.assert_close(y, expected)
    y.backward(dy)
    assert torch.equal(operands.weight_VH, before)
    for sink, leaf in ((operands.sink, weight), (operands.sink_a, a), (operands.sink_b, b)):
        torch.testing.assert_close(sink.buffer, leaf.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 5])
def test_cross_entropy_against_torch(dtype: torch.dtype, padding: int):
    tokens, vocabulary = 7, 123
    values = _random(tokens, vocabulary, seed=1, dtype=dtype).mul(4)
    # padding columns of a head with zero rows hold zeros; large ones would show were they counted
    padded = torch.cat((values, torch.full((tokens, padding), 50.0, dtype=dtype)), 1).requires_grad_()
    labels = torch.tensor([0, 122, IGNORE_LABEL, 5, 5, IGNORE_LABEL, 60])
    dloss = torch.linspace(0.5, 2, tokens)
    exact = values.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORE_LABEL)
    expected.backward(dloss.double())
    losses = cross_entropy(padded * 1, labels, first_id=0, num_ids=vocabulary, axis=ALONE)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    losses.backward(dloss)
    rounding = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
    torch.testing.assert_close(padded.grad[:, :vocabulary].double(), exact.grad, **rounding)
    assert padded.grad[:, vocabulary:].abs().sum() == 0
    assert padded.grad[[2, 5]].abs().sum() == 0


def test_cross_entropy_of_extreme_logits_is_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]]).requires_grad_()
    losses = cross_entropy(logits * 1, torch.tensor([1, 2]), first_id=0, num_ids=3, axis=ALONE)
    torch.testing.assert_close(
        losses, torch.tensor([2e4, 3.0]).index_copy(0, torch.tensor([1]), torch.log(torch.tensor([3.0])))
    )
    losses.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -1.0, 0.0], [1 / 3, 1 / 3, -2 / 3]]))
