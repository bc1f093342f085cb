"""A module of transformers whose parameters and linears the engine owns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from engine.adopted.attention import Run, attach
from engine.adopted.experts import StackAdapter, StackedExperts, expert_spec, stack_adapter, stack_leaves
from engine.adopted.linears import AdoptedLinear
from engine.adopted.recognised import AdoptedMLP, AdoptedNorm, mlp_form, norm_form
from engine.adopted.tensor_modules import over_ranks
from engine.adopted.tensor_plan import ExpertPlan, Split, TensorPlan, head_split, parallel_linear, parameter_spec
from engine.distributed.mesh import Axis
from engine.layers.context import LayerContext
from engine.layers.module import ShardedModule, ShardEntry, shard_entries
from engine.layers.plain_module import linear_names, replace_module
from engine.ops.gradients import past_unused

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that do not decay in transformers' Trainer, in lower case. A vector of another name is no norm's
weight and no bias, and some biases are no vectors."""


class _Collected(torch.autograd.Function):
    """Identity on what enters a region: its backward, the region's last, adds the gradients that autograd has left on
    the region's leaves to their sinks, and reports all of its sinks.

    The leaves are no inputs: autograd would leave their gradients only once this backward is done. A linear's sink is
    reported here too, because transformers' forward may call a linear more than once, or not at all. `live`, of no
    numbers, has it run where x needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Adopted, live: Tensor) -> Tensor:
        ctx.region = region
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        for entry in ctx.region.collected:
            gradient, entry.parameter.grad = entry.parameter.grad, None
            if gradient is not None:
                entry.sink.add(gradient)
        for sink in ctx.region.sinks:
            sink.settle()
        return dx, None, None


class Adopted(ShardedModule):
    """A module of transformers whose parameters and linears the engine owns.

    Args:
        prefix: of the parameters' logical names, with a point at its end; empty for none.
        module: on the meta device; its parameters are replaced.
        build: what trains, and where.
        run: of the body.
        first_site: dropout site of its first linear's adapter; the others follow.
        plan: how modules are split over tensor ranks; None where there is one.
        experts: modules whose experts ranks have apart.
        place: the module's name inside the body, with a point at its end; empty for the body.
    """

    def __init__(
        self,
        prefix: str,
        module: nn.Module,
        *,
        build: LayerContext,
        run: Run,
        first_site: int = 0,
        plan: TensorPlan | None = None,
        experts: ExpertPlan | None = None,
        place: str = "",
    ) -> None:
        super().__init__()
        self.module, self._plan, self._experts, self._place = module, plan, experts or ExpertPlan(), place
        sites = count(first_site)
        for name, child in list(module.named_modules()):
            if (form := mlp_form(child)) is not None and name:
                first = "gate_up_proj" if form.fused else "gate_proj"
                splits = self._split(f"{name}.{first}"), self._split(f"{name}.down_proj")
                pair = next(sites), next(sites)
                replace_module(
                    module, name, AdoptedMLP(f"{prefix}{name}.", child, form, splits, pair, build=build, run=run)
                )
        for name in linear_names(module):
            plain = module.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            split = self._split(name)
            if plan is not None:
                within = module.get_submodule(name.rpartition(".")[0])
                shares = plan.shares_heads
                split = head_split(f"{prefix}{name}", within, plain, split, build.layout, shares=shares)
            linear = parallel_linear(f"{prefix}{name}", plain, split, next(sites), build)
            replace_module(module, name, AdoptedLinear(f"{prefix}{name}", linear, plain, run))
        done = {id(child) for linear in self._linears(module) for child in linear.modules()}
        for owner, child in list(module.named_modules()):
            if id(child) not in done:
                ranks = build.layout.expert_axes.ep if self._is_apart(owner, build) else Axis("ep")
                adapters = self._adapt_stacks(prefix, owner, child, build, sites)
                self._own_leaves(prefix, owner, child, build)
                if adapters or ranks.size > 1:
                    replace_module(module, owner, StackedExperts(f"{prefix}{owner}", child, adapters, ranks, run))
        if plan is not None:
            for name, child in reversed(list(module.named_modules())):  # those inside before what holds them
                if (by := over_ranks(plan, f"{place}{name}", child, build.layout.tp)) is not child:
                    replace_module(module, name, by)
        attach(prefix, module, run)
        self.collected = [entry for entry in self.entries if entry.sink is not None]
        """What autograd leaves gradients on."""
        self.sinks = [entry.sink for entry in shard_entries(self) if entry.sink is not None]
        """Those of all that trains in it."""
        for sink in self.sinks:
            sink.held = True

    @staticmethod
    def _linears(module: nn.Module) -> list[nn.Module]:
        return [child for child in module.modules() if isinstance(child, (AdoptedLinear, AdoptedMLP))]

    def _split(self, name: str) -> Split:
        return "whole" if self._plan is None else self._plan.split(f"{self._place}{name}")

    def _is_apart(self, owner: str, build: LayerContext) -> bool:
        """Returns whether expert ranks have some of a module's experts each."""
        return build.layout.expert_axes.ep.size > 1 and self._experts.divides(f"{self._place}{owner}")

    def _adapt_stacks(
        self, prefix: str, owner: str, module: nn.Module, build: LayerContext, sites: Iterator[int]
    ) -> dict[str, StackAdapter]:
        """Makes the adapters of a module's stacks of experts' weights, with the next dropout sites."""
        found: dict[str, StackAdapter] = {}
        for leaf in stack_leaves(module):
            name = f"{owner}.{leaf}"
            if (settings := build.plan.adapter(f"{prefix}{name}")) is not None:
                found[leaf] = stack_adapter(
                    f"{prefix}{name}",
                    module,
                    leaf,
                    split=self._split(name),
                    apart=self._is_apart(owner, build),
                    settings=settings,
                    site=next(sites),
                    build=build,
                    own=lambda full, shape, spec: self.own(full, build.factor(shape), spec, trainable=True),
                )
        return found

    def _own_leaves(self, prefix: str, owner: str, module: nn.Module, build: LayerContext) -> None:
        """Puts the engine's parameters in place of a module's own ones, and its buffers on the device."""
        name = f"{prefix}{owner}" if owner else prefix.rstrip(".")
        tp = build.layout.tp

        def own(leaf: str, shape: torch.Size, *, trainable: bool) -> ShardEntry:
            inside, full = f"{owner}.{leaf}" if owner else leaf, f"{name}.{leaf}" if name else leaf
            split = self._split(inside)
            if self._is_apart(owner, build):
                spec = expert_spec(tuple(shape), 0, build.layout.expert_axes)
            else:
                spec = parameter_spec(tuple(shape), self._split(owner) if split == "whole" else split, tp, name=full)
            full = f"{full}.weight" if leaf in stacks else full
            decays = not is_norm and _NO_DECAY.search(full.lower()) is None
            return self.own(full, build.empty(spec.local_shape), spec, trainable=trainable, decays=decays)

        is_norm = "norm" in type(module).__name__.lower()
        stacks = stack_leaves(module)
        if owner and not build.plan.trains(name) and (form := norm_form(module)) is not None:
            weight = own("weight", module.weight.shape, trainable=False)
            replace_module(self.module, owner, AdoptedNorm(weight, form, build.layout.kernels))
            return
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            trains = build.plan.trains(f"{name}.{leaf}" if leaf in stacks else name)
            trains &= parameter.requires_grad  # some never train in transformers either
            module.register_parameter(leaf, own(leaf, parameter.shape, trainable=trains).parameter)
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            if leaf in module._non_persistent_buffers_set or not buffer.is_floating_point():
                module.register_buffer(leaf, buffer.to(build.device), persistent=False)
            else:
                module.register_buffer(leaf, own(leaf, buffer.shape, trainable=False).parameter.data)

    def enter(self, x: Tensor) -> Tensor:
        """Returns what enters the module, in whose backward the gradients of its leaves are taken."""
        if not self.sinks or not torch.is_grad_enabled():
            return x
        return _Collected.apply(x, self, torch.zeros(0, requires_grad=True))

    def pass_by(self, x: Tensor) -> Tensor:
        """Returns x, where the module is not run, in whose backward its sinks are reported."""
        if not self.sinks or not torch.is_grad_enabled():
            return x
        return past_unused(x, self.sinks, [torch.zeros(0, requires_grad=True)])
