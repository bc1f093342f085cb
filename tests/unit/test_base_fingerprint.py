"""The base's fingerprint is many small reads: one rank makes them for all, and not while training waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.model_weights import HfSource, open_source
from engine.errors import UserError
from engine.training import saving, start_model
from engine.training.start_model import ModelSource
from tests.support.family_models import make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model("llama", tmp_path / "hf")
    return tmp_path / "hf"


def test_other_ranks_take_over_what_rank_0_has_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = (open_source(model) for _ in range(2))
    sent: list[object] = []
    monkeypatch.setattr(start_model, "broadcast_object", lambda value: sent.append(value) or value)
    ModelSource(model=first.model, weights=first).agree_on_fingerprint(0)
    monkeypatch.setattr(start_model, "broadcast_object", lambda value: sent.append(value) or sent[0])
    monkeypatch.setattr(HfSource, "computed_fingerprint", lambda self: pytest.fail("another rank reads it too"))
    source = ModelSource(model=other.model, weights=other)
    source.agree_on_fingerprint(1)
    assert source.fingerprint() == first.fingerprint() and sent[1] is None


def test_it_is_read_beside_training_from_files_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it looks at weights unchecked, which the source that others read from must not."""
    weights = open_source(model)
    goes_on, readers = threading.Event(), []
    original = HfSource.computed_fingerprint

    def slow(self: HfSource) -> str:
        assert goes_on.wait(20)
        readers.append(self)
        return original(self)

    monkeypatch.setattr(HfSource, "computed_fingerprint", slow)
    outcome = saving._in_background(ModelSource(model=weights.model, weights=weights).fresh_fingerprint)
    assert not outcome.done()
    goes_on.set()
    assert outcome.result(20) == original(weights) and readers[0] is not weights
    weights.know_fingerprint("known")
    assert ModelSource(model=weights.model, weights=weights).fresh_fingerprint() == "known" and len(readers) == 1


def test_an_error_that_has_passed_loses_no_steps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files cannot be opened anew for a while; those that the weights were read from still can be read."""
    weights = open_source(model)

    def gone(path: Path, implementation: str) -> HfSource:
        raise UserError(f"{path} cannot be read (Input/output error): use another copy.")

    monkeypatch.setattr(start_model, "open_source", gone)
    source = ModelSource(model=weights.model, weights=weights)
    outcome = saving._in_background(source.fresh_fingerprint)
    with pytest.raises(UserError):
        outcome.result(20)
    monkeypatch.undo()
    assert saving._result_or(outcome, source) == open_source(model).fingerprint()


def test_a_model_without_weights_has_none(model: Path) -> None:
    folder: ModelFolder = open_source(model).model
    source = ModelSource(model=folder, weights=None)
    source.agree_on_fingerprint(0)
    assert source.fresh_fingerprint() is None
