"""The parts of a conversation that need no model: what is shown of an answer, commands, files, and dropped images."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image

from engine.errors import UserError
from engine.inference.options import Sampling
from engine.runtime.launch import Launch
from rankfold.chat import main
from rankfold.chatting import answering
from rankfold.chatting import options as chatting
from rankfold.chatting.commands import Command, parsed
from rankfold.chatting.conversation import Conversation, text_of, without_images
from rankfold.chatting.display import Display, opens_thought
from rankfold.chatting.options import build_parser, recommended_sampling, sampling_line, settle

DIM, COLOUR, PLAIN = "\x1b[2m", "\x1b[36m", "\x1b[0m"
SHOWN = [
    ("a <b> c", False, "a <b> c\n"),
    ("<think>why</think>so\n", False, f"{DIM}<think>why</think>{PLAIN}so\n"),
    ("why</think>so", True, f"{DIM}why</think>{PLAIN}so\n"),
    ("<think>it never ends", False, f"{DIM}<think>it never ends{PLAIN}\n"),
    ('<tool_call>{"a": 1}</tool_call>', False, f'{COLOUR}<tool_call>{{"a": 1}}</tool_call>{PLAIN}\n'),
    ("a\x1b[2Jb 世界 <thi", False, "a\\x1b[2Jb 世界 <thi\n"),
]


@pytest.mark.parametrize(("text", "thinks", "expected"), SHOWN)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_is_shown_as_it_comes(text: str, thinks: bool, expected: str, size: int) -> None:
    stream = io.StringIO()
    display = Display(stream, styled=True, thinks=thinks)
    for start in range(0, len(text), size):
        display.add(text[start : start + size])
    display.finish()
    assert stream.getvalue() == expected


def test_only_the_beginning_of_a_tag_waits() -> None:
    stream = io.StringIO()
    display = Display(stream, styled=True)
    shown = []
    for piece in ("x <", "t", "ea", "</thi"):
        display.add(piece)
        shown.append(stream.getvalue())
    assert shown == ["x ", "x ", "x <tea", "x <tea</thi"]  # a closing tag closes nothing here


def test_what_is_no_terminal_gets_the_text_alone() -> None:
    stream = io.StringIO()
    display = Display(stream, styled=False, thinks=True)
    display.add("a\x1b[2J</think>\n")
    display.finish()
    assert stream.getvalue() == "a\x1b[2J</think>\n\n"


def test_a_prompt_that_opens_a_thought() -> None:
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_commands_and_messages(tmp_path: Path) -> None:
    assert parsed("/temperature 0.5") == Command("temperature", "0.5")
    assert parsed("/quit") == Command("exit", "") and parsed("/system") == Command("system", "")
    assert parsed("hello /help") == "hello /help"
    assert parsed(f"{tmp_path} what is this?") == f"{tmp_path} what is this?"
    for entry, words in (
        ("/temprature 1", "did you mean /temperature?"),
        ("/xyzzy", "/help lists them."),
        ("/undo 3", "/undo takes nothing, but '3' was given"),
        ("/image", "write /image PATH."),
    ):
        with pytest.raises(UserError, match="^[^\n]*$") as refusal:
            parsed(entry)
        assert words in str(refusal.value)


def test_images_that_are_dropped_on_a_message(tmp_path: Path) -> None:
    """As terminals write them: with backslashes, in quotes, and as a URI."""
    names = ("a b.png", "c'd.PNG", "é.jpg")
    for name in names:
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    plain, quoted, uri = (tmp_path / name for name in names)
    written = f'{str(plain).replace(" ", chr(92) + " ")} What is it? "{quoted}" {uri.as_uri()}'
    assert without_images(written) == ("What is it?", [str(plain), str(quoted), str(uri)])
    for text in ("it's  none.png", "don't ~nobody/x.png", str(tmp_path)):
        assert without_images(text) == (text, [])


def test_saved_and_loaded(tmp_path: Path) -> None:
    talk = Conversation(system="Be brief.", images=["/a.png"])
    with pytest.raises(UserError, match="there is no conversation yet"):
        talk.save(tmp_path / "none.json")
    talk.messages = [*talk.asked("What?"), {"role": "assistant", "content": "Black."}]
    for name in ("talk.json", "talks.jsonl", "talks.jsonl"):
        talk.save(tmp_path / name)
    with pytest.raises(UserError, match="talk.json exists: give a new file, or one that ends in .jsonl"):
        talk.save(tmp_path / "talk.json")
    lines = (tmp_path / "talks.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"] for line in lines] == [talk.whole()] * 2
    for name in ("talk.json", "talks.jsonl"):
        again = Conversation()
        again.load(tmp_path / name)
        assert (again.system, again.messages) == (talk.system, talk.messages)
    assert again.undo() and not again.messages and not again.undo()


def test_a_file_of_tools_and_files_that_are_none(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [
        {"role": "user", "content": "Go."}, call, {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "7."},
    ]  # fmt: skip
    (tmp_path / "tools.json").write_text(json.dumps({"messages": [*messages, {"role": "user", "content": "And?"}]}))
    talk = Conversation(system="old")
    talk.load(tmp_path / "tools.json")
    assert talk.messages == messages and talk.system is None
    assert [text_of(message) for message in messages][1:3] == [
        'assistant: \n<tool_call>{"function": {"name": "f", "arguments": {}}}', "tool: 7",
    ]  # fmt: skip
    assert text_of({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}) == (
        "user: <image> Who?"
    )
    for content in ("[]", '{"messages": 3}', '{"messages": [{"content": "a"}]}', "nothing"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match="bad.json"):
            talk.load(tmp_path / "bad.json")
    assert talk.messages == messages


def test_sampling_that_the_model_recommends(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path, 3).greedy
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_line(recommended_sampling(tmp_path, 0)) == "temperature 0.6, top-p 0.95"
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "top_p": "high"}))
    with pytest.raises(UserError, match="has a setting of sampling that is no number"):
        recommended_sampling(tmp_path, 0)


def test_a_model_a_run_and_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(*words: object) -> tuple[Path | None, Path | None]:
        arguments = build_parser(None).parse_args(list(map(str, words)))
        settle(arguments)
        return arguments.model, arguments.adapter

    base, run, adapter = tmp_path / "base", tmp_path / "run", tmp_path / "adapter"
    for folder in (base, run / "checkpoints", adapter):
        folder.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert settled(base) == (base, None)
    assert settled(base, "--adapter", adapter) == (base, adapter)
    assert settled(run) == (None, run) and settled(run, "--base", base) == (base, run)
    assert settled(adapter) == (base, adapter)
    for words, message in (
        ((base, "--base", base), "is neither: leave it out"),
        ((run, "--adapter", adapter), "--adapter names another one"),
    ):
        with pytest.raises(UserError, match=message):
            settled(*words)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "acme/tiny"}))
    with pytest.raises(UserError, match="of acme/tiny, which is no folder here, but looks like a model.* --download"):
        settled(adapter)
    asked = []
    monkeypatch.setattr(chatting, "local_folder", lambda name, download: (asked.append((name, download)), str(base))[1])
    assert settled(adapter, "--download") == (base, adapter) and asked == [("acme/tiny", True)]
    monkeypatch.undo()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="give the folder of its base with --base"):
        settled(adapter)


def test_the_command_opens_a_run_with_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are checked before torch is loaded, and what that finds does not count as given."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["chat", str(tmp_path / "run")])

    def reached(_timeout: float) -> None:
        raise InterruptedError

    monkeypatch.setattr("engine.runtime.launch.start", reached)
    with pytest.raises(InterruptedError):
        main()


def test_a_base_that_cannot_be_read_again_leaves_the_adapter_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the codes with the adapter may be the base's by then: the model is opened again."""

    class Opened:
        def __init__(self, arguments: argparse.Namespace, *_: Any, **given: Any) -> None:
            opened.append(arguments)
            self.chat, self.reader = given["chat"], None
            self.model = SimpleNamespace(use_adapters=self._use, folder=Path("base"))

        def _use(self, on: bool) -> None:
            if not on:
                raise UserError("gone")

    opened = list[argparse.Namespace]()
    monkeypatch.setattr(answering, "Opened", Opened)
    launch, arguments = Launch(rank=0, world_size=1, device=torch.device("cpu")), argparse.Namespace(adapter="a")
    first = Opened(arguments, chat=True)
    talk = answering.Answering(arguments, launch, cast(Any, first), Sampling())
    with pytest.raises(UserError, match="gone"):
        talk.order(answering.UseAdapter(on=False))
    assert opened == [arguments, arguments] and cast(Any, talk.opened) is not first
    assert talk.adapters and talk.opened.chat
