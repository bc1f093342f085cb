"""Cases of weights in the formats that vendors ship: decoding them for a product, with an adapter in them or without,
and products of few rows.

The weight is the MLP's, [intermediate, hidden]. The peers are the libraries that write such checkpoints, by the
functions with which they read them; some of those write bf16 whatever the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.kernels import reference_formats
from engine.kernels.formats import FORMATS
from engine.ops.quantized_backends import choose_quantized
from engine.quantization.encoding import encoding
from rankfold.benchmarking.case import LIMITS, TORCH, Case, Contestant, Results, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting

COMPRESSED, TORCHAO = "compressed-tensors", "torchao"

_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
}
"""Format -> its name for compressed-tensors, and the arguments that describe it."""


def _weight(setting: Setting) -> Tensor:
    return setting.draws("weight in few bits").normal(
        setting.options.intermediate, setting.options.hidden, scale=0.02, dtype=torch.float32
    )


def _engines(setting: Setting, function: str) -> dict[str, Callable[..., None]]:
    """Returns the function of plain torch, and those of the backends that have one of their own."""
    found = {TORCH: getattr(reference_formats, function)}
    for name in setting.backends:
        own = getattr(choose_quantized(name, setting.device).arithmetic, function)
        if own is not found[TORCH]:
            found[name] = own
    return found


def _writing(function: Callable[..., None], *arguments: object, out: Tensor) -> Contestant:
    def run() -> Results:
        function(*arguments, out)
        return (out,)

    return Contestant(run=run)


def _exact(function: Callable[..., None], *arguments: object, like: Tensor) -> Results:
    out = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    function(*arguments, out)
    return (out.double(),)


def _by_compressed_tensors(name: str, parts: dict[str, Tensor], columns: int) -> Contestant:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind, arguments = _COMPRESSED[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    packed, rows = name in ("nvfp4", "mxfp4", "int4"), len(parts["codes"])
    stored = {"weight_packed" if packed else "weight": parts["codes"], "weight_scale": parts["scales"]}
    if name == "nvfp4":
        stored["weight_global_scale"] = 1 / parts["tensor_scale"][:1]  # it divides there
    if name == "int4":
        stored |= {"weight_packed": parts["codes"].view(torch.int32), "weight_shape": torch.tensor([rows, columns])}
    compressor = BaseCompressor.get_value_from_registry(kind)
    return calling(lambda: compressor.decompress(dict(stored), scheme)["weight"])


def _by_torchao(name: str, parts: dict[str, Tensor], dtype: torch.dtype) -> Contestant:
    import torchao.prototype.mx_formats.mx_tensor
    import torchao.prototype.mx_formats.nvfp4_tensor

    formats: ModuleType = torchao.prototype.mx_formats
    if name == "nvfp4":
        scale = parts["tensor_scale"][0]
        whole = formats.nvfp4_tensor.NVFP4Tensor(parts["codes"], parts["scales"], 16, dtype, per_tensor_scale=scale)
        return calling(whole.dequantize, dtype)
    elements = torch.float4_e2m1fn_x2 if name == "mxfp4" else torch.float8_e4m3fn
    scales = parts["scales"].view(torch.float8_e8m0fnu)
    return calling(formats.mx_tensor.to_dtype, parts["codes"], scales, elements, 32, dtype)


def decode(setting: Setting, *, name: str) -> Case:
    """Returns the case of decoding a weight."""
    of, weight = FORMATS[name], _weight(setting)
    parts = encoding(of).encode(weight)
    out = weight.to(setting.dtype)
    contestants = {
        who: _writing(function, of, parts, out=torch.empty_like(out))
        for who, function in _engines(setting, "block_decode").items()
    }
    whole_groups = weight.shape[1] % 128 == 0  # the peers know no others
    if COMPRESSED in setting.peers and whole_groups:
        contestants[COMPRESSED] = _by_compressed_tensors(name, parts, weight.shape[1])
    if TORCHAO in setting.peers and whole_groups and name in ("nvfp4", "mxfp4", "mxfp8"):
        contestants[TORCHAO] = _by_torchao(name, parts, setting.dtype)
    return Case(
        size=f"{weight.shape[0]}x{weight.shape[1]}",
        demand=Demand(moved=sum(part.nbytes for part in parts.values()) + out.nbytes),
        contestants=contestants,
        answer=lambda: _exact(reference_formats.block_decode, of, parts, like=weight),
        limit=LIMITS[torch.bfloat16] if COMPRESSED in contestants else None,
    )


DECODED = "%s, decoded"
"""A backend whose product reads the decoded weight."""


def few_rows(setting: Setting, *, name: str, count: int) -> Case:
    """Returns the case of few rows times a weight, from its codes and from numbers that are decoded first: up to how
    many rows the former takes less time is `Arithmetic.most_few_rows`."""
    of, weight = FORMATS[name], _weight(setting)
    parts, x = encoding(of).encode(weight), setting.draws("few rows").normal(count, weight.shape[1])
    numbers = weight.to(setting.dtype)
    out = x.new_empty(count, weight.shape[0])

    def after(decode: Callable[..., None], scratch: Tensor) -> Callable[..., None]:
        def product(out: Tensor) -> None:
            decode(of, parts, scratch)
            torch.mm(x, scratch.t(), out=out)

        return product

    contestants, pairs = {}, {}
    for who, decode in _engines(setting, "block_decode").items():
        multiply = None if who == TORCH else choose_quantized(who, setting.device).arithmetic.few_rows_product
        decoded = who if multiply is None else DECODED % who
        contestants[decoded] = _writing(after(decode, torch.empty_like(numbers)), out=torch.empty_like(out))
        if multiply is not None:
            contestants[who] = _writing(multiply, of, parts, x, out=torch.empty_like(out))
            pairs[f"{name}, {count} rows"] = (who, decoded)

    def answer() -> Results:
        reference_formats.block_decode(of, parts, numbers)
        return (x.double() @ numbers.double().t(),)

    return Case(
        size=f"{count} rows, {weight.shape[0]}x{weight.shape[1]}",
        demand=Demand(moved=sum(part.nbytes for part in (*parts.values(), x, out))),
        contestants=contestants,
        answer=answer,
        verdicts=pairs,
    )


def merged(setting: Setting, *, name: str, rank: int) -> Case:
    """Returns the case of a weight that takes an adapter before it is rounded; the limit is that of decoding, since no
    ceiling is one of sums in order."""
    of, weight = FORMATS[name], _weight(setting)
    parts, draws = encoding(of).encode(weight), setting.draws("merged adapter")
    # changes of about a hundredth of the weight
    b = draws.normal(weight.shape[0], rank, scale=0.02 * 0.01 * rank**-0.5)
    a = draws.normal(rank, weight.shape[1])
    out = weight.to(setting.dtype)
    # thousands of torch's small ops a call: they are the answer, and take no part beside another backend
    engines = _engines(setting, "merged_decode")
    own = {who: function for who, function in engines.items() if who != TORCH} or engines
    return Case(
        size=f"{weight.shape[0]}x{weight.shape[1]}, rank {rank}",
        demand=Demand(moved=sum(part.nbytes for part in (*parts.values(), b, a, out))),
        contestants={
            who: _writing(function, of, parts, b, a, 1.0, out=torch.empty_like(out)) for who, function in own.items()
        },
        answer=lambda: _exact(reference_formats.merged_decode, of, parts, b, a, 1.0, like=weight),
    )


_MERGED = ("nvfp4", "fp8_block", "int4", "fp8_channel")
"""Blocks that are merged one by one, with scales that are divided by, blocks of rows, in steps, and whole rows."""

CASES = {
    **{f"{name} decode": partial(decode, name=name) for name in _COMPRESSED},
    **{
        f"{name} product, {count} rows": partial(few_rows, name=name, count=count)
        for name in ("nvfp4", "mxfp4", "fp8_block", "int4")
        for count in (1, 4, 16, 64)
    },
    **{f"{name} merged, rank {rank}": partial(merged, name=name, rank=rank) for name in _MERGED for rank in (16, 64)},
}
