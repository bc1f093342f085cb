"""Requests at the endpoint, with a model that says what the test wants: which tokens follow which, what clients get,
and what they are refused."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.config.load import load_config
from engine.data.record_files import Place
from engine.data.tokenizer import ChatOptions, load_tokenizer
from engine.errors import UserError
from engine.rollouts.agents.chat import AgentChat
from engine.rollouts.agents.conversation import AgentConversation, AgentTalk
from engine.rollouts.agents.endpoint import Endpoint, Inbox, Pending
from engine.rollouts.agents.metrics import agent_figures, metric_arrays, metrics_of
from engine.rollouts.agents.requests import Asked, Refusal
from engine.rollouts.data.prompts import Prompt
from engine.rollouts.sampler import Sampled, Turns
from engine.rollouts.user_process import CallFailed
from tests.support.agent_runs import agent_settings
from tests.support.commands import options
from tests.support.tool_runs import ENDS, TEMPLATE, write_tool_tokenizer

Client = Callable[..., Any]
_ENDS = frozenset(range(len(ENDS)))
_CALL = '<tool_call>{"name": "open_door", "arguments": {"hand": 3}}</tool_call>'
REASONING_LAST = TEMPLATE.replace(
    "<assistant>{{ message.content }}",
    "<assistant>{%- if loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)
"""Writes reasoning in the last turn alone, and so drops that of earlier ones."""
NO_TOOLS = (
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% if message.role == 'assistant' %}<end3>"
    "{% endif %}{%- endfor %}{%- if add_generation_prompt %}<assistant>{% endif %}"
)
"""Knows neither calls nor reasoning."""


class Workplace:
    """An endpoint with conversations of a model that says what it is told.

    Args:
        folder: with a model.
        template: of its chats.
    """

    def __init__(self, folder: Path, template: str = TEMPLATE, **changes: object) -> None:
        settings = agent_settings(folder, **changes)
        write_tool_tokenizer(folder / "model")
        path = folder / "model" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"chat_template": template}), "utf-8")
        self.tokenizer = load_tokenizer(folder / "model", ChatOptions())
        self.talk = AgentTalk(
            load_config(options(settings)), AgentChat(self.tokenizer, _ENDS, None), ends=_ENDS, vocabulary=128
        )
        self.talk.listen(0)
        self.url = self.talk.endpoint.base_url.removesuffix("/v1")

    def converse(self, client: Client, turns: Sequence[str | list[int]]) -> AgentConversation:
        """A conversation of an agent, whose turns of the model are these; a text ends with an end token."""
        seat = SimpleNamespace(ask=lambda request: client(self, request["api_key"]))
        self.talk.pool = SimpleNamespace(  # type: ignore[assignment]
            take=lambda: seat, give_back=lambda seat: None, close=lambda: None
        )
        prompt = Prompt(place=Place(Path("p"), "line", 1), ids=(1, 2), given=[{"role": "user", "content": "Hi"}])
        found, says = self.talk.converse(prompt), iter(turns)
        found.begin()
        goes = True
        while goes and found._open is not None:
            turn = next(says)
            tokens = turn if isinstance(turn, list) else [*self.tokenizer.encode(turn), 2]
            tokens = tokens[: found.room]
            goes = found.take(tokens, [-0.5] * len(tokens))
        assert next(says, None) is None, "a turn was not asked for"
        return found

    def ask(self, key: str, path: str = "/v1/chat/completions", **body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode() if body else None, {"Authorization": f"Bearer {key}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                data = answer.read().decode()
                return answer.status, json.loads(data) if data.startswith("{") else data
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    found = Workplace(tmp_path_factory.mktemp("place"))
    yield found
    found.talk.close()


def done(reward: float | None = None) -> dict[str, Any]:
    return {"reward": reward, "metrics": {}}


TOOLS = [{"type": "function", "function": {"name": "open_door", "parameters": {}}}]
HI = [{"role": "user", "content": "Hi"}]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a client sends it back that keeps no reasoning, and cuts white space off."""
    kept = {name: message[name] for name in ("role", "tool_calls") if name in message}
    return {**kept, "content": message["content"].strip() if message["content"] else None}


@pytest.mark.parametrize(("template", "calls"), [(TEMPLATE, True), (REASONING_LAST, True), (NO_TOOLS, False)])
def test_tokens_only_grow(tmp_path: Path, template: str, calls: bool) -> None:
    """Each request begins with the tokens of the answer before, reasoning included, whatever the template writes."""
    place, answers = Workplace(tmp_path, template, data__seq_length=120, rollout__max_completion_length=90), []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}, *HI]
        tools = {"tools": TOOLS} if calls else {}
        for new in ([{"role": "tool", "content": "6"}] if calls else HI, [{"role": "user", "content": "More"}], []):
            status, found = place.ask(key, messages=messages, return_token_ids=True, **tools)
            assert status == 200, found
            answers.append(found)
            messages.append(_plain(found["choices"][0]["message"]))
            messages += [
                {**one, "tool_call_id": messages[-1]["tool_calls"][0]["id"]} if one["role"] == "tool" else one
                for one in new
            ]
        return done(1.0)

    first = f"<think>why</think>{_CALL}" if calls else "<think>why</think>a"
    found = place.converse(client, [first, "<think>so</think> b ", "c"]).sampled()
    place.talk.close()
    assert found.turns is not None and (found.turns.turns, found.turns.branches, found.turns.left_out) == (3, 1, 0)
    show, prompt = place.tokenizer.show, answers[0]["prompt_token_ids"]
    assert found.prompt is not None and found.prompt.tolist() == prompt
    ids = prompt
    between = ["<result>6<assistant>" if calls else "<user>Hi<assistant>", "<user>More<assistant>"]
    for answer, written in zip(answers, [*between, ""], strict=True):
        assert answer["prompt_token_ids"] == ids
        ids = [*ids, *answer["choices"][0]["token_ids"]]
        if written:
            ids = [*ids, *place.tokenizer.encode(written)]
            assert show(ids).endswith(written)
    assert [*prompt, *found.tokens.tolist()] == ids
    assert found.dialogue is not None and found.dialogue.reward == 1.0 and found.dialogue.failure is None
    roles = [one["role"] for one in found.dialogue.messages]
    assert roles == ["assistant", "tool" if calls else "user", "assistant", "user", "assistant"]
    message = answers[0]["choices"][0]["message"]
    assert message["reasoning_content"] == "why"
    assert answers[0]["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    if calls:
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"hand": 3}


def test_a_turn_that_was_cut_off_is_ended_before_it_is_followed(place: Workplace) -> None:
    answers = []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        answers.append(place.ask(key, messages=HI, max_tokens=2, return_token_ids=True)[1])
        message = answers[0]["choices"][0]["message"]
        answers.append(place.ask(key, messages=[*HI, message, *HI], return_token_ids=True)[1])
        return done()

    place.converse(client, ["abcd", "e"])
    assert [one["choices"][0]["finish_reason"] for one in answers] == ["length", "stop"]
    grown = [*answers[0]["prompt_token_ids"], *answers[0]["choices"][0]["token_ids"]]
    assert answers[1]["prompt_token_ids"] == [*grown, *place.tokenizer.encode("<end0><user>Hi<assistant>")]


def test_a_changed_beginning_is_a_branch(place: Workplace) -> None:
    """Branches from a turn in the middle too; the branch with most sampled tokens is the completion."""

    def client(place: Workplace, key: str) -> dict[str, Any]:
        first = place.ask(key, messages=HI)[1]["choices"][0]["message"]
        for new in ("b", "c"):
            place.ask(key, messages=[*HI, first, {"role": "user", "content": new}])
        place.ask(key, messages=[*HI, {**first, "content": "other"}, *HI])
        place.ask(key, messages=HI, tools=TOOLS)
        return done()

    found = place.converse(client, ["aa", "b", "cccc", "dd", "e"]).sampled()
    assert found.turns is not None and (found.turns.turns, found.turns.branches) == (2, 4)
    # aa<end> and cccc<end> are trained on; b<end>, dd<end> and e<end> are not
    assert found.num_sampled == 8 and found.turns.left_out == 2 + 3 + 2
    assert place.tokenizer.show(found.tokens.tolist()) == "aa<end2><user>c<assistant>cccc<end2>"


def test_token_ids_in_and_out(place: Workplace) -> None:
    """vLLM's route, and OpenAI's without messages; what verifiers' client and renderers read."""
    answers = []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        ids = [50, 51]
        for new in ([60], []):
            body = {"token_ids": ids, "model": "model", "sampling_params": {"logprobs": 1, "max_tokens": 9}}
            answers.append(place.ask(key, "/inference/v1/generate", **body)[1])
            ids = [*ids, *answers[-1]["choices"][0]["token_ids"], *new]
        answers.append(place.ask(key, "/v1/completions", prompt=ids, logprobs=0, return_token_ids=True)[1])
        answers.append(place.ask(key, "/v1/completions", prompt="12")[1])
        answers.append(place.ask(key, "/tokenize", prompt="12")[1])
        answers.append(place.ask(key, "/v1/models")[1])
        return done()

    found = place.converse(client, ["a", "b", "c", "d"]).sampled()
    first = answers[0]["choices"][0]
    assert first["finish_reason"] == "stop" and len(first["token_ids"]) == 2
    assert first["logprobs"]["content"] == [
        {"token": f"token_id:{token}", "logprob": -0.5, "bytes": None, "top_logprobs": []}
        for token in first["token_ids"]
    ]
    third = answers[2]["choices"][0]
    assert third["text"] == "c" and third["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert answers[2]["prompt_token_ids"] == [50, 51, *place.tokenizer.encode("a<end2>"), 60,
                                             *place.tokenizer.encode("b<end2>")]  # fmt: skip
    assert found.written is not None and found.written.tolist() == [False, False, True, False, False, False, False]
    assert found.prompt is not None and found.prompt.tolist() == [50, 51]
    assert found.turns is not None and (found.turns.turns, found.turns.branches) == (3, 2)
    assert answers[4]["tokens"] == place.tokenizer.encode("12")
    assert answers[5]["data"][0]["id"] == "model" and answers[5]["data"][0]["max_model_len"] == 64


def test_events(place: Workplace) -> None:
    found = []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        body = {"messages": HI, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        found.append(place.ask(key, **body)[1])
        return done()

    place.converse(client, [f"x{_CALL}"])
    lines = [line.removeprefix("data: ") for line in found[0].split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    first, last, usage = map(json.loads, lines)
    assert first["object"] == "chat.completion.chunk" and first["choices"][0]["finish_reason"] is None
    delta = first["choices"][0]["delta"]
    assert delta["content"] == "x" and delta["tool_calls"][0]["index"] == 0
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert usage["usage"]["completion_tokens"] == 3 and usage["choices"] == []


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat/completions", {"messages": HI, "n": 2}, 400, "n is 2, which a training run does not offer"),
        ("chat/completions", {"messages": HI, "stop": ["x"]}, 400, "stop is"),
        ("chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}, 400, "asks for a grammar"),
        ("chat/completions", {"messages": "Hi"}, 400, "messages is a text, where a list of messages is expected"),
        ("chat/completions", {"messages": [{"role": "me", "content": ""}]}, 400, "message 0 has no role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "is no text"),
        ("chat/completions", {"messages": HI, "tools": [{"type": "mcp"}]}, 400, "something else than functions"),
        ("chat/completions", {"messages": HI, "max_tokens": 0}, 400, "max_tokens is 0, where an integer of at least"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 50}]}, 400, "maximum context length"),
        ("completions", {"prompt": "x" * (8 << 20)}, 413, "are the most at this model's maximum context length"),
        ("completions", {"prompt": ["a", "b"]}, 400, "where one text, or the token ids of one, is expected"),
        ("completions", {"prompt": [500]}, 400, "token 500, and the model's vocabulary 128 entries"),
        ("completions", {"prompt": [1, 10**19]}, 400, "and the model's vocabulary 128 entries"),
        ("completions", {"prompt": ""}, 400, "no tokens"),
        ("embeddings", {"input": "x"}, 404, "there is no POST /v1/embeddings"),
    ],
)
def test_refusals(place: Workplace, path: str, body: dict[str, Any], status: int, words: str) -> None:
    """Each is an error of OpenAI's form, and the conversation continues."""
    found = []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        found.append(place.ask(key, f"/v1/{path}", **body))
        assert place.ask(key, messages=HI)[0] == 200
        return done()

    place.converse(client, ["a"])
    assert found[0][0] == status and words in found[0][1]["message"]
    if "context" in words:
        assert found[0][1]["code"] == "context_length_exceeded"


def test_limits_of_a_conversation(tmp_path: Path) -> None:
    """The most tokens behind the first request, and the most turns."""
    place = Workplace(tmp_path, rollout__max_turns=2)
    found = []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        message = place.ask(key, messages=HI)[1]["choices"][0]["message"]
        found.append(place.ask(key, messages=[*HI, message, *HI]))
        place.ask(key, messages=[*HI])
        found.append(place.ask(key, messages=[*HI]))
        return done()

    place.converse(client, ["x" * 21, "x"])
    place.talk.close()
    assert found[0][0] == 400 and found[0][1]["code"] == "context_length_exceeded"
    assert found[1][0] == 400 and "rollout.max_turns" in found[1][1]["message"]


def test_a_loop_without_end_has_an_end(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.rollouts.agents.conversation._MOST_TURNS", 3)
    found = []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        found.extend(place.ask(key, messages=HI) for _ in range(4))
        return done()

    place.converse(client, ["a", "b", "c"])
    assert [one[0] for one in found] == [200, 200, 200, 400] and "has had 3 turns" in found[3][1]["message"]


def test_settings_that_are_not_the_runs_are_said_once(place: Workplace) -> None:
    def client(place: Workplace, key: str) -> dict[str, Any]:
        body = {"top_p": 1, "presence_penalty": 1, "model": "gpt", "tool_choice": "required"}
        for number in (2, 3):  # a client may draw them anew for each request
            more = {"temperature": number / 10, "seed": number}
            assert place.ask(key, messages=HI, tools=TOOLS, **body, **more)[0] == 200
        return done()

    place.talk.notes()
    place.converse(client, ["a", "b"])
    said = place.talk.notes()
    assert len(said) == 5 and place.talk.notes() == []
    for words in (
        "temperature 0.2, and gets 1.0", "seed 2, and gets the run's", "presence_penalty 1, and gets none",
        "tool_choice", 'model "gpt"',
    ):  # fmt: skip
        assert any(words in one for one in said), words


def test_keys(place: Workplace) -> None:
    """A request belongs to the conversation of its key; without one, with another, or after the end there is none."""
    keys: list[str] = []

    def client(place: Workplace, key: str) -> dict[str, Any]:
        keys.append(key)
        for wrong in ("", "x", key[:-1]):
            assert place.ask(wrong, messages=HI)[0] == 401
            assert place.ask(wrong, "/v1/models")[0] == 401
        assert all(place.ask(old, messages=HI)[0] == 401 for old in keys[:-1])
        assert place.ask(key, messages=HI)[0] == 200
        return done()

    for _ in range(2):
        assert place.converse(client, ["a"]).sampled().turns is not None
    assert keys[0] != keys[1] and place.ask(keys[1], messages=HI)[0] == 401


def test_requests_at_the_end_are_refused(place: Workplace) -> None:
    """Those that wait, and those that come later: a client must not wait for ever. Nor must the conversation, which
    gets its other events before and after."""
    inbox, early, late = Inbox(), Pending(Asked(route="chat")), Pending(Asked(route="chat"))
    inbox.put("before")
    inbox.put(early)
    inbox.close()
    inbox.put(late)
    inbox.put("after")
    assert [inbox._events.get_nowait(), inbox._events.get_nowait()] == ["before", "after"]
    for one in (early, late):
        with pytest.raises(Refusal, match="no conversation under way"):
            one.answer.result(1)

    def client(place: Workplace, key: str) -> dict[str, Any]:
        place.ask(key, messages=HI)
        raise CallFailed("it ended")

    dialogue = place.converse(client, ["a"]).sampled().dialogue
    assert dialogue is not None and dialogue.failure == "it ended" and dialogue.reward is None


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST /v1/chat/completions HTTP/1.1\r\n\r\n", b"411"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"411"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nKEY\r\nContent-Length: 3\r\n\r\n{{{", b"400"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nKEY\r\nContent-Length: 5\r\n\r\n[NaN]", b"400"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 60000000\r\n\r\n{{{", b"401"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"PUT / HTTP/1.1\r\n\r\n", b"501"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b""),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
    ],
)
def test_hostile_bytes(place: Workplace, data: bytes, answer: bytes) -> None:
    """Whatever comes is answered, or its connection closed, and others are served."""
    address, key = ("127.0.0.1", int(place.url.rpartition(":")[2])), place.talk.endpoint.open(Inbox())
    data = data.replace(b"KEY", f"Authorization: Bearer {key}".encode())
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer in received.partition(b"\r\n")[0]
    with socket.create_connection(address):  # one that says nothing keeps no other out
        assert place.converse(lambda place, key: (place.ask(key, messages=HI), done())[1], ["a"]).sampled().turns


def test_a_port_that_there_is_not(place: Workplace) -> None:
    """That of the second copy of the model."""
    options = replace(place.talk.endpoint.options, endpoint="127.0.0.1:65535")
    with pytest.raises(UserError, match="127.0.0.1:65536 cannot be listened at"):
        Endpoint(options, place.talk.chat, model="model", length=8, copy=1)


def test_a_defect_keeps_its_traceback(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("engine.rollouts.agents.endpoint.parse_request", broken)
    key = place.talk.endpoint.open(Inbox())
    with pytest.raises(OSError):
        place.ask(key, messages=HI)
    assert "RuntimeError: no such thing" in capfd.readouterr().err


def test_metrics_with_a_name_for_each_task_are_bounded() -> None:
    """Those that most completions have stay, in the buffer too."""
    tokens, logps = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    completions = [
        Sampled(
            tokens=tokens, logps=logps, truncated=False, turns=Turns(branches=1),
            metrics={"z": float(number), **{f"task{number}_{one}": 1.0 for one in range(10)}},
        )
        for number in range(40)
    ]  # fmt: skip
    figures = agent_figures(completions)
    assert figures["agent/z"] == 19.5 and sum(name.startswith("agent/") for name in figures) == 256
    read = metrics_of(metric_arrays(completions), 40)
    assert [one["z"] for one in read] == list(range(40)) and len({name for one in read for name in one}) == 256


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (TEMPLATE, None),
        (NO_TOOLS, None),
        (
            "{%- for message in messages %}{{ message.content }}{% if loop.last %}<end3>{% endif %}{%- endfor %}",
            "is not",
        ),
        (
            "{%- for message in messages %}{{ message.content }}{%- endfor %}{%- if not add_generation_prompt %}<end3>"
            "{% endif %}",
            "fewer tokens where other messages follow",
        ),
        ("{{ raise_exception('no') }}", "refuses these messages"),
    ],
    ids=["tools", "plain", "one end", "no end", "refusal"],
)
def test_a_template_that_cannot_continue_is_said(template: str, words: str | None, tmp_path: Path) -> None:
    place = Workplace(tmp_path, template)
    note = place.talk.chat.note()
    place.talk.close()
    assert (note is None) if words is None else (note is not None and words in note), note
