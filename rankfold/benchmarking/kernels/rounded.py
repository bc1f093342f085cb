"""Cases of inputs rounded in groups, and of products of codes beside those of decoded weights on a GPU.

    x W^T    a weight [intermediate, hidden] in codes, x rounded to its format
    dY W     the same of the output's gradient, where the format has it

torch's side of a product decodes the weight, by the backend's kernel, and multiplies in the activations' dtype; what
`model.base_products` chooses between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels import reference_inputs
from engine.kernels.formats import FORMATS, Format
from engine.ops.encoded_weight import Scratch
from engine.ops.quantized_backends import QuantizedBackend, choose_quantized
from engine.ops.quantized_products import QuantizedWeight
from engine.ops.scaled_products import SCALED_FORMATS, require_scaled_device, require_scaled_sizes
from engine.ops.scaled_weight import ScaledWeight
from engine.quantization.encoding import encoding
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting

_Round = Callable[[Format, Tensor], Mapping[str, Tensor]]
CODES, ALONE = "codes", "product of 16 bits alone"


def rounding(setting: Setting, *, name: str) -> Case:
    """Returns the case of rounding an input."""
    of, options = FORMATS[name], setting.options
    x = setting.draws("rounded input").normal(options.tokens, options.hidden)
    functions: dict[str, _Round] = {TORCH: reference_inputs.round_input}
    for who in setting.backends:
        own = choose_quantized(who, setting.device).operands.round_input
        if own is not functions[TORCH]:
            functions[who] = own

    stored = sum(part.nbytes for part in reference_inputs.round_input(of, x).values())
    return Case(
        size=f"{options.tokens}x{options.hidden}",
        demand=Demand(moved=x.nbytes + stored),
        contestants={who: calling(partial(_parts, function, of), x) for who, function in functions.items()},
        answer=lambda: tuple(part.double() for part in _parts(reference_inputs.round_input, of, x)),
    )


def _parts(function: _Round, of: Format, x: Tensor) -> Results:
    return tuple(function(of, x).values())


def _backend(setting: Setting, of: Format) -> QuantizedBackend | None:
    """Returns the backend whose products are timed; None where the device has none of codes."""
    if setting.device.type != "cuda":
        return None
    try:
        require_scaled_device(of, setting.device, "weight")
        options = setting.options
        require_scaled_sizes(of, options.intermediate, options.hidden, setting.device, "weight")
    except UserError:
        return None
    return choose_quantized("auto", setting.device)


def product(setting: Setting, *, name: str, tokens: int, backward: bool) -> Case:
    """Returns the case of a product of `tokens` rows; without contestants where the device has none of codes."""
    of, (rows, columns) = FORMATS[name], (setting.options.intermediate, setting.options.hidden)
    inner, outer = (rows, columns) if backward else (columns, rows)
    demand = Demand(
        moved=(tokens * (inner + outer) + rows * columns // 2) * setting.itemsize,
        operations=2 * tokens * rows * columns,
    )
    size = f"{tokens}x{inner}x{outer}"
    if (backend := _backend(setting, of)) is None:
        return Case(size=size, demand=demand, contestants={}, answer=list)
    draws = setting.draws(f"product of codes {tokens} {backward}")
    x, code = draws.normal(tokens, inner), encoding(of, backend.arithmetic)
    parts = code.encode(draws.normal(rows, columns, scale=0.02, dtype=torch.float32))
    stored = QuantizedWeight(
        encoding=code, parts=parts, in_features=columns, sections=(rows,), operands=backend.operands
    )
    weight = ScaledWeight(weight=stored, dtype=setting.dtype, scratch=Scratch())
    whole = torch.empty(rows, columns, dtype=setting.dtype, device=setting.device)
    dense = torch.empty_like(whole)
    code.decode(parts, dense)

    def decoded() -> Results:
        code.decode(parts, whole)
        return (x @ (whole if backward else whole.t()),)

    def codes() -> Results:
        return (weight.input_gradient(x, None, columns) if backward else weight.product(x, None),)

    return Case(
        size=size,
        demand=demand,
        contestants={
            TORCH: Contestant(run=decoded, note="decodes the weight first."),
            CODES: Contestant(run=codes, note="rounds the input first."),
            ALONE: Contestant(run=lambda: (x @ (dense if backward else dense.t()),)),
        },
        answer=lambda: (x.double() @ (dense.double() if backward else dense.double().t()),),
        limit=0.3,  # what the rounding of inputs to 4 bits may add
    )


CASES = {
    **{f"{name} input": partial(rounding, name=name) for name in SCALED_FORMATS},
    **{
        f"{name} product, {tokens} rows{', dY W' if backward else ''}": partial(
            product, name=name, tokens=tokens, backward=backward
        )
        for name, demands in SCALED_FORMATS.items()
        for backward in ((False, True) if demands.has_gradient else (False,))
        for tokens in (128, 1024, 8192)
    },
}
