"""The launches of a training step at the sizes that models have, as named cases; nothing here needs a GPU.

A case calls the backend's kernels (engine.ops.kernels) as the ops do, on tensors with the shapes and strides of
training. Their memory is never touched: the caller has replaced the launch itself (tests.kernels.compiling,
tests.kernels.launching).

A folded linear keeps x and H as columns of one buffer [T, I + E], W and B as columns of one storage [O, I + E], and
gets dX and dH as columns of one product.

Legend: T tokens, I input features, O output features, R rows of the stacked A, E = R padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.kernels.formats import FORMATS, part_shapes
from engine.kernels.records import AdapterSection, DropoutKey, InputUpdate
from engine.kernels.triton import coded_rows, formats, inputs, merged_formats, quantize
from engine.ops.scaled_products import SCALED_FORMATS
from tests.kernels.launch_sizes import (
    EPS,
    LLAMA_HEADS,
    ONES,
    TRITON,
    Adapters,
    Case,
    Experts,
    Heads,
    Sizes,
    States,
)
from tests.kernels.layer_launches import decode_cases, expert_cases, state_cases, state_space_case

LLAMA_8B = Sizes(
    name="8b", tokens=8192, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=128256
)
LLAMA_70B = replace(LLAMA_8B, name="70b", hidden=8192, intermediate=28672, heads=64)


E4M3_SINCE = 90
"""Triton compiles e4m3 from 8.9 on, and there are tables from 9.0 on."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """Linears on one input: its width, the width of each one's output, and what the input is made by."""

    name: str
    inputs: int
    outputs: tuple[int, ...]
    made_by: str


def _linears(sizes: Sizes) -> list[_Linear]:
    heads, kv_heads = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    hidden, intermediate = sizes.hidden, sizes.intermediate
    return [
        _Linear("qkv", hidden, (heads, kv_heads, kv_heads), "norm"),
        _Linear("o", heads, (hidden,), "attention"),
        _Linear("gate_up", hidden, (intermediate, intermediate), "norm"),
        _Linear("down", intermediate, (hidden,), "swiglu"),
    ]


def adapter_cases(sizes: Sizes, adapters: Adapters, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yields a case for each input that adapters share."""
    for linear in _linears(sizes):
        yield Case(f"{sizes.name} {linear.name} {adapters}", partial(_adapted, sizes.tokens, linear, adapters, dtype))


def _adapted(num_tokens: int, linear: _Linear, adapters: Adapters, dtype: torch.dtype) -> None:
    """Forward and backward of a linear, its base product and what lies behind its input left out."""
    empty = partial(torch.empty, dtype=dtype)
    width, ranks = linear.inputs, adapters.rank * len(linear.outputs)
    multiple = TRITON.fold_multiple if adapters.folded else 1
    extra = -(-ranks // multiple) * multiple

    def beside(rows: int) -> tuple[Tensor, Tensor]:
        """Columns of one buffer where folded, those of H with their padding, and each contiguous otherwise."""
        if not adapters.folded:
            return empty(rows, width), empty(rows, ranks)
        whole = empty(rows, width + extra)
        return whole[:, :width], whole[:, width:]

    a_RI, mask, scale = empty(ranks, width), _mask(num_tokens, width, adapters), 1.25 if adapters.dropped else 1.0
    x, h = beside(num_tokens)
    u, weight = empty(num_tokens, width), empty(width)
    gate_up = empty(num_tokens, 2 * width)
    rstd = None
    if linear.made_by == "norm":
        rstd = TRITON.norm_forward(u, weight, EPS, x)
        if linear.name == "gate_up":  # attention's output is added on the way
            TRITON.norm_forward(u, weight, EPS, x, torch.empty_like(u), torch.empty_like(u))
    elif linear.made_by == "swiglu":
        TRITON.swiglu_forward(gate_up, x)
    sections = _sections(linear, adapters, beside(sum(linear.outputs))[1])
    if linear.made_by == "swiglu":
        assert TRITON.swiglu_project is not None
        TRITON.swiglu_project(gate_up, x, a_RI, mask, scale, sections, h)
    TRITON.project(x, a_RI, mask, scale, sections, h)
    if linear.made_by == "attention" and adapters.folded:  # its output is copied beside H
        TRITON.project(u, a_RI, mask, scale, sections, h, x)

    kept_h, again, (dx, low) = empty(num_tokens, ranks), empty(num_tokens, width), beside(num_tokens)
    dy, dh = empty(num_tokens, sum(linear.outputs)), low[:, :ranks]
    assert TRITON.output_gradients is not None
    if adapters.folded:  # dX and dH come in one product
        TRITON.b_gradient(dy, kept_h, sections)
    else:
        TRITON.output_gradients(dy, kept_h, sections, dh_out=dh)
        TRITON.output_gradients(dy, kept_h, [replace(one, db=None) for one in sections], dh_out=dh)
    if linear.made_by == "norm":
        assert rstd is not None and TRITON.norm_a_gradient is not None
        TRITON.norm_a_gradient(dh, u, rstd, weight, mask, scale, sections)
    TRITON.a_gradient(dh, again, mask, scale, sections)
    update = InputUpdate(dh_TR=dh, a_RI=a_RI, mask=mask, scale=scale, h_TR=kept_h)
    if linear.made_by == "norm":
        assert rstd is not None
        for weight_gradient in (None, torch.empty(width)):
            TRITON.norm_backward(dx, u, weight, rstd, update, weight_gradient, again)
    elif linear.made_by == "swiglu":
        assert TRITON.swiglu_backward_adapted is not None
        TRITON.swiglu_backward_adapted(dx, gate_up, update, dh, mask, scale, sections)
        TRITON.swiglu_backward(dx, gate_up, update)
    else:
        TRITON.apply_update(dx, update)


def _sections(linear: _Linear, adapters: Adapters, b_OR: Tensor) -> list[AdapterSection]:
    sections, column = [], 0
    for index, outputs in enumerate(linear.outputs):
        rank, first = adapters.rank, index * adapters.rank
        b = b_OR[column : column + outputs, first : first + rank]
        sections.append(
            AdapterSection(
                first_column=column,
                num_columns=outputs,
                first_row=first,
                num_ranks=rank,
                scale=2.0,
                b=b if adapters.folded else torch.empty(outputs, rank, dtype=b_OR.dtype),
                da=torch.zeros(rank, linear.inputs),
                db=torch.empty(outputs, rank),
            )
        )
        column += outputs
    return sections


def _mask(num_tokens: int, num_features: int, adapters: Adapters) -> Tensor | None:
    if not adapters.dropped:
        return None
    return TRITON.draw_mask(
        DropoutKey(
            token_index=torch.zeros(num_tokens, dtype=torch.int64),
            step=torch.zeros((), dtype=torch.int64),
            seed=3,
            site=5,
            probability=0.2,
            num_features=num_features,
            feature_offset=adapters.first_feature,
        )
    )


def norm_cases(width: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yields norms without adapters: forward, also of a sum, its codes, and backward with a frozen and with a trained
    weight, alone and with a residual."""

    def launch() -> None:
        x, weight = torch.empty(tokens, width, dtype=dtype), torch.empty(width, dtype=dtype)
        rstd = TRITON.norm_forward(x, weight, EPS, torch.empty_like(x))
        TRITON.norm_forward(x, weight, EPS, torch.empty_like(x), x, torch.empty_like(x))
        for gradient in (None, torch.empty(width)):
            for residual in (None, x):
                TRITON.norm_backward(x, x, weight, rstd, None, gradient, residual)

    def codes() -> None:
        x, weight = torch.empty(tokens, width, dtype=dtype), torch.empty(width, dtype=dtype)
        assert TRITON.row_codes is not None
        TRITON.row_codes.norm(x, weight, EPS, torch.empty_like(x))

    yield Case(f"norm {width}", launch)
    yield Case(f"norm {width} with codes", codes, E4M3_SINCE)


def elementwise_cases(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yields what has no adapter: norms, SwiGLU, rotary embedding, norms of heads, dropout, sums of rows, the
    choice of a token, and the loss."""
    empty = partial(torch.empty, dtype=dtype)
    tokens = sizes.tokens

    def swiglu() -> None:
        gate_up, y = empty(tokens, 2 * sizes.intermediate), empty(tokens, sizes.intermediate)
        TRITON.swiglu_forward(gate_up, y)
        TRITON.swiglu_backward(y, gate_up, None)

    def swiglu_codes() -> None:
        assert TRITON.row_codes is not None
        TRITON.row_codes.swiglu(empty(tokens, 2 * sizes.intermediate), empty(tokens, sizes.intermediate))

    def drop() -> None:
        key = DropoutKey(
            token_index=torch.zeros(tokens, dtype=torch.int64), step=torch.zeros((), dtype=torch.int64), seed=3, site=5,
            probability=0.2, num_features=sizes.hidden,
        )  # fmt: skip
        x = empty(tokens, sizes.hidden)
        TRITON.drop(x, key)
        TRITON.drop(x, key, empty(tokens, sizes.hidden))

    def combine() -> None:
        rows = torch.zeros(tokens, 8, dtype=torch.int64)
        for weights in (None, empty(tokens, 8)):
            TRITON.combine_rows(empty(8 * tokens, sizes.hidden), rows, weights)

    def sampling() -> None:
        assert TRITON.gumbel_argmax is not None
        rows = torch.zeros(64, dtype=torch.int64)
        TRITON.gumbel_argmax(torch.empty(64, sizes.vocabulary), rows, rows, first_id=0, key=(1, 2))

    def loss() -> None:
        logits, one = empty(tokens, sizes.vocabulary), torch.empty(tokens)
        targets = torch.zeros(tokens, dtype=torch.int64)
        TRITON.loss.statistics(logits, targets)
        TRITON.loss.gradient(logits, targets, one, one, one, one)

    yield from norm_cases(sizes.hidden, tokens, dtype)
    yield Case(f"{sizes.name} swiglu", swiglu)
    yield from head_cases(sizes, dtype)
    for launch in (drop, combine, sampling, loss):
        yield Case(f"{sizes.name} {launch.__name__}", launch)
    yield Case(f"{sizes.name} swiglu with codes", swiglu_codes, E4M3_SINCE)


def head_cases(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yields the rotary embedding, and norms of heads."""
    empty = partial(torch.empty, dtype=dtype)
    tokens, half = sizes.tokens, sizes.head_dim // 2
    heads = (sizes.heads, sizes.kv_heads, sizes.head_dim)
    packed_width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim

    def rope() -> None:
        table = torch.empty(tokens, half)
        parts = TRITON.split_rotate(empty(tokens, packed_width), table, table, *heads)
        TRITON.split_rotate_backward(*parts, table, table)

    def head_norm() -> None:
        table, weights = torch.empty(tokens, half), (empty(2 * half), empty(2 * half))
        packed = empty(tokens, packed_width)
        assert TRITON.head_norms is not None
        q, k, rstd = TRITON.head_norms.forward(packed, weights, EPS, table, table, *heads)
        trained = (torch.empty(2 * half), torch.empty(2 * half))
        for gradients in ((None, None), trained):
            parts = (q, k, torch.empty_like(k))
            TRITON.head_norms.backward(parts, packed, weights, rstd, table, table, weight_gradients=gradients)

    for launch in (rope, head_norm):
        yield Case(f"{sizes.name} {launch.__name__}", launch)


def encoded_cases(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yields what encoded bases need: decoding, also beside a folded adapter's B, and the codes of FP8 products."""

    rows, columns = sizes.hidden, sizes.intermediate

    def beside(extra: int) -> Tensor:
        return torch.empty(rows, columns + extra, dtype=dtype)[:, :columns]

    def nf4(extra: int) -> None:
        codes, blocks = torch.empty(rows, -(-columns // 2), dtype=torch.uint8), -(-columns // 64)
        scales, phase = torch.empty(rows, blocks, dtype=torch.uint8), torch.empty(rows, dtype=torch.uint8)
        quantize.nf4_decode(codes, scales, torch.empty(rows, 1 + -(-(blocks + 255) // 256)), phase, beside(extra))

    def by_row(code_dtype: torch.dtype, extra: int) -> None:
        quantize.row_decode(torch.empty(rows, columns, dtype=code_dtype), torch.empty(rows), beside(extra))

    def codes() -> None:
        for width in (sizes.hidden, sizes.intermediate):
            x = torch.empty(sizes.tokens, width, dtype=dtype)
            for scale in (None, torch.empty(width)):
                quantize.quantize_rows(x, scale)
                quantize.quantize_matrix(x, scale)
        quantize.transpose_codes(torch.empty(sizes.intermediate, sizes.hidden, dtype=torch.float8_e4m3fn))

    def rounded(name: str) -> None:
        for width in (sizes.hidden, sizes.intermediate):
            inputs.round_input(FORMATS[name], torch.empty(sizes.tokens, width, dtype=dtype))

    for extra in (0, 16):
        name = f"{sizes.name}{f' beside B of {extra}' if extra else ''}"
        yield Case(f"{name} nf4", partial(nf4, extra))
        yield Case(f"{name} int8", partial(by_row, torch.int8, extra))
        yield Case(f"{name} fp8", partial(by_row, torch.float8_e4m3fn, extra), E4M3_SINCE)
    yield Case(f"{sizes.name} codes", codes, E4M3_SINCE)
    for name in SCALED_FORMATS:
        yield Case(f"{sizes.name} rounded to {name}", partial(rounded, name), E4M3_SINCE)
    for name in FORMATS:
        yield Case(f"{sizes.name} format {name}", partial(_format, name, rows, columns, dtype))


def _format(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Decodes a weight in few bits beside a folded adapter's B, and merges an adapter of rank 16 into its codes."""
    of, whole = FORMATS[name], torch.empty(rows, columns + 16, dtype=dtype)
    parts = _empty_parts(name, rows, columns)
    formats.block_decode(of, parts, whole[:, :columns])
    b_OR, a_RI = whole[:, columns:], torch.empty(16, columns, dtype=dtype)
    merged_formats.merged_decode(of, parts, b_OR, a_RI, 2.0, whole[:, :columns])


def few_rows_cases(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yields 16 rows times matrices in codes, and of experts with an adapter of rank 16."""
    rows, columns, experts = sizes.hidden, sizes.intermediate, 8

    def one(name: str) -> None:
        x, out = torch.empty(16, columns, dtype=dtype), torch.empty(16, rows, dtype=dtype)
        coded_rows.few_rows_product(FORMATS[name], _empty_parts(name, rows, columns), x, out)

    def of_experts(name: str) -> None:
        index, ends = torch.empty(64, dtype=torch.int64), torch.empty(experts, dtype=torch.int32)
        h, b = torch.empty(64, 16, dtype=dtype), torch.empty(experts, rows, 16, dtype=dtype)
        parts, x = _empty_parts(name, experts * rows, columns), torch.empty(16, columns, dtype=dtype)
        coded_rows.expert_rows_product(FORMATS[name], parts, x, ends, index_N=index, factors=(h, b))

    prefix = sizes.name if dtype == torch.bfloat16 else f"{sizes.name} {str(dtype)[6:]}"
    for name in FORMATS:
        yield Case(f"{prefix} few rows {name}", partial(one, name))
    for name in ("mxfp4", "fp8_block"):
        yield Case(f"{prefix} few rows of experts {name}", partial(of_experts, name))


def _empty_parts(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    shapes = part_shapes(FORMATS[name], rows, columns)
    return {part: torch.empty(shape, dtype=kind) for part, (shape, kind) in shapes.items()}


QWEN_9B = States(name="qwen3.5 9b", tokens=8192, key_heads=16, heads=32, key_dim=128, value_dim=128)


QWEN_30B = Experts(name="qwen3 30b", tokens=8192, hidden=2048, intermediate=768, experts=128, per_token=8)
GPT_OSS_20B = Experts(name="gpt-oss 20b", tokens=8192, hidden=2880, intermediate=2880, experts=32, per_token=4)


def sample_cases() -> Iterator[Case]:
    """Yields the quick cases that compile in seconds: all kernels but those of convolutions, gated norms, delta rules
    and state spaces over documents."""
    long = ("r=8 ", "convolution", "gated_norm", "delta_rule", "state_space", "qwen3 30b gate_up")
    yield from (case for case in quick_cases() if not any(word in case.name for word in long))


def quick_cases() -> Iterator[Case]:
    """Yields a training of Llama-3-8B as a GPU runs it by default, with PEFT's default rank too; every kernel is in.
    Of float32 there is one linear, whose products have to be exact."""
    for rank in (16, 8):
        yield from adapter_cases(LLAMA_8B, Adapters(rank=rank))
    for case in adapter_cases(replace(LLAMA_8B, name="8b float32"), Adapters(rank=16), torch.float32):
        if " o " in case.name:
            yield case
    yield from elementwise_cases(LLAMA_8B)
    yield from encoded_cases(LLAMA_8B)
    yield from few_rows_cases(LLAMA_8B)
    yield from decode_cases(LLAMA_HEADS)
    yield from state_cases(QWEN_9B)
    yield state_space_case("nemotron 8b", 8192, 128, 8, 64, 128)
    yield from expert_cases(QWEN_30B, 16)


def training_cases() -> Iterator[Case]:
    """Yields all at training's sizes in bf16, the quick ones first: a kernel is named after its first case."""
    yield from quick_cases()
    for adapters in (
        Adapters(rank=48),
        Adapters(rank=16, dropped=False),
        *(Adapters(rank=rank, folded=False) for rank in (8, 16, 48)),
    ):
        yield from adapter_cases(LLAMA_8B, adapters)
    yield from adapter_cases(LLAMA_70B, Adapters(rank=16))
    yield from elementwise_cases(LLAMA_70B)
    yield from encoded_cases(LLAMA_70B)
    for head_dim in (48, 80):  # half of which no 16 divides
        yield from head_cases(replace(LLAMA_8B, name=f"heads of {head_dim}", head_dim=head_dim))
    for width in (5120, 16384, 20480):
        yield from norm_cases(width, LLAMA_8B.tokens)
    for rank in (4, 12):  # whose rows of H begin where no 16 bytes do
        yield from adapter_cases(LLAMA_8B, Adapters(rank=rank))
    yield from decode_cases(LLAMA_HEADS, lengths=(256,))
    for heads in (
        Heads(name="gemma 2 9b", heads=16, kv_heads=8, head_dim=256, softcap=50.0),
        Heads(name="gpt-oss 20b", heads=64, kv_heads=8, head_dim=64, sinks=True),
        Heads(name="one key head", heads=71, kv_heads=1, head_dim=64),
    ):
        yield from decode_cases(heads)
    yield from expert_cases(QWEN_30B, 16, dropped=True)
    yield from expert_cases(GPT_OSS_20B, 12)


NARROW = Sizes(
    name="narrow", tokens=2**20 + 1, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocabulary=128
)
"""As many rows as 131,072 tokens have with 8 experts each."""


def tall_cases() -> Iterator[Case]:
    """Yields every kernel whose grid has rows in it, at the rows of 4 x 4096 tokens with 8 experts each, and more of
    them where they are narrow, so that a program takes several: too many for the second and third side of a grid."""
    for sizes in (replace(LLAMA_8B, tokens=2**17 + 1), NARROW):
        for folded in (True, False):
            yield from adapter_cases(sizes, Adapters(rank=16, folded=folded))
        yield from elementwise_cases(sizes)
        yield from encoded_cases(sizes)
        yield from state_cases(replace(QWEN_9B, name=sizes.name, tokens=sizes.tokens))
        yield state_space_case(sizes.name, sizes.tokens, 128, 8, 64, 128)
        yield from expert_cases(replace(QWEN_30B, name=sizes.name, tokens=sizes.tokens), 16)


def other_cases(name: str) -> Iterator[Case]:
    """Yields the cases of `name`: "float32" and "float16" in that dtype, "ones" with sizes of 1, "rank 192"."""
    if name == "ones":
        for folded in (False, True):
            yield from adapter_cases(ONES, Adapters(rank=1, folded=folded, first_feature=3))
        yield from elementwise_cases(ONES)
        yield from encoded_cases(ONES)
        yield from few_rows_cases(ONES)
        yield from decode_cases(Heads(name="ones", heads=1, kv_heads=1, head_dim=2), lengths=(1, 2048))
        yield from state_cases(States(name="ones", tokens=2, key_heads=1, heads=1, key_dim=1, value_dim=1, width=2))
        yield state_space_case("ones", 2, 1, 1, 1, 1)
    elif name == "rank 192":
        yield from adapter_cases(LLAMA_8B, Adapters(rank=192, folded=False))
    else:
        dtype = getattr(torch, name)
        for folded in (True, False):
            yield from adapter_cases(LLAMA_8B, Adapters(rank=16, folded=folded), dtype)
        yield from elementwise_cases(LLAMA_8B, dtype)
        yield from encoded_cases(LLAMA_8B, dtype)
        yield from few_rows_cases(LLAMA_8B, dtype)
        yield from decode_cases(LLAMA_HEADS, dtype)
        yield from state_cases(QWEN_9B, dtype)
        yield state_space_case("nemotron 8b", 8192, 128, 8, 64, 128, dtype)
