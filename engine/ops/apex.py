"""NVIDIA apex where it is installed: whether its compiled parts can be used, its FusedAdam and its RMSNorm.

The package called apex on the Python package index is another project, a toolkit for web sites. It is recognised
without being imported. NVIDIA's is installed from its source; its CUDA code lies in modules beside it (`amp_C`,
`fused_layer_norm_cuda`) that are missing where it was installed without --cuda_ext.

apex is imported only on use, and nothing here falls back: the caller asks `apex_status()` and
chooses.

Legend: T tokens, F features.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.errors import UserError
from engine.kernels import reference
from engine.kernels.records import InputUpdate
from engine.ops.kernels import Kernels

Part = Literal["FusedAdam", "FusedRMSNorm"]

REMEDY = "install NVIDIA apex from its source with --cpp_ext and --cuda_ext"

_ADAM_ARGUMENTS = ("adam_w_mode", "capturable", "master_weights")
_NORM_FUNCTIONS = ("rms_forward_affine", "rms_backward_affine")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApexStatus:
    """The state of a part of NVIDIA apex: usable, or why not.

    Args:
        available: whether it can.
        reason: part of a sentence: the version found, or the fault and its remedy.
    """

    available: bool
    reason: str


class _Unavailable(Exception):
    """Carries the reason that apex_status() gives."""


def apex_status(part: Part = "FusedAdam") -> ApexStatus:
    """Returns whether `part` of NVIDIA apex is installed and can be loaded, on a machine with or without a GPU."""
    try:
        _load(part)
    except _Unavailable as error:
        return ApexStatus(available=False, reason=str(error))
    return ApexStatus(available=True, reason=f"{part} of NVIDIA apex")


def fused_adam() -> type[Optimizer]:
    """Returns the class `apex.optimizers.FusedAdam`.

    Raises:
        UserError: it cannot be used here.
    """
    kind: type[Optimizer] = _require("FusedAdam").FusedAdam
    return kind


def with_apex_norms(kernels: Kernels) -> Kernels:
    """Returns `kernels` with RMSNorm by apex, for tensors on a GPU; named "apex".

    Norms of query and key heads are left unchanged where they share a kernel with the rotation. Kernels that make a
    norm's output as part of another op are left out: they would round otherwise than apex does.

    Raises:
        UserError: apex's norms cannot be used here.
    """
    norm = FusedRMSNorm(extension=_require("FusedRMSNorm"), apply_update=kernels.apply_update)
    return replace(
        kernels,
        name="apex",
        norm_forward=norm.forward,
        norm_backward=norm.backward,
        row_codes=None,
        norm_a_gradient=None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedRMSNorm:
    """RMSNorm by apex's CUDA kernels; `forward` is a NormForward and `backward` a NormBackward of engine.ops.kernels.

    apex takes dense rows and returns new tensors: rows with gaps between them are copied first, and y is copied to
    where the caller wants it.

    Args:
        extension: the module fused_layer_norm_cuda.
        apply_update: adds an adapter's part to a gradient, since apex knows nothing of adapters.
    """

    extension: Any
    apply_update: Callable[[Tensor, InputUpdate], Tensor]

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        added: Tensor | None = None,
        total: Tensor | None = None,
    ) -> Tensor:
        """Computes norm(x) * weight into `out`.

        Args:
            x: [T, F], rows of any stride.
            weight: [F], of x's dtype.
            eps: added to the mean square.
            out: [T, F], rows of any stride.
            added, total: [T, F]; the first is added to x, and the sum written to the second. None for none.

        Returns:
            fp32 [T, 1], the reciprocal root mean square.
        """
        if added is not None:
            x = torch.add(x, added, out=total)
        assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
        y, rstd = self.extension.rms_forward_affine(x.contiguous(), weight.shape, weight, eps)
        out.copy_(y)
        return rstd.view(*x.shape[:-1], 1)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        update: InputUpdate | None,
        weight_gradient: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Computes dx.

        Args:
            dy: [T, F], gradient of y that still lacks `update`; may be overwritten.
            x, weight: as in forward.
            rstd: of forward.
            update: the adapters' part of dy.
            weight_gradient: fp32 [F], the weight's gradient is added to it; None where it is frozen.
            residual: [T, F] to add to dx; None for none.
        """
        if update is not None:
            dy = self.apply_update(dy, update)
        # The eps of backward is the smallest weight that the kernel lets pass, larger ones it takes as they are; with 0
        # that is every weight. The eps of the mean square is in rstd already.
        dx, dw = self.extension.rms_backward_affine(
            dy.contiguous(), rstd.view(-1), x.contiguous(), weight.shape, weight, 0.0, False
        )
        if weight_gradient is not None:
            # apex rounds the weight's gradient to the weight's dtype; sums of it are kept in fp32
            exact = dw.dtype == weight_gradient.dtype
            weight_gradient.add_(dw if exact else reference.rmsnorm_weight_gradient(dy, x, rstd))
        return dx if residual is None else dx.add_(residual)


def _require(part: Part) -> Any:
    try:
        return _load(part)
    except _Unavailable as error:
        raise UserError(f"{part} was asked for, but {error}.") from error


def _load(part: Part) -> ModuleType:
    """Returns the module that holds `part`, checked to have every name used here."""
    _find_nvidia_apex()
    if part == "FusedRMSNorm":
        norms = _import("fused_layer_norm_cuda")
        if not all(hasattr(norms, name) for name in _NORM_FUNCTIONS):
            raise _Unavailable(f"this NVIDIA apex is too old, it has no RMSNorm: {REMEDY}")
        return norms
    _import("amp_C")
    optimizers = _import("apex.optimizers")
    accepted = inspect.signature(optimizers.FusedAdam).parameters
    unknown = [name for name in _ADAM_ARGUMENTS if name not in accepted]
    if unknown:
        raise _Unavailable(f"this NVIDIA apex is too old, its FusedAdam has no argument {unknown[0]}: {REMEDY}")
    return optimizers


def _find_nvidia_apex() -> None:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise _Unavailable(f"NVIDIA apex is not installed: {REMEDY}")
    # looked for as a file: find_spec of a submodule would run the package, whichever it is
    folders = spec.submodule_search_locations
    if folders is None or PathFinder.find_spec("apex.optimizers", list(folders)) is None:
        where = spec.origin or ", ".join(folders or ())
        raise _Unavailable(
            f"the package apex that is installed ({where}) has no apex.optimizers and so is not NVIDIA's (the package "
            f"index gives another project of that name): uninstall it and {REMEDY}"
        )


def _import(name: str) -> ModuleType:
    if "." not in name and importlib.util.find_spec(name) is None:
        raise _Unavailable(f"NVIDIA apex was installed without its CUDA code ({name} is missing): {REMEDY}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _Unavailable(f"NVIDIA apex cannot be loaded ({error}): {REMEDY}") from error
