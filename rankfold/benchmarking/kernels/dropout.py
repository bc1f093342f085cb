"""Cases that draw a dropout mask.

The engine's is a function of coordinates and must agree bit for bit; torch's is another mask, whose share of kept
elements alone can be checked. Memory does not limit drawing, so the limit (one bit written an element) is far away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.philox import dropout_mask
from engine.kernels.records import InputUpdate
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting


def draw(setting: Setting) -> Case:
    options = setting.options
    shape = (options.tokens, options.hidden)
    key = setting.dropout_key(options.hidden)
    right = dropout_mask(key)

    def engine(kernels: Kernels) -> Contestant:
        def error(results: Results) -> float:
            return float((_as_numbers(setting, kernels, results[0]) != right).float().mean())

        return Contestant(run=lambda: (kernels.draw_mask(key),), error=error)

    def peer() -> Contestant:
        mask = torch.empty(shape, dtype=torch.bool, device=setting.device)
        return Contestant(
            run=lambda: (mask.bernoulli_(1.0 - options.dropout),),
            error=lambda results: _share_error(results[0], options.dropout),
            note="torch draws another mask, a byte per element, whose share of kept elements alone is checked.",
        )

    return Case(
        size=f"{shape[0]}x{shape[1]}, p = {options.dropout}",
        demand=Demand(moved=shape[0] * shape[1] // 8),
        contestants=setting.contestants(engine, torch=peer),
        answer=lambda: (right,),
        limit=0.0,
    )


def _as_numbers(setting: Setting, kernels: Kernels, mask: Tensor) -> Tensor:
    """Returns a mask of whatever form as booleans: where an update of ones reaches zeros."""
    options = setting.options
    update = InputUpdate(
        dh_TR=torch.ones(options.tokens, 1, dtype=setting.dtype, device=setting.device),
        a_RI=torch.ones(1, options.hidden, dtype=setting.dtype, device=setting.device),
        mask=mask,
        scale=setting.keep_scale,
    )
    zeros = torch.zeros(options.tokens, options.hidden, dtype=setting.dtype, device=setting.device)
    return kernels.apply_update(zeros, update) != 0


def _share_error(mask: Tensor, probability: float) -> float:
    """Returns 0 where the share of kept elements is within five standard deviations of its expectation."""
    share, expected = float(mask.float().mean()), 1.0 - probability
    deviations = abs(share - expected) / max((probability * expected / mask.numel()) ** 0.5, 1e-30)
    return 0.0 if deviations <= 5.0 else float("inf")


CASES = {"dropout mask": draw}
