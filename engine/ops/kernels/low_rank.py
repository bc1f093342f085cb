"""The products with adapters: H = s drop(x) A^T, dA = dH^T drop(x), dB = dY^T H, dX += drop'(dH A).

project(x [T, I], a_RI, mask, keep_scale, adapters, out, copy): H into the first columns of `out` [T, E], with each
adapter's own s, and zeros into the others. `out` may lie beside x in one buffer, and holds anything before. Copies x to
`copy` [T, I], if given.

a_gradient(dh_TR, x, mask, keep_scale, sections): adds dH^T drop(x) to each `da`.

norm_a_gradient(dh_TR, u, rstd, weight, mask, scale, sections): the same for x = u * rstd * weight, from u; None where
the norm has to be recomputed.

b_gradient(dy_TO, h_TR, sections): adds dY^T H to each `db`.

output_gradients(dy_TO, h_TR, sections, *, dh_out): dH = s dY B into `dh_out` [T, R] and `b_gradient`, from one read of
dY; None where torch's product for dH and `b_gradient` after it are as fast.

apply_update(dx, update) -> dx + update, in place where dx allows it; on a GPU dense, because attention's backward reads
no other gradient of its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.kernels import reference, reference_fused
from engine.kernels.native import low_rank
from engine.kernels.records import AdapterSection
from engine.ops.kernels.op import Op, like, wide, write_in_place
from engine.ops.kernels.tiles import TILE_TOKENS, input_features, num_splits, output_features, rank_blocks


def _project_shape(x: Tensor, a_RI: Tensor, *_: Any) -> None:
    """Allocates the partial sums of H."""
    num_ranks = a_RI.shape[0]
    programs = -(-x.shape[0] // TILE_TOKENS) * rank_blocks(x, num_ranks)
    if (splits := num_splits(programs, x.shape[1], input_features(x, num_ranks))) > 1:
        wide(x, (splits, x.shape[0], num_ranks))


PROJECT = Op(
    reference=reference.scaled_projection(reference.project),
    native=reference.scaled_projection(low_rank.project_into),
    triton="engine.kernels.triton.ops:project",
    shape=write_in_place,
    triton_shape=_project_shape,
    flops=lambda x, a_RI, *_, **__: 2.0 * x.shape[0] * a_RI.numel(),
)


def _a_partials(dh_TR: Tensor, x: Tensor, sections: Sequence[AdapterSection]) -> None:
    """Allocates the partial sums of dA, of all sections unless one alone trains."""
    trained = [one for one in sections if one.da is not None]
    if trained:
        num_ranks = trained[0].num_ranks if len(trained) == 1 else dh_TR.shape[1]
        programs = -(-x.shape[1] // input_features(x, num_ranks)) * rank_blocks(x, num_ranks)
        wide(x, (num_splits(programs, x.shape[0], TILE_TOKENS), num_ranks, x.shape[1]))


A_GRADIENT = Op(
    reference=reference.a_gradient,
    native=low_rank.a_gradient,
    triton="engine.kernels.triton.ops:a_gradient",
    shape=write_in_place,
    triton_shape=lambda dh, x, mask, scale, sections: _a_partials(dh, x, sections),
    flops=lambda dh_TR, x, *_, **__: 2.0 * dh_TR.numel() * x.shape[1],
)
NORM_A_GRADIENT = Op(
    native=low_rank.norm_a_gradient,
    triton="engine.kernels.triton.ops:norm_a_gradient",
    shape=write_in_place,
    triton_shape=lambda dh, u, rstd, weight, mask, scale, sections: _a_partials(dh, u, sections),
    flops=lambda dh_TR, u, *_, **__: 2.0 * dh_TR.numel() * u.shape[1],
)


def _section_flops(h_TR: Tensor, sections: Sequence[AdapterSection]) -> float:
    """Returns the arithmetic of one product with each section's B, or of its gradient."""
    return 2.0 * h_TR.shape[0] * sum(one.num_columns * one.num_ranks for one in sections)


def _output_partials(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor | None) -> None:
    """Allocates the partial sums of dH and of dB, over blocks of each section's columns."""
    most = max(one.num_ranks for one in sections)
    columns = output_features(dy_TO, most)
    blocks = sum(-(-one.num_columns // columns) for one in sections)
    if dh_out is not None:
        wide(dy_TO, (blocks, dy_TO.shape[0], most))
    if any(one.db is not None for one in sections):
        splits = num_splits(blocks * rank_blocks(dy_TO, most), dy_TO.shape[0], TILE_TOKENS)
        wide(dy_TO, (splits, blocks * columns, most))


def _b_partials(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection]) -> None:
    if trained := [one for one in sections if one.db is not None]:
        _output_partials(dy_TO, h_TR, trained, dh_out=None)


B_GRADIENT = Op(
    reference=reference.b_gradient,
    native=low_rank.accumulate_b,
    triton="engine.kernels.triton.ops:b_gradient",
    shape=write_in_place,
    triton_shape=_b_partials,
    flops=lambda dy_TO, h_TR, sections: _section_flops(h_TR, sections),
)


def _output_gradients(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor) -> None:
    reference_fused.output_gradients(dy_TO, h_TR, sections, dh_out=dh_out, add=True)


OUTPUT_GRADIENTS = Op(
    reference=_output_gradients,
    triton="engine.kernels.triton.ops:add_output_gradients",
    shape=_output_partials,
    flops=lambda dy_TO, h_TR, sections, *_, **__: 2.0 * _section_flops(h_TR, sections),
)
APPLY_UPDATE = Op(
    reference=reference.apply_update,
    native=low_rank.add_input_gradient,
    triton="engine.kernels.triton.ops:apply_update",
    shape=lambda dx, update: dx,
    triton_shape=lambda dx, update: dx if dx.is_contiguous() else like(dx),
)
