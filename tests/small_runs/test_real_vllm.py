"""Runs with a vLLM server that is none of ours, where RANKFOLD_VLLM names its executable.

They also hold the stand-in of the quick tests to what that server answers. On a CPU vLLM's attention takes heads of 32
elements and more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from engine.rollouts.servers.dialects import Question, SamplingSettings, Vllm
from engine.rollouts.servers.http import HttpServer
from examples.grpo_arithmetic.make_small import write_model
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import records, run_here
from tests.support.served_runs import save_weights, served_settings

VLLM = os.environ.get("RANKFOLD_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM is None, reason="RANKFOLD_VLLM does not name the executable of a vLLM"),
]
START_SECONDS = 400
PROMPT = (1, 11, 1, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "model"
    write_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_weights(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert VLLM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--enable-lora",
        "--max-lora-rank", "8", "--max-num-seqs", "16", "--served-model-name", "base",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    told = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w", encoding="utf-8") as lines:
        process = subprocess.Popen(
            [VLLM, "serve", str(model), *given],
            env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ, **told},
            stdout=lines, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process, log)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


def _settings(folder: Path, model: Path, url: str, **changes: object) -> dict[str, object]:
    given = {"train__seed": 5, "rollout__num_generations": 2, "train__global_batch_size": 8, **changes}
    return served_settings(folder, url, **given) | {"model.path": model}


# the stand-in


def _post(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def _asked(**changes: object) -> dict[str, Any]:
    settings = SamplingSettings(
        temperature=0.7, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=6, ends=(0,)
    )
    return Vllm().sample_base("base", Question(PROMPT, 5), settings).body | changes


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", _asked(temperature=10.0)),
    ("/v1/completions", _asked(logprobs=50)),
    ("/v1/completions", _asked(prompt=[1] * 70)),
    ("/v1/completions", _asked(prompt=[1, 99])),
    ("/v1/completions", _asked(stop_token_ids=[99])),
    ("/v1/completions", _asked(model="gone")),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=range(len(REFUSED)))
def test_the_stand_in_refuses_as_the_server_does(path: str, body: dict[str, Any], server: str, model: Path) -> None:
    status, answer = _post(server, path, body)
    with StandIn(model) as stand_in:
        found_status, found = _post(stand_in.url, path, body)
    assert (found_status, found["error"].keys()) == (status, answer["error"].keys())
    assert {key: found["error"][key] for key in ("type", "code")} == {
        key: answer["error"][key] for key in ("type", "code")
    }
    assert answer["error"]["message"].startswith(found["error"]["message"].split(":")[0].split(" (")[0])


@pytest.mark.parametrize(
    "changes", [{}, {"stop_token_ids": []}, {"prompt": [1] * 60, "max_tokens": 10}, {"logprobs": 3}]
)
def test_the_stand_in_answers_as_the_server_does(changes: dict[str, Any], server: str, model: Path) -> None:
    """What the server sampled is given to the stand-in, which then says the same of it, and has no other fields."""
    body = _asked(**changes)
    choice = _post(server, "/v1/completions", body)[1]["choices"][0]
    tokens = choice["token_ids"]
    assert tokens[-1] in body["stop_token_ids"] or len(tokens) == min(body["max_tokens"], 64 - len(body["prompt"]))
    with StandIn(model) as stand_in:
        stand_in.script_of_base = True
        stand_in.script = {5: tokens}
        found = _post(stand_in.url, "/v1/completions", body)[1]["choices"][0]
    assert found.keys() <= choice.keys() and found["logprobs"].keys() == choice["logprobs"].keys()
    assert (found["token_ids"], found["finish_reason"]) == (tokens, choice["finish_reason"])
    assert found["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    for own, known in zip(found["logprobs"]["top_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert own == pytest.approx(known, abs=1e-5)


# runs: after the stand-in's, because on a CPU vLLM 0.32 adds an adapter of the head to calls without adapters too


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("targets", ["q_proj,down_proj", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,lm_head"])
def test_what_is_served_is_what_is_trained(
    targets: str, overlap: str, server: str, model: Path, tmp_path: Path
) -> None:
    """Each batch is, without overlap, sampled by the weights that it is compared with; with it, the first one is."""
    settings = _settings(
        tmp_path, model, server, train__steps=4, rollout__temperature=0.8, lora__targets=targets, lora__alpha=16,
        rollout__overlap=overlap,
    )  # fmt: skip
    run_here(settings)
    found = records(tmp_path / "run")
    assert [one["off_policy_steps"] for one in found] == ([0, 0, 0, 0] if overlap == "false" else [0, 1, 1, 1])
    assert max(one["sampler_difference_max"] for one in found if one["off_policy_steps"] == 0) < 1e-5
    assert found[1]["loss"] != found[0]["loss"]
    listed = HttpServer(server, timeout=30).call("/v1/models")["data"]
    assert [card["id"] for card in listed] == ["base"], "the run's adapters were given up"
    assert not (tmp_path / "run" / "served_adapters").exists()


def test_a_rank_that_the_server_does_not_take(server: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"LoRA rank 16 is greater than max_lora_rank 8.*--max-lora-rank of lora.rank"):
        run_here(_settings(tmp_path, model, server, lora__rank=16))
