"""The schemes of compressed-tensors: what a group of `config_groups` says about its weights."""

from __future__ import annotations

from dataclasses import replace

from engine.kernels.formats import FORMATS, Format
from engine.quantization.shipped.entries import Entries
from engine.quantization.shipped.floats import Floats
from engine.quantization.shipped.integers import PackedIntegers
from engine.quantization.shipped.spelling import Spelling

_NAIVE = ("int-quantized", "float-quantized", "naive-quantized")
_READ = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "pack-quantized", *_NAIVE)


def scheme_spelling(group: Entries, outer: object) -> Spelling | None:
    """Returns the spelling of a group's weights; None where they are not in few bits.

    Args:
        group: of `config_groups`.
        outer: the config's own format, which counts where the group has none.

    Raises:
        UserError: a value is not read.
    """
    if group.get("weights") is None:
        return None
    weights = group.mapping("weights", needed=True)
    own = group.get("format") or (outer if outer not in (None, "mixed-precision", "fakequant") else None)
    if own == "dense":
        return None
    if own not in (None, *_READ):
        holder = group if group.get("format") else Entries({"format": outer})
        raise holder.wrong("format", f"one of {', '.join(_READ)}")
    kind, bits = str(weights.get("type", "int")).lower(), weights.count("num_bits", 8)
    if own is None:
        own = _inferred(kind, bits, weights, is_weight_only=group.get("input_activations") is None)
    if kind not in ("int", "float"):
        raise weights.wrong("type", "int or float")
    if own == "pack-quantized":
        return _packed(weights, kind, bits)
    if weights.get("symmetric", True) is not True:
        raise weights.wrong("symmetric", "true")
    if own == "nvfp4-pack-quantized":
        _expect(weights, kind, bits, "float", 4, 16)
        nvfp4 = replace(FORMATS["nvfp4"], divides=True)
        return Floats(kind=nvfp4, codes=".weight_packed", tensor_scale=".weight_global_scale")
    if own == "mxfp4-pack-quantized":
        _expect(weights, kind, bits, "float", 4, 32)
        return Floats(kind=FORMATS["mxfp4"], codes=".weight_packed")
    if own == "mxfp8-quantized":
        _expect(weights, kind, bits, "float", 8, 32)
        return Floats(kind=FORMATS["mxfp8"])
    return _naive(weights, kind, bits)


def _inferred(kind: str, bits: int, weights: Entries, *, is_weight_only: bool) -> str:
    """Returns the format that compressed-tensors infers where none is written."""
    group = weights.get("group_size")
    if kind == "float" and bits == 4:
        return "mxfp4-pack-quantized" if group == 32 else "nvfp4-pack-quantized"
    if kind == "float" and group == 32 and "uint8" in str(weights.get("scale_dtype")):
        return "mxfp8-quantized"
    return "pack-quantized" if kind == "int" and is_weight_only else "naive-quantized"


def _expect(weights: Entries, kind: str, bits: int, type_: str, num_bits: int, group: int) -> None:
    if kind != type_:
        raise weights.wrong("type", type_)
    if bits != num_bits:
        raise weights.wrong("num_bits", str(num_bits))
    if weights.get("group_size") != group:
        raise weights.wrong("group_size", str(group))


def _strategy(weights: Entries) -> str:
    """Returns what a scale is for, which the size of a group says where it is not written."""
    size = weights.get("group_size")
    otherwise = "tensor" if size is None else "channel" if size == -1 else "group"
    return str(weights.get("strategy", otherwise)).lower()


def _packed(weights: Entries, kind: str, bits: int) -> Spelling:
    if kind != "int":
        raise weights.wrong("type", "int")
    if bits not in (4, 8):
        raise weights.wrong("num_bits", "4 or 8")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise weights.wrong("actorder", "null, weight or static")
    strategy = _strategy(weights)
    if strategy not in ("group", "channel"):
        raise weights.wrong("strategy", "group or channel")
    group = weights.count("group_size") if strategy == "group" else 0
    if group % (32 // bits):
        raise weights.wrong("group_size", f"a multiple of {32 // bits}")
    return PackedIntegers(bits=bits, columns_of_group=group, has_zeros=not weights.switch("symmetric", default=True))


def _naive(weights: Entries, kind: str, bits: int) -> Spelling:
    if bits != 8:
        raise weights.wrong("num_bits", "8")
    strategy = _strategy(weights)
    if kind == "int":
        if strategy not in ("channel", "tensor"):
            raise weights.wrong("strategy", "channel or tensor")
        return Floats(kind=Format(name="int8"), one_scale=strategy == "tensor")
    if strategy in ("channel", "tensor"):
        return Floats(kind=FORMATS["fp8_channel"], one_scale=strategy == "tensor")
    if strategy == "block":
        rows, columns = weights.pair("block_structure")
        return Floats(kind=Format(name="fp8_block", group=columns, rows=rows, granule=rows))
    if strategy == "group":
        return Floats(kind=Format(name="fp8_block", group=weights.count("group_size")))
    raise weights.wrong("strategy", "channel, tensor, block or group")
