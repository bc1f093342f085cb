"""Compiles every kernel for a Hopper GPU on a machine that has none: python -m tests.kernels.compiling [bfloat16 ...]

Another version of Triton: pip install --no-deps --target FOLDER triton==3.6.0, then the same with PYTHONPATH=FOLDER.

The interpreter forgives what the compiler does not: one-bit shifts, arguments equal to 1 that turn into constants,
types that change in a loop. Here the launchers run on CPU tensors with a driver that compiles and never launches, and
the resources of each kernel are printed as one JSON object a line. Runs in a process of its own, without the
interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels.records import AdapterSection, DropoutKey, InputUpdate
from engine.kernels.triton import (
    cross_entropy,
    dropout,
    head_norm,
    launch,
    lora,
    output_gradients,
    partial_sums,
    quantize,
    rmsnorm,
    rope,
    swiglu,
)
from tests.kernels.launches import refuse_none_in_tuples

_PROCESSORS = 132
"""Streaming multiprocessors of an H100 and an H200: the sizes of blocks and ranges follow from it."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_seen: set[int] = set()


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack a thread: spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def _compile_instead(self: JITFunction[Any], grid: object) -> Callable[..., None]:
    def call(*arguments: object, **options: object) -> None:
        refuse_none_in_tuples(self.fn.__name__, arguments)
        kernel = self.run(*arguments, grid=grid, warmup=True, **options)
        if id(kernel) in _seen:
            return
        _seen.add(id(kernel))
        constants = {name: str(value) for name, value in options.items()}
        line = {"kernel": f"{self.fn.__module__}.{self.fn.__name__}", "shared": kernel.metadata.shared}
        print(json.dumps({**line, **_resources(kernel.asm["cubin"]), "options": constants}), flush=True)

    return call


def _pretend_to_have_a_gpu() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            launcher_cls=lambda *arguments, **options: None,
        )
    )
    JITFunction.__getitem__ = _compile_instead
    options = {t: {"DOT": launch._TYPES[t], "PRECISION": "tf32"} for t in (torch.bfloat16, torch.float16)}
    options[torch.float32] = {"DOT": launch._TYPES[torch.float32], "PRECISION": "ieee"}
    for module in (launch, lora):
        module.dot_options = lambda x: options[x.dtype]
    for module in (quantize, rmsnorm, swiglu):
        module.casts = lambda x: True
    for module in (launch, head_norm, rmsnorm):
        module.num_processors = lambda device: _PROCESSORS


def _mask(num_tokens: int, num_features: int, offset: int) -> Tensor:
    return dropout.dropout_bits(
        DropoutKey(
            token_index=torch.zeros(num_tokens, dtype=torch.int64),
            step=torch.zeros((), dtype=torch.int64),
            seed=3,
            site=5,
            probability=0.1,
            num_features=num_features,
            feature_offset=offset,
        )
    )


def _adapters(dtype: torch.dtype, num_tokens: int, width: int, rank: int, offset: int, *, folded: bool = False) -> None:
    """Everything that knows of adapters, with a mask and without.

    Args:
        offset: first feature of the mask.
        folded: x and H are columns of one buffer and W and B of another, as in a folded linear: with rank 8 their rows
            lie a multiple of 8 elements apart, and not of 16.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def beside(rows: int) -> tuple[Tensor, Tensor]:
        if not folded:
            return empty(rows, width), empty(rows, rank)
        return empty(rows, width + rank).tensor_split([width], dim=1)

    (x, h), (_, b) = beside(num_tokens), beside(width)
    gate_up, weight, a, rstd = (
        empty(num_tokens, 2 * width),
        empty(width),
        empty(rank, width),
        torch.empty(num_tokens, 1),
    )
    rmsnorm.rmsnorm_forward(empty(num_tokens, width), weight, 1e-5, out=x)
    swiglu.swiglu_forward(gate_up, out=x)
    for mask in (_mask(num_tokens, width, offset), None):
        lora.project(x, a, mask, out=h)
        lora.a_gradient(h, x, mask, torch.empty(rank, width))
        update = InputUpdate(dh_TR=h, a_RI=a, mask=mask, h_TR=h)
        lora.add_input_gradient(x, update)
        for dw in (None, torch.empty(width)):
            rmsnorm.rmsnorm_backward(x, x, weight, rstd, update=update, weight_gradient_F=dw)
        swiglu.swiglu_backward(x, gate_up, update=update, out=gate_up)
    _output_gradients(x, h, b)


def _output_gradients(dy: Tensor, h: Tensor, b: Tensor) -> None:
    """dB alone, dH alone and both; of one adapter, and of three on one input, as q, k and v have them."""
    (width, rank), gradient = b.shape, torch.empty(b.shape)
    one = AdapterSection(first_column=0, num_columns=width, first_row=0, num_ranks=rank, b=b, db=gradient)
    # rows of dY and H as far apart, modulo 16, as those they are made of
    wide, stacked = (torch.cat((x, x, x), 1) for x in (dy, h))
    if h.stride(0) % 16:
        wide, stacked = (torch.cat((x, x[:, :8]), 1)[:, : x.shape[1]] for x in (wide, stacked))
    three = [replace(one, first_column=i * width, first_row=i * rank) for i in range(3)]
    for rows, low, sections in ((dy, h, [one]), (wide, stacked, three)):
        frozen = [replace(section, db=None) for section in sections]
        alone = [replace(section, b=None) for section in sections]
        output_gradients.output_gradients(rows, low, alone, add=True)
        output_gradients.output_gradients(rows, None, frozen, dh_out=torch.empty_like(low))
        output_gradients.output_gradients(rows, low, sections, dh_out=torch.empty_like(low), add=True)


def _elementwise(dtype: torch.dtype, num_tokens: int, width: int, heads: int, head_dim: int) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    x, weight, gate_up = empty(num_tokens, width), empty(width), empty(num_tokens, 2 * width)
    rstd, one = torch.empty(num_tokens, 1), torch.empty(num_tokens)
    rmsnorm.rmsnorm_forward(x, weight, 1e-5)
    rmsnorm.rmsnorm_backward(x, x, weight, rstd)
    rmsnorm.rmsnorm_backward(x, x, weight, rstd, weight_gradient_F=torch.empty(width))
    swiglu.swiglu_forward(gate_up)
    swiglu.swiglu_forward_codes(gate_up, x)
    rmsnorm.rmsnorm_forward_codes(x, weight, 1e-5, x)
    swiglu.swiglu_backward(x, gate_up)
    swiglu.swiglu_backward(x, gate_up, activation_out=x)
    qkv, table = empty(num_tokens, 3 * heads * head_dim), torch.empty(num_tokens, head_dim // 2)
    rope.rope_merge(*rope.rope_split(qkv, table, table, heads, heads, head_dim), table, table)
    norms, gradients = (empty(head_dim), empty(head_dim)), tuple(empty(num_tokens, heads, head_dim) for _ in range(3))
    rstd_heads = head_norm.norm_rope_split(qkv, norms, 1e-5, table, table, heads, heads, head_dim)[2]
    for dw in ((None, None), (torch.empty(head_dim), torch.empty(head_dim))):
        head_norm.norm_rope_merge(gradients, qkv, norms, rstd_heads, table, table, weight_gradients=dw)
    partial_sums.sum_partials(torch.empty(512, 1, width), torch.empty(1, width), add=True)
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    cross_entropy.local_statistics(x, targets)
    cross_entropy.local_gradient(x, targets, one, one, one, one)


def _quantisation(dtype: torch.dtype, rows: int, columns: int) -> None:
    weight = torch.empty(rows, columns, dtype=dtype)
    blocks = -(-columns // 64)
    codes, scales = torch.empty(rows, -(-columns // 2), dtype=torch.uint8), torch.empty(rows, blocks, dtype=torch.uint8)
    phase = torch.empty(rows, dtype=torch.uint8)
    quantize.nf4_decode(codes, scales, torch.empty(rows, 3), phase, weight)
    for code_dtype in (torch.int8, torch.float8_e4m3fn):
        quantize.row_decode(torch.empty(rows, columns, dtype=code_dtype), torch.empty(rows), weight)
    for wide in (weight, torch.empty(rows, 5 * columns, dtype=dtype)):
        for scale in (None, torch.empty(wide.shape[1])):
            quantize.quantize_rows(wide, scale)
            quantize.quantize_matrix(wide, scale)
    quantize.transpose_codes(torch.empty(rows, columns, dtype=torch.float8_e4m3fn))


def main(names: list[str]) -> None:
    """Compiles what each name stands for.

    Args:
        names: dtypes; "folded:RANK" for the rows of folded linears; "all" for larger ranks, and sizes
            of 1 that become constants.
    """
    warnings.simplefilter("error", UserWarning)
    # says which default the next version changes, and nothing about a kernel
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    _pretend_to_have_a_gpu()
    for name in names:
        if name == "all":
            _adapters(torch.bfloat16, 1, 1, 1, 3)
            _elementwise(torch.bfloat16, 1, 1, 1, 2)
            _quantisation(torch.bfloat16, 1, 1)
            _adapters(torch.bfloat16, 512, 4096, 192, 0)
        elif name.startswith("folded:"):
            _adapters(torch.bfloat16, 512, 4096, int(name.partition(":")[2]), 0, folded=True)
        else:
            _adapters(getattr(torch, name), 256, 4096, 16, 0)
            _elementwise(getattr(torch, name), 256, 4096, 16, 128)
            _quantisation(getattr(torch, name), 256, 4096)


if __name__ == "__main__":
    main(sys.argv[1:])
