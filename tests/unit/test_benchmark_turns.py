"""The benchmark of steps with calls: both sides read the same prompt, and with -m slow the section on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.data.tokenizer import load_tokenizer
from engine.rollouts.turns.chat import ToolChat
from engine.rollouts.turns.worker import Host, load_object
from rankfold.benchmarking import turns
from rankfold.benchmarking.sections import TurnsOptions

TINY = TurnsOptions(
    hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, rank=2, prompts=2, group=2, new=48, turns=3, workers=1,
    repeats=1, warmup=1, threads=1,
)  # fmt: skip


def test_both_sides_read_the_same_prompt(tmp_path: Path) -> None:
    turns.write_job(TINY, tmp_path)
    schemas = Host([], load_object(tmp_path / "env.py", "Places")).description()["schemas"]
    chat = ToolChat(load_tokenizer(tmp_path / "model"), frozenset({0}), schemas, None)
    assert chat.check() == [] and chat.tool_format == "hermes"
    question = [{"role": "user", "content": "abc"}]
    ids = chat.prompt(question)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    found = tokenizer.apply_chat_template(question, tools=schemas, add_generation_prompt=True, return_dict=False)
    assert found == ids and len(ids) == 3 + 7
    assert [one.name for one in chat.turn([turns.TOKENS.index(turns._CALLS[1]), 0]).calls] == ["look"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_turns_section() -> None:
    pytest.importorskip("trl")
    table = turns.run(TINY)
    assert [row[0] for row in table.rows] == [turns.ENGINE, turns.PEER]
    for found in table.data["steps"].values():
        [whole], [rollout], [environment] = found["seconds"], found["rollout"], found["environment"]
        assert whole > rollout + environment > 0
        [sampled], [written], [count] = found["sampled"], found["written"], found["turns"]
        conversations = TINY.prompts * TINY.group
        assert conversations <= count <= TINY.turns * conversations
        assert count <= sampled and sampled + written <= TINY.new * conversations
        assert (written > 0) == (count > conversations)
