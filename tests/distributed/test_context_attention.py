"""Attention over 2, 3 and 4 ranks against torch's attention on one process with the documents' mask written out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.kernels.native.loader import native_status
from engine.kernels.records import Documents
from engine.ops.attention import ring as ring_attention
from engine.ops.attention import ulysses as ulysses_attention
from engine.ops.attention.blocks import CPU_BLOCKS, NATIVE_BLOCKS, REFERENCE_BLOCKS, AttentionBlocks
from engine.ops.attention.context_parallel import context_attention
from engine.ops.attention.packed import attention_by_document
from engine.ops.attention.sinks import Sinks, with_sinks
from engine.ops.gradients import GradientSink
from engine.zigzag import ContextLayout, make_plan
from tests.support.document_trees import seen_tokens
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.support.wire_bytes import bytes_on_the_wire

pytestmark = pytest.mark.distributed

HEAD_DIM, SCALE = 8, 0.35
WORLDS = (2, 3, 4)
SHAPES = {
    # rows, row length, documents: they cross the borders of chunks and of ranks, and divide by nothing
    "long": (1, 96, (96,)),
    "packed": (2, 37, (10, 27, 3, 30, 4)),
    "odd": (3, 13, (1, 12, 13, 5, 3, 5)),
    "tiny": (2, 3, (1, 2, 3)),  # chunks without tokens, and on four ranks a rank without
    "group": (1, 41, (9, 11, 4, 10, 7)),
    "tree": (2, 37, (10, 9, 1, 5, 8, 4, 3, 30, 4)),
}
PARENTS = {
    "group": (-1, 0, 0, 0, 0),
    "tree": (-1, 0, 1, 1, 0, 4, -1, 6, 6),  # the last row's second branch lies on one rank, and its root on others
}
HEADS = {2: ((4, 2), (6, 1)), 3: ((6, 3), (3, 1)), 4: ((8, 2), (4, 4), (4, 1))}
METHODS = ("ring reference", "ring torch_cpu", "ring native", "ulysses")
NAMES = ("out", "dq", "dk", "dv")
every_world = pytest.mark.parametrize("size", sampled(WORLDS, (2, 3)))
BLOCKS = {blocks.name: blocks for blocks in (REFERENCE_BLOCKS, CPU_BLOCKS, NATIVE_BLOCKS)}


@dataclass(frozen=True)
class Case:
    """One problem, the same on all ranks."""

    size: int
    shape: str
    heads: tuple[int, int]

    @property
    def layout(self) -> ContextLayout:
        rows, length, documents = SHAPES[self.shape]
        return ContextLayout.even(
            size=self.size,
            num_rows=rows,
            row_length=length,
            document_lengths=documents,
            document_parents=PARENTS.get(self.shape, ()),
        )

    @property
    def documents(self) -> Documents:
        lengths, parents = self.layout.document_lengths, self.layout.document_parents
        return Documents(lengths=lengths, offsets=None, max_length=max(lengths), parents=parents)

    def seen(self) -> Tensor:
        """[T, T], whether a token sees another, in the plain order."""
        lengths = self.layout.document_lengths
        return seen_tokens(lengths, self.layout.document_parents or (-1,) * len(lengths))

    def whole(self) -> tuple[Tensor, ...]:
        """q, k, v and the output's gradient of all tokens in their plain order."""
        generator = torch.Generator().manual_seed(self.size)
        counts = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        return tuple(torch.randn(self.layout.num_tokens, num, HEAD_DIM, generator=generator) for num in counts)

    def sinks(self) -> Tensor:
        """A score for each head, some above all others and some below."""
        return torch.linspace(-2.0, 4.0, self.heads[0])

    def held(self, rank: int) -> Tensor:
        """Plain places of the tokens on `rank`: chunks rank and 2 size - 1 - rank of each row."""
        rows, length, _ = SHAPES[self.shape]
        cuts = [place * length // (2 * self.size) for place in range(2 * self.size + 1)]
        places = [
            row * length + column
            for row in range(rows)
            for chunk in (rank, 2 * self.size - 1 - rank)
            for column in range(cuts[chunk], cuts[chunk + 1])
        ]
        return torch.tensor(places, dtype=torch.long)


def _cases(size: int) -> list[Case]:
    return [Case(size, shape, heads) for shape in SHAPES for heads in HEADS[size]]


def _methods() -> list[str]:
    return [method for method in METHODS if method != "ring native" or native_status().available]


def _run(case: Case, method: str, axis: Axis, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """This rank's output and gradients."""
    plan, held = make_plan(case.layout, axis.rank), case.held(axis.rank)
    q, k, v, dout = (x[held].to(dtype) for x in case.whole())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    name, _, blocks = method.partition(" ")
    out = context_attention(
        *inputs, plan, axis, method=name, scale=SCALE,
        blocks=BLOCKS[blocks or "reference"], attention=attention_by_document, documents=case.documents,
    )  # fmt: skip
    assert out.dtype == dtype
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))


def _run_with_sinks(case: Case, method: str, axis: Axis) -> tuple[Tensor, ...]:
    """This rank's output and gradients where each head has a sink, the last those of the sinks."""
    plan, held = make_plan(case.layout, axis.rank), case.held(axis.rank)
    *inputs, dout = (x[held] for x in case.whole())
    inputs = [x.requires_grad_() for x in inputs]
    name, _, kind = method.partition(" ")
    blocks = BLOCKS[kind or "reference"]
    gradient = GradientSink((case.heads[0],), torch.device("cpu"))
    sinks = Sinks(scores_H=case.sinks(), gradient=gradient)
    out = context_attention(
        *inputs, plan, axis, method=name, scale=SCALE, blocks=blocks, documents=case.documents,
        attention=with_sinks(attention_by_document, blocks, window=None, sinks=sinks, cp=axis),
    )  # fmt: skip
    return (out.detach(), *torch.autograd.grad(out, inputs, dout), gradient.buffer)


def _bytes_sent(case: Case, method: str, axis: Axis) -> tuple[int, int]:
    """What really leaves this rank, forward and backward, by counting where the ops hand it over."""
    sent: list[int] = []
    exchange, all_to_all = ring_attention.exchange_async, ulysses_attention.all_to_all

    def counting_exchange(tensor: Tensor, axis: Axis, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return exchange(tensor, axis, **kwargs)

    def counting_all_to_all(tensor: Tensor, axis: Axis, **kwargs: Any) -> Tensor:
        mine = kwargs["sent"][axis.rank] * tensor[:1].numel()
        sent.append((tensor.numel() - mine) * tensor.element_size())
        return all_to_all(tensor, axis, **kwargs)

    ring_attention.exchange_async, ulysses_attention.all_to_all = counting_exchange, counting_all_to_all
    try:
        _run(case, method, axis)
    finally:
        ring_attention.exchange_async, ulysses_attention.all_to_all = exchange, all_to_all
    half = len(sent) // 3 if method.startswith("ring") else len(sent) // 2
    return sum(sent[:half]), sum(sent[half:])


def _sum_of_outputs(case: Case, method: str, axis: Axis) -> Tensor:
    """Gradient of q behind a plain sum, whose gradient is one number seen through a stride of 0."""
    plan, held = make_plan(case.layout, axis.rank), case.held(axis.rank)
    q, k, v, _ = (x[held] for x in case.whole())
    name, _, blocks = method.partition(" ")
    out = context_attention(
        q.requires_grad_(), k, v, plan, axis, method=name, scale=SCALE,
        blocks=BLOCKS[blocks or "reference"], attention=attention_by_document, documents=case.documents,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(out.sum(), q)
    return gradient


def _all_checks() -> dict[str, Any]:
    axis = build_mesh(RankGrid(cp=dist.get_world_size()), device_type="cpu", num_kv_heads=1).cp
    found: dict[str, Any] = {"results": {}, "again": {}, "sent": {}, "bf16": {}, "sum": {}, "sinks": {}}
    for case in _cases(axis.size):
        for method in _methods():
            key = (case.shape, case.heads, method)
            found["results"][key] = _run(case, method, axis)
            again = _run(case, method, axis)
            found["again"][key] = all(map(torch.equal, again, found["results"][key]))
            found["sinks"][key] = _run_with_sinks(case, method, axis)
    case = Case(axis.size, "packed", HEADS[axis.size][0])
    for method in _methods():
        found["sent"][method] = _bytes_sent(case, method, axis)
        found["sum"][method] = _sum_of_outputs(case, method, axis)
        if "native" not in method:
            found["bf16"][method] = _run(case, method, axis, torch.bfloat16)
    return found


@functools.cache
def _ranks(size: int) -> list[dict[str, Any]]:
    return spawn(_all_checks, world=size)


@functools.cache
def _expected_with_sinks(case: Case) -> tuple[Tensor, ...]:
    """As transformers' eager attention of gpt-oss: the scores with one more column, which has no value, in fp64."""
    *inputs, dout = (x.double() for x in (*case.whole()[:3], case.sinks(), case.whole()[3]))
    q, k, v, sinks = (x.requires_grad_() for x in inputs)
    seen = case.seen()
    k3, v3 = (x.repeat_interleave(case.heads[0] // case.heads[1], dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k3.transpose(1, 2) * SCALE).masked_fill(~seen, -torch.inf)
    column = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    out = (torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ v3).transpose(0, 1)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), dout))


@functools.cache
def _expected(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Output and gradients of all tokens by torch, [S, heads, D] in `dtype`; inputs as they are in fp32."""
    q, k, v, dout = (x.to(dtype) for x in case.whole())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = case.seen()
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in inputs)
    out = scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))


def _whole(case: Case, parts: list[tuple[Tensor, ...]], which: int) -> Tensor:
    """The ranks' parts of one result in their plain order."""
    places = torch.cat([case.held(rank) for rank in range(case.size)])
    return torch.cat([part[which] for part in parts])[places.argsort()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
@every_world
def test_equals_one_process(size: int, method: str, name: str):
    if method not in _methods():
        pytest.skip(native_status().reason)
    which = NAMES.index(name)
    for case in _cases(size):
        key = (case.shape, case.heads, method)
        found = _whole(case, [rank["results"][key] for rank in _ranks(size)], which)
        # sums of at most 96 products of numbers near 1 in fp32
        torch.testing.assert_close(
            found.double(), _expected(case)[which], rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("method", METHODS)
@every_world
def test_sinks_equal_a_softmax_with_one_more_column(size: int, method: str):
    """Each rank's part of the sinks' gradient is that of its own tokens or heads. With sinks that are taken in twice
    the first case is off by 0.28."""
    if method not in _methods():
        pytest.skip(native_status().reason)
    for case in _cases(size):
        key = (case.shape, case.heads, method)
        ranks = [rank["sinks"][key] for rank in _ranks(size)]
        found = [*(_whole(case, ranks, which) for which in range(4)), sum(rank[4] for rank in ranks)]
        for name, one, expected in zip((*NAMES, "dsinks"), found, _expected_with_sinks(case), strict=True):
            torch.testing.assert_close(
                one.double(), expected, rtol=1e-5, atol=1e-5, msg=lambda text, what=(*key, name): f"{what}: {text}"
            )


@every_world
def test_the_same_bits_in_every_run(size: int):
    for rank in _ranks(size):
        assert rank["again"] and all(rank["again"].values()), rank["again"]


@every_world
def test_an_expanded_gradient_is_taken(size: int):
    case = Case(size, "packed", HEADS[size][0])
    q, k, v, _ = (x.double() for x in case.whole())
    mask = case.seen()
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q.requires_grad_(), k, v))
    out = scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, scale=SCALE, enable_gqa=True)
    (expected,) = torch.autograd.grad(out.sum(), q)
    for method in _methods():
        found = _whole(case, [(rank["sum"][method],) for rank in _ranks(size)], 0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [method for method in METHODS if "native" not in method])
@every_world
def test_bf16_error_is_torchs_own(size: int, method: str, name: str):
    """Partial results are rounded to bf16 once more than in one process; at most twice its error is allowed."""
    case, which = Case(size, "packed", HEADS[size][0]), NAMES.index(name)
    exact, theirs = _expected(case)[which], _expected(case, torch.bfloat16)[which]
    found = _whole(case, [rank["bf16"][method] for rank in _ranks(size)], which)
    assert (found.double() - exact).norm() <= 2 * (theirs.double() - exact).norm()


@every_world
def test_bytes_are_those_that_leave(size: int):
    case = Case(size, "packed", HEADS[size][0])
    for method in _methods():
        counted = bytes_on_the_wire(
            method.partition(" ")[0], case.layout,
            num_heads=case.heads[0], num_kv_heads=case.heads[1], head_dim=HEAD_DIM, itemsize=4,
        )  # fmt: skip
        sent = [rank["sent"][method] for rank in _ranks(size)]
        assert sent == list(zip(counted.forward, counted.backward, strict=True)), method
        assert min(map(min, sent)) > 0, "this case shows nothing"


def test_one_rank_needs_no_plan_of_steps():
    case = Case(1, "packed", (4, 2))
    q, k, v, _ = case.whole()
    found = context_attention(
        q, k, v, make_plan(case.layout, 0), Axis("cp"), method="ring", scale=SCALE,
        blocks=_never(), attention=attention_by_document, documents=case.documents,
    )  # fmt: skip
    torch.testing.assert_close(found.double(), _expected(case)[0], rtol=1e-5, atol=1e-5)


def _never() -> AttentionBlocks:
    def forward(*_: Any, **__: Any) -> Any:
        raise AssertionError("ring attention was entered")

    return AttentionBlocks(name="never", forward=forward, backward=forward)
