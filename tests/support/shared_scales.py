"""Whole weights as a run encodes them: linears that servers put into one matrix have one NVFP4 scale of scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engine.quantization.encoded_parts import WholeMatrix
from engine.quantization.encoding import Encoding

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def siblings(name: str, names: Mapping[str, object]) -> list[str]:
    """The weights among `names` that servers put into one matrix with one of them."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    group = next((group for group in TOGETHER if leaf in group), (leaf,))
    return [one for other in group if (one := f"{parent}.{other}.weight") in names]


def encoded_whole(
    codec: Encoding,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    value: Callable[[str, tuple[int, ...]], Tensor],
    together: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The parts of a whole weight.

    Args:
        shapes: of all weights, by name.
        value: gives a weight's numbers.
        together: the weights that share a scale with it; None for its siblings.
    """
    weight = value(name, shapes[name])
    sharing = siblings(name, shapes) if together is None else together
    largest = torch.stack([value(one, shapes[one]).float().abs().amax() for one in sharing]).amax()
    return codec.encode(weight, WholeMatrix(absmax=codec.absmax(weight), largest=largest))
