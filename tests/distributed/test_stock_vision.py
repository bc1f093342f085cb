"""Vision-language models with towers of transformers, in every layout against one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from engine.distributed.mesh import build_mesh, single_process_mesh
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import TOWERS, Run, Trained, assemble
from tests.distributed.test_vision import LAYOUTS, ONE
from tests.spawning import spawn
from tests.sweeps import sampled

pytestmark = pytest.mark.distributed

KINDS = ("in full", "adapters", "frozen")
NUM_STEPS = 3
QUICK = {
    "llava in full": ("tp2 sequence", "pp2", "cp2", "dp2, parameters, recomputed"),
    "llava_onevision in full": ("tp2 sequence", "dp2, gradients"),
    "internvl adapters": ("tp2", "dp2, parameters, recomputed"),
    "gemma3 in full": ("tp2 sequence", "pp2", "cp2", "dp2, parameters, recomputed", "one, recomputed"),
    "qwen2_5_vl in full": ("tp2 sequence", "cp2", "dp2, parameters"),
    "qwen3_vl in full": ("pp2", "cp2", "dp2, parameters, recomputed"),
    "qwen3_vl adapters": ("tp2 sequence",),
}


def _names() -> list[object]:
    every = [(case, name) for tower in TOWERS for case in (f"{tower} {kind}" for kind in KINDS) for name in LAYOUTS]
    return sampled(every, [(case, name) for case, names in QUICK.items() for name in names])


def _trained(case: str, name: str) -> Trained:
    layout, level = LAYOUTS[name]
    layout = replace(layout, case=case, dropout=0.0 if case.endswith("adapters") else layout.dropout)
    one = layout.grid == ONE.grid
    mesh = single_process_mesh() if one else build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
    return Run(layout, mesh, level).trained(NUM_STEPS)


def _run_all(case: str, names: list[str]) -> dict[str, Trained]:
    return {name: _trained(case, name) for name in names}


@functools.cache
def _ranks(case: str, quick: bool) -> list[dict[str, Trained]]:
    names = [name for name in LAYOUTS if not name.startswith("one") and (name in QUICK.get(case, ())) == quick]
    return spawn(_run_all, world=2, args=(case, names), timeout=240)


@functools.cache
def _one(case: str) -> Trained:
    layout = replace(ONE, case=case, dropout=0.0 if case.endswith("adapters") else ONE.dropout)
    return Run(layout, single_process_mesh(), "none").trained(NUM_STEPS)


@pytest.mark.parametrize(("case", "name"), _names())
def test_layouts_equal_one_process(case: str, name: str) -> None:
    """Losses, norms and what is trained after three steps; rows with none, one and two pictures."""
    expected = _one(case)
    if name.startswith("one"):
        found = [_trained(case, name)]
    else:
        found = [rank[name] for rank in _ranks(case, name in QUICK.get(case, ()))]
    assert found[-1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-5)
    whole, reference = assemble([one.masters for one in found]), assemble([expected.masters])
    assert whole.keys() == reference.keys() and any(key.startswith("vision") for key in whole) != ("frozen" in case)
    # a bias of keys shifts all scores of a query alike: its gradient is rounding, which Adam scales up
    errors = {key: relative_error(value, reference[key]) for key, value in whole.items() if "k_proj.bias" not in key}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}
