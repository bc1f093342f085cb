"""Publishing masters into weights, some of which lie beside others in one storage."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.optim.publish import CopyPublish


def test_dense_weights_are_copied_apart_from_strided_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies a list in one launch only where all of it is dense."""
    extended = torch.full((6, 12), -1.0, dtype=torch.bfloat16)
    weights = [torch.empty(3, 8, dtype=torch.bfloat16), extended[:, 8:11], torch.empty(5, dtype=torch.bfloat16)]
    sizes = [weight.numel() for weight in weights]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    master = torch.arange(sum(sizes)) / 8
    masters = [master[first : first + size] for first, size in zip(starts, sizes, strict=True)]
    views = [part.view(weight.shape) for part, weight in zip(masters, weights, strict=True)]
    slots = [SimpleNamespace(view=lambda whole, view=view: view) for view in views]
    lists: list[list[bool]] = []
    copy = torch._foreach_copy_

    def recorded(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        lists.append([target.is_contiguous() for target in targets])
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", recorded)
    CopyPublish(slots, master, weights).start()  # type: ignore[arg-type]
    assert lists == [[True, True], [False]]
    for view, weight in zip(views, weights, strict=True):
        assert torch.equal(weight, view.to(torch.bfloat16))
    assert (extended[:, :8] == -1).all() and (extended[:, 11:] == -1).all()
    CopyPublish([], master, []).start()
    assert len(lists) == 2
