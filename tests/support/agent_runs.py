"""Parts of tests of conversations that a program outside drives: agents that ask with the standard library alone."""

from __future__ import annotations

from pathlib import Path

from tests.support.tool_runs import tool_settings

AGENTS = '''
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

TOOLS = [{"type": "function", "function": {"name": "open_door", "description": "Opens.", "parameters": {
    "type": "object", "properties": {"hand": {"type": "integer"}}}}}]
FOLDER = Path(__file__).parent


def ask(base_url, api_key, path="/v1/chat/completions", raw=False, **body):
    """Returns the status and the JSON of an answer."""
    url = base_url.removesuffix("/v1") + path
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            data = answer.read()
            return answer.status, data.decode() if raw else json.loads(data)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def record(number, answers):
    with (FOLDER / f"{number}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(answers) + "\\n")


def talk(prompt, base_url, api_key, model, **more):
    """Returns the answers of a conversation that opens doors until it may not, and how many were opened."""
    messages, answers, opened = list(prompt), [], 0
    while True:
        status, found = ask(base_url, api_key, model=model, messages=messages, tools=TOOLS, logprobs=True,
                            return_token_ids=True, **more)
        if status != 200:
            assert found["error"]["code"] == "context_length_exceeded", found
            return answers, opened
        answers.append(found)
        message = found["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return answers, opened
        for call in message["tool_calls"]:
            opened += 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{opened}1"})


def door(prompt, number, base_url, api_key, model):
    answers, opened = talk(prompt, base_url, api_key, model)
    record(number, answers)
    return {"reward": float(opened > 0), "metrics": {"opened": opened}}


def warm(prompt, number, base_url, api_key, model):
    """Wants another temperature than the run's."""
    answers, opened = talk(prompt, base_url, api_key, model, temperature=0.3)
    record(number, answers)
    return float(opened > 0)


def parallel(prompt, number, base_url, api_key, model):
    """Three conversations at once, of which one is told apart by its first message."""
    found = {}

    def run(name, messages):
        found[name] = talk(messages, base_url, api_key, model)

    threads = [threading.Thread(target=run, args=(name, messages)) for name, messages in
               {"a": prompt, "b": prompt, "c": [{"role": "user", "content": "other"}]}.items()]
    for one in threads[:: -1 if os.getpid() % 2 else 1]:
        one.start()
    for one in threads:
        one.join()
    return float(sum(opened for _, opened in found.values()))


def silent(number, prompt, base_url, api_key, model):
    """Asks for nothing where the number is even."""
    if number % 2:
        talk(prompt, base_url, api_key, model, temperature=0.3)
    return 1.0


class Hostile:
    """Fails in another way for each record."""

    def __call__(self, number, prompt, base_url, api_key, model):
        if number == 0:
            return 1.0
        ask(base_url, api_key, model=model, messages=prompt)
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            time.sleep(600)
        if number == 3:
            raise RuntimeError("no way")
        if number == 4:
            return float("nan")
        if number == 5:
            return {"reward": 1, "metrics": {"a\\n": 1}}
        return {"reward": 0.5, "other": 1} if number == 6 else 0.25
'''


def agent_settings(folder: Path, name: str = "door", **changes: object) -> dict[str, object]:
    """Options of a run whose agent may open a door, by their names; those of `changes` with __ for the point."""
    settings = tool_settings(folder)
    (folder / "agents.py").write_text(AGENTS, encoding="utf-8")
    del settings["rollout.environment"]
    settings["rollout.agent"] = f"{folder}/agents.py:{name}"
    return settings | {option.replace("__", "."): value for option, value in changes.items()}
