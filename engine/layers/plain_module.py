"""Modules written in plain torch, with the engine's parameters in place of their own.

Such a module computes by autograd and is whole on every tensor-parallel rank. What the engine needs of it is the same
as of its own layers: each parameter has a logical name, a shard spec and, where it trains, a gradient sink, and linears
may have adapters. Whoever runs the module takes the gradients of `leaves` from autograd and adds them to the sinks (see
`engine.layers.vision`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from engine.distributed.sharding import replicated_spec
from engine.errors import UserError
from engine.layers.context import AdapterSettings, LayerContext
from engine.layers.module import ShardedModule, ShardEntry


class _ParametersOnMeta(TorchFunctionMode):
    """Gives parameters no memory while modules are built, as `torch.empty` makes them; buffers are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {}), "device": "meta"} if func is torch.empty else kwargs or {}
        return func(*args, **kwargs)


def build_plain(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns what `make` builds, its parameters on the meta device and its buffers on the CPU."""
    with torch.device("cpu"), _ParametersOnMeta(), torch.no_grad():
        return make().eval()


def linear_names(module: nn.Module) -> list[str]:
    """Returns the names of the linears in `module`, which may have adapters."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


class AdaptedLinear(nn.Module):
    """y = base(x) + scale * x A^T B^T.

    Args:
        base: the linear.
        a_RI, b_OR: the factors.
        scale: alpha / r.
    """

    def __init__(self, base: nn.Linear, a_RI: nn.Parameter, b_OR: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.base, self.a_RI, self.b_OR, self.scale = base, a_RI, b_OR, scale
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if not self.enabled else y + linear(linear(x, self.a_RI), self.b_OR) * self.scale


class _Recomputed(nn.Module):
    """A block of which its inputs alone are kept: backward runs it a second time."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return checkpoint(self.block, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


class PlainModule(ShardedModule):
    """A module in plain torch whose parameters the engine owns.

    Args:
        prefix: of the parameters' logical names, with a point at its end; the rest are the module's own names.
        make: builds the module.
        recompute: blocks that stand in an `nn.ModuleList` keep their inputs alone for backward.

    Raises:
        UserError: an adapter that such linears do not have: with dropout, with magnitudes or with a bias.
    """

    def __init__(
        self, prefix: str, make: Callable[[], nn.Module], *, build: LayerContext, recompute: bool = False
    ) -> None:
        super().__init__()
        module = build_plain(make)
        tp = build.layout.tp

        def own(name: str, shape: tuple[int, ...], *, trainable: bool) -> ShardEntry:
            # each tensor rank computes a part of what passes through, so that its gradients are partial sums
            spec = replicated_spec(shape, rank=tp.rank, size=tp.size, grad_reduce=("tp",))
            return self.own(f"{prefix}{name}", build.empty(shape), spec, trainable=trainable)

        for name, parameter in list(module.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            trains = build.plan.trains(f"{prefix}{owner}")
            entry = own(name, tuple(parameter.shape), trainable=trains)
            module.get_submodule(owner).register_parameter(leaf, entry.parameter)
        self._adapted: list[AdaptedLinear] = []
        for name in linear_names(module):
            if (settings := build.plan.adapter(f"{prefix}{name}")) is not None:
                _check_settings(f"{prefix}{name}", settings)
                base = module.get_submodule(name)
                assert isinstance(base, nn.Linear)
                a = own(f"{name}.lora_A", (settings.rank, base.in_features), trainable=True)
                b = own(f"{name}.lora_B", (base.out_features, settings.rank), trainable=True)
                adapted = AdaptedLinear(base, a.parameter, b.parameter, settings.scale)
                self._adapted.append(adapted)
                _replace(module, name, adapted)
        if recompute:
            for blocks in list(module.modules()):
                if isinstance(blocks, nn.ModuleList):
                    for index, block in enumerate(blocks):
                        blocks[index] = _Recomputed(block)
        for name, buffer in list(module.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, buffer.to(build.device))
        self.module = module

    @property
    def trained(self) -> list[ShardEntry]:
        """The parameters that train, in the order of `entries`."""
        return [entry for entry in self.entries if entry.sink is not None]

    def run(self, *arguments: Any, adapters: bool = True) -> Any:
        """Returns the module of these arguments.

        Args:
            adapters: False leaves the adapters out.
        """
        for adapted in self._adapted:
            adapted.enabled = adapters
        return self.module(*arguments)


def _check_settings(module: str, settings: AdapterSettings) -> None:
    for option, asked, remedy in (
        ("dropout", settings.dropout > 0, "0"),
        ("dora", settings.dora, "false"),
        ("bias", settings.bias, "false"),
    ):
        if asked:
            raise UserError(
                f"lora.{option} is set and {module} is to have an adapter, but adapters outside the language model "
                f"have none: set lora.{option} to {remedy}, or leave that module out of lora.targets."
            )


def _replace(module: nn.Module, name: str, by: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    if isinstance(parent, (nn.ModuleList, nn.Sequential)):
        parent[int(leaf)] = by
    else:
        setattr(parent, leaf, by)


def plain_modules(module: nn.Module) -> Iterator[PlainModule]:
    """Yields the modules in plain torch below `module`."""
    return (child for child in module.modules() if isinstance(child, PlainModule))
