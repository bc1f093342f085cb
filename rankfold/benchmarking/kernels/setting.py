"""The setting of all cases: sizes, device, contestants, and random inputs that are the same at each build."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from engine.kernels.philox import dropout_mask, dropout_scale
from engine.kernels.records import DropoutKey, InputUpdate
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import TORCH, Contestant, Results, calling
from rankfold.benchmarking.options import KernelOptions
from rankfold.benchmarking.peers import Peers

SEED, SITE = 5, 3
"""Seed and site of the dropout masks."""


class Draws:
    """Random tensors of one case, the same whenever it is built."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        self._device, self._dtype = device, dtype

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Draws normal values, in the case's dtype unless another is given."""
        values = torch.randn(shape, generator=self._generator, device=self._device)
        return values.mul_(scale).add_(mean).to(dtype or self._dtype)

    def ids(self, count: int, below: int) -> Tensor:
        """Draws token ids, int64 [count]."""
        return torch.randint(below, (count,), generator=self._generator, device=self._device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The setting of all cases.

    Args:
        options: with all values set.
        device, dtype: of weights and activations.
        backends: the engine's, by name.
        peers: of the engine.
    """

    options: KernelOptions
    device: torch.device
    dtype: torch.dtype
    backends: dict[str, Kernels]
    peers: Peers

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def draws(self, name: str) -> Draws:
        return Draws(name, self.device, self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def contestants(
        self, engine: Callable[[Kernels], Contestant], **peers: Callable[[], Contestant]
    ) -> dict[str, Contestant]:
        """Returns the contestants of an op: the engine's backends by name, then the peers that take part.

        Args:
            engine: builds a backend's contestant.
            peers: a name that `--peers` knows -> builds its contestant.
        """
        found = {name: engine(kernels) for name, kernels in self.backends.items()}
        for name, build in peers.items():
            if name in self.peers:
                found["torch.compile" if name == "compile" else name] = build()
        return found

    def plain(
        self, function: Callable[..., Tensor | Results], *arguments: Tensor | None
    ) -> dict[str, Callable[[], Contestant]]:
        """Returns plain torch and torch.compile of the same function as peers."""
        return {
            TORCH: lambda: calling(function, *arguments),
            "compile": lambda: self.compiled(function, *arguments),
        }

    def compiled(self, function: Callable[..., Tensor | Results], *arguments: Tensor | None) -> Contestant:
        """Returns a function compiled by torch.compile for fixed sizes as a contestant."""
        return calling(torch.compile(function, dynamic=False), *arguments)

    def moved(self, kernel: str, *sizes: int | Sequence[int], **how: int | bool) -> Any:
        """Returns the least bytes that an op of `engine.kernels.triton.KERNEL` moves, by its own `bytes_moved`."""
        return import_module(f"engine.kernels.triton.{kernel}").bytes_moved(*sizes, itemsize=self.itemsize, **how)

    def adapter(self, name: str, num_ranks: int, num_features: int) -> tuple[Tensor, Tensor]:
        """Returns dH [T, R] and the stacked A [R, F] of adapters on an op's output."""
        draws = self.draws(name)
        dh = draws.normal(self.options.tokens, num_ranks, scale=0.1)
        return dh, draws.normal(num_ranks, num_features, scale=num_features**-0.5)

    def added(self, dh_TR: Tensor, a_RI: Tensor, *, dropped: bool) -> Tensor:
        """Returns the adapters' share of the gradient of their input by plain torch, fp64 [T, I]."""
        share = dh_TR.double() @ a_RI.double()
        return share * self.scaled_mask(a_RI.shape[1]) if dropped else share

    def dropout_key(self, num_features: int) -> DropoutKey:
        """Returns coordinates of a mask over `num_features` of all tokens."""
        return DropoutKey(
            token_index=torch.arange(self.options.tokens, device=self.device),
            step=torch.zeros((), dtype=torch.int64, device=self.device),
            seed=SEED,
            site=SITE,
            probability=self.options.dropout,
            num_features=num_features,
        )

    @property
    def keep_scale(self) -> float:
        """The scale of kept elements, 1 / (1 - p)."""
        return dropout_scale(self.options.dropout)

    def scaled_mask(self, num_features: int) -> Tensor:
        """Returns fp64 [T, F]: 0 where dropped, 1 / (1 - p) where kept, by the plain specification."""
        return dropout_mask(self.dropout_key(num_features)).double().mul_(self.keep_scale)

    def drawn(self, kernels: Kernels, num_features: int) -> Tensor:
        """Returns the same mask in the backend's own form."""
        return kernels.draw_mask(self.dropout_key(num_features))

    def update(
        self, kernels: Kernels, dh_TR: Tensor, a_RI: Tensor, *, dropped: bool, h_TR: Tensor | None = None
    ) -> InputUpdate:
        """Returns the update that adapters of scale 1 add to the gradient of their input."""
        mask = self.drawn(kernels, a_RI.shape[1]) if dropped else None
        return InputUpdate(dh_TR=dh_TR, a_RI=a_RI, mask=mask, scale=self.keep_scale if dropped else 1.0, h_TR=h_TR)
