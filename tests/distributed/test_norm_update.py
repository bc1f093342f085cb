"""The norm before a column linear is handed the H of its own tokens, with which it makes the adapters' update itself.

Under every way to split: gradients by norms that use H equal those by norms that do not.
"""

from __future__ import annotations

import pytest

from engine.ops.kernels import REFERENCE
from tests.distributed.cases import relative_error
from tests.distributed.gradient_table import CASES
from tests.support.memory_models import gradients_on_two_ranks
from tests.support.projection_norm import norms_by_projection
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

TRAVELS = (
    "adapters joint", "adapters sequence", "fused sequence", "unfolded joint", "unfolded sequence",
    "some trained, some adapted",
)  # fmt: skip
"""Cases in which dH is complete when the norm gets it."""
LOCAL = ("adapters local", "unfolded local")
"""Cases in which each rank's update is added to dX before the sum over ranks."""


def _compare(names: tuple[str, ...]) -> dict[str, tuple[int, float]]:
    """Updates that came with H, and the largest relative error of a gradient."""
    found = {}
    for name in names:
        kernels, seen = norms_by_projection()
        ours, theirs = gradients_on_two_ranks(CASES[name], kernels), gradients_on_two_ranks(CASES[name], REFERENCE)
        assert ours.keys() == theirs.keys()
        found[name] = seen(), max(relative_error(value, theirs[key]) for key, value in ours.items())
    return found


def test_norms_that_use_the_projection() -> None:
    for rank in spawn(_compare, world=2, args=(TRAVELS + LOCAL,)):
        assert all(rank[name][0] > 0 for name in TRAVELS), "no norm was handed an H"
        assert all(rank[name][0] == 0 for name in LOCAL)
        assert all(error < 1e-5 for _, error in rank.values()), rank
