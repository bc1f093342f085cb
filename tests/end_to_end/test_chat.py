"""`rankfold chat` on a terminal of its own, as a person has it: keys, history, an answer that is stopped, and what is
saved; the answers are those of transformers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.faults.ranks import run_environment
from tests.support.generation import chat_ids, save_chat_model
from tests.support.terminal import CTRL_C, OnTerminal

UP, CTRL_D = b"\x1b[A", b"\x04"
PROMPT = r"> (\x1b\[[0-9;?]*[a-zA-Z])*$"
"""The prompt, with what readline sends behind it."""
ANSWER = r"[\s\S]*2004l\s*[^\s\x1b]"
"""The beginning of an answer: readline has left the terminal, and text has come."""


@pytest.fixture(scope="module")
def model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has room for an answer that is still coming when it is stopped."""
    return save_chat_model(tmp_path_factory.mktemp("chat"), data_dir, 16384)


def stock_answer(folder: Path, messages: list[dict[str, str]], new: int) -> str:
    text: str = AutoTokenizer.from_pretrained(folder).decode(chat_ids(folder, messages, new)[1])
    return text


def plain(output: str) -> str:
    """Without a terminal's codes and carriage returns."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).replace("\r", "")


def test_a_conversation_on_a_terminal(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "rankfold", "chat", model, "--max-new-tokens", 8, "--ignore-eos"]
    with OnTerminal(command, {**run_environment(), "HOME": str(home)}, tmp_path) as run:
        run.wait_for(PROMPT)
        for keys, expected in (
            ("Grüße, 世界!\n".encode(), PROMPT),
            (b"/max-new-tokens 16000\n", PROMPT),
            (b'"""one\ntwo"""\n', rf"two{ANSWER}"),
            (b"typed ahead\x03", r"\(stopped\)[\s\S]*> .*typed ahead"),
            (CTRL_C, PROMPT),  # clears the line
            (UP * 4 + b"\n", rf"Grüße{ANSWER}"),  # the first message again
            (CTRL_C, rf"\(stopped\)[\s\S]*{PROMPT}"),
            (b"/undo\n", "forgotten"),
            (b"/save talk.json\n", "saved in talk.json"),
        ):
            run.press(keys)
            run.wait_for(expected, 30)
        run.press(CTRL_D)
        assert run.wait() == 0, run.output
    first, answer, second, stopped = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert (first["content"], second["content"]) == ("Grüße, 世界!", "one\ntwo")
    assert answer["content"] == stock_answer(model, [first], 8)
    assert answer["content"] in plain(run.output) and stopped["content"]
    assert stock_answer(model, [first, answer, second], 8).startswith(stopped["content"][:4])
    history = home / ".local/state/rankfold/chat_history"
    assert history.read_text().startswith("Grüße, 世界!\n") and history.stat().st_mode & 0o777 == 0o600
