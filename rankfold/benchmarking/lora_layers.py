"""One linear with adapters, by the engine, by PEFT and by plain torch, and the same linear frozen.

Every contestant computes output, input gradient and the gradients of A and B of each section, from equal weights. With
dropout they draw different masks, but each mask is known: the engine's from its coordinates, torch's by drawing again
from the same seed. So each is compared with the answer for its own mask.

Legend: T tokens, I input features, O output features of all sections, R rows of the stacked A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.distributed.sharding import split_spec
from engine.kernels.philox import dropout_mask, dropout_scale
from engine.kernels.records import Documents, DropoutKey
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section
from engine.ops.activations import SwiGLUInput
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput, NormInput
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Contestant, Results, deviation
from rankfold.benchmarking.options import Shape
from rankfold.benchmarking.oracles import EPS, rms_norm, swiglu, with_gradients

SCALE = 2.0
"""alpha / r."""
_SEED, _SITE, _TORCH_SEED = 5, 3, 11
Masks = list[Tensor | None]
"""A dropout mask for each section: fp64 [T, I], 0 where dropped, 1 / (1 - p) where kept; None without dropout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The operands that all contestants share.

    Args:
        shape: kind and sizes.
        dropout: probability of dropping an element of the adapters' input.
        u: the source of x: [T, I], or [T, 2I] for SwiGLU.
        norm: [I].
        weights, a, b: of each section: [o, I], [r, I], [o, r].
        dy: [T, O].
    """

    shape: Shape
    dropout: float
    u: Tensor
    norm: Tensor
    weights: list[Tensor]
    a: list[Tensor]
    b: list[Tensor]
    dy: Tensor

    @property
    def device(self) -> torch.device:
        return self.u.device

    def make_x(self, u: Tensor, norm: Tensor) -> Tensor:
        """Computes x [T, I] by plain torch, differentiable."""
        if self.shape.kind == "norm-column":
            return rms_norm(u, norm)
        if self.shape.kind == "swiglu-row":
            return swiglu(u)
        return u

    def dy_sections(self) -> tuple[Tensor, ...]:
        return self.dy.split(list(self.shape.outputs), dim=1)


def make_layer(shape: Shape, rank: int, dropout: float, device: torch.device, dtype: torch.dtype) -> Layer:
    """Returns random operands, the same whenever they are made."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale).add_(mean).to(dtype)

    width = shape.inputs
    return Layer(
        shape=shape,
        dropout=dropout,
        u=normal(shape.tokens, 2 * width if shape.kind == "swiglu-row" else width),
        norm=normal(width, scale=0.1, mean=1.0),
        weights=[normal(rows, width, scale=width**-0.5) for rows in shape.outputs],
        a=[normal(rank, width, scale=width**-0.5) for _ in shape.outputs],
        b=[normal(rows, rank, scale=0.1) for rows in shape.outputs],
        dy=normal(shape.tokens, sum(shape.outputs)),
    )


def answer(layer: Layer, masks: Masks) -> Results:
    """Computes y, du, dA and dB of each section, in float64."""
    count = len(masks)

    def forward(u: Tensor, *factors: Tensor) -> Tensor:
        x, outputs = layer.make_x(u, layer.norm.double()), []
        for weight, low, high, mask in zip(layer.weights, factors[:count], factors[count:], masks, strict=True):
            dropped = x if mask is None else x * mask
            outputs.append(x @ weight.double().t() + SCALE * (dropped @ low.t()) @ high.t())
        return torch.cat(outputs, dim=1)

    return with_gradients(forward, (layer.u, *layer.a, *layer.b), (layer.dy,))


def frozen(layer: Layer) -> Contestant:
    """Returns the frozen linear alone as a contestant, all sections in one product."""
    u, weight = layer.u.clone().requires_grad_(), torch.cat(layer.weights)

    def run() -> Results:
        y = functional.linear(layer.make_x(u, layer.norm), weight)
        return y.detach(), *torch.autograd.grad(y, u, layer.dy)

    return Contestant(run=run, error=lambda found: deviation(found, _frozen_answer(layer)))


def _frozen_answer(layer: Layer) -> Results:
    weight = torch.cat(layer.weights).double()
    return with_gradients(lambda u: layer.make_x(u, layer.norm.double()) @ weight.t(), (layer.u,), (layer.dy,))


def engine(layer: Layer, kernels: Kernels, *, adapters: bool = True, fold: bool = True) -> Contestant:
    """Returns the engine's parallel linear on one rank as a contestant; its gradients go to fp32 sinks."""
    module = _build(layer, kernels, adapters=adapters, fold=fold)
    u, source, context = layer.u.clone().requires_grad_(), _source(layer), _context(layer)
    adapted = () if module.operands.low_rank is None else module.operands.low_rank.adapters
    buffers = [one.sink_a.buffer for one in adapted] + [one.sink_b.buffer for one in adapted]

    def run() -> Results:
        y = module(u, source, context)
        return y.detach(), *torch.autograd.grad(y, u, layer.dy), *buffers

    def reset() -> None:
        for buffer in buffers:
            buffer.zero_()

    def error(found: Results) -> float:
        return deviation(found, answer(layer, _engine_masks(layer)) if adapters else _frozen_answer(layer))

    return Contestant(run=run, reset=reset, error=error)


def _build(layer: Layer, kernels: Kernels, *, adapters: bool, fold: bool) -> ColumnParallelLinear | RowParallelLinear:
    shape, rank = layer.shape, layer.a[0].shape[0]
    settings = AdapterSettings(rank=rank, scale=SCALE, dropout=layer.dropout) if adapters else None
    build = LayerContext(
        layout=TensorLayout(kernels=kernels, fold=fold),
        plan=TrainingPlan(adapter=lambda name: settings, seed=_SEED),
        device=layer.device,
        dtype=layer.u.dtype,
    )
    module: ColumnParallelLinear | RowParallelLinear
    if shape.kind.endswith("row"):
        module = RowParallelLinear("section0", shape.inputs, shape.outputs[0], bias=False, site=_SITE, build=build)
    else:
        sections = [
            Section(name=f"section{index}", spec=split_spec((rows, shape.inputs), 0, rank=0, size=1, what="rows"))
            for index, rows in enumerate(shape.outputs)
        ]
        module = ColumnParallelLinear(sections, bias=False, site=_SITE, build=build)
    module.weight_view().copy_(torch.cat(layer.weights))
    if module.operands.low_rank is not None:
        module.operands.low_rank.a_RI.copy_(torch.cat(layer.a))
        for adapter, b in zip(module.operands.low_rank.adapters, layer.b, strict=True):
            adapter.b_OR.copy_(b)
    return module


def _source(layer: Layer) -> LinearInput:
    if layer.shape.kind == "norm-column":
        return NormInput(weight=layer.norm, eps=EPS, sink=None)
    return SwiGLUInput() if layer.shape.kind == "swiglu-row" else GivenInput()


def _context(layer: Layer) -> TokenContext:
    tokens = layer.shape.tokens
    index = torch.arange(tokens, device=layer.device)
    nothing = torch.empty(0, device=layer.device)
    return TokenContext(
        documents=Documents.of_rows((tokens,), row_length=tokens),
        context_plan=None,
        cos=nothing,
        sin=nothing,
        token_index=index,
        local_token_index=index,
        step=torch.zeros((), dtype=torch.int64, device=layer.device),
        training=True,
    )


def _engine_masks(layer: Layer) -> Masks:
    """Returns one mask for the common input, from its coordinates."""
    if layer.dropout == 0:
        return [None] * len(layer.a)
    context = _context(layer)
    key = DropoutKey(
        token_index=context.token_index,
        step=context.step,
        seed=_SEED,
        site=_SITE,
        probability=layer.dropout,
        num_features=layer.shape.inputs,
    )
    kept = dropout_mask(key)
    return [kept.double().mul_(dropout_scale(layer.dropout))] * len(layer.a)


def _torch_masks(layer: Layer) -> Masks:
    """Returns a mask for each section, in the order in which the linears draw them."""
    if layer.dropout == 0:
        return [None] * len(layer.a)
    torch.manual_seed(_TORCH_SEED)
    ones = torch.ones(layer.shape.tokens, layer.shape.inputs, dtype=layer.u.dtype, device=layer.device)
    return [(functional.dropout(ones, layer.dropout) != 0).double() / (1.0 - layer.dropout) for _ in layer.a]


def _by_autograd(layer: Layer, forward: Callable[[Tensor], list[Tensor]], trained: list[Tensor]) -> Contestant:
    """Returns separate linears on one x as a contestant, with gradients by autograd, in the order of `answer`."""
    u = layer.u.clone().requires_grad_()
    parts = layer.dy_sections()

    def run() -> Results:
        outputs = forward(layer.make_x(u, layer.norm))
        gradients = torch.autograd.grad(outputs, [u, *trained], parts)
        return *(y.detach() for y in outputs), *gradients

    def error(found: Results) -> float:
        count = len(parts)
        joined = (torch.cat(list(found[:count]), dim=1), *found[count:])
        return deviation(joined, answer(layer, _torch_masks(layer)))

    return Contestant(run=run, reset=lambda: torch.manual_seed(_TORCH_SEED), error=error)


def plain_torch(layer: Layer) -> Contestant:
    """Returns y = x W^T + s (drop(x) A^T) B^T as a contestant, each section separately."""
    a, b = ([each.clone().requires_grad_() for each in factors] for factors in (layer.a, layer.b))

    def forward(x: Tensor) -> list[Tensor]:
        return [
            x @ weight.t() + (functional.dropout(x, layer.dropout) @ low.t()) @ high.t() * SCALE
            for weight, low, high in zip(layer.weights, a, b, strict=True)
        ]

    return _by_autograd(layer, forward, [*a, *b])


def peft(layer: Layer) -> Contestant:
    """Returns PEFT's lora.Linear as a contestant, adapters in the activations' dtype, its fastest setting."""
    from peft import LoraConfig, inject_adapter_in_model

    rank = layer.a[0].shape[0]
    base = nn.ModuleDict()
    for index, weight in enumerate(layer.weights):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=layer.device, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        base[f"section{index}"] = linear
    config = LoraConfig(
        r=rank, lora_alpha=int(rank * SCALE), lora_dropout=layer.dropout, target_modules=list(base), bias="none"
    )
    model = inject_adapter_in_model(config, base).to(layer.u.dtype).train()
    linears = [model[name] for name in base]
    trained = []
    for factors, name in ((layer.a, "lora_A"), (layer.b, "lora_B")):
        for linear, value in zip(linears, factors, strict=True):
            parameter = linear.get_submodule(f"{name}.default").weight
            parameter.data.copy_(value)
            trained.append(parameter)
    return _by_autograd(layer, lambda x: [linear(x) for linear in linears], trained)
