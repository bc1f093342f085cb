"""Section `merge-aware`: its shares by hand from its losses, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import UserError
from rankfold.benchmarking.merge_aware import run
from rankfold.benchmarking.options import StepOptions
from rankfold.benchmarking.sections import MergeAwareOptions


def test_shares_are_of_the_gain_of_plain_adapters(stories_dir: Path, data_dir: Path) -> None:
    text = data_dir / "corpus" / "tinyshakespeare.txt"
    options = MergeAwareOptions(
        model=str(stories_dir), data=str(text), characters=4000, formats="mxfp4", seeds=1, steps=12, rows=2, length=32,
        held=2, warmup=1, lr=1e-2, kernels="reference",
    )  # fmt: skip
    table = run(options)
    (losses,) = table.data["losses"]["mxfp4"]
    gain = losses["base"] - losses["plain"]
    assert gain > 0.1, "nothing was learned"
    (row,) = table.rows
    assert row[:3] == ("mxfp4", f"{losses['base']:.4f}", f"{losses['plain']:.4f}")
    for cell, name in zip(row[3:], ("plain, merged with new scales", "plain, merged", "merge-aware"), strict=True):
        assert float(cell) == pytest.approx((losses["base"] - losses[name]) / gain, abs=0.006), name
    # three roundings of nearly the same weights, none of which is the sum
    assert len({round(loss, 6) for loss in losses.values()}) == 5


def test_what_it_cannot_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model is '', which does not exist"):
        MergeAwareOptions(data=str(tmp_path))
    with pytest.raises(UserError, match="--formats has 'nf4'"):
        MergeAwareOptions(model=str(tmp_path), data=str(tmp_path), formats="nf4")
    with pytest.raises(UserError, match="--method merge-aware merges into a base that is stored encoded"):
        StepOptions(method="merge-aware", peers="none")
    with pytest.raises(UserError, match="--method merge-aware drops no inputs"):
        StepOptions(method="merge-aware", base_dtype="nvfp4", dropout=0.1, peers="none")
