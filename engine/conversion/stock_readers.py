"""Stock transformers as a reader of folders in few bits: which it decodes on a CPU, and how it is asked to."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.checkpoint.folder import CONFIG
from engine.checkpoint.hf_tensors import HfTensors
from engine.files.documents import read_json
from engine.quantization.shipped.config import ShippedEncoding, encoding_of

_COMPRESSED_TENSORS = "compressed-tensors"
_DECODED = {_COMPRESSED_TENSORS: "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""quant_method -> transformers' class, which takes `dequantize`."""
_UNREAD_EXPERTS = {
    "NVFP4": "transformers leaves their tensors' scales out where experts are in NVFP4",
    "FP8 in blocks": "transformers has no blocks of experts in compressed-tensors' FP8",
    "MXFP8": "transformers has no blocks of experts in compressed-tensors' FP8",
    "INT8": "transformers does not read experts in int8",
}
"""Spellings of compressed-tensors in which stock transformers does not read a mixture's experts; vLLM does."""


def stock_decoding(folder: Path) -> Any:
    """Returns transformers' option by which it decodes all weights of a folder as it reads them; None for one without
    weights in few bits."""
    import transformers

    shipped = _shipped(folder)
    return None if shipped is None else getattr(transformers, _DECODED[shipped.method])(dequantize=True)


def obstacle_to_decoding(folder: Path, *, has_experts: bool) -> str | None:
    """Returns why stock transformers does not decode the weights of a folder on a CPU, or None."""
    if (shipped := _shipped(folder)) is None:
        return None
    if shipped.method not in _DECODED:
        return f"transformers does not decode weights of quant_method {shipped.method} on a CPU"
    if shipped.method == "fp8" and (cut := _ends_in_a_block(folder, shipped)) is not None:
        return f"transformers takes all blocks of a matrix as equal, and {cut} ends inside one"
    if shipped.method != _COMPRESSED_TENSORS:
        return None
    if find_spec("compressed_tensors") is None:
        return "compressed-tensors is not installed"
    if len(shipped.spellings()) > 1:
        return "transformers decodes checkpoints of one format alone"
    found = (_UNREAD_EXPERTS.get(one.name) for one in shipped.spellings() if has_experts)
    return next((reason for reason in found if reason is not None), None)


def _ends_in_a_block(folder: Path, shipped: ShippedEncoding) -> str | None:
    """Returns the first matrix of several blocks in FP8 whose last one is cut off, as DeepSeek-V3's 576 rows cut it:
    transformers divides lengths of the matrix by those of its scales, and takes blocks of other sizes, or raises."""
    files = HfTensors(folder)
    for name in files.names():
        weight = name.removesuffix("_scale_inv")
        spelling = None if weight == name else shipped.spelling(weight.removesuffix(".weight"))
        if spelling is None or weight not in files:
            continue
        each = zip(files.shape(name), (spelling.format.rows, spelling.format.group), files.shape(weight), strict=False)
        if any(blocks > 1 and blocks * size != length for blocks, size, length in each):
            return weight
    return None


def _shipped(folder: Path) -> ShippedEncoding | None:
    return encoding_of(read_json(folder / CONFIG))
