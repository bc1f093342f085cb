"""Modules written in plain torch, with the engine's parameters in place of their own.

Such a module computes by autograd and is whole on every tensor-parallel rank. What the engine needs of it is the same
as of its own layers: each parameter has a logical name, a shard spec and, where it trains, a gradient sink, and linears
may have adapters. The caller takes the gradients of `leaves` from autograd and adds them to the sinks (see
`engine.vision.layers.encoder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from engine.distributed.sharding import replicated_spec
from engine.kernels.philox import dropout_mask
from engine.layers.context import LayerContext, TrainingPlan
from engine.layers.module import ShardedModule, ShardEntry
from engine.ops.dropout import DropoutSite
from engine.ops.magnitude import row_squares

_LARGEST_BUFFER = 1 << 28
"""Elements; what is larger is a parameter, such as a stack of experts."""


class _ParametersOnMeta(TorchFunctionMode):
    """Gives parameters no memory while modules are built, as `torch.empty` makes them, and `torch.zeros` some large
    ones; buffers are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {}), "device": "meta"} if _makes_parameter(func, args) else kwargs or {}
        return func(*args, **kwargs)


def _makes_parameter(func: Any, args: tuple[Any, ...]) -> bool:
    if func is not torch.zeros:
        return func is torch.empty
    sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
    return prod(size for size in sizes if isinstance(size, int)) > _LARGEST_BUFFER


def build_plain(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns what `make` builds, its parameters on the meta device and its buffers on the CPU."""
    with torch.device("cpu"), _ParametersOnMeta(), torch.no_grad():
        return make().eval()


def linear_names(module: nn.Module) -> list[str]:
    """Returns the names of the linears in `module`, which may have adapters."""
    return [name for name, child in module.named_modules() if is_linear(child)]


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module computes what torch's linear does; some that derive from it do not."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


@lru_cache(maxsize=4)
def _owners(make: Callable[[], nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of the modules that have parameters, and of the linears."""
    module = build_plain(make)
    return frozenset(name.rpartition(".")[0] for name, _ in module.named_parameters()), frozenset(linear_names(module))


def anything_trains(prefix: str, make: Callable[[], nn.Module], plan: TrainingPlan) -> bool:
    """Returns whether a `PlainModule` of these arguments has a parameter that trains."""
    owners, linears = _owners(make)
    return any(plan.trains(f"{prefix}{name}") for name in owners) or any(
        plan.adapter(f"{prefix}{name}") is not None for name in linears
    )


TILE_ROWS = 1 << 18
"""More rows than a linear sees of one tile: row r of tile i has the dropout coordinate i * TILE_ROWS + r."""


def tile_rows(tile_index: Tensor, count: int) -> Tensor:
    """Returns int64 [..., count], the coordinates of the first rows of tiles with these coordinates, [..., 1]."""
    assert count < TILE_ROWS, count
    return tile_index * TILE_ROWS + torch.arange(count, device=tile_index.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class TileDropout:
    """The coordinates of the masks that a run of a module draws, the same however tiles are dealt out to ranks.

    Args:
        tile_index_N: int64, the coordinate of each tile.
        step: int64 0-dim, the optimizer step.
    """

    tile_index_N: Tensor
    step: Tensor

    def rows(self, count: int) -> Tensor:
        """Returns int64 [count], the coordinates of rows of which each tile has equally many, tile after tile."""
        each, rest = divmod(count, self.tile_index_N.shape[0])
        assert rest == 0, (count, self.tile_index_N.shape)
        return tile_rows(self.tile_index_N[:, None], each).flatten()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """How a module's adapters take part in one run of it.

    Args:
        adapters: False leaves them out.
        dropout: None drops nothing.
    """

    adapters: bool = True
    dropout: TileDropout | None = None


@dataclass(slots=True)
class _Runs:
    """The run that a module is in, for its adapters to read. A second run of a block is in that of the first, whatever
    has run in between."""

    now: _Run = field(default_factory=_Run)

    @contextmanager
    def again(self, run: _Run) -> Iterator[None]:
        before, self.now = self.now, run
        try:
            yield
        finally:
            self.now = before


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factors:
    """The tensors of one adapter.

    Args:
        a_RI, b_OR: the factors.
        scale: alpha / r.
        magnitude_O: lengths of the output rows (see ops.magnitude); None for those of base and adapter.
        bias_O: of B; None for none.
        dropout: of the input; None for none.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None
    bias_O: Tensor | None
    dropout: DropoutSite | None


class AdaptedLinear(nn.Module):
    """y = base(x) + scale * (drop(x) A^T B^T + bias), and with magnitudes rows of that length, but for the base's bias.

    Args:
        base: the linear.
        factors: of its adapter.
        runs: of the module that this is in.
    """

    def __init__(self, base: nn.Linear, factors: _Factors, runs: _Runs) -> None:
        super().__init__()
        self.base, self._factors, self._runs = base, factors, runs

    def forward(self, x: Tensor) -> Tensor:
        run, own = self._runs.now, self._factors
        if not run.adapters:
            return self.base(x)
        low = linear(linear(self._dropped(x, run.dropout), own.a_RI), own.b_OR, own.bias_O) * own.scale
        if own.magnitude_O is None:
            return self.base(x) + low
        with torch.no_grad():
            lengths = row_squares(self.base.weight, own.a_RI, own.b_OR, own.scale).clamp_(min=0).sqrt_()
        factor = own.magnitude_O.float() / lengths.clamp_(min=torch.finfo(torch.float32).tiny)
        y = ((linear(x, self.base.weight) + low) * factor).to(x.dtype)
        return y if self.base.bias is None else y + self.base.bias

    def _dropped(self, x: Tensor, dropout: TileDropout | None) -> Tensor:
        site = self._factors.dropout
        if site is None or dropout is None:
            return x
        key = site.key(dropout.rows(x.shape[:-1].numel()), x.shape[-1], dropout.step)
        return x * dropout_mask(key).view(x.shape) * site.scale


class _Recomputed(nn.Module):
    """A block of which its inputs alone are kept: backward runs it a second time."""

    def __init__(self, block: nn.Module, runs: _Runs) -> None:
        super().__init__()
        self.block, self._runs = block, runs

    def forward(self, *arguments: Any, **named: Any) -> Any:
        run = self._runs.now
        return checkpoint(
            self.block,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._runs.again(run)),
            **named,
        )


class PlainModule(ShardedModule):
    """A module in plain torch whose parameters the engine owns.

    Args:
        prefix: of the parameters' logical names, with a point at its end; the rest are the module's own names.
        make: builds the module.
        recompute: blocks that stand in an `nn.ModuleList` keep their inputs alone for backward.
        first_site: dropout site of its first linear's adapter; the others follow.

    Linears that may have adapters with dropout take as many rows of each tile, tile after tile, when they are given
    tiles of one size.
    """

    def __init__(
        self,
        prefix: str,
        make: Callable[[], nn.Module],
        *,
        build: LayerContext,
        recompute: bool = False,
        first_site: int = 0,
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
        self._runs, self.drops = _Runs(), False
        """`drops` says whether an adapter has dropout."""
        for site, name in enumerate(linear_names(module), first_site):
            if (settings := build.plan.adapter(f"{prefix}{name}")) is not None:
                base = module.get_submodule(name)
                assert isinstance(base, nn.Linear)
                shapes: dict[str, tuple[int, ...]] = {
                    "lora_A": (settings.rank, base.in_features),
                    "lora_B": (base.out_features, settings.rank),
                }
                shapes |= {"lora_magnitude": (base.out_features,)} if settings.dora else {}
                shapes |= {"lora_bias": (base.out_features,)} if settings.bias else {}
                tensors = {
                    leaf: own(f"{name}.{leaf}", shape, trainable=True).parameter for leaf, shape in shapes.items()
                }
                dropout = None
                if settings.dropout > 0:
                    dropout = DropoutSite(probability=settings.dropout, seed=build.plan.seed, site=site)
                self.drops |= dropout is not None
                factors = _Factors(
                    a_RI=tensors["lora_A"],
                    b_OR=tensors["lora_B"],
                    scale=settings.scale,
                    magnitude_O=tensors.get("lora_magnitude"),
                    bias_O=tensors.get("lora_bias"),
                    dropout=dropout,
                )
                replace_module(module, name, AdaptedLinear(base, factors, self._runs))
        if recompute:
            for blocks in list(module.modules()):
                if isinstance(blocks, nn.ModuleList):
                    for index, block in enumerate(blocks):
                        blocks[index] = _Recomputed(block, self._runs)
        for name, buffer in list(module.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, buffer.to(build.device))
        self.module = module

    @property
    def trained(self) -> list[ShardEntry]:
        """The parameters that train, in the order of `entries`."""
        return [entry for entry in self.entries if entry.sink is not None]

    def run(self, *arguments: Any, adapters: bool = True, dropout: TileDropout | None = None) -> Any:
        """Returns the module of these arguments.

        Args:
            adapters: False leaves the adapters out.
            dropout: coordinates of the tiles among the arguments, which are of one size; None drops nothing.
        """
        with self._runs.again(_Run(adapters=adapters, dropout=dropout)):
            return self.module(*arguments)


def replace_module(module: nn.Module, name: str, by: nn.Module) -> None:
    """Puts a module in the place of the one of this name inside `module`, which may be in a list."""
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    if isinstance(parent, (nn.ModuleList, nn.Sequential)):
        parent[int(leaf)] = by
    else:
        setattr(parent, leaf, by)
