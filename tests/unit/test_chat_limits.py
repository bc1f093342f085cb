"""Chat templates that hang, fill the memory or break: each ends in one sentence, soon, and leaves no limit behind."""

from __future__ import annotations

import json
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from engine.data import bounds
from engine.data.build_store import Request, preprocess
from engine.data.template import ChatTemplate
from engine.data.tokenizer import ChatOptions
from engine.errors import UserError
from tests.shared_data import shared

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
HOSTILE = {
    "endless range": ("{% for i in range(10**12) %}{% endfor %}", "refuses these messages"),
    "nested ranges": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "runs for more than 0.3 s",
    ),
    "a number without end": ("{{ 7 ** (9 ** 9) }}", "runs for more than 0.3 s"),
    "a long text": ("{{ 'x' * 10 ** 10 }}", "asks for more than 0.25 GiB of memory"),
    "a text that doubles": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "asks for more than 0.25 GiB of memory",
    ),
    "a list that doubles": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "asks for more than 0.25 GiB of memory",
    ),
    "a wide format": ("{{ '%10000000000d' % 1 }}", "asks for more than 0.25 GiB of memory"),
    "a wide filter": ("{{ 'x' | center(10 ** 10) }}", "asks for more than 0.25 GiB of memory"),
    "a macro in itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
    "nested brackets": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "calls itself without end"),
    "many characters": ("{{ 'x' * 10 ** 7 }}", "writes 10,000,000 characters, more than"),
    "half a character": ("{{ '\\ud800' }}", "writes half of a surrogate pair at character 0"),
    "a long complaint": ("{{ raise_exception('x' * 9999) }}", "refuses these messages (xxx"),
    "no syntax": ("{% for %}", "refuses these messages"),
    "a way out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
    "an import": ("{% include '/etc/passwd' %}", "refuses these messages"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.3)
    monkeypatch.setattr(bounds, "EXTRA_BYTES", 2**28)
    source, words = HOSTILE[name]
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    started = time.process_time()
    with pytest.raises(UserError) as caught:
        ChatTemplate(source, "that model", {}).render(CHAT)
    message = str(caught.value)
    assert message.startswith("the chat template of that model") and words in message, message
    assert len(message) < 700 and time.process_time() - started < 20 * bounds.SECONDS
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_records_are_not_skipped_one_by_one_for_a_template_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.3)
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 500)
    (tmp_path / "t.jinja").write_text(HOSTILE["nested ranges"][0])
    request = Request(
        files=(tmp_path / "a.jsonl",), tokenizer=shared("tokenizers/minimind"), skip_bad_records=True,
        chat=ChatOptions(template=str(tmp_path / "t.jinja")),
    )  # fmt: skip
    started = time.process_time()
    with pytest.raises(UserError, match="runs for more than 0.3 s"):
        preprocess(request, tmp_path / "store")
    assert time.process_time() - started < 30 * bounds.SECONDS


def test_a_long_conversation_is_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 1.0)
    chat = [{"role": "user", "content": "x" * 2**20}, {"role": "assistant", "content": "y" * 2**20}] * 4
    text, spans = ChatTemplate(
        "{% for m in messages %}{{ m.role + m.content + '\n' }}{% endfor %}", "x", {}
    ).render_with_targets(chat)
    assert len(text) > 2**23 and len(spans) == 4


def test_a_thread_renders_too() -> None:
    """Only the main thread can be stopped after a time, but others render all the same."""
    texts: list[str] = []
    template = ChatTemplate("{{ messages[0].content }}", "x", {})
    thread = threading.Thread(target=lambda: texts.append(template.render(CHAT)))
    thread.start()
    thread.join()
    assert texts == ["a"]


def test_marks_cannot_be_forged() -> None:
    for mark in ("\ufdd0", "\ufdd1", "\ufdd2"):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{mark}"}]
        with pytest.raises(UserError, match=f"U\\+{ord(mark):04X}"):
            ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "x", {}).render_with_targets(chat)
