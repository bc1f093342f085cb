"""The refusal of a capture by CUDA, with a stand-in for torch's graphs that refuses as CUDA does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from engine.errors import UserError
from engine.kernels.records import Documents
from engine.layers.graph_capture import Captured, CudaCapture
from engine.ops.attention.packed import attention_by_document

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


@contextmanager
def _graph(*arguments: object, **options: object) -> Iterator[None]:
    try:
        yield
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def _capture(monkeypatch: pytest.MonkeyPatch, function: Captured) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Stream=lambda device: None, CUDAGraph=object, graph=_graph))
    CudaCapture(torch.device("cuda")).capture(function, None)


def _refused() -> None:
    raise RuntimeError(f"{NOT_PERMITTED}\nCUDA kernel errors might be reported at another call")


def _refused_in_attention() -> tuple[torch.Tensor]:
    x = torch.zeros(2, 1, 8)
    return (attention_by_document(x, x, x, Documents.of_rows((1, 1), row_length=2), scale=1.0),)


def test_what_broke_a_capture_is_one_sentence_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the capture raises as well, which hides what came first."""
    monkeypatch.setattr("engine.ops.attention.packed.scaled_dot_product_attention", lambda *_, **__: _refused())
    with pytest.raises(UserError) as refused:
        _capture(monkeypatch, _refused_in_attention)
    said = str(refused.value)
    assert said.startswith(f"a CUDA graph cannot be captured here ({NOT_PERMITTED}, at tests/unit/")
    assert said.endswith("to none, or give rankfold generate --cuda-graph none.")


@contextmanager
def _ends_well(*arguments: object, **options: object) -> Iterator[None]:
    yield


@pytest.mark.parametrize("error", [ValueError("a defect"), torch.OutOfMemoryError("CUDA out of memory")])
def test_any_other_error_stays_what_it_is(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> tuple[()]:
        raise error

    monkeypatch.setattr(f"{__name__}._graph", _ends_well)
    with pytest.raises(type(error), match=str(error)):
        _capture(monkeypatch, fails)
