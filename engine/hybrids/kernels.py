"""The arithmetic of layers with states, by one of several backends; see `engine.ops.kernels`, which this follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache

from torch import Tensor

from engine.errors import UserError
from engine.hybrids import reference, state_space_reference, steps, triton_costs, triton_shapes
from engine.hybrids.pieces import Pieces
from engine.kernels.native.recurrence import num_kept
from engine.ops.kernels import Counted, Kernels, Op
from engine.ops.kernels.op import like, wide


def _delta_forward_shape(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces, initial: Tensor | None, *,
    scale: float, keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    state = (v.shape[1], k.shape[2], v.shape[2])
    final = wide(v, (len(pieces.sent), *state)) if pieces.sent else None
    return like(v), final, (wide(v, (num_kept(pieces), *state)),) if keep else ()


def _delta_backward_shape(
    d_out: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces,
    initial: Tensor | None, *, scale: float, kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    return like(q), like(k), like(v), like(decay), like(beta), None if initial is None else like(initial)


def _ssd_forward_shape(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, pieces: Pieces, initial: Tensor | None, *,
    keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    heads, features, size = x.shape[1], x.shape[2], b.shape[2]
    final = wide(x, (len(pieces.sent), heads, features, size)) if pieces.sent else None
    return like(x), final, (wide(x, (num_kept(pieces), heads, size, features)),) if keep else ()


def _ssd_backward_shape(
    dy: Tensor, d_final: Tensor | None, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    pieces: Pieces, initial: Tensor | None, *, kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    of_d, of_initial = (None if one is None else like(one) for one in (d, initial))
    return like(x), like(dt), like(a), like(b), like(c), of_d, of_initial


DELTA_FORWARD = Op(
    reference=reference.delta_forward,
    native="engine.kernels.native.delta:delta_forward",
    triton="engine.hybrids.triton_ops:delta_forward",
    shape=_delta_forward_shape,
    triton_shape=triton_shapes.delta_forward,
    triton_cost=triton_costs.delta_forward,
)
DELTA_BACKWARD = Op(
    reference=reference.delta_backward,
    native="engine.kernels.native.delta:delta_backward",
    triton="engine.hybrids.triton_ops:delta_backward",
    shape=_delta_backward_shape,
    triton_shape=triton_shapes.delta_backward,
    triton_cost=triton_costs.delta_backward,
)
CONV_FORWARD = Op(
    reference=reference.conv_forward,
    native="engine.kernels.native.convolution:conv_forward",
    triton="engine.hybrids.triton_ops:conv_forward",
    shape=lambda x, *_, **__: like(x),
    triton_cost=triton_costs.conv_forward,
)
CONV_BACKWARD = Op(
    reference=reference.conv_backward,
    native="engine.kernels.native.convolution:conv_backward",
    triton="engine.hybrids.triton_ops:conv_backward",
    shape=lambda dy, x, weight, bias, pieces, tail, **_: (like(x), None if tail is None else like(tail)),
    triton_shape=triton_shapes.conv_backward,
    triton_cost=triton_costs.conv_backward,
)
GATED_NORM_FORWARD = Op(
    reference=reference.gated_norm_forward,
    native="engine.kernels.native.gated_norm:gated_norm_forward",
    triton="engine.hybrids.triton_ops:gated_norm_forward",
    shape=lambda x, *_: like(x),
)
GATED_NORM_BACKWARD = Op(
    reference=reference.gated_norm_backward,
    native="engine.kernels.native.gated_norm:gated_norm_backward",
    triton="engine.hybrids.triton_ops:gated_norm_backward",
    shape=lambda dy, x, z, *_: (like(x), like(z)),
    triton_cost=triton_costs.gated_norm_backward,
)
SIGMOID_NORM_FORWARD = Op(
    reference=reference.sigmoid_norm_forward,
    triton="engine.hybrids.triton_ops:sigmoid_norm_forward",
    shape=lambda x, *_: like(x),
)
SIGMOID_NORM_BACKWARD = Op(
    reference=reference.sigmoid_norm_backward,
    triton="engine.hybrids.triton_ops:sigmoid_norm_backward",
    shape=lambda dy, x, z, *_: (like(x), like(z)),
    triton_cost=triton_costs.gated_norm_backward,
)
SSD_FORWARD = Op(
    reference=state_space_reference.ssd_forward,
    native="engine.kernels.native.ssd:ssd_forward",
    triton="engine.hybrids.triton_ops:ssd_forward",
    shape=_ssd_forward_shape,
    triton_shape=triton_shapes.ssd_forward,
    triton_cost=triton_costs.ssd_forward,
)
SSD_BACKWARD = Op(
    reference=state_space_reference.ssd_backward,
    native="engine.kernels.native.ssd:ssd_backward",
    triton="engine.hybrids.triton_ops:ssd_backward",
    shape=_ssd_backward_shape,
    triton_shape=triton_shapes.ssd_backward,
    triton_cost=triton_costs.ssd_backward,
)
CONV_STEP = Op(
    reference=steps.conv_step,
    native="engine.hybrids.native_steps:conv_step",
    triton="engine.hybrids.triton_ops:conv_step",
    shape=lambda x, *_, **__: like(x),
)
DELTA_STEP = Op(
    reference=steps.delta_step,
    native="engine.hybrids.native_steps:delta_step",
    triton="engine.hybrids.triton_ops:delta_step",
    shape=lambda q, k, v, *_, **__: like(v),
)
SSD_STEP = Op(
    reference=steps.ssd_step,
    native="engine.hybrids.native_steps:ssd_step",
    triton="engine.hybrids.triton_ops:ssd_step",
    shape=lambda x, *_: like(x),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridKernels:
    """One backend's functions; their signatures are those of `engine.hybrids.reference`,
    `engine.hybrids.state_space_reference` and, of the steps of generation, `engine.hybrids.steps`."""

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
    sigmoid_norm_forward: Callable[..., Tensor] = field(metadata={"op": SIGMOID_NORM_FORWARD})
    sigmoid_norm_backward: Callable[..., tuple[Tensor, Tensor]] = field(metadata={"op": SIGMOID_NORM_BACKWARD})
    ssd_forward: Callable[..., tuple[Tensor, Tensor | None, tuple[Tensor, ...]]] = field(metadata={"op": SSD_FORWARD})
    ssd_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]] = field(
        metadata={"op": SSD_BACKWARD}
    )
    conv_step: Callable[..., Tensor] = field(metadata={"op": CONV_STEP})
    delta_step: Callable[..., Tensor] = field(metadata={"op": DELTA_STEP})
    ssd_step: Callable[..., Tensor] = field(metadata={"op": SSD_STEP})


def _require_assembler() -> None:
    """Checks that kernels of layers with states are assembled right.

    Raises:
        UserError: the GPU is a Hopper, and no assembler that was found is new enough.
    """
    from engine.kernels.triton.assembler import CHOICE, FIXED, RIGHT_FOR_STATES, hopper_assembler

    chosen = hopper_assembler()
    if chosen is not None and chosen.version < RIGHT_FOR_STATES:
        raise UserError(
            f"layers with states are computed wrong on this GPU by kernels that {chosen} assembled ({chosen.path}): "
            f"install the package nvidia-cuda-nvcc>={FIXED[0]}.{FIXED[1]}, name a newer ptxas by {CHOICE}, or set "
            "model.kernels to reference."
        )


@cache
def _backend(name: str) -> HybridKernels:
    if name == "triton":
        _require_assembler()
    return HybridKernels(**{one: op.implementation(name) or op.reference for one, op in _ops().items()})


def _ops() -> dict[str, Op]:
    return {one.name: one.metadata["op"] for one in fields(HybridKernels)}


def _stand_ins(name: str, counted: Counted | None) -> HybridKernels:
    """Returns what stands for compiled kernels on the meta device; plain torch runs there, and is counted, as it is."""
    found = {}
    for one, op in _ops().items():
        compiled = None if name == "reference" else op.stand_in(name)
        if compiled is not None and counted is not None:
            compiled = counted(compiled, one, op if name == "triton" else replace(op, triton_cost=None))
        found[one] = op.reference if compiled is None else compiled
    return HybridKernels(**found)


def hybrid_kernels(kernels: Kernels, *, shapes: bool = False) -> HybridKernels:
    """Returns the functions of a model's backend, and the specification where it lacks one.

    Args:
        shapes: for the meta device, where compiled kernels only allocate.
    """
    name = "triton" if kernels.name == "apex" else kernels.name
    return _stand_ins(name, kernels.counted) if shapes else _backend(name)
