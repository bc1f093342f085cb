"""The matrices of all experts of a layer as one tensor of a checkpoint, and each expert's part of it.

    [E, out, in], or [E, in, out] where matrices are transposed; biases are [E, out]

Gate and up share a tensor: gate's rows come before up's, or the two alternate. A part is a view of the stored tensor,
so that it is read from and written to by one rule. Released gpt-oss models store such tensors in MXFP4, by rows that
are not transposed; see `engine.quantization.mxfp4`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StackedPart(NamedTuple):
    """The place of one of an expert's linears in the tensors of all experts.

    Args:
        module: where those are, inside a layer of the checkpoint, such as `mlp.experts`.
        leaf: of the weights; that of biases ends in `_bias`.
        half: 0 for gate and 1 for up, where they share a tensor; None for a linear that has one alone.
        alternates: rows of gate and up take turns.
        transposed: matrices are stored [in, out].
    """

    module: str
    leaf: str
    half: int | None = None
    alternates: bool = False
    transposed: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """Returns the linear's weight [out, in], or its bias [out], as a view of its expert's part of the tensor."""
        rows = whole.t() if self.transposed and whole.dim() == 2 else whole
        if self.half is None:
            return rows
        if self.alternates:
            return rows[self.half :: 2]
        size = rows.shape[0] // 2
        return rows[self.half * size : (self.half + 1) * size]

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an expert's part of the tensor, of which a linear's has `shape`."""
        rows = shape[0] * (1 if self.half is None else 2)
        whole = (rows, *shape[1:])
        return whole[::-1] if self.transposed else whole


class ExpertPart(NamedTuple):
    """A linear of one expert in the tensors of all.

    Args:
        expert: its number.
        part: of that expert's part.
    """

    expert: int
    part: StackedPart

    def of(self, stored_EOI: Tensor) -> Tensor:
        """Returns the weight or bias, as a view of the tensor of all experts."""
        return self.part.of(stored_EOI[self.expert])


def stacked(module: str, *, alternates: bool = False, transposed: bool = False) -> dict[str, StackedPart]:
    """Returns engine module name inside a layer -> its place, where `module` holds all experts."""
    places = (("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1), ("down_proj", "down_proj", None))
    return {
        f"mlp.experts.*.{name}": StackedPart(
            module, leaf, half, alternates=alternates and half is not None, transposed=transposed
        )
        for name, leaf, half in places
    }
