"""What each backend of the ops keeps and writes beside its results.

Names are those of `engine.ops.kernels.Kernels.name`. The plain-torch backend writes every intermediate out, which is
what makes it the largest; kernels keep them in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelMemory:
    """One backend.

    Args:
        name: of the backend.
        writes_intermediates: whether norms, SwiGLU, rotation, dropout and the loss are several torch operations, each
            with a tensor of its own.
        mask_bytes: number of features -> bytes of one token's dropout mask.
        wide_attention_gradient: whether attention's backward adds up dq in fp32 and writes dk and dv for every query
            head before summing those of a group, as flash attention on a GPU does.
        fuses_head_norms: whether norm and rotation of queries and keys are one pass.
        decodes_plainly: whether frozen weights that are stored encoded are decoded by several torch operations.
        quantizes_plainly: the same of the operands of FP8 products.
    """

    name: str
    writes_intermediates: bool
    mask_bytes: Callable[[int], int]
    wide_attention_gradient: bool = False
    fuses_head_norms: bool = False
    decodes_plainly: bool = False
    quantizes_plainly: bool = False


KERNEL_MEMORY = {
    "reference": KernelMemory(
        name="reference", writes_intermediates=True, mask_bytes=lambda features: features,
        decodes_plainly=True, quantizes_plainly=True,
    ),
    # bits in rows of whole 8 bytes
    "native": KernelMemory(
        name="native", writes_intermediates=False, mask_bytes=lambda features: -(-features // 64) * 8,
        quantizes_plainly=True,
    ),
    "triton": KernelMemory(
        name="triton", writes_intermediates=False, mask_bytes=lambda features: -(-features // 8),
        wide_attention_gradient=True, fuses_head_norms=True,
    ),
}  # fmt: skip


_NATIVE = ("float32", "bfloat16")


def kernel_memory(name: str, *, device_type: str, dtype: str) -> KernelMemory:
    """What `model.kernels` would be on a device, without asking whether it can run there.

    Args:
        name: as in the configuration; "auto" is the fast backend of the device, and "apex" is counted as "triton",
            from which it differs in its norms alone.
        device_type: "cuda" or "cpu".
        dtype: of the model; the compiled CPU kernels know float32 and bfloat16.

    Raises:
        UserError: there is no such backend.
    """
    if name == "auto":
        name = "triton" if device_type == "cuda" else "native" if dtype in _NATIVE else "reference"
    if name == "apex":
        name = "triton"
    if name not in KERNEL_MEMORY:
        raise UserError(f"there is no backend {name!r} of the ops: choose one of {', '.join(KERNEL_MEMORY)}.")
    return KERNEL_MEMORY[name]
