"""Products of activations with frozen weights on a CPU, both ways: the native backend's candidates.

    x W^T    the forward product of each linear and of the head
    dY W     its input gradient

Legend: T tokens, I input features, O output features of all sections.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.kernels.native import product
from rankfold.benchmarking.case import TORCH, Case, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.product import widths_of
from rankfold.benchmarking.kernels.setting import Setting

_Multiply = Callable[..., Tensor]


def _ways(setting: Setting) -> dict[str, tuple[_Multiply, str]]:
    """Returns name -> product and note, of those that run here; none on a GPU, where the engine's product is
    torch's.
    """
    if setting.device.type != "cpu":
        return {}
    ways: dict[str, tuple[_Multiply, str]] = {TORCH: (torch.mm, "")}
    if "native" not in setting.backends or setting.dtype != torch.float32:
        return ways
    ways["vectors"] = product.multiply, ""
    if product.has_tiles():
        note = (
            f"tiles: three bfloat16 numbers for each fp32 number; chosen from {product.FEWEST_PRODUCTS:,} products on."
        )
        ways["tiles"] = product.multiply_by_tiles, note
    return ways


def _case(setting: Setting, *, name: str, backward: bool) -> Case:
    linears = widths_of(setting) | {"head": (setting.options.hidden, (setting.options.vocab,))}
    inputs, outputs = linears[name][0], sum(linears[name][1])
    draws, tokens = setting.draws(f"frozen {name} {backward}"), setting.options.tokens
    ways = _ways(setting)
    weight = draws.normal(outputs, inputs, scale=inputs**-0.5)
    left = draws.normal(tokens, outputs if backward else inputs)
    right = weight if backward else weight.t()
    out = setting.empty(tokens, right.shape[1])
    moved = (left.numel() + right.numel() + out.numel()) * setting.itemsize
    return Case(
        size=f"{tokens}x{right.shape[0]}x{right.shape[1]}",
        demand=Demand(moved=moved, operations=2 * left.numel() * right.shape[1]),
        contestants={
            who: calling(partial(multiply, out=out), left, right, note=note) for who, (multiply, note) in ways.items()
        },
        answer=(lambda: (left.double() @ right.double(),)) if ways else list,
    )


CASES = {
    f"{name}, {'dY W' if backward else 'x W^T'}": partial(_case, name=name, backward=backward)
    for name in ("qkv", "o", "gate and up", "down", "head")
    for backward in (False, True)
}
