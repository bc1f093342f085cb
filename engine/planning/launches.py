"""Counts the launches of a piece of the model: for each operation its arithmetic and the bytes that it moves.

The engine's own code runs on the meta device while `LaunchCounter` looks on. An operation reads each of its tensors
once and writes its result once; views and allocations launch nothing. Kernels that cannot run there are counted where
they are called: their arguments and results, buffers in between (written and read again), and the arithmetic
of their products with adapters. Collectives are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from math import prod
from operator import itemgetter, mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from engine.document_levels import call_costs, level_calls
from engine.kernels.codec import PLAIN
from engine.kernels.records import AdapterPlace, AdapterSection, Documents, InputUpdate
from engine.kernels.reference_formats import WIDE_CHUNK
from engine.ops.attention.blocks import AttentionBlocks
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.kernels import Kernels, in_two_for_many_ranks, ops
from engine.ops.kernels.op import Op, write_in_place
from engine.ops.quantized_backends import TRITON_FEW_ROWS
from engine.planning.attention_speeds import BLOCK, AttentionShape
from engine.planning.recording import EagerMode
from engine.planning.stand_ins import DECODERS, shape_torch_attention
from engine.spans import Block

_OF_CODES = ("_scaled_mm", "_scaled_mm_v2")
_PRODUCTS = frozenset(("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", *_OF_CODES))
_UNTOUCHED = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_", "lift_fresh")
)
"""Operations that move nothing and are not marked as views."""
_OVERWRITE = frozenset(("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"))
"""Operations that do not read their destination."""
_PICK_ROWS = frozenset(("embedding", "index", "index_select", "gather"))
"""Operations that read as much of their first tensor as they write."""

_PUT_ROWS = {"index_copy_": 2, "index_add_": 3}
"""Operations that touch as much of their first tensor as their last one has -> how often that many bytes are moved."""

_READ_TWICE = frozenset(("fp8 quantize_matrix",))
"""Kernels that look at all of their input, for its largest number, before they read it again."""
_READ_B = frozenset(("output_gradients",))
"""Kernels that multiply by the B of the adapters that they are given."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation, or one kernel with the sums that follow it.

    Args:
        name: of the operation, without sizes.
        nbytes: read and written.
        flops: of its products.
        result: rows and columns of a matrix product, which decide how evenly it fills a device; None for all else. Of
            products of many experts in one launch, those of each: as many of the rows as of any other.
        products: how many of them.
        kind: "product", "fp8 product", "grouped product", "attention" and "packed attention" run at the speeds that a
            device has for them, "kernel" at that of memory unless its arithmetic takes longer, "vector kernel" too,
            with arithmetic outside of the matrix units.
        count: launches.
        attention: of a launch of attention, what decides its speed.
    """

    name: str
    nbytes: int
    flops: float = 0.0
    result: tuple[int, int] | None = None
    kind: str = "kernel"
    count: int = 1
    products: int = 1
    attention: AttentionShape | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceLaunches:
    """The launches of one piece for one micro-batch.

    Args:
        forward, backward: in their order; recomputation is in `backward`.
        weights: of the gradients of weights that train in full.
        exchanged_forward, exchanged_backward: bytes that arrive in each all-to-all of rows for experts, those of this
            rank's own tokens among them; no launches.
    """

    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...] = ()
    weights: tuple[Launch, ...] = ()
    exchanged_forward: tuple[int, ...] = ()
    exchanged_backward: tuple[int, ...] = ()


class LaunchCounter(EagerMode):
    """Counts the launches inside its block.

    Args:
        packed: whether several documents share a row, which another kernel attends to.
        merges: whether attention takes a call more for each level of documents that others continue, as flash kernels
            do; False where one call sees all of their keys.

    Attributes:
        launches: in their order, without those of `weights`.
        weights: of the gradients of weights that train in full, which a schedule may put off.
    """

    def __init__(self, *, packed: bool = False, merges: bool = False) -> None:
        super().__init__()
        self._merges = merges
        self._attention = "packed attention" if packed else "attention"
        self.launches: list[Launch] = []
        self.weights: list[Launch] = []
        self._inside = 0
        self._allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._inside:
            if name.startswith(("empty", "new_empty")):
                self._allocated += out.nbytes
        elif not func.is_view and name not in _UNTOUCHED and any(one.numel() for one in _tensors(out)):
            given = [*args, *(value for key, value in (kwargs or {}).items() if key != "out")]
            self.launches.append(_operation(name, given, out))
        return out

    @property
    def deferred(self) -> list[Callable[[], None]]:
        """A gradient sink's list of deferred products, which computes each at once and counts it among `weights`."""
        return _AtOnce(self)

    @contextmanager
    def _one_kernel(self) -> Iterator[None]:
        """Counts no operation in the block, which stands for one kernel."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def kernel(
        self, function: Callable[..., Any], name: str, flops: Callable[..., float], kind: str = "kernel"
    ) -> Callable[..., Any]:
        """Returns `function`, which stands for a kernel, counted at each call.

        Args:
            name, kind: of the launch.
            flops: of the same arguments, the arithmetic beside that of an `InputUpdate` among them.
        """

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self._allocated
            with self._one_kernel():
                out = function(*args, **kwargs)
            results = list(_tensors(out))
            between = self._allocated - before - sum(one.nbytes for one in results)
            given = [*args, *kwargs.values()]
            read_again = _moved(_tensors(given)) if name in _READ_TWICE else 0
            if name not in _READ_B:
                given = [_read(one) for one in given]
            updates = sum(2.0 * one.dh_TR.shape[0] * one.a_RI.numel() for one in given if isinstance(one, InputUpdate))
            self.launches.append(
                Launch(
                    name,
                    _moved(_tensors(given)) + read_again + _moved(results) + 2 * max(0, between),
                    flops(*args, **kwargs) + updates,
                    kind=kind,
                    count=2 if between > 0 else 1,
                )
            )
            return out

        return counted

    def expert_rows(
        self,
        format: Any,
        parts: Mapping[str, Tensor],
        x: Tensor,
        ends_E: Tensor,
        index_N: Tensor | None,
        factors: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Stands for `expert_rows_product` of `engine.kernels.codec`, which reads the codes of the experts that have
        rows: as many as by chance, where each row is any expert's."""
        num_rows, experts = len(x if index_N is None else index_N), len(ends_E)
        stacked = len(parts["codes"])
        with self._one_kernel():
            y = x.new_empty(num_rows, stacked // experts)
        share = 1.0 - (1.0 - 1.0 / experts) ** num_rows
        of_experts = share * _moved((*parts.values(), *(() if factors is None else factors[1:])))
        others = _moved(one for one in (x, index_N, y, None if factors is None else factors[0]) if one is not None)
        flops = share * _DECODING * stacked * x.shape[1]
        self.launches.append(Launch("experts' few rows", int(of_experts) + others, flops, kind="vector kernel"))
        return y

    def op(self, function: Callable[..., Any], name: str, op: Op) -> Callable[..., Any]:
        """Returns the stand-in of an op of a wing, counted at each call; by what its Triton kernels take, where that is
        known."""
        by_tensors = self.kernel(function, name, _no_products if op.flops is None else op.flops)
        if (cost := op.triton_cost) is None:
            return by_tensors

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._one_kernel():
                out = function(*args, **kwargs)
            taken = cost(*args, **kwargs)
            self.launches.append(
                Launch(
                    name,
                    taken.nbytes,
                    taken.flops,
                    taken.result,
                    taken.kind,
                    count=taken.launches,
                    products=taken.products,
                )
            )
            return out

        return counted

    def attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns the attention of packed documents, counted forward and backward."""

        def counted(q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float) -> Tensor:
            pairs = sum(length * (length + 1) / 2 for length in documents.lengths)
            width, calls = q.shape[1] * q.shape[2], level_calls(documents.lengths, documents.parents)
            if not self._merges:
                pairs += sum(block.query.length * block.key.length for call in calls for block in call)
            moved = 2 * _moved((q,)) + _moved((k, v))
            shape = _documents(documents.lengths, q.shape[1], q.shape[2])

            # reads q, k, v, the output and its gradient; writes three gradients; dq is summed in fp32
            one = partial(Launch, kind=self._attention, attention=shape)
            back = [one("attention backward", 2 * moved + 8 * q.numel(), 10 * pairs * width, count=3)]
            with self._one_kernel():
                out = function(q, k, v, documents, scale=scale)
            self.launches.append(one("attention forward", moved, 4 * pairs * width))
            if self._merges and calls:
                of_levels = [_level(call, q, k, self._attention) for call in calls]
                self.launches += [one for forward, _ in of_levels for one in forward]
                back += [one for _, backward in of_levels for one in backward]
            noted: Tensor = _WhenBackward.apply(out, partial(self.launches.extend, back))
            return noted

        return counted

    def torch_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the stand-in of torch's attention to all keys or those of a mask, counted forward and backward."""
        pairs = 2.0 * prod(q.shape[:-1]) * k.shape[-2] * q.shape[-1]
        moved = 2 * _moved((q,)) + _moved((k, v)) + (0 if mask is None else _moved((mask,)))
        heads, queries = prod(q.shape[:-2]), q.shape[-2]
        shape = AttentionShape(
            length=k.shape[-2], head_dim=q.shape[-1], blocks=heads * -(-queries // BLOCK), causal=False
        )
        one = partial(Launch, kind="attention", attention=shape)
        back = one("attention backward", 2 * moved + 8 * q.numel(), 5 * pairs, count=3)
        with self._one_kernel():
            out = shape_torch_attention(q, k, v, mask)
        self.launches.append(one("attention forward", moved, 2 * pairs))
        noted: Tensor = _WhenBackward.apply(out, partial(self.launches.append, back))
        return noted

    def blocks(self, blocks: AttentionBlocks) -> AttentionBlocks:
        """Returns the attention of ranges of queries to ranges of keys, counted at each call."""
        forward = self._blocks(blocks.forward, "attention forward", 2)
        return replace(blocks, forward=forward, backward=self._blocks(blocks.backward, "attention backward", 5))

    def _blocks(self, function: Callable[..., Any], name: str, products: int) -> Callable[..., Any]:
        def counted(*args: Any, scale: float) -> Any:
            with self._one_kernel():
                out = function(*args, scale=scale)
            *tensors, blocks = args
            pairs = [
                one.query.length * ((one.query.length + 1) / 2 if one.causal else one.key.length) for one in blocks
            ]
            heads, head_dim = tensors[0].shape[1:]
            flops = 2 * products * sum(pairs) * heads * head_dim
            nbytes = _moved(tensors) + _moved(_tensors(out))
            longest = max(zip(pairs, blocks, strict=True), key=itemgetter(0))[1]
            shape = AttentionShape(
                length=longest.key.length,
                head_dim=head_dim,
                blocks=heads * -(-longest.query.length // BLOCK),
                causal=longest.causal,
            )
            count = len(blocks)
            self.launches.append(Launch(name, nbytes, flops, kind=self._attention, count=count, attention=shape))
            return out

        return counted


def counted_kernels(kernels: Kernels, counter: LaunchCounter) -> Kernels:
    """Returns a backend whose kernels are counted; its plain torch is counted as torch's operations are."""
    attention = counter.attention(kernels.attention)
    if kernels.name == "reference":
        return replace(kernels, attention=attention)

    def count(record: Any, flops: dict[str, Callable[..., float]], kind: str = "") -> dict[str, Any]:
        return {
            one.name: counter.kernel(getattr(record, one.name), f"{kind}{one.name}", flops.get(one.name, _no_products))
            for one in fields(record)
            if one.name not in ("name", "attention", "folds", "product", "add_product", "counted")
            and callable(getattr(record, one.name))
        }

    nested: dict[str, Any] = {
        name: replace(record, **count(record, {}, kind))
        for name, kind in (("head_norms", "head norm "), ("row_codes", "codes of "), ("loss", "loss "))
        if (record := getattr(kernels, name)) is not None
    }
    if kernels.paged_attention is not None:
        attend = counter.op(kernels.paged_attention.attend, "paged attention", ops()["paged_attention"])
        nested["paged_attention"] = replace(kernels.paged_attention, attend=attend)
    if kernels.gumbel_argmax is not None:
        nested["gumbel_argmax"] = counter.op(kernels.gumbel_argmax, "gumbel_argmax", ops()["gumbel_argmax"])
    flops = {name: op.flops for name, op in ops().items() if op.flops is not None}
    counted = replace(kernels, **(count(kernels, flops) | nested), attention=attention, counted=counter.op)
    return in_two_for_many_ranks(counted)


def counted_base(base: BaseEncoding, kernels: str, counter: LaunchCounter) -> BaseEncoding:
    """Returns how frozen weights are read by the backend `kernels`, counted."""
    if kernels == "reference":
        return base
    decode = counter.kernel(write_in_place, "decode", _no_products)
    merge = counter.kernel(write_in_place, "merge and decode", _merging, kind="vector kernel")
    makers = {
        one.name: counter.kernel(getattr(base.operands, one.name), f"fp8 {one.name}", _no_products)
        for one in fields(base.operands)
        if one.name not in ("multiply", "multiply_groups")
    }
    decoders = {name: merge if name == "merged_decode" else decode for name in DECODERS}

    def merge_in_place(format: Any, parts: Any, b_OR: Tensor, a_RI: Tensor, scale: float) -> None:
        counter.launches.append(_merged_in_place(b_OR.shape[0], *a_RI.shape, by_torch=kernels == "triton"))

    arithmetic = replace(PLAIN, **decoders, merge_in_place=merge_in_place)
    if kernels == "triton":
        few = counter.kernel(write_in_place, "product of few rows", _decoding_few, kind="vector kernel")
        arithmetic = replace(
            arithmetic,
            merged_stack=merge,
            few_rows_product=few,
            most_few_rows=TRITON_FEW_ROWS,
            expert_rows_product=counter.expert_rows,
        )
    return replace(base, arithmetic=arithmetic, operands=replace(base.operands, **makers))


def _merging(format: Any, parts: Any, b_OR: Tensor, a_RI: Tensor, scale: float, out_OI: Tensor) -> float:
    """Returns the arithmetic of the sum B A, number by number: a product and an addition each as long as both fused."""
    return 4.0 * b_OR.shape[-1] * out_OI.numel()


_MERGE_BYTES = 20
"""Bytes a number that plain torch moves for each rank of a merge: a product that is written, read and added."""
_ROUND_BYTES, _ROUND_LAUNCHES = 600, 70
"""The same of rounding to codes, and its launches: some 70 operations on fp32 numbers, by count."""


def _merged_in_place(rows: int, ranks: int, columns: int, *, by_torch: bool) -> Launch:
    """Returns the launches that write the codes of a merged matrix, by plain torch or by one compiled function."""
    numbers = rows * columns
    if not by_torch:
        return Launch("merge in place", numbers, 4.0 * ranks * numbers, kind="vector kernel")
    count = -(-numbers // WIDE_CHUNK) * (2 * ranks + _ROUND_LAUNCHES)
    return Launch("merge in place", numbers * (_MERGE_BYTES * ranks + _ROUND_BYTES), count=count)


_DECODING = 18.0
"""Arithmetic of a number that is decoded in registers: nine instructions, each as long as a product and an addition."""


def _decoding_few(format: Any, parts: Any, x_TI: Tensor, out_TO: Tensor) -> float:
    return _DECODING * out_TO.shape[1] * x_TI.shape[1]


def _no_products(*_: Any, **__: Any) -> float:
    return 0.0


class TorchAttention(TorchFunctionMode):
    """Has modules in plain torch call the stand-in of torch's attention: on the meta device torch itself would write
    scores, which no device's kernel does."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            return self._counter.torch_attention(*args[:3], mask)
        # torch leaves the mode for as long as a function runs, and these run blocks a second time
        if func is Tensor.backward:
            with self:
                return _engine_run_backward(args, (torch.ones_like(args[0]),), False, False, (), True, True)
        if func is torch.autograd.grad:
            outputs, inputs, gradients = (*args, kwargs.get("grad_outputs"))[:3]
            if isinstance(gradients, Tensor):
                gradients = (gradients,)
            unused = bool(kwargs.get("allow_unused"))
            with self:
                return _engine_run_backward(outputs, tuple(gradients), False, False, tuple(inputs), unused, False)
        return func(*args, **kwargs)


class _AtOnce(list[Callable[[], None]]):
    """See `LaunchCounter.deferred`."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def append(self, product: Callable[[], None]) -> None:
        launches = self._counter.launches
        first = len(launches)
        product()
        self._counter.weights += launches[first:]
        del launches[first:]


class _WhenBackward(torch.autograd.Function):
    """Calls a function when backward arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrived: Callable[[], None]) -> Tensor:
        ctx.arrived = arrived
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.arrived()
        return dx, None


def _operation(name: str, given: Sequence[Any], out: Any) -> Launch:
    operands = list(_tensors(given))
    if name in _PRODUCTS:
        left = operands[1 if "add" in name else 0]
        *batch, rows, columns = out.shape
        inner = left.shape[-1]
        kind = "fp8 product" if name in _OF_CODES else "product"
        inner *= 2 if left.dtype == torch.float4_e2m1fn_x2 else 1
        flops = 2.0 * prod(batch) * rows * inner * columns
        shape = f"{name.strip('_')} [{rows}, {inner}] [{inner}, {columns}]"
        return Launch(shape, _moved(operands) + _moved((out,)), flops, (prod(batch) * rows, columns), kind)
    if name == "_grouped_mm":  # of rows in groups with a matrix each, or of the rows of both
        left, right = operands[:2]
        inner = left.shape[-1]
        flops = 2.0 * inner * (out.numel() if out.dim() == 2 else out[0].numel())
        rows, columns = out.shape[-2:]
        shape = f"grouped_mm [{rows}, {inner}] [{inner}, {columns}]"
        experts = out.shape[0] if out.dim() == 3 else right.shape[0]
        each = (rows, columns) if out.dim() == 3 else (-(-rows // experts), columns)
        moved = _moved((left, right)) + _moved((out,))
        return Launch(shape, moved, flops, each, "grouped product", products=experts)
    results = list(_tensors(out))
    if name in _PICK_ROWS:
        return Launch(name, 2 * _moved(results) + _moved(operands[1:]))
    if name in _PUT_ROWS:
        *_, index, source = operands
        return Launch(name, _PUT_ROWS[name] * _moved((source,)) + _moved((index,)))
    if name in _OVERWRITE:
        half = len(operands) // 2 if name == "_foreach_copy_" else 1
        operands = operands[half:]
    return Launch(name, _moved(operands) + _moved(results or _tensors(given[0])))


def _level(call: Sequence[Block], q: Tensor, k: Tensor, kind: str) -> tuple[list[Launch], list[Launch]]:
    """Returns the launches of a call of a flash kernel for documents that others continue, forward and backward: the
    kernel's, and those that gather its tokens and merge its results, by the counts of `engine.document_levels`."""
    heads, head_dim, item = q.shape[1], q.shape[2], q.element_size()
    queries, keys = (sum(getattr(block, side).length for block in call) for side in ("query", "key"))
    pairs = sum(block.query.length * block.key.length for block in call)
    own, both = queries * heads * head_dim * item, keys * k.shape[1] * head_dim * item * 2
    shape = AttentionShape(
        length=sum(block.query.length * block.key.length**2 for block in call) / pairs,
        head_dim=head_dim,
        blocks=heads * sum(-(-block.query.length // BLOCK) for block in call),
        causal=False,
    )
    one = partial(Launch, kind=kind, attention=shape)
    ahead, back = call_costs(gathered=len(call) > 1)
    width = heads * head_dim
    forward = one("attention forward", 2 * own + both, 4.0 * pairs * width)
    backward = one("attention backward", 4 * own + 2 * both + 8 * queries * width, 10.0 * pairs * width, count=3)
    return (
        [forward, Launch("attention merge", ahead.copies * own, count=ahead.launches - forward.count)],
        [backward, Launch("attention merge", back.copies * own, count=back.launches - backward.count)],
    )


def _documents(lengths: Sequence[int], heads: int, head_dim: int) -> AttentionShape:
    """Returns the shape of causal attention within documents."""
    pairs = [length * (length + 1) for length in lengths]
    return AttentionShape(
        length=sum(map(mul, lengths, pairs)) / max(1, sum(pairs)),
        head_dim=head_dim,
        blocks=heads * sum(-(-length // BLOCK) for length in lengths),
    )


def _read(value: Any) -> Any:
    """Returns the tensors that a kernel reads of an argument that does not multiply by B: of adapters the gradients it
    adds to."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], AdapterPlace):
        return [(one.da, one.db) for one in value if isinstance(one, AdapterSection)]
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of arguments, of records among them too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))


def _moved(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, each once; a dimension that is expanded is not repeated."""
    seen: dict[tuple[Any, ...], int] = {}
    for one in tensors:
        size = prod(length for length, stride in zip(one.shape, one.stride(), strict=True) if stride)
        key = (one.untyped_storage()._cdata, one.storage_offset(), tuple(one.shape), one.stride())
        seen[key] = size * one.element_size()
    return sum(seen.values())
