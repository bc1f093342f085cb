"""Collectives on four ranks: adjoint pairs, the loss of a split vocabulary, nothing deprecated.

An operator F over the ranks' stacked vectors and its backward F' are a pair where <F x, y> = <x, F' y>, with the inner
product summed over the ranks.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from engine.batch import IGNORE_LABEL
from engine.distributed import collectives, differentiable
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid, kv_replica_ranks
from engine.distributed.sharding import padded_split_spec
from engine.ops.cross_entropy import cross_entropy
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

WORLD = 4
PAIRS = {
    # name: rows of the input and of the output on each rank
    "reduce_from_all": (6, 6),
    "split_tokens": (12, 3),
}
REPLICATED = {
    # of which operators input and output are the same on all ranks, and hence one vector, not four
    "reduce_from_all": (False, True),
    "split_tokens": (True, False),
}
VOCABULARIES = (131, 9, 4, 2)
"""9 over 4 ranks leaves the last one with padding alone; of 2, two ranks hold nothing."""


def _draw(shape: tuple[int, ...], seed: int, *, same: bool) -> Tensor:
    """Random and different on each rank, unless `same`."""
    place = 0 if same else dist.get_rank() + 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + place), dtype=torch.float64)


def _inner(left: Tensor, right: Tensor, *, same: bool) -> float:
    total = (left * right).sum()
    if not same:
        dist.all_reduce(total)
    return total.item()


def _adjoint(name: str, axis: Axis) -> tuple[float, float]:
    """<F x, y> and <x, F' y>."""
    rows_in, rows_out = PAIRS[name]
    same_in, same_out = REPLICATED[name]
    x = _draw((rows_in, 5), 1, same=same_in).requires_grad_()
    y = _draw((rows_out, 5), 2, same=same_out)
    out = getattr(differentiable, name)(x, axis)
    (gradient,) = torch.autograd.grad(out, x, y)
    return _inner(out.detach(), y, same=same_out), _inner(x.detach(), gradient, same=same_in)


def _values(axis: Axis) -> dict[str, Any]:
    """What each collective makes of rank-dependent inputs, with inputs that are not contiguous too."""
    rank = dist.get_rank()
    strided = (torch.arange(24.0).view(3, 8) + 100 * rank).t()
    plain = strided.contiguous()
    return {
        "all_reduce": collectives.all_reduce(plain.clone(), axis),
        "all_reduce max": collectives.all_reduce(plain.clone(), axis, dist.ReduceOp.MAX),
        "all_gather": collectives.all_gather(strided, axis),
        "reduce_scatter": collectives.reduce_scatter(strided, axis),
        "local_part": collectives.local_part(plain, axis),
        "bf16 gather": collectives.all_gather(strided.bfloat16(), axis),
        "bf16 sum": collectives.all_reduce(torch.ones(3, dtype=torch.bfloat16), axis),
        "objects": collectives.gather_objects({"rank": rank}, axis),
        "broadcast": collectives.broadcast_object(rank + 7),
    }


def _split_loss(vocabulary: int, axis: Axis) -> dict[str, Tensor]:
    """Loss and logit gradient of this rank's vocabulary rows; padding columns hold large numbers."""
    spec = padded_split_spec((vocabulary, 8), 0, rank=axis.rank, size=axis.size)
    pieces = spec.pieces
    first, count = (pieces[0].global_offset, pieces[0].length) if pieces else (vocabulary, 0)
    local = torch.full((7, spec.local_shape[0]), 77.0)
    local[:, :count] = _logits(vocabulary)[:, first : first + count]
    local.requires_grad_()
    losses = cross_entropy(local * 1, _labels(vocabulary), first_id=first, num_ids=count, axis=axis)
    losses.backward(torch.linspace(0.5, 2, 7))
    return {"losses": losses.detach(), "gradient": local.grad[:, :count], "padding": local.grad[:, count:]}


def _logits(vocabulary: int) -> Tensor:
    return 4 * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(vocabulary))


def _labels(vocabulary: int) -> Tensor:
    labels = torch.arange(7) * 5 % vocabulary
    labels[[2, 5]] = IGNORE_LABEL
    return labels


def _groups(num_kv_heads: int, grid: RankGrid) -> dict[str, list[object]]:
    """Global ranks on each axis, in the order of the axis."""
    mesh = build_mesh(grid, device_type="cpu", num_kv_heads=num_kv_heads)
    axes = {name: getattr(mesh, name) for name in ("tp", "dp", "dp_cp", "kv_replica", "pp")}
    found = {name: collectives.gather_objects(dist.get_rank(), axis) for name, axis in axes.items()}
    assert all(members[axes[name].rank] == dist.get_rank() for name, members in found.items())
    return found


def _all_checks() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        axis = build_mesh(RankGrid(tp=WORLD), device_type="cpu", num_kv_heads=2).tp
        found = {
            "adjoint": {name: _adjoint(name, axis) for name in PAIRS},
            "values": _values(axis),
            "losses": {vocabulary: _split_loss(vocabulary, axis) for vocabulary in VOCABULARIES},
            "groups tp4": _groups(2, RankGrid(tp=4)),
            "groups tp2 dp2": _groups(1, RankGrid(tp=2, dp=2)),
        }
    kinds = (FutureWarning, DeprecationWarning)
    found["deprecations"] = [str(warning.message) for warning in caught if issubclass(warning.category, kinds)]
    return found


@functools.cache
def _ranks() -> list[dict[str, Any]]:
    return spawn(_all_checks, world=WORLD)


@pytest.mark.parametrize("name", PAIRS)
def test_backward_is_the_adjoint(name: str):
    for rank in _ranks():
        forward, backward = rank["adjoint"][name]
        assert abs(forward) > 1e-3
        assert forward == pytest.approx(backward, rel=1e-12)


def test_nothing_deprecated_is_called():
    assert [rank["deprecations"] for rank in _ranks()] == [[]] * WORLD


def test_values():
    inputs = [(torch.arange(24.0).view(3, 8) + 100 * rank).t() for rank in range(WORLD)]
    total = torch.stack(inputs).sum(0)
    for place, rank in enumerate(_ranks()):
        values = rank["values"]
        assert torch.equal(values["all_reduce"], total)
        assert torch.equal(values["all_reduce max"], inputs[-1])
        assert torch.equal(values["all_gather"], torch.cat(inputs))
        assert torch.equal(values["reduce_scatter"], total[2 * place : 2 * place + 2])
        assert torch.equal(values["local_part"], inputs[place][2 * place : 2 * place + 2])
        assert torch.equal(values["bf16 gather"], torch.cat(inputs).bfloat16())
        assert values["bf16 sum"].tolist() == [4.0] * 3
        assert values["objects"] == [{"rank": other} for other in range(WORLD)]
        assert values["broadcast"] == 7


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_split_vocabulary_loss(vocabulary: int):
    logits = _logits(vocabulary).double().requires_grad_()
    expected = F.cross_entropy(logits, _labels(vocabulary), reduction="none", ignore_index=IGNORE_LABEL)
    expected.backward(torch.linspace(0.5, 2, 7).double())
    ranks = [rank["losses"][vocabulary] for rank in _ranks()]
    for found in ranks:
        torch.testing.assert_close(found["losses"].double(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(found["losses"], ranks[0]["losses"]), "ranks disagree on the loss"
        assert found["padding"].abs().sum() == 0
    gradient = torch.cat([found["gradient"] for found in ranks], 1)
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-4, atol=1e-6)


def test_groups():
    for place, rank in enumerate(_ranks()):
        half = [0, 1] if place < 2 else [2, 3]
        assert rank["groups tp4"] == {
            "tp": [0, 1, 2, 3], "dp": [place], "dp_cp": [place], "kv_replica": half, "pp": [place],
        }  # fmt: skip
        other = [place % 2, place % 2 + 2]
        assert rank["groups tp2 dp2"] == {
            "tp": half, "dp": other, "dp_cp": other, "kv_replica": half, "pp": [place],
        }  # fmt: skip


def test_replicas_of_key_value_heads():
    assert kv_replica_ranks(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert kv_replica_ranks(2, 8) == [[0], [1]]
