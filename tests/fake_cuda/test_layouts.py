"""One rank of each layout takes training steps on a GPU that does not exist, and does nothing that a GPU would mind.

A case fails where devices mix, where the host waits for the device at another place than `MAY_WAIT`, where memory is
used in the wrong order or given back too early, where NCCL or Triton would refuse what they get, and where a graph's
capture holds what a graph cannot. `mistakes.py` has one of each, so that it is known that they are found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from engine.inference.decode_graphs import WARMUP_PASSES
from tests.fake_cuda.layouts import CASES
from tests.fake_cuda.models import LLAMA_8B
from tests.fake_cuda.serving import CASE_SECONDS, MISTAKES, START_SECONDS, Ranks
from tests.fake_cuda.waits import MAY_WAIT

MOST_LAUNCHES = 8
"""By the host, for a token of each row: its inputs, pages of rows that begin or move, the graph, and what is read."""
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(START_SECONDS + CASE_SECONDS),
    pytest.mark.skipif(which("g++") is None, reason="the device is compiled by g++"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pytest.importorskip("triton")
    with Ranks() as started:
        yield started


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.quick else pytest.mark.slow) for name, case in CASES.items()]
)
def test_layout(ranks: Ranks, name: str) -> None:
    found = ranks.run(name)
    assert not found["error"], found["error"]
    assert not found["mistakes"], "\n".join(f"{count} times: {text}" for text, count in found["mistakes"].items())
    for operation in CASES[name].expects:
        assert operation in found["operations"], found["operations"]


def test_a_token_of_each_row_is_few_launches(ranks: Ranks) -> None:
    """Llama 3.1 8B with adapters on all linears, sampled as rollouts are: prompts in one pass of attention, and then
    passes of which only the first ones are launched kernel by kernel. In the last one a row has ended."""
    found = ranks.run("tokens of llama 3.1 8b in 64 rows")
    assert not found["error"], found["error"]
    prompts, *passes = found["decoding"]
    layers = LLAMA_8B["num_hidden_layers"]
    assert prompts == {"attentions of prompts": layers}
    warmup, captured, replayed = passes[:WARMUP_PASSES], passes[WARMUP_PASSES], passes[WARMUP_PASSES + 1 :]
    assert all(one["by the host"] > 10 * layers for one in warmup)
    assert captured["in captures"] > 10 * layers
    assert len(replayed) == 2 and all(set(one) == {"by the host"} for one in replayed)
    assert all(one["by the host"] <= MOST_LAUNCHES for one in (captured, *replayed))
    # logits in bfloat16 and scores in float32, beside which nothing is large
    assert found["pool bytes"] == pytest.approx(64 * LLAMA_8B["vocab_size"] * 6, rel=0.02)


def test_mistakes_are_found(ranks: Ranks) -> None:
    found = ranks.run(MISTAKES)
    assert not found["error"], found["error"]
    assert len(found["made"]) > 60
    assert {name: one for name, one in found["made"].items() if not _is_told(*one)} == {}


def _is_told(said: str | None, texts: list[str]) -> bool:
    return not texts if said is None else any(said in text for text in texts)


def test_places_where_the_host_may_wait_exist() -> None:
    for file, function in MAY_WAIT:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        nodes: list[ast.stmt] = tree.body
        for part in function.split("."):
            found = [node for node in nodes if getattr(node, "name", None) == part]
            assert found, f"{file} has no {function}"
            nodes = found[0].body  # type: ignore[attr-defined]
