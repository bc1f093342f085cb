"""The arithmetic of layers with states, by one of several backends; see `engine.ops.kernels`, which this follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache

from torch import Tensor

from engine.hybrids import reference
from engine.ops.kernels import Kernels, Op

DELTA_FORWARD = Op(reference=reference.delta_forward)
DELTA_BACKWARD = Op(reference=reference.delta_backward)
CONV_FORWARD = Op(reference=reference.conv_forward)
CONV_BACKWARD = Op(reference=reference.conv_backward)
GATED_NORM_FORWARD = Op(reference=reference.gated_norm_forward)
GATED_NORM_BACKWARD = Op(reference=reference.gated_norm_backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridKernels:
    """One backend's functions; their signatures are those of `engine.hybrids.reference`."""

    delta_forward: Callable[..., tuple[Tensor, Tensor | None, tuple[Tensor, ...]]] = field(
        metadata={"op": DELTA_FORWARD}
    )
    delta_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]] = field(
        metadata={"op": DELTA_BACKWARD}
    )
    conv_forward: Callable[..., Tensor] = field(metadata={"op": CONV_FORWARD})
    conv_backward: Callable[..., tuple[Tensor, Tensor | None]] = field(metadata={"op": CONV_BACKWARD})
    gated_norm_forward: Callable[..., Tensor] = field(metadata={"op": GATED_NORM_FORWARD})
    gated_norm_backward: Callable[..., tuple[Tensor, Tensor]] = field(metadata={"op": GATED_NORM_BACKWARD})


@cache
def _backend(name: str, *, shapes: bool) -> HybridKernels:
    found = {}
    for one in fields(HybridKernels):
        op: Op = one.metadata["op"]
        compiled = None if name == "reference" else op.stand_in(name) if shapes else op.implementation(name)
        found[one.name] = op.reference if compiled is None else compiled
    return HybridKernels(**found)


def hybrid_kernels(kernels: Kernels, *, shapes: bool = False) -> HybridKernels:
    """Returns the functions of a model's backend, and the specification where it lacks one.

    Args:
        shapes: for the meta device, where compiled kernels only allocate.
    """
    return _backend("triton" if kernels.name == "apex" else kernels.name, shapes=shapes)
