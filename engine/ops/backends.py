"""The choice of a model's backend of the ops: the one named, or the fastest that can run on the model's device.

The choice is made once, when the model is built. Triton is imported only where its kernels may be chosen: on a GPU,
or on a CPU where they were asked for by name.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.native.loader import native_status
from engine.kernels.native.product import multiply, product
from engine.ops.kernels import REFERENCE, Kernels, backend

NATIVE = backend("native")
BACKENDS = ("reference", "native", "triton")
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def choose_kernels(wanted: str, *, device: torch.device, dtype: torch.dtype) -> tuple[Kernels, str]:
    """Chooses the backend for a model on `device` that computes in `dtype`.

    Args:
        wanted: "auto" (the fastest that can run), "reference", "native", "triton", or "apex" (auto with the norms of
            NVIDIA apex).

    Returns:
        The backend, and one sentence with its name and the reason.

    Raises:
        UserError: a backend was asked for by name that cannot run here.
    """
    if wanted == "reference":
        return REFERENCE, "kernels: reference (plain torch), as asked for"
    if wanted == "apex":
        from engine.ops.apex import apex_status, with_apex_norms

        status = apex_status("FusedRMSNorm")
        if device.type != "cuda" or not status.available:
            why = status.reason if device.type == "cuda" else f"apex runs on a GPU, not on {device.type}"
            raise UserError(f"model.kernels is apex, but {why}: set model.kernels to auto or reference.")
        kernels, sentence = choose_kernels("auto", device=device, dtype=dtype)
        return with_apex_norms(kernels), f"{sentence}, norms by apex"
    triton = wanted == "triton" or (wanted == "auto" and device.type == "cuda")
    why = _why_not_triton(device, dtype) if triton else _why_not_native(device, dtype)
    if why is None:
        return _triton(device) if triton else (NATIVE, f"kernels: native ({native_status().instruction_set})")
    if wanted != "auto":
        raise UserError(f"model.kernels is {wanted}, but {why}: set model.kernels to auto or reference.")
    return REFERENCE, f"kernels: reference (plain torch): {why}"


def row_invariant(kernels: Kernels, dtype: torch.dtype) -> Kernels:
    """Returns the backend with products whose rows depend neither on each other nor on their number, and which are the
    same whether or not all rows have one model's adapters, where it has such: the compiled ones for fp32. Others differ
    by the order of their sums.
    """
    if kernels.product is not product or dtype != torch.float32:
        return kernels
    return replace(
        kernels,
        product=multiply,
        narrow_product=multiply,
        sigmoid=sigmoid_anywhere,
        adapted=None,
        norm_a_gradient=None,
        swiglu_project=None,
        swiglu_backward_adapted=None,
        loss=replace(kernels.loss, product=multiply),
    )


class _SigmoidAnywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0].contiguous()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * (1.0 - y) * y


def sigmoid_anywhere(x: Tensor) -> Tensor:
    """Returns the sigmoid of each number, whose bits do not depend on its place: torch computes the last few numbers of
    a tensor otherwise than those before, but each row of a softmax alone."""
    return _SigmoidAnywhere.apply(x)  # type: ignore[no-any-return]


def backend_name(name: str, *, device_type: str, dtype: str) -> str:
    """Returns the backend that `model.kernels` means on a device, without asking whether it can run there.

    Args:
        name: as in the configuration; "auto" is the fast backend of the device, and "apex" is counted as "triton",
            from which it differs in its norms alone.
        device_type: "cuda" or "cpu".
        dtype: of the model; the compiled CPU kernels know float32 and bfloat16.

    Raises:
        UserError: there is no such backend.
    """
    if name == "auto":
        name = "triton" if device_type == "cuda" else "native" if dtype in ("float32", "bfloat16") else "reference"
    if name == "apex":
        name = "triton"
    if name not in BACKENDS:
        raise UserError(f"there is no backend {name!r} of the ops: choose one of {', '.join(BACKENDS)}.")
    return name


def _why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu" or dtype not in _NATIVE_DTYPES:
        return f"the native kernels compute in float32 and bfloat16 on a CPU, not in {dtype} on {device.type}"
    status = native_status()
    return None if status.available else status.reason


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        return None if dtype in _TRITON_DTYPES else f"the Triton kernels do not compute in {dtype}"
    if device.type != "cpu":
        return f"the Triton kernels run on a CUDA device, not on {device.type}"
    if dtype != torch.float32:
        return (
            f"on a CPU the Triton kernels are interpreted, and Triton's interpreter is right in float32, not in {dtype}"
        )
    if not _interprets():
        return "on a CPU the Triton kernels run only where TRITON_INTERPRET=1 was set before Triton was imported"
    return None


def _interprets() -> bool:
    """Returns whether Triton's own functions and our kernels are interpreted; each was decided when it was imported."""
    import triton

    from engine.kernels.triton.dropout import philox4x32

    return not any(isinstance(function, triton.JITFunction) for function in (triton.language.cdiv, philox4x32))


def _triton(device: torch.device) -> tuple[Kernels, str]:
    import triton

    from engine.kernels.triton.assembler import hopper_assembler

    kernels, assembler = backend("triton"), hopper_assembler() if device.type == "cuda" else None
    details = "interpreted" if device.type == "cpu" else assembler
    return kernels, f"kernels: triton ({triton.__version__}{'' if details is None else f', {details}'})"
