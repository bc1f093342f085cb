"""The loss scale against torch's GradScaler, and what the optimizer makes of a scaled gradient."""

from __future__ import annotations

import pytest
import torch

from engine.config.optim import OptimOptions
from engine.errors import UserError
from engine.optim.loss_scale import CEILING, FLOOR, LossScale

CPU = torch.device("cpu")


def stock_scales(overflows: list[bool], *, initial: float, window: int) -> list[float]:
    """torch's scale after each of these steps."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=window)
    found = []
    for overflow in overflows:
        parameter.grad = torch.full((3,), float("inf") if overflow else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize("window", [1, 2, 5])
def test_it_follows_torchs(window: int) -> None:
    torch.manual_seed(0)
    overflows = (torch.rand(20) < 0.3).tolist()
    scale = LossScale(2.0**9, window, CPU)
    ours = []
    for overflow in overflows:
        scale.update(torch.tensor(float("nan") if overflow else 3.0))
        assert bool(scale.overflow) == overflow
        ours.append(float(scale.value))
    assert ours == stock_scales(overflows, initial=2.0**9, window=window)
    assert len(set(ours)) > 2


def test_it_stays_between_floor_and_ceiling() -> None:
    scale = LossScale(2.0, 1, CPU)
    for _ in range(3):
        scale.update(torch.tensor(float("inf")))
    assert float(scale.value) == FLOOR
    for _ in range(40):
        scale.update(torch.tensor(1.0))
    assert float(scale.value) == CEILING


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_scale": 1000.0}, "optim.loss_scale is 1000, but a power of two from 1 to 16777216 is expected"),
        ({"loss_scale": 0.0}, "optim.loss_scale is 0"),
        ({"loss_scale_window": 0}, "optim.loss_scale_window is 0"),
    ],
)
def test_wrong_options(options: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        OptimOptions(**options)
