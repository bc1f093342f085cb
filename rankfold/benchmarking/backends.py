"""Finds the engine's backends that can run here, and why the others cannot."""

from __future__ import annotations

import torch

from engine.errors import UserError
from engine.ops.backends import choose_kernels
from engine.ops.kernels import Kernels

BACKENDS = ("reference", "native", "triton")


def find_backends(
    device: torch.device, dtype: torch.dtype, *, timed: bool
) -> tuple[dict[str, Kernels], dict[str, str]]:
    """Returns the kernels by name; and name -> why it is absent.

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
    return present, absent
