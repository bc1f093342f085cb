"""Finds the engine's backends and the peers that can run here, and reports why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from engine.errors import UserError
from engine.ops.backends import choose_kernels
from engine.ops.kernels import Kernels

BACKENDS = ("reference", "native", "triton")


def find_backends(
    device: torch.device, dtype: torch.dtype, *, timed: bool
) -> tuple[dict[str, Kernels], tuple[str, ...]]:
    """Returns the kernels by name, and a sentence for each that is absent.

    Args:
        device, dtype: of their inputs.
        timed: skip kernels that Triton interprets: their results can be checked, their times mean nothing.
    """
    present, absent = {}, {}
    for name in BACKENDS:
        if name == "triton" and device.type == "cpu" and timed:
            absent[name] = "needs a GPU; on a CPU its kernels are interpreted, and their times mean nothing"
            continue
        try:
            kernels, _ = choose_kernels(name, device=device, dtype=dtype)
        except UserError as error:
            absent[name] = str(error).rstrip(".")
            continue
        present[name] = kernels
    return present, _not_measured(absent)


def _not_measured(absent: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"Not measured: {name} ({why})." for name, why in absent.items())


_PACKAGES = {
    "peft": ("peft",),
    "peft-bitsandbytes": ("bitsandbytes",),
    "liger": ("liger_kernel", "liger_kernel.ops"),
    "quack": ("quack", "quack.rmsnorm"),
    "flash-attn": ("flash_attn", "flash_attn.flash_attn_interface"),
    "flash-attn-4": ("flash_attn", "flash_attn.cute"),
    "fla": ("fla", "fla.ops.gated_delta_rule"),
    "compressed-tensors": ("compressed_tensors", "compressed_tensors.compressors"),
    "torchao": ("torchao", "torchao.prototype.mx_formats.nvfp4_tensor"),
}
"""Peer -> its package, and the others that must be importable."""
_ON_GPU_ONLY = ("liger", "quack", "flash-attn", "flash-attn-4", "fla")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """The peers of a section.

    Args:
        present: names of those that can run here.
        absent: name -> why it cannot, or that it was not asked for.
    """

    present: frozenset[str]
    absent: dict[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.present

    def without(self, name: str, why: str) -> Peers:
        """Returns those without one."""
        return Peers(present=self.present - {name}, absent={name: why} | self.absent)

    def sentences(self) -> tuple[str, ...]:
        """Returns a sentence for each absent peer."""
        return _not_measured(self.absent)


def find_peers(
    known: tuple[str, ...], wanted: tuple[str, ...], device: torch.device, *, compiled: bool = True
) -> Peers:
    """Looks for each peer of a section.

    Args:
        known: all that the section knows.
        wanted: those asked for.
        device: where they would run.
        compiled: whether torch.compile takes part on a CPU.
    """
    reasons = {name: _why_not(name, device, compiled) if name in wanted else "not asked for" for name in known}
    return Peers(
        present=frozenset(name for name, why in reasons.items() if why is None),
        absent={name: why for name, why in reasons.items() if why is not None},
    )


def _why_not(name: str, device: torch.device, compiled: bool) -> str | None:
    if name == "compile":
        return None if compiled or device.type == "cuda" else "on a CPU only with --compile"
    modules = _PACKAGES.get(name, _PACKAGES["peft"] if name.startswith("peft-") else ())
    if modules and find_spec(modules[0]) is None:
        return "not installed"
    if name.endswith("-kept-memory") and device.type != "cpu":
        return "a matter of the C allocator, on a CPU"
    if name in _ON_GPU_ONLY and device.type != "cuda":
        return "needs a GPU"
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        return f"cannot be imported: {error}"
    return None
