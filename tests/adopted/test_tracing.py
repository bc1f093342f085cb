"""What tensors without memory remember, against the same operations on numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.adopted.arrangement import StoredPart
from engine.adopted.tracing import TracedTensor
from engine.errors import UserError

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stack of chunks": lambda x, y: torch.stack([*x.chunk(2, 1), *y.chunk(2, 1)]),
    "transpose and cat": lambda x, y: torch.cat([x.transpose(0, 1).contiguous(), y.t()], dim=-1),
    "every other row": lambda x, y: torch.cat([x[1::2], y[::2]]),
    "interleave": lambda x, y: x.reshape(6, 2, 8).transpose(0, 1).reshape(12, 8).contiguous(),
    "rope": lambda x, y: torch.cat([x, y]).view(2, 6, 2, 8).transpose(1, 2).reshape(24, 8),
    "columns by turns": lambda x, y: torch.stack([x, y], dim=-1).reshape(12, 16),
    "flat and back": lambda x, y: torch.cat([x, y], 1).reshape(-1).view(16, 12).permute(1, 0)[3:7],
    "unbind": lambda x, y: torch.cat(torch.unbind(torch.stack([x, y], 1), dim=1)[::-1]),
    "split": lambda x, y: torch.cat(torch.split(x, [5, 3, 4], dim=0)[::-1]).unsqueeze(1).squeeze(1),
    "uneven view": lambda x, y: torch.cat([x[:5], y[:7]]).view(4, 3, 8).transpose(0, 2).reshape(3, 32),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_traces_are_the_numbers(name: str) -> None:
    inputs = {"x": torch.randn(12, 8), "y": torch.randn(12, 8)}
    expected = OPERATIONS[name](inputs["x"], inputs["y"])
    with torch.no_grad():
        traced = OPERATIONS[name](*(TracedTensor.whole(key, value.shape) for key, value in inputs.items()))
    assert isinstance(traced, TracedTensor)
    assert traced.shape == expected.shape
    found = torch.full(expected.shape, torch.nan)
    for box in traced.boxes:
        part = StoredPart("made", *box)
        place = tuple(slice(start, start + size) for start, size in zip(box.starts, box.sizes, strict=True))
        assert found[place].isnan().all(), "two parts are the same numbers"
        found[place] = part.of(inputs[box.stored])
    assert torch.equal(found, expected)


def test_new_numbers_are_refused() -> None:
    x = TracedTensor.whole("x", (4, 4))
    with pytest.raises(UserError, match="which is no rearrangement of what is stored"):
        x * 2.0
    with pytest.raises(ValueError, match="are joined"):
        torch.cat([x, TracedTensor.whole("y", (3, 3))])
