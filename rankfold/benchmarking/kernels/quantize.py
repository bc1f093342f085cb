"""Cases of quantized weights: decoding them for a product, and the operands of FP8 products.

The weight is the MLP's, [intermediate, hidden]; activations are [tokens, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.kernels import reference_quantize
from engine.ops.kernels import REFERENCE, Kernels, RowCodeKernels
from engine.ops.quantized_backends import QuantizedBackend, choose_quantized
from engine.ops.quantized_products import OperandKernels
from engine.quantization.encoding import encoding
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.oracles import EPS


def _backends(setting: Setting) -> dict[str, QuantizedBackend]:
    """Returns plain torch, and the backends that have their own loops for this."""
    found = {TORCH: choose_quantized("reference", setting.device)}
    for name in setting.backends:
        backend = choose_quantized(name, setting.device)
        if backend.arithmetic.name == name != "reference":
            found[name] = backend
    return found


def _with_operands(setting: Setting) -> dict[str, OperandKernels]:
    """Returns plain torch's operands of FP8 products, and those of the backends that make their own."""
    found = {who: each.operands for who, each in _backends(setting).items()}
    return {who: each for who, each in found.items() if who == TORCH or each != found[TORCH]}


def _weight(setting: Setting) -> Tensor:
    return setting.draws("quantised weight").normal(setting.options.intermediate, setting.options.hidden, scale=0.02)


def decode(setting: Setting, *, name: str) -> Case:
    weight = _weight(setting)
    parts = encoding(name).encode(weight)
    stored = sum(part.nbytes for part in parts.values())

    def contestant(backend: QuantizedBackend) -> Contestant:
        code, out = encoding(name, backend.arithmetic), torch.empty_like(weight)

        def run() -> Results:
            code.decode(parts, out)
            return (out,)

        return Contestant(run=run)

    def answer() -> Results:
        out = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        encoding(name).decode(parts, out)
        return (out.double(),)

    return Case(
        size=f"{weight.shape[0]}x{weight.shape[1]}",
        demand=Demand(moved=stored + weight.nbytes),
        contestants={who: contestant(backend) for who, backend in _backends(setting).items()},
        answer=answer,
    )


def operand(setting: Setting, *, by_row: bool) -> Case:
    options = setting.options
    x = setting.draws("FP8 operand").normal(options.tokens, options.hidden)
    exact = reference_quantize.quantize_rows if by_row else reference_quantize.quantize_matrix
    return Case(
        size=f"{options.tokens}x{options.hidden}",
        # a scale for the whole tensor is known only after reading all of it
        demand=Demand(moved=x.nbytes * (1 if by_row else 2) + x.numel()),
        contestants={
            who: calling(each.quantize_rows if by_row else each.quantize_matrix, x, None)
            for who, each in _with_operands(setting).items()
        },
        answer=lambda: tuple(part.double() for part in exact(x, None)),
    )


def transpose(setting: Setting) -> Case:
    codes = encoding("fp8").encode(_weight(setting))["codes"]
    return Case(
        size=f"{codes.shape[0]}x{codes.shape[1]}",
        demand=Demand(moved=2 * codes.nbytes),
        contestants={who: calling(each.transpose, codes) for who, each in _with_operands(setting).items()},
        answer=lambda: (codes.double().t(),),
    )


def made(setting: Setting, *, by_norm: bool) -> Case:
    """Returns the case of an FP8 operand made by norm or SwiGLU and quantised by row; the limit is one pass over its
    input.
    """
    options = setting.options
    features = options.hidden if by_norm else options.intermediate
    draws = setting.draws("FP8 input")
    u = draws.normal(options.tokens, features if by_norm else 2 * features)
    weight = draws.normal(features, mean=1.0, scale=0.1)

    def apart(kernels: Kernels, quantize: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]) -> Contestant:
        out = setting.empty(options.tokens, features)

        def run() -> Results:
            if by_norm:
                kernels.norm_forward(u, weight, EPS, out)
            else:
                kernels.swiglu_forward(u, out)
            return out, *quantize(out, None)

        return Contestant(run=run)

    def together(row_codes: RowCodeKernels) -> Contestant:
        out = setting.empty(options.tokens, features)
        if by_norm:
            return Contestant(run=lambda: (out, *row_codes.norm(u, weight, EPS, out)[1:]))
        return Contestant(run=lambda: (out, *row_codes.swiglu(u, out)))

    plain = apart(REFERENCE, reference_quantize.quantize_rows)
    contestants = {TORCH: plain}
    for name, kernels in setting.backends.items():
        if kernels.row_codes is not None:
            quantize = choose_quantized(name, setting.device).operands.quantize_rows
            contestants[f"{name}, two kernels"] = apart(kernels, quantize)
            contestants[name] = together(kernels.row_codes)
    moved = u.nbytes + options.tokens * (features * (setting.itemsize + 1) + 4)
    return Case(
        size=f"{options.tokens}x{features}",
        demand=Demand(moved=moved),
        contestants=contestants,
        answer=lambda: tuple(part.double() for part in plain.run()),
        limit=0.08,  # a last bit of a number may change its code to the next one, 32 of 448 at the top
    )


CASES = {
    "NF4 decode": partial(decode, name="nf4"),
    "int8 decode": partial(decode, name="int8"),
    "FP8 operand, a scale a row": partial(operand, by_row=True),
    "FP8 operand, one scale": partial(operand, by_row=False),
    "FP8 transpose": transpose,
    "RMSNorm and FP8 codes": partial(made, by_norm=True),
    "SwiGLU and FP8 codes": partial(made, by_norm=False),
}
