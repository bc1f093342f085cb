"""Chat templates that hang, fill the memory or break, whatever call of a library they are in: each ends in a sentence,
soon, and the tokenizer works for the next conversation."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.data import tokenizer_calls
from engine.data.build_store import Request, preprocess
from engine.data.template import ChatTemplate
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.data.tokenizer_calls import CallLimits, Runaway
from engine.errors import UserError
from tests.support.shared_data import shared
from tests.support.sweeps import sampled
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.cold_workers

PYTHON = sys.executable
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
NUMBERS = "[3, 1, 2] * 4000000"
LATE = "did not finish a conversation within 0.3 seconds"
LARGE = "asks for more than"
REFUSED = "refuses these messages"
LIMIT = f"{LATE}|{LARGE}"
"""Which of the two is met first depends on the machine."""
RECURSION = "calls itself without end"
FINE = "fine"
HOSTILE = {
    "endless range": ("{% for i in range(10**12) %}{% endfor %}", REFUSED),
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", LATE),
    "a number without end": ("{{ 7 ** (9 ** 9) }}", LATE),
    "a product without end": (
        "{% set ns = namespace(n=7) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        LIMIT,
    ),
    "digits of a number": ("{{ 7 ** 99999 }}", REFUSED),
    "digits in hexadecimal": ("{{ '%x' % (1 // 1 + 2 ** 9999999) }}", "writes 2,500,000 characters"),
    "a sorted list": ("{% set r = (" + NUMBERS + ") | sort %}{{ r | length }}", LIMIT),
    "a sorted list of texts": ("{% set r = ('ba' * 4000000) | sort %}{{ r | length }}", LIMIT),
    "a reversed sort": (
        "{% for i in range(999) %}{% set r = ([3, 1] * 999999) | sort(reverse=true) %}{% endfor %}",
        LATE,
    ),
    "replaced": ("{{ ('a' * 1000000) | replace('a', 'b' * 1000) }}", LARGE),
    "joined": ("{{ (['x' * 1000000] * 1000) | join(',') }}", LARGE),
    "batches": ("{{ [1] | batch(1000000000, 'x') | list | length }}", LIMIT),
    "slices": ("{{ [1] | slice(1000000000) | list | length }}", LIMIT),
    "a long text": ("{{ 'x' * 10 ** 10 }}", LARGE),
    "a text that doubles": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        LARGE,
    ),
    "a list that doubles": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        LARGE,
    ),
    "a dictionary that nests": (
        "{% set ns = namespace(d={}) %}{% for i in range(99999) %}{% set ns.d = {'d': ns.d} %}{% endfor %}"
        "{{ ns.d | tojson }}",
        LIMIT,
    ),
    "indented": ("{{ (CHAT | default([1] * 9999)) | tojson(indent=10000000) }}", LIMIT),
    "a wide format": ("{{ '%10000000000d' % 1 }}", LIMIT),
    "a wide formatted number": ("{{ '%999999999d' % 1 }}", LARGE),
    "a filter's format": ("{{ '%999999999d' | format(1) }}", LARGE),
    "a method's format": ("{{ '{:>999999999}'.format(1) }}", LARGE),
    "a method's attributes": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", REFUSED),
    "a precise format": ("{{ '%.999999999f' % 1.5 }}", LIMIT),
    "a wide filter": ("{{ 'x' | center(10 ** 10) }}", LARGE),
    "an indentation": ("{{ ('x\n' * 9999) | indent(9999999) }}", LIMIT),
    "wrapped": ("{% for i in range(99999) %}{{ ('x ' * 9999) | wordwrap(1) }}{% endfor %}", LIMIT),
    "many words": ("{{ lipsum(n=99999, min=9999, max=99999) }}", LIMIT),
    "a cycler": ("{% set c = cycler(*([1] * 10 ** 9)) %}{{ c.next() }}", LIMIT),
    "a joiner": ("{% set j = joiner('x' * 10 ** 9) %}{{ j() }}{{ j() }}", LARGE),
    "the time": ("{{ strftime_now('%Y' * 10 ** 7) }}", LIMIT),
    "a macro in itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", RECURSION),
    "two macros": (
        "{% macro a() %}{{ b() }}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        RECURSION,
    ),
    "a loop in itself": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", RECURSION),
    "a namespace in itself": ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns.a.a.a }}", FINE),
    "nested brackets": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", RECURSION),
    "nested blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, RECURSION),
    "many characters": ("{{ 'x' * 10 ** 7 }}", "writes 10,000,000 characters, more than"),
    "half a character": ("{{ '\\ud800' }}", "writes half of a surrogate pair at character 0"),
    "a long complaint": ("{{ raise_exception('x' * 9999) }}", r"refuses these messages \(xxx"),
    "a complaint without end": ("{{ raise_exception('x' * 10 ** 8) }}", LIMIT),
    "no syntax": ("{% for %}", REFUSED),
    "a cycler of nothing": ("{{ cycler() }}", "at least one item"),
    "a wrong argument": ("{{ ('x ' * 99) | truncate(1) }}", "expected length >= 3"),
    "an infinite constant": ("{{ 1e400 | int }}", REFUSED),
    "a way out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", REFUSED),
    "a filter's way out": ("{{ messages | map(attribute='__class__.__init__.__globals__') | list }}", REFUSED),
    "an import": ("{% include '/etc/passwd' %}", REFUSED),
    "another import": ("{% import '/etc/passwd' as x %}", REFUSED),
    "a large text of its own": ("{# " + "x" * 2**22 + " #}", "characters, more than 4,194,304"),
}  # fmt: skip


QUICK = (
    "endless range", "nested ranges", "a number without end", "a sorted list", "slices", "a long text",
    "a list that doubles", "a wide formatted number", "a macro in itself", "a namespace in itself", "many characters",
    "half a character", "a long complaint", "no syntax", "a cycler of nothing", "a way out", "an import",
    "a large text of its own",
)  # fmt: skip
BAD = [{"role": "user", "content": "bad"}]
SOMETIMES = (
    "{% if messages[0].content == 'bad' %}{{ ([messages | length, 3, 2] * 3000000) | sort | length }}{% endif %}"
    + ("{% for m in messages %}{{ m.role + m.content + '\n' }}{% endfor %}")
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, and processes that start at once."""
    monkeypatch.setattr(
        tokenizer_calls, "LIMITS", CallLimits(template_seconds=0.3, template_bytes=2**28, text_seconds=2.0)
    )
    monkeypatch.setattr(sys, "executable", str(warm_python()))


def opened(folder: Path, template: str) -> Tokenizer:
    (folder / "t.jinja").write_text(template, encoding="utf-8")
    return load_tokenizer(shared("tokenizers/torchtitan_test"), ChatOptions(template=str(folder / "t.jinja")))


@pytest.mark.parametrize("name", sampled(HOSTILE, QUICK))
def test_hostile_templates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, words = HOSTILE[name]
    if words not in (LATE, LIMIT):  # on a busy machine even a short run may take the small time
        monkeypatch.setattr(tokenizer_calls, "LIMITS", dataclasses.replace(tokenizer_calls.LIMITS, template_seconds=30))
    started = time.process_time()
    if words == FINE:
        opened(tmp_path, source).chat_prompt(CHAT)
        return
    with pytest.raises(UserError, match=words) as caught:
        opened(tmp_path, source).chat_prompt(CHAT)
    message = str(caught.value)
    assert message.startswith(f"the chat template of {tmp_path}") and "\n" not in message, message
    assert len(message) < 700 and time.process_time() - started < 1


def test_a_tokenizer_works_on_after_its_template_was_ended(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, SOMETIMES)
    before = tokenizer.apply_chat(CHAT)
    with pytest.raises(Runaway, match=LATE):
        tokenizer.apply_chats([CHAT, BAD, CHAT], learn="answers")
    assert tokenizer.apply_chat(CHAT) == before
    assert tokenizer.decode(before[0]).startswith("user")


def test_a_refused_conversation_is_no_reason_to_refuse_its_neighbours(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, "{% if messages | length < 2 %}{{ raise_exception('short') }}{% endif %}" + SOMETIMES)
    first, refusal, last = tokenizer.apply_chats([CHAT, CHAT[:1], CHAT], learn="answers")
    ids, targets = tokenizer.apply_chat(CHAT)
    assert isinstance(refusal, UserError) and "short" in str(refusal)
    for found in (first, last):
        assert not isinstance(found, UserError) and (found[0].tolist(), found[1].tolist()) == (ids, targets)


def test_a_process_that_was_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)  # a warm one serves in a fork, which ends a little later
    tokenizer = opened(tmp_path, SOMETIMES)
    before = tokenizer.encode("a text")
    kill_process_of(tokenizer)
    with pytest.raises(Runaway, match="ended its process"):
        tokenizer.encode("a text")
    assert tokenizer.encode("a text") == before


def test_a_connection_that_is_closed(tmp_path: Path) -> None:
    """A library may close it, or end its process with a status."""
    tokenizer = opened(tmp_path, SOMETIMES)
    before = tokenizer.encode("a text")
    vars(tokenizer)["_process"]._messages._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Runaway, match="ended its process"):
        tokenizer.encode("a text")
    assert tokenizer.encode("a text") == before


def test_a_process_ends_with_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, SOMETIMES)
    process = vars(tokenizer)["_process"]._process
    assert process.poll() is None
    del tokenizer
    gc.collect()
    assert process.poll() is not None


def test_records_are_not_skipped_one_by_one_for_a_template_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 500)
    (tmp_path / "t.jinja").write_text(HOSTILE["a sorted list"][0])
    request = Request(
        files=(tmp_path / "a.jsonl",), tokenizer=shared("tokenizers/minimind"), skip_bad_records=True,
        chat=ChatOptions(template=str(tmp_path / "t.jinja")),
    )  # fmt: skip
    with pytest.raises(UserError, match=LIMIT):
        preprocess(request, tmp_path / "store")


def test_a_long_conversation_is_within_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_calls, "LIMITS", CallLimits())
    chat = [{"role": "user", "content": "x " * 2**16}, {"role": "assistant", "content": "y " * 2**16}] * 2
    ids, targets = opened(tmp_path, SOMETIMES).apply_chat(chat)
    assert len(ids) == len(targets) > 2**18 and 2**17 <= sum(targets) < 2**18


def test_a_thread_renders_too(tmp_path: Path) -> None:
    """The limits hold on every thread: they are another process's."""
    tokenizer = opened(tmp_path, SOMETIMES)
    found: list[str] = []

    def ask() -> None:
        try:
            tokenizer.chat_prompt(BAD)
        except UserError as refusal:
            found.append(str(refusal))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert LATE in found[0]


def test_an_answer_that_is_not_written_is_not_marked() -> None:
    source = "{% set x %}{% generation %}" + "y" * 9 + "{% endgeneration %}{% endset %}z"
    with pytest.raises(UserError, match="marks text that it does not write as the assistant's"):
        ChatTemplate(source, "x", {}).render_with_targets(CHAT)


def test_marks_cannot_be_forged() -> None:
    for mark in ("\ufdd0", "\ufdd1", "\ufdd2"):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{mark}"}]
        with pytest.raises(UserError, match=f"U\\+{ord(mark):04X}"):
            ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "x", {}).render_with_targets(chat)


def kill_process_of(tokenizer: Tokenizer) -> None:
    process = vars(tokenizer)["_process"]._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
