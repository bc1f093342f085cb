"""What a comparison of fingerprints says of a value that differs, is missing or is new."""

from __future__ import annotations

from tests.fingerprints.measure import after_kept, differences


def test_the_first_value_that_differs_is_named() -> None:
    before = {"metrics": {"step 1 loss": 1.5, "step 4 loss": 1.25}, "tensors": {"master/a": "0" * 64, "master/b": "1"}}
    assert not list(differences(before, before))
    after = {"metrics": {"step 1 loss": 1.5, "step 4 loss": 1.26}, "tensors": {"master/b": "1", "master/c": "2"}}
    assert list(differences(before, after)) == [
        "1 of 2 metrics (first step 4 loss: 1.25 -> 1.26)",
        "2 of 2 tensors (first master/a: 000000000000... -> absent)",
    ]
    assert after_kept(before)["metrics"] == {"step 4 loss": 1.25}
