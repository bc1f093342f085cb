"""Modules of transformers that the engine computes with ops of its own: norms, linears, and gated MLPs.

What a module computes is found by running a copy of it with a few features, whatever its class is called.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from engine.adopted.attention import Run
from engine.adopted.linears import token_context
from engine.adopted.tensor_plan import Split, parallel_linear, parallel_sections
from engine.layers.context import LayerContext
from engine.layers.mlp import Activation
from engine.layers.module import ShardEntry
from engine.ops.activations import GeGLUInput, SwiGLUInput
from engine.ops.inputs import GivenInput, LinearInput
from engine.ops.kernels import Kernels
from engine.ops.norm import output_rmsnorm

_FEATURES, _INNER, _ROWS = 8, 12, 3
_GATED: dict[Activation, LinearInput] = {"silu": SwiGLUInput(), "gelu_tanh": GeGLUInput()}


class NormForm(NamedTuple):
    """x / rms(x) * (weight + offset)."""

    eps: float
    offset: float


def norm_form(module: nn.Module) -> NormForm | None:
    """Returns the RMSNorm that a module computes; None where it computes something else."""
    names = [name for name, _ in module.named_parameters()]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if names != ["weight"] or module.weight.dim() != 1 or not isinstance(eps, float) or not _takes_one(module):
        return None
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module)
    twin.weight = nn.Parameter(torch.randn(_FEATURES, generator=generator))
    x = torch.randn(1, _ROWS, _FEATURES, generator=generator)
    found = _run(twin, x)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if _same(found, normed * (twin.weight.detach() + offset)):
            return NormForm(eps, offset)
    return None


class AdoptedNorm(nn.Module):
    """A frozen RMSNorm, [..., F] -> the same shape, by the backend's kernels."""

    def __init__(self, weight: ShardEntry, form: NormForm, kernels: Kernels) -> None:
        super().__init__()
        assert weight.sink is None, weight.name
        self.weight, self._form, self._kernels = weight.parameter, form, kernels
        self.variance_epsilon = self.eps = form.eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return output_rmsnorm(rows, self.weight, self._form.eps, None, self._form.offset, self._kernels).view(x.shape)


def computes_linear(module: nn.Linear) -> bool:
    """Returns whether a linear with a forward of its own computes x W^T + b."""
    if not _takes_one(module):
        return False
    generator = torch.Generator().manual_seed(0)
    twin, plain = copy.deepcopy(module), nn.Linear(_FEATURES, _INNER, bias=module.bias is not None)
    with torch.no_grad():
        for leaf, parameter in plain.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            twin.register_parameter(leaf, parameter)
        twin.in_features, twin.out_features = _FEATURES, _INNER
        x = torch.randn(1, _ROWS, _FEATURES, generator=generator)
        return _same(_run(twin, x), plain(x))


class MLPForm(NamedTuple):
    """down(activation(gate(x)) * up(x)).

    Args:
        fused: gate and up are the halves of one linear, gate_up_proj.
    """

    activation: Activation
    fused: bool


def mlp_form(module: nn.Module) -> MLPForm | None:
    """Returns the gated MLP that a module computes; None where it computes something else."""
    linears = {name for name, child in module.named_children() if type(child) is nn.Linear}
    owners = {name.partition(".")[0] for name, _ in module.named_parameters()}
    fused = linears == {"gate_up_proj", "down_proj"}
    if owners != linears or not (fused or linears == {"gate_proj", "up_proj", "down_proj"}) or not _takes_one(module):
        return None
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module)
    for name in linears:
        inner = 2 * _INNER if fused and name != "down_proj" else _INNER
        shape = (inner, _FEATURES) if name != "down_proj" else (_FEATURES, _INNER)
        small = nn.Linear(shape[1], shape[0], bias=module.get_submodule(name).bias is not None)
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        setattr(twin, name, small)
    x = torch.randn(1, _ROWS, _FEATURES, generator=generator)
    found = _run(twin, x)
    with torch.no_grad():
        gate, up = twin.gate_up_proj(x).chunk(2, -1) if fused else (twin.gate_proj(x), twin.up_proj(x))
        for activation, gated in (("silu", silu(gate)), ("gelu_tanh", gelu(gate, approximate="tanh"))):
            if _same(found, twin.down_proj(gated * up)):
                return MLPForm(activation, fused)  # type: ignore[arg-type]
    return None


class AdoptedMLP(nn.Module):
    """A gated MLP, [..., hidden] -> the same shape: gate and up in one product, their activation never kept.

    Args:
        prefix: of the linears' engine names, with a point at its end.
        module: transformers' module.
        form: of `mlp_form`.
        splits: how gate, or the linear of both, and down are split over tensor ranks.
        sites: dropout sites of the input and of the down projection's.
        run: of the body.
    """

    def __init__(
        self,
        prefix: str,
        module: Any,
        form: MLPForm,
        splits: tuple[Split, Split],
        sites: tuple[int, int],
        *,
        build: LayerContext,
        run: Run,
    ) -> None:
        super().__init__()
        self._prefix, self._run, self._gated = prefix, run, _GATED[form.activation]
        if form.fused:
            self.gate_up = parallel_linear(f"{prefix}gate_up_proj", module.gate_up_proj, splits[0], sites[0], build)
        else:
            both = {f"{prefix}{name}": getattr(module, name) for name in ("gate_proj", "up_proj")}
            self.gate_up = parallel_sections(both, splits[0], sites[0], build)
        self.down = parallel_linear(f"{prefix}down_proj", module.down_proj, splits[1], sites[1], build)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        context = token_context(self._run, rows, self.gate_up, self.down, name=self._prefix.rstrip("."))
        both = self.gate_up(rows, GivenInput(), context)
        return self.down(both, self._gated, context).view(*x.shape[:-1], -1)


def _takes_one(module: nn.Module) -> bool:
    """Returns whether a module's forward takes one tensor and nothing else."""
    parameters = inspect.signature(module.forward).parameters.values()
    return len(parameters) == 1 and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


def _run(twin: nn.Module, x: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            found = twin(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it needs what a copy of a few features lacks
        return None
    return found if isinstance(found, Tensor) else None


def _same(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
