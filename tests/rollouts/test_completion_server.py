"""A server of completions that is asked: what it is sent, what is read of its answers, and what is refused."""

from __future__ import annotations

import ast
import base64
import codecs
import importlib.util
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

from engine.config.rollout import RolloutOptions
from engine.errors import UserError
from engine.rollouts.data.routes import RouteShape
from engine.rollouts.servers.dialects import Question, SamplingSettings, Sglang, Vllm, dialect_of
from engine.rollouts.servers.http import CallRefused, HttpServer
from engine.rollouts.servers.server import CompletionServer, Shown
from tests.support.completion_stand_in import Reply, StandIn
from tests.support.served_runs import served_settings

SETTINGS = SamplingSettings(
    temperature=0.7, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=6, ends=(0,)
)
ROUTES = RouteShape(layers=(0,), num_layers=1, num_experts=4, per_token=2)
PROMPT = (1, 11, 1, 12)
TEXT = "0+0="


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an adapter whose B is drawn."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("served")
    served_settings(folder)
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(folder / "model"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(params=["vllm", "sglang"])
def stand_in(request: pytest.FixtureRequest, place: Path) -> Iterator[StandIn]:
    with StandIn(place / "model", request.param) as server:
        yield server


def opened(stand_in: StandIn, **options: Any) -> CompletionServer:
    given = {"server": stand_in.url, "server_kind": stand_in.kind, "server_timeout": 20.0, "slots": 4} | options
    return CompletionServer(str(given["server"]), RolloutOptions(**given), vocabulary=16)


def sampled(stand_in: StandIn, place: Path, count: int = 4, **options: Any) -> list[Any]:
    server = opened(stand_in, **options)
    try:
        server.load("a", str(place / "adapter"))
        return server.ask("a", [Question(PROMPT, seed) for seed in range(count)], SETTINGS).result()
    finally:
        server.close()


def checked(stand_in: StandIn, **options: Any) -> list[str]:
    settings = replace(SETTINGS, **{name: value for name, value in options.items() if name in ("temperature", "ends")})
    server = opened(stand_in, **{name: value for name, value in options.items() if name != "ends"})
    try:
        return server.check(Shown(32, TEXT, PROMPT, PROMPT), settings)
    finally:
        server.close()


def test_completions_by_the_adapter(stand_in: StandIn, place: Path) -> None:
    """Log-probabilities are those of transformers and PEFT, at the temperature; without the adapter they are others."""
    import torch
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    found = sampled(stand_in, place)
    assert found == sampled(stand_in, place) and len({one.tokens for one in found}) > 1
    model: Any = LlamaForCausalLM.from_pretrained(place / "model")
    apart = []
    for with_adapter in (False, True):
        if with_adapter:
            model = PeftModel.from_pretrained(model, place / "adapter")
        worst = 0.0
        for one in found:
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *one.tokens]])).logits[0, len(PROMPT) - 1 : -1]
            known = (logits / SETTINGS.temperature).log_softmax(-1)
            worst = max(
                worst,
                *(abs(float(known[n, t]) - p) for n, (t, p) in enumerate(zip(one.tokens, one.logps, strict=True))),
            )
        apart.append(worst)
    assert apart[1] < 5e-6 < 0.05 < apart[0]


def test_an_adapter_is_given_up_and_loaded_again(stand_in: StandIn, place: Path) -> None:
    """A load whose response was lost is retried; where "already loaded" is an error, it ends the run."""
    server = opened(stand_in)
    folder = str(place / "adapter")
    server.load("run-a", folder)
    server.load("run-a", folder)
    server.load("other", folder)
    server.unload_all("run-")
    assert [*stand_in.adapters] == ["other"]
    server.unload("nobody")
    server.close()


def test_a_server_that_can_take_part(stand_in: StandIn) -> None:
    assert checked(stand_in, temperature=0.7) == []
    stand_in.fault = lambda path, body, count: (404, {"detail": "Not Found"}) if path == "/tokenize" else None
    (note,) = checked(stand_in)
    assert note.startswith("the server's tokenizer could not be compared: http://127") and "status 404" in note


CHECKS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"scaled": False}, {"temperature": 0.7}, "gives log-probabilities of temperature 1: start it with"),
    (
        {"tokens": [1, 2]},
        {},
        r"has another tokenizer, which makes other tokens of prompts that are \[1, 11, 1, 12\] \(\[1, 2\]\): serve",
    ),
    ({"takes_adapters": False}, {}, "takes no adapters while it runs .*: start it with --enable-lora"),
    ({"listed": {"max_model_len": 16}}, {}, r"shorter than data.seq_length, which is 32 \(base: 16 tokens\)"),
    ({"listed": {"owned_by": "llamacpp", "id": "gpt"}}, {"server_model": "base"}, "rollout.server_model is base, and"),
]


@pytest.mark.parametrize(("faults", "options", "words"), CHECKS, ids=lambda value: str(value)[:40])
def test_a_server_that_cannot(faults: dict[str, Any], options: dict[str, Any], words: str, stand_in: StandIn) -> None:
    for name, value in faults.items():
        setattr(stand_in, name, value)
    with pytest.raises(UserError, match=words):
        checked(stand_in, **options)


def test_what_top_p_leaves_is_no_distribution_of_the_trainers(stand_in: StandIn) -> None:
    """vLLM's processed log-probabilities are those of the tokens that top_p leaves, SGLang's of all."""
    if stand_in.kind == "sglang":
        assert checked(stand_in, top_p=0.9) == []
        return
    with pytest.raises(UserError, match="gives log-probabilities of the tokens they leave"):
        checked(stand_in, top_p=0.9)
    stand_in.scaled = False
    assert checked(stand_in, top_p=0.9) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 2.5}, r"status 400: temperature must be in \[0, 2\], got 2.5.*: change the option that it"),
        ({"ends": (0, 99)}, r"status 400: token_id\(s\) \[99\] in stop_token_ids .*, or serve the model of model.path"),
    ],
)
def test_what_a_run_asks_for_is_tried_first(options: dict[str, Any], words: str, stand_in: StandIn) -> None:
    """vLLM takes no temperature above 2, and no tokens from outside the vocabulary."""
    if stand_in.kind == "sglang":
        assert checked(stand_in, **options) == []
        return
    with pytest.raises(UserError, match=words):
        checked(stand_in, **options)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("sharpness", [0.02, 3000.0])
def test_the_scale_is_seen_in_sure_and_unsure_models(sharpness: float, scaled: bool, stand_in: StandIn) -> None:
    """The likeliest token's own log-probability is nearly the same at twice the temperature where all tokens are alike,
    and where one has all the probability."""
    with torch.no_grad():
        stand_in._base.lm_head.weight *= sharpness
    stand_in.scaled = scaled
    if scaled:
        assert checked(stand_in, temperature=0.7) == []
        return
    with pytest.raises(UserError, match="gives log-probabilities of temperature 1: start it with"):
        checked(stand_in, temperature=0.7)


def test_the_other_kind_of_server(stand_in: StandIn) -> None:
    other = "sglang" if stand_in.kind == "vllm" else "vllm"
    with pytest.raises(UserError, match=f"rollout.server_kind is {other}, and .* says that it is {stand_in.kind}"):
        checked(stand_in, server_kind=other)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.rollouts.servers.http._FIRST_PAUSE", 0.01)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"{url} cannot be reached .*refused.*: start the server"):
            HttpServer(url, timeout=5).call("/v1/models")


def test_a_server_that_hangs(stand_in: StandIn, place: Path) -> None:
    """One second is the limit; the call that hangs is ended with the others."""
    stand_in.seconds = 30.0
    begin = time.monotonic()
    with pytest.raises(UserError, match="^http://127[^ ]* did not answer [^ ]* within 1 seconds: see whether the "):
        sampled(stand_in, place, server_timeout=1.0)
    assert time.monotonic() - begin < 10


def test_calls_under_way_are_ended(stand_in: StandIn, place: Path) -> None:
    server = opened(stand_in)
    server.load("a", str(place / "adapter"))
    stand_in.seconds = 30.0
    asked = server.ask("a", [Question(PROMPT, seed) for seed in range(9)], SETTINGS)
    assert not asked.wait(0.3)
    begin = time.monotonic()
    server.close()
    assert asked.wait(5) and time.monotonic() - begin < 5


def test_now_and_then_an_error(stand_in: StandIn, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second call fails temporarily: the completions are the same. With every call failing, the run says so."""
    monkeypatch.setattr("engine.rollouts.servers.http._FIRST_PAUSE", 0.01)
    expected = sampled(stand_in, place)
    stand_in.fault = lambda path, body, count: (503, {"message": "busy"}) if count % 2 else None
    stand_in.adapters.clear()
    assert sampled(stand_in, place) == expected
    stand_in.fault = lambda path, body, count: (500, "no") if stand_in.adapter_of(body) else None
    with pytest.raises(UserError, match="with status 500: no"):
        sampled(stand_in, place)


def _shorter(answer: dict[str, Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["token_ids"].pop()
    else:
        answer["output_ids"].pop()


def _ended(answer: dict[str, Any]) -> None:
    _set(answer, [3], [-0.5])


def _behind_end(answer: dict[str, Any]) -> None:
    _set(answer, [0, 3], [-0.5, -0.5])


def _foreign(answer: dict[str, Any]) -> None:
    _set(answer, [77, 0], [-0.5, -0.5])


def _impossible(answer: dict[str, Any]) -> None:
    _set(answer, [5, 0], [-0.5, 0.5])


def _unknown(answer: dict[str, Any]) -> None:
    _set(answer, [5, 0], [-0.5, None])


def _longer(answer: dict[str, Any]) -> None:
    _set(answer, [5] * 7, [-0.5] * 7)


def _set(answer: dict[str, Any], tokens: list[int], logps: list[Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]["token_logprobs"] = tokens, logps
    else:
        answer["output_ids"] = tokens
        answer["meta_info"]["output_token_logprobs"] = [[p, t, None] for t, p in zip(tokens, logps, strict=True)]


def _no_tokens(answer: dict[str, Any]) -> None:
    answer["choices"][0].pop("token_ids") if "choices" in answer else answer.pop("output_ids")


def _no_logps(answer: dict[str, Any]) -> None:
    answer["choices"][0].pop("logprobs") if "choices" in answer else answer.pop("meta_info")


ANSWERS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_shorter, "tokens and [0-9] log-probabilities"),
    (_ended, "ended after 1 of 6 tokens with 3 for a token, which ends none here"),
    (_behind_end, "continues after a token that ends one here"),
    (_foreign, "has 77 for a token, and the model's vocabulary 16 entries"),
    (_impossible, "has 0.5 for a log-probability, and -1000 to 0 are expected"),
    (_unknown, "has null for a log-probability"),
    (lambda answer: _set(answer, [5, 0], [-0.5, -1e30]), r"has -1e\+30 for a log-probability"),
    (lambda answer: _set(answer, [5, 0], [-0.5, False]), "has false for a log-probability"),
    (lambda answer: _set(answer, [5, 0], [-0.5, "-0.5"]), "has a text for a log-probability"),
    (lambda answer: _set(answer, [5, 0], [-0.5, [-0.5]]), "has a list of 1 for a log-probability"),
    (lambda answer: _set(answer, [5, False], [-0.5, -0.5]), "has false, where tokens are expected as integers"),
    (lambda answer: _set(answer, [5.0, 0], [-0.5, -0.5]), "has 5, where tokens are expected as integers"),
    (lambda answer: _set(answer, [{"id": 5}, 0], [-0.5, -0.5]), "has an object, where tokens are expected as"),
    (lambda answer: _set(answer, [-1, 0], [-0.5, -0.5]), "has -1 for a token, and the model's vocabulary 16"),
    (_longer, "a completion has 7 tokens, and 1 to 6 were asked for"),
    (_no_tokens, "the answer has no (token_ids|output_ids)"),
    (_no_logps, "the answer has no (token_logprobs|output_token_logprobs)"),
]


@pytest.mark.parametrize(("mangle", "words"), ANSWERS)
def test_answers_that_cannot_be_trained_on(
    mangle: Callable[[dict[str, Any]], None], words: str, stand_in: StandIn, place: Path
) -> None:
    stand_in.mangle = mangle
    with pytest.raises(UserError, match=f"cannot be sampled from: .*{words}"):
        sampled(stand_in, place)


def test_an_adapter_that_the_server_does_not_see(stand_in: StandIn, place: Path) -> None:
    server = opened(stand_in)
    with pytest.raises(UserError, match="did not load the adapter in .*/nowhere .*: it reads that folder itself"):
        server.load("a", str(place / "nowhere"))
    server.close()


def test_a_server_that_asks_for_a_key(stand_in: StandIn) -> None:
    stand_in.fault = lambda path, body, count: (401, {"error": "Unauthorized"})
    with pytest.raises(UserError, match=r"refuses the run \(401\): RANKFOLD_SERVER_KEY is not set, and it asks for"):
        checked(stand_in)


def _encodings(key: str) -> list[str]:
    """What a server may make of a key."""
    return [
        key,
        base64.b64encode(key.encode()).decode(),
        key.encode().hex(),
        quote(key, safe=""),
        key[::-1],
        codecs.encode(key, "rot13"),
        " ".join(key),
        json.dumps(key),
    ]


@pytest.mark.parametrize("key", ["sk-0123456789abcdef", 'sk-a"b\\c', "hunter"])
def test_no_message_repeats_a_server_that_was_given_the_key(key: str, stand_in: StandIn) -> None:
    server = HttpServer(stand_in.url, timeout=5, key=key)
    for told in _encodings(key):
        for reply in (told, {"error": told}, {"error": {"told": [f"{'x' * 290} {told}"]}}):
            stand_in.fault = lambda path, body, count, reply=reply: (400, reply)
            with pytest.raises(CallRefused) as refused:
                server.call("/tokenize", {})
            assert told not in str(refused.value) and "words are left out" in str(refused.value)
    server.close()


def test_no_message_repeats_numbers(stand_in: StandIn, place: Path) -> None:
    """Each has the first eight bytes of the key."""
    number = int.from_bytes(b"sk-01234")
    shown, options = Shown(32, TEXT, PROMPT, PROMPT), RolloutOptions(server=stand_in.url, server_kind=stand_in.kind)  # type: ignore[arg-type]
    server = CompletionServer(stand_in.url, options, vocabulary=16, key="sk-0123456789abcdef")
    server.load("a", str(place / "adapter"))
    sentences = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(UserError) as refusal:
            call()
        sentences.append(str(refusal.value))

    for listed in ({"max_model_len": -number}, {"parent": number}, {"id": str(number), "max_model_len": 1}):
        stand_in.listed = listed
        refused(lambda: server.check(shown, SETTINGS))
    stand_in.listed, stand_in.tokens = {}, [number, number]
    refused(lambda: server.check(shown, SETTINGS))
    for tokens, logps in (
        ([number, 0], [-0.5] * 2),
        ([number * 1.0, 0], [-0.5] * 2),
        ([1, 0], [number, -0.5]),
        ([9], [-0.5]),
    ):
        stand_in.mangle = lambda answer, tokens=tokens, logps=logps: _set(answer, tokens, logps)
        refused(lambda: server.ask("a", [Question(PROMPT, 1)], SETTINGS).result())
    assert len(sentences) == 8 and not any(re.search(r"83167|8\.31|with 9", one) for one in sentences), sentences
    server.close()


@pytest.mark.parametrize("field", ["id", "owned_by", "parent", "max_model_len"])
def test_no_message_repeats_a_list_of_models(field: str, stand_in: StandIn) -> None:
    key = "sk-0123456789abcdef"
    options = RolloutOptions(server=stand_in.url, server_kind=stand_in.kind, server_model="other", server_timeout=5)  # type: ignore[arg-type]
    server = CompletionServer(stand_in.url, options, vocabulary=16, key=key)
    for told in _encodings(key):
        for value in (told, [told], {told: told}):
            stand_in.listed = {field: value}
            with pytest.raises(UserError) as refused:
                server.check(Shown(32, TEXT, PROMPT, PROMPT), SETTINGS)
            assert told not in str(refused.value)
    server.close()


def test_an_adapter_of_a_higher_rank(stand_in: StandIn, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.rollouts.servers.http._FIRST_PAUSE", 0.01)
    stand_in.max_rank = 2
    server = opened(stand_in)
    with pytest.raises(
        UserError, match="LoRA rank 4 is greater than max_lora_rank 2.*; start it with .*--max-lora-rank"
    ):
        server.load("a", str(place / "adapter"))
    server.close()


def test_a_server_that_was_started_again(stand_in: StandIn, place: Path) -> None:
    server = opened(stand_in)
    server.load("a", str(place / "adapter"))
    stand_in.fault = lambda path, body, count: (
        (404, {"error": {"message": "no such model"}}) if "seed" in str(body) else None
    )
    with pytest.raises(UserError, match="status 404: no such model: where the server was started again"):
        server.ask("a", [Question(PROMPT, 1)], SETTINGS).result()
    server.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"error": {"message": "a\n b", "code": 400}}, "a b"),
        ({"success": False, "error_message": "c"}, "c"),
        ({"object": "error", "message": "d"}, "d"),
        ({"detail": [1]}, "[1]"),
        ("plain", "plain"),
    ],
)
def test_words_of_an_error(answer: Any, words: str, stand_in: StandIn) -> None:
    def fault(path: str, body: dict[str, Any], count: int) -> Reply:
        return 400, answer

    stand_in.fault = fault
    with pytest.raises(CallRefused) as refusal:
        HttpServer(stand_in.url + "/v1/", timeout=5).call("/x")
    assert refusal.value.words == words and refusal.value.status == 400


# what the servers' own schemas say

VLLM_FIELDS = {
    "CompletionRequest": {
        "model", "prompt", "max_tokens", "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "logprobs", "return_token_ids", "ignore_eos", "stop_token_ids",
        "return_tokens_as_token_ids",
    },
    "LoadLoRAAdapterRequest": {"lora_name", "lora_path", "load_inplace", "is_3d_lora_weight"},
    "UnloadLoRAAdapterRequest": {"lora_name", "lora_int_id"},
}  # fmt: skip
"""Fields of vLLM 0.33: `vllm/entrypoints/openai/completion/protocol.py` and `vllm/entrypoints/serve/lora/protocol.py`;
of the first class those that are used here."""
SGLANG_FIELDS = {
    "GenerateReqInput": {
        "input_ids", "sampling_params", "return_logprob", "return_routed_experts", "top_logprobs_num", "lora_path",
    },
    "SamplingParams": {
        "max_new_tokens", "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "sampling_seed", "stop_token_ids",
    },
    "LoadLoRAAdapterReqInput": {"lora_name", "lora_path", "pinned"},
    "UnloadLoRAAdapterReqInput": {"lora_name"},
}  # fmt: skip
"""Fields of SGLang 0.5.23: `sglang/srt/managers/io_struct.py` and `sglang/srt/sampling/sampling_params.py`; of the
first two classes those that are used here."""


def test_calls_have_the_servers_fields() -> None:
    question = Question(PROMPT, 5)
    vllm, sglang = Vllm(), Sglang()
    for call, kind in (
        (vllm.sample("a", question, SETTINGS), "CompletionRequest"),
        (vllm.look("m", PROMPT, 1.0), "CompletionRequest"),
        (vllm.load("a", "/f"), "LoadLoRAAdapterRequest"),
        (vllm.unload("a"), "UnloadLoRAAdapterRequest"),
    ):
        assert call.body.keys() <= VLLM_FIELDS[kind], call
    for call, kind in (
        (sglang.sample("a", question, SETTINGS), "GenerateReqInput"),
        (sglang.sample("a", question, replace(SETTINGS, routes=ROUTES)), "GenerateReqInput"),
        (sglang.look("m", PROMPT, 1.0), "GenerateReqInput"),
        (sglang.load("a", "/f"), "LoadLoRAAdapterReqInput"),
        (sglang.unload("a"), "UnloadLoRAAdapterReqInput"),
    ):
        assert call.body.keys() <= SGLANG_FIELDS[kind], call
        assert call.body.get("sampling_params", {}).keys() <= SGLANG_FIELDS["SamplingParams"]
    assert vllm.sample("a", question, SETTINGS).body["top_k"] == 0
    assert sglang.sample("a", question, SETTINGS).body["sampling_params"]["top_k"] == -1
    assert dialect_of("vllm").owner == "vllm" and dialect_of("sglang").owner == "sglang"


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_recorded_fields_are_those_of_an_installed_package(package: str) -> None:
    """Its source is read, not run: importing it would need its device."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    files = {
        "vllm": ["entrypoints/openai/completion/protocol.py", "entrypoints/serve/lora/protocol.py"],
        "sglang": ["srt/managers/io_struct.py", "srt/sampling/sampling_params.py"],
    }[package]
    found: dict[str, set[str]] = {}
    for name in files:
        for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                found[node.name] = {one.id for one in fields if isinstance(one, ast.Name)}
    for kind, fields in (VLLM_FIELDS if package == "vllm" else SGLANG_FIELDS).items():
        assert fields <= found[kind], kind
