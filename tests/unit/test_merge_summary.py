"""What is said of a merge."""

from engine.conversion.add_adapter import summary


def test_an_exact_merge_is_called_exact() -> None:
    exact = {"max_error": 0.0, "relative_error": 0.0}
    assert summary({"a": exact, "b": exact}) == "2 tensors merged exactly: merge_report.json"
    assert summary({"a": exact}, "rounded") == "1 tensor rounded exactly: merge_report.json"
    assert "exact" not in summary({"a": exact, "b": {"max_error": 1e-9, "relative_error": 1e-9}})
