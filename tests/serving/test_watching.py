"""What a server shows who watches it: Prometheus' text, and a page in a real browser."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from rankfold.serving.figures import MOST_MODELS, Family, Figures, Usage, exposition
from tests.serving.asgi import KEY, OTHER_KEY, Answer, ask
from tests.serving.bodies import forward_backward, random_datum

pytest.importorskip("starlette")
from rankfold.serving.page import PAGE
from rankfold.serving.server import Address, listen, read_watch_key
from tests.serving.stand_in import Served, served

WATCH = "watch-a-key-of-the-tests"
HOSTILE = 'a "base" \\ <img src=x onerror=alert(1)>\nrankfold_serve_clients 99'


async def _look(app: Any, path: str, key: str | None = WATCH) -> Answer:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await ask(app, path, headers=headers, root="/")


def _values(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:{.*})?) (\S+)$", text, re.MULTILINE)}


def test_figures_of_all_clients_are_counted(tmp_path: Path) -> None:
    async def use(made: Served) -> None:
        session = await made.session()
        name = (await made.create(session)).json["request_id"]
        assert (await made.result(name)).status == 200
        other = await made.session(key=OTHER_KEY)
        name = (await made.create(other, key=OTHER_KEY)).json["request_id"]
        assert (await made.result(name, key=OTHER_KEY)).status == 200
        made.backend.goes.clear()
        await made.ask("forward_backward", forward_backward(f"{session}:train:0", 1, [random_datum(5, 1, 64)]))
        for _ in range(100):
            values = _values((await _look(made.app, "metrics")).body.decode())
            if values.get('rankfold_serve_waiting{kind="forward_backward"}') == 0.0:
                break
            await asyncio.sleep(0.02)
        made.backend.goes.set()
        await made.result(f"{session}:train:0:1")
        values = _values((await _look(made.app, "metrics")).body.decode())
        expected = {
            "clients": 2, 'sessions{state="open"}': 2, 'models{state="live"}': 2,
            'commands_total{kind="create_model",outcome="done"}': 2,
            'commands_total{kind="forward_backward",outcome="done"}': 1, f'model_rank{{model="{session}:train:0"}}': 4,
        }  # fmt: skip
        found = {name: values[f"rankfold_serve_{name}"] for name in expected}
        assert found == expected
        assert values["rankfold_serve_journal_bytes"] > 4096 and values["rankfold_serve_front_memory_bytes"] > 2**20
        text = (await _look(made.app, "metrics.json")).body.decode() + (await _look(made.app, "metrics")).body.decode()
        assert KEY not in text and OTHER_KEY not in text and WATCH not in text

    served(tmp_path, use, watch_key=WATCH)


def test_what_ranks_hold_is_asked_again_when_nothing_comes(tmp_path: Path) -> None:
    asked: list[int] = []

    def usage() -> Usage:
        asked.append(len(asked))
        return Usage(resident=len(asked))

    async def use(made: Served) -> None:
        session = await made.session()
        for number in range(2):
            name = (await made.create(session, number)).json["request_id"]
            assert (await made.result(name)).status == 200
        soon = time.monotonic() + 10
        while len(asked) < 2 and time.monotonic() < soon:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert len(asked) == 2, "at the start, and once the models were there for a while"
        assert made.service.figures.usage == Usage(resident=2)

    served(tmp_path, use, usage=usage)


def test_clients_and_strangers_see_nothing(tmp_path: Path) -> None:
    async def use(made: Served) -> None:
        for path in ("metrics", "metrics.json"):
            for key in (None, "", KEY, WATCH[:-1], WATCH + "x", "é"):
                answer = await _look(made.app, path, key)
                assert answer.status == 401 and b"rankfold_serve" not in answer.body
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await _look(made.app, path)).status == 200
        page = await _look(made.app, "", None)
        assert page.status == 200 and page.body.decode() == PAGE
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy

    served(tmp_path, use, watch_key=WATCH)

    async def without(made: Served) -> None:
        for key in (None, "", "None"):
            assert (await _look(made.app, "metrics", key)).status == 401

    served(tmp_path / "without", without)


def test_keys_of_who_watches() -> None:
    made, is_made = read_watch_key(None, [KEY])
    assert is_made and len(made) > 30 and read_watch_key(f" {WATCH} ", [KEY]) == (WATCH, False)
    for key in ("short", KEY):
        with pytest.raises(UserError, match="RANKFOLD_SERVE_WATCH_KEY has fewer") as refusal:
            read_watch_key(key, [KEY])
        assert key not in str(refusal.value)


def test_the_page_asks_nobody_else() -> None:
    assert not re.findall(r"https?:|//\w", PAGE.replace("<!DOCTYPE html>", ""))
    assert "innerHTML" not in PAGE and not re.findall(r'\s(?:on\w+|style)="', PAGE)


def test_models_of_the_past_leave_no_series() -> None:
    figures = Figures()
    for number in range(3 * MOST_MODELS):
        figures.note("forward_backward", good=True, model=f"m{number}", work="trained", tokens=2)
    figures.note("asample", good=True, model="", work="sampled", tokens=3)
    figures.note("asample", good=True, model="gone", work="sampled", tokens=5)
    live = {f"m{number}": "8" for number in range(2 * MOST_MODELS)}
    found = {one.name: one.samples for one in figures.families(live, "base")}
    names = [labels["model"] for labels, _ in found["model_tokens_total"]]
    assert names == ["base", *(f"m{number}" for number in range(MOST_MODELS, 2 * MOST_MODELS))]
    assert {labels["work"]: value for labels, value in found["tokens_total"]} == {
        "trained": 6 * MOST_MODELS, "sampled": 8,
    }  # fmt: skip
    few = {one.name: one.samples for one in figures.families({"m399": "1", "new": "2"}, "base")}
    assert [labels["model"] for labels, _ in few["model_rank"]] == ["m399", "new"]


def test_prometheus_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    figures = Figures()
    figures.usage = Usage(resident=2, resting=1, host_bytes=(5, 6), device_bytes=(1, 2), device_total=(9, 9))
    figures.note("optim_step", good=False, model=HOSTILE, work="scored", tokens=1)
    named = Family(name="base_info", kind="gauge", help="The base.", samples=(({"base": HOSTILE}, 1.0),))
    text = exposition([named, *figures.families({HOSTILE: "4"}, HOSTILE)])
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["rankfold_serve_base_info", ("base", HOSTILE)] == 1.0
    assert found["rankfold_serve_model_tokens_total", ("model", HOSTILE), ("work", "scored")] == 1.0
    assert found["rankfold_serve_rank_memory_bytes", ("rank", "1")] == 6.0
    assert found["rankfold_serve_commands_total", ("kind", "optim_step"), ("outcome", "failed")] == 1.0
    assert found["rankfold_serve_clients",] == 0.0


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium, which notes its console and what it asks for."""
    selenium = pytest.importorskip("selenium.webdriver")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium with its chromedriver is installed")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,1000"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield found
    found.quit()


def _until(is_true: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.1)


@pytest.mark.slow
def test_a_browser_shows_it(browser: Any, tmp_path: Path) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    made = Served(tmp_path, watch_key=WATCH)
    made.service.names = (HOSTILE,)
    made.service.figures.usage = Usage(resident=2, resting=1, host_bytes=(3 << 30,))
    made.start()
    listening = listen(Address(host="127.0.0.1", port=0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(made.app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        browser.get(url)

        def text(id_: str) -> str:
            return str(browser.find_element("id", id_).text)

        def enter(key: str) -> None:
            browser.find_element("id", "key").send_keys(key)
            browser.find_element("css selector", "#ask button").click()

        enter(KEY)
        _until(lambda: "not the key" in text("state"))
        assert not browser.find_element("id", "figures").is_displayed()
        enter(WATCH)
        _until(lambda: text("state").startswith("as of"))
        assert text("base") == " ".join(HOSTILE.split()) and HOSTILE.split("\n")[0] in browser.title
        figures = made.service.figures
        made.journal.add_session("s", "owner")
        made.journal.add_command(
            request="s:train:0:0", owner="owner", target="s:train:0", seq=0, kind="create_model", body=b"", session="s"
        )
        made.journal.set_model("s:train:0", "live", '{"rank": 16}')
        figures.note("forward_backward", good=True, model="s:train:0", work="trained", tokens=12_345)
        figures.note("asample", good=False, model="", work="sampled", tokens=7)
        _until(lambda: "12.35 k" in text("models") or "12.34 k" in text("models"))
        rows = [row.text.split() for row in browser.find_elements("css selector", "#models tr")]
        assert rows[1][:2] == ["s:train:0", "16"] and rows[-1][-2] == "7"
        assert ["create_model", "1", "0", "0", "0.0"] in [
            row.text.split() for row in browser.find_elements("css selector", "#commands tr")
        ]
        assert "3.0 GiB" in text("memory") and "2 / 1" in text("tiles")
        if folder := os.environ.get("RANKFOLD_SCREENSHOTS"):
            browser.save_screenshot(f"{folder}/watching.png")
        server.should_exit = True
        thread.join()
        _until(lambda: text("state").startswith("no answer"))
    finally:
        server.should_exit = True
        thread.join()
        made.close()
    assert not browser.find_elements("css selector", "img")
    said = [one["message"] for one in browser.get_log("browser")]
    assert not [one for one in said if "Content Security Policy" in one or "Uncaught" in one]
    asked = re.findall(r'"url":"(http[^"]*)"', " ".join(one["message"] for one in browser.get_log("performance")))
    assert asked and all(one.startswith(url) for one in asked)
