"""How a process starts, where there is no launcher."""

from __future__ import annotations

import os

import pytest

from engine.runtime.launch import start

NAME = "CUBLAS_WORKSPACE_CONFIG"
"""Without it, and before torch 2.13, torch refuses the first product of a deterministic run on a GPU."""


def test_a_deterministic_run_gets_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")  # so that it is as before when this ends
    monkeypatch.delenv(NAME)
    start()
    assert NAME not in os.environ
    start(deterministic=True)
    assert os.environ[NAME] == ":4096:8"
    monkeypatch.setenv(NAME, ":16:8")
    start(deterministic=True)
    assert os.environ[NAME] == ":16:8", "the user's own stays"
