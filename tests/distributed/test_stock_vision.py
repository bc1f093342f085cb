"""Vision-language models with towers of transformers, in every layout against one process."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import pytest
from torch import Tensor

from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.sharding import NamedShard
from tests.distributed.cases import relative_error
from tests.distributed.run_cases import TOWERS
from tests.distributed.sharded_runs import Run, Trained, assemble
from tests.distributed.test_vision import LAYOUTS, ONE
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

KINDS = ("in full", "adapters", "frozen")
NUM_STEPS = 3
EPS = 1e-5
"""Adam's. Far above the rounding of a gradient's elements and far below most of these. With the usual 1e-8, Adam
divides an element that is rounding alone by its own length: each process then moves it somewhere else, by up to the
learning rate, which is more than any other error here, whether two layouts are compared or one process with fp64."""
QUICK = {
    "llava in full": ("tp2 sequence", "pp2", "cp2", "dp2, parameters, recomputed"),
    "llava_onevision in full": ("tp2 sequence", "dp2, gradients"),
    "llava_next in full": ("cp2",),
    "internvl adapters": ("tp2", "dp2, parameters, recomputed"),
    "gemma3 in full": ("tp2 sequence", "pp2", "cp2", "dp2, parameters, recomputed", "one, recomputed"),
    "qwen2_5_vl in full": ("tp2 sequence", "cp2", "dp2, parameters"),
    "qwen3_vl in full": ("pp2", "cp2", "dp2, parameters, recomputed"),
    "qwen3_vl adapters": ("tp2 sequence",),
    "minicpmv4_7 in full": ("tp2 sequence", "pp2", "cp2", "dp2, parameters, recomputed"),
}


def _names() -> list[object]:
    every = [(case, name) for tower in TOWERS for case in (f"{tower} {kind}" for kind in KINDS) for name in LAYOUTS]
    return sampled(every, [(case, name) for case, names in QUICK.items() for name in names])


class Seen(NamedTuple):
    """What one rank saw: the gradient before any step, and a run from there."""

    gradients: list[NamedShard]
    run: Trained


def _seen(case: str, name: str) -> Seen:
    layout, level = LAYOUTS[name] if name else (ONE, "none")
    layout = replace(layout, case=case, dropout=0.0 if case.endswith("adapters") else layout.dropout)
    one = layout.grid == ONE.grid
    mesh = single_process_mesh() if one else build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
    run = Run(layout, mesh, level, eps=EPS)
    return Seen(run.gradients(1), run.trained(NUM_STEPS))


def _run_all(case: str, names: list[str]) -> dict[str, Seen]:
    return {name: _seen(case, name) for name in names}


@functools.cache
def _ranks(case: str, quick: bool) -> list[dict[str, Seen]]:
    names = [name for name in LAYOUTS if not name.startswith("one") and (name in QUICK.get(case, ())) == quick]
    return spawn(_run_all, world=2, args=(case, names), timeout=240)


@functools.cache
def _one(case: str) -> Seen:
    return _seen(case, "")


@pytest.mark.parametrize(("case", "name"), _names())
def test_layouts_equal_one_process(case: str, name: str) -> None:
    """The first gradient, losses, norms and what is trained after three steps; rows with none, one and two images."""
    expected = _one(case)
    if name.startswith("one"):
        found = [_seen(case, name)]
    else:
        found = [rank[name] for rank in _ranks(case, name in QUICK.get(case, ()))]
    assert found[-1].run.losses == pytest.approx(expected.run.losses, rel=1e-5)
    assert found[0].run.norms == pytest.approx(expected.run.norms, rel=1e-5)
    gradients, reference = (assemble([one.gradients for one in ranks]) for ranks in (found, [expected]))
    limit = 1e-5 * max(float(gradient.norm()) for gradient in reference.values())
    # a bias of keys without norms shifts all scores of a query alike, so that its gradient is rounding
    rounding = {
        key for key, one in reference.items() if "vision_tower" in key and "k_proj.bias" in key and one.norm() < limit
    }
    assert all(float(gradients[key].norm()) < limit for key in rounding)
    _assert_close(gradients, reference, but=rounding)
    masters, reference = (assemble([one.run.masters for one in ranks]) for ranks in (found, [expected]))
    assert any(key.startswith("vision") for key in masters) != ("frozen" in case)
    _assert_close(masters, reference)


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], but: Collection[str] = ()) -> None:
    assert found.keys() == expected.keys()
    errors = {key: relative_error(found[key], value) for key, value in expected.items() if key not in but}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}
