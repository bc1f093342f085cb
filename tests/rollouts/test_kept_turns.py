"""Turns whose rows stay in the cache: what they compute, the trainer's log-probabilities, and bits that do not depend
on when an environment answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.inference import decode_graphs
from engine.inference.model_part import InferenceStage
from engine.inference.waiting_rows import RECOMPUTED
from tests.support.generation import lasting_tensors
from tests.support.graph_stand_in import FunctionCapture
from tests.support.kept_turns import Talked, family_settings, talked
from tests.support.sweeps import sampled

FAMILIES = (
    "qwen3", "gemma3", "gpt oss", "deepseek v3", "qwen3.5", "falcon h1", "lfm2", "kimi linear", "nemotron h", "gemma4",
    "mixtral",
)  # fmt: skip
"""Full attention, with a window, with sinks, latent; layers with states, of four kinds; shared keys; and experts."""
STATES = ("qwen3.5", "falcon h1", "lfm2", "kimi linear", "nemotron h")
SOME = ("gpt oss", "deepseek v3", "falcon h1", "nemotron h", "mixtral", "kimi linear")
"""Families of whose linears PEFT or the engine takes some only, by the names that PEFT has."""
BOUND = 4e-6
"""Of a log-probability in fp32: some units of the last place at the size of logits."""


def check_counts(found: Talked, first: int, *, states: bool = False) -> None:
    """Each turn computed the results before it and the last token that was sampled before these; with states that one
    was in a pass of its own.

    Args:
        first: tokens of the first turns' prompts.
    """
    turns = [count - states for own in found.turns for count in own]
    assert len(turns) >= 5
    assert found.computed == first + sum(turns)
    assert found.used == 0, "pages of a conversation that has ended"


@pytest.mark.parametrize(
    ("name", "ahead"),
    sampled([(name, ahead) for name in FAMILIES for ahead in (0, 1)], (("gemma3", 0), ("qwen3.5", 1))),
)
def test_turns_compute_their_new_tokens(name: str, ahead: int, tmp_path: Path) -> None:
    """Prompts are computed once for a group, and no token twice; with a position that is off by one, a row that lies
    elsewhere or states of another token the log-probabilities differ by tenths."""
    adapted = ["o_proj"] if name in SOME else "all-linear"
    found = talked(family_settings(tmp_path, name, tools=True, adapted=adapted), ahead=ahead)
    check_counts(found, sum(map(len, found.prompts[::4])), states=name in STATES)
    assert found.distance < BOUND
    assert RECOMPUTED not in found.notes


def test_environments_that_add_to_prompts(tmp_path: Path) -> None:
    """Each conversation computes its own prompt then, in a pass by itself; more are under way than there are slots."""
    found = talked(family_settings(tmp_path, "qwen3", rollout__slots=3, rollout__environment_workers=7, shows=True), 8)
    check_counts(found, sum(map(len, found.prompts)))
    assert found.distance < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("tools", sampled((False, True), (True,)))
def test_bits_do_not_depend_on_delays(tools: bool, tmp_path: Path) -> None:
    """Environments answer after random times. No row is kept because there is room for it just then, and no two prompts
    share a pass because both are there: only those that begin at once, where prompts are known."""
    changes = {"tools": tools, "rollout__slots": 6}
    at_once = talked(family_settings(tmp_path / "0", "qwen3", **changes), environment_workers=6)  # type: ignore[arg-type]
    for number, workers in ((1, 6), (2, 9)):
        settings = family_settings(tmp_path / str(number), "qwen3", delay=0.05, **changes)  # type: ignore[arg-type]
        late = talked(settings, environment_workers=workers)
        assert late.tokens == at_once.tokens
        assert late.sampled == at_once.sampled
        assert late.together[0] == 1 + tools and set(late.together[1:]) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(("qwen3", "qwen3.5"), ("qwen3.5",)))
def test_graphs_change_no_number(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come back have other pages and states in their slots than the graphs' first rows had."""
    monkeypatch.setattr(decode_graphs, "SHORTEST", 16)
    settings, captures = family_settings(tmp_path, name, tools=True, rollout__slots=4), list[FunctionCapture]()

    def capture(stage: Callable[[], InferenceStage]) -> FunctionCapture:
        captures.append(FunctionCapture(lambda: lasting_tensors(stage())))
        return captures[-1]

    plain, graphed = talked(settings), talked(settings, capture=capture)
    assert (graphed.tokens, graphed.sampled) == (plain.tokens, plain.sampled)
    assert sum(one.replays for one in captures[0].captured) > 10


@pytest.mark.parametrize("kernels", sampled(("native", "reference"), ("native",)))
def test_bfloat16(kernels: str, tmp_path: Path) -> None:
    """A row that lies elsewhere differs by tenths; bfloat16 has 8 bits, and logits here are some units."""
    settings = family_settings(tmp_path, "qwen3", tools=True, model__kernels=kernels)
    found = talked({**settings, "model.dtype": "bfloat16"})
    check_counts(found, sum(map(len, found.prompts[::4])))
    assert found.distance < 0.06


def test_what_cannot_be_continued_is_computed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a model in transformers' own modules whose layers keep more than keys and values; a note says so."""
    settings = family_settings(tmp_path, "lfm2", tools=True, model__implementation="adopted", data__packing="false")
    found = talked(settings)
    assert found.notes[-1] == RECOMPUTED
    whole = 0
    for prompt, written in zip(found.prompts, found.written, strict=True):
        edges = [place for place in range(1, len(written)) if written[place - 1] and not written[place]]
        whole += sum(len(prompt) + edge for edge in edges)
    assert found.computed == sum(map(len, found.prompts)) + whole
    assert found.distance < 10 * BOUND
