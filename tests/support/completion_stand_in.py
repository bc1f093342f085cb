"""A small server that speaks as vLLM's or SGLang's does, on a port of this machine.

It computes with transformers and PEFT alone, from the folders that it is told of: so what it samples, and says of it,
shows that an adapter was written as others read it. What it refuses, and in which words, is as vLLM 0.32 answered.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tests.support.stock_routers import NoisyRoutes, all_layers, as_int32, as_npy, routers

Reply = tuple[int, Any]
CONTEXT, MOST_LOGPROBS = 64, 20
"""Tokens of a prompt with its completion, and log-probabilities that vLLM gives for a token."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call that came: its path, its JSON, and the time."""

    path: str
    body: dict[str, Any]
    at: float


@dataclass
class StandIn:
    """A server; to be entered.

    Args:
        model: folder of the base.
        kind: "vllm" or "sglang".
        scaled: whether log-probabilities are those at the temperature of sampling.
        script: seed -> the completion to give; None samples.
        script_of_base: whether it is followed without adapter too.
        fault: what a call answers instead of what it should; None for nothing. It is given the path, the JSON and how
            often that path was called.
        seconds: that each completion takes longer.
        listed: changes to the model's entry in the list of models.
        tokens: what /tokenize answers; None tokenizes.
        takes_adapters: whether the paths of adapters are there.
        max_rank: of an adapter.
        key: what calls must carry; None for nothing. The answer to others has what they carried.
    """

    model: Path
    kind: str = "vllm"
    scaled: bool = True
    script: dict[int, Sequence[int]] | None = None
    script_of_base: bool = False
    fault: Callable[[str, dict[str, Any], int], Reply | None] | None = None
    seconds: float = 0.0
    listed: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None
    takes_adapters: bool = True
    max_rank: int = 64
    key: str | None = None
    calls: list[Called] = field(default_factory=list)
    probes: list[Called] = field(default_factory=list)
    """Calls for the log-probabilities of texts, which are no `calls` and meet no `fault`."""
    keeps: str = ""
    """Adapters in whose names it is are loaded, and computed as the one before, or without one."""
    adapters: dict[str, str] = field(default_factory=dict)
    noise: float = 0.0
    """Added to the logits by which routers choose, where `routes` are returned."""
    routes: bool = False
    """Whether it says which experts were chosen; without, routers choose as in transformers."""
    mangle: Callable[[dict[str, Any]], None] | None = None
    """Changes the answer of a completion."""
    mangles_base: bool = False
    """Whether also without adapter, and of probes."""
    port: int = 0
    """Of the server; 0 for a free one."""

    def __enter__(self) -> Self:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._peft = PeftModel
        self._base = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        self._routes: dict[int, NoisyRoutes] = {}
        self._watch(self._base)
        self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        self._models: dict[str, Any] = {}
        self._lock = threading.RLock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any]) -> None:
                given = self.headers["Authorization"]
                if outer.key is not None and given != f"Bearer {outer.key}":
                    status, reply = 401, {"error": f"Unauthorized: {given}"}
                else:
                    status, reply = outer.reply(self.path, body)
                data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has left

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def of(self, path: str) -> list[Called]:
        """The calls of a path."""
        return [one for one in self.calls if one.path == path]

    @property
    def asked(self) -> list[Called]:
        """The calls for completions by an adapter."""
        return [one for one in self.calls if self.adapter_of(one.body) is not None]

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        if body.get("prompt_logprobs") is not None or body.get("logprob_start_len") is not None:
            self.probes.append(Called(path, body, time.monotonic()))
            return self._probe(body)
        with self._lock:
            self.calls.append(Called(path, body, time.monotonic()))
            count = len(self.of(path))
        if self.fault is not None and (instead := self.fault(path, body, count)) is not None:
            return instead
        if path == "/v1/models":
            cards = [self._card("base", str(self.model), None)]
            cards += [self._card(name, folder, "base") for name, folder in self.adapters.items()]
            return 200, {"object": "list", "data": cards}
        if path == "/tokenize":
            tokens = self.tokens or self._tokenizer.encode(
                body["prompt"], add_special_tokens=body["add_special_tokens"]
            )
            return 200, {"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT}
        if path.endswith("load_lora_adapter"):
            return self._change(path, body)
        if path == {"vllm": "/v1/completions", "sglang": "/generate"}[self.kind]:
            return self._complete(body)
        return 404, {"detail": "Not Found"}

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        card = {"id": name, "object": "model", "owned_by": self.kind, "root": root, "parent": parent}
        return card | {"max_model_len": CONTEXT} | self.listed if parent is None else card

    def _change(self, path: str, body: dict[str, Any]) -> Reply:
        name, prefix = body["lora_name"], "/v1" if self.kind == "vllm" else ""
        if path not in (f"{prefix}/load_lora_adapter", f"{prefix}/unload_lora_adapter"):
            return 404, {"detail": "Not Found"}
        if not self.takes_adapters:
            if self.kind == "vllm":
                return 404, {"detail": "Not Found"}
            return 400, {"success": False, "error_message": "LoRA is not enabled. Please set `--enable-lora`."}
        with self._lock:
            status, problem = self._changed(name, "unload" in path, body)
        if self.kind == "sglang":
            return (200 if problem is None else 400), {"success": problem is None, "error_message": problem}
        if problem is None:
            return 200, f"Success: LoRA adapter '{name}' done."  # no JSON
        kind = {400: "InvalidUserInput", 404: "NotFoundError", 500: "InternalServerError"}[status]
        return _error(status, kind, problem)

    def _changed(self, name: str, gives_up: bool, body: dict[str, Any]) -> tuple[int, str | None]:
        """Loads an adapter or gives it up; returns vLLM's status and words where it does not."""
        if gives_up:
            self._models.pop(name, None)
            if self.adapters.pop(name, None) is None:
                return 404, f"The lora adapter '{name}' cannot be found."
            return 200, None
        if name in self.adapters:
            # vLLM alone loads in place, and adds how
            return 400, f"The lora adapter '{name}' has already been loaded."
        config = Path(body["lora_path"], "adapter_config.json")
        if not config.is_file():
            return 404, f"Loading lora {name} failed: No adapter found for <path>"
        rank = json.loads(config.read_text(encoding="utf-8"))["r"]
        if rank > self.max_rank:
            words = f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."
            return 500, (
                f"Call to add_lora method failed: Worker failed with error '{words}', please check the stack trace "
                "above for the root cause"
            )
        self.adapters[name] = body["lora_path"]
        before = next(reversed(self._models.values()), self._base)
        stale = bool(self.keeps) and self.keeps in name
        self._models[name] = before if stale else self.opened(body["lora_path"])
        return 200, None

    def read(self, ids: list[int]) -> list[int]:
        """The tokens that it computes with, given those that it was sent."""
        return ids

    def opened(self, folder: str) -> Any:
        """The model with an adapter."""
        from copy import deepcopy

        return self._watch(self._peft.from_pretrained(deepcopy(self._base), folder).merge_and_unload().eval())

    def _watch(self, model: Any) -> Any:
        if self.noise or self.routes:
            self._routes[id(model)] = NoisyRoutes(model, self.noise, CONTEXT)
        return model

    def _taken(self, model: Any, count: int) -> np.ndarray:
        """The experts of the first tokens of the model's last pass, of all layers; of those without a router, 0."""
        layers = [number for number, one in enumerate(model.model.layers) if routers(one)]
        return all_layers(self._routes[id(model)].taken(count), layers, len(model.model.layers))

    def adapter_of(self, body: dict[str, Any]) -> str | None:
        """The adapter that a completion is asked of; None for another call."""
        if self.kind == "sglang":
            return body.get("lora_path") if "input_ids" in body else None
        return body["model"] if "prompt" in body and body.get("model") not in (None, "base") else None

    def _problem(self, body: dict[str, Any]) -> str | None:
        """What vLLM has against a call."""
        temperature, wanted = body["temperature"], body.get("logprobs") or 0
        if not 0 <= temperature <= 2:
            return f"temperature must be in [0, 2], got {temperature}. (parameter=temperature, value={temperature})"
        if wanted > MOST_LOGPROBS:
            return f"Requested sample logprobs of {wanted}, which is greater than max allowed: {MOST_LOGPROBS}"
        if len(body["prompt"]) >= CONTEXT:
            return f"This model's maximum context length is {CONTEXT} tokens."
        size = self._base.config.vocab_size
        foreign = [one for one in body["prompt"] if one >= size]
        if foreign:
            return f"Token id {foreign[0]} is out of vocabulary"
        foreign = [one for one in body.get("stop_token_ids", ()) if one >= size]
        return f"token_id(s) {foreign} in stop_token_ids contain out-of-vocab token ids." if foreign else None

    def _complete(self, body: dict[str, Any]) -> Reply:
        time.sleep(self.seconds)
        name = self.adapter_of(body)
        if self.kind == "vllm" and (problem := self._problem(body)) is not None:
            return _error(400, "BadRequestError", problem)
        with self._lock:
            if name is not None and name not in self._models:
                return _error(404, "NotFoundError", f"The model `{name}` does not exist. Valid aliases: base.")
            model = self._base if name is None else self._models[name]
            if self.kind == "vllm":
                options, ids, longest, seed = body, body["prompt"], body["max_tokens"], body.get("seed")
            else:
                options, ids = body["sampling_params"], body["input_ids"]
                longest, seed = options["max_new_tokens"], options.get("sampling_seed")
            ends = set(options.get("stop_token_ids", ()))
            if not options.get("ignore_eos"):
                ends.add(self._tokenizer.eos_token_id)
            scripted = self.script is not None and (name is not None or self.script_of_base)
            given = self.script[seed] if scripted else None
            ids = self.read(ids)
            longest = min(longest, CONTEXT - len(ids))
            tokens, logps, rows = self._sampled(model, ids, longest, seed, options["temperature"], ends, given)
            routes = self._taken(model, len(ids) + len(tokens) - 1) if self.routes else None
        answer: dict[str, Any]
        if self.kind == "vllm":
            choice = {"index": 0, "text": "", "logprobs": self._told(tokens, logps, rows, body), "stop_reason": None}
            choice |= {"finish_reason": "stop" if tokens[-1] in ends else "length"}
            shown = (tokens, ids) if body.get("return_token_ids") else (None, None)
            choice |= dict(zip(("token_ids", "prompt_token_ids"), shown, strict=True))
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
            choice |= {"routed_experts": None if routes is None else as_npy(routes.astype(np.uint8))}
            answer = {"id": "cmpl-1", "object": "text_completion", "model": name or "base", "choices": [choice]}
            answer["usage"] = usage
        else:
            facts: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
            facts["output_token_logprobs"] = [[p, t, None] for p, t in zip(logps, tokens, strict=True)]
            if wanted := body.get("top_logprobs_num"):
                facts["output_top_logprobs"] = [
                    [[float(row[token]), int(token), None] for token in row.argsort(descending=True)[:wanted]]
                    for row in rows
                ]
            if body.get("return_routed_experts"):
                facts["routed_experts"] = None if routes is None else as_int32(routes)  # type: ignore[assignment]
            answer = {"text": "", "output_ids": tokens, "meta_info": facts}
        if self.mangle is not None and (name is not None or self.mangles_base):
            self.mangle(answer)
        return 200, answer

    def _probe(self, body: dict[str, Any]) -> Reply:
        """The log-probabilities of a text."""
        name = self.adapter_of(body)
        if self.kind == "vllm" and (problem := self._problem(body)) is not None:
            return _error(400, "BadRequestError", problem)
        ids = self.read(body["prompt" if self.kind == "vllm" else "input_ids"])
        with self._lock:
            model = self._base if name is None else self._models[name]
            logps, likely = self._of_text(model, ids), self._likely(model, ids, body)
        answer: dict[str, Any]
        if self.kind == "vllm":
            entries = [
                None if logp is None else {str(token): {"logprob": logp, "rank": 1, "decoded_token": ""}}
                for token, logp in zip(ids, logps, strict=True)
            ]
            for entry, more in zip(entries[1:], likely, strict=False):
                assert entry is not None
                entry |= {str(token): {"logprob": logp, "rank": 1, "decoded_token": ""} for token, logp in more}
            choice = {"index": 0, "text": "", "prompt_logprobs": entries}
            answer = {"object": "text_completion", "model": name or "base", "choices": [choice]}
        else:
            told = [[logp, token, None] for token, logp in zip(ids, logps, strict=True)]
            facts = {"input_token_logprobs": told}
            if likely:
                facts["input_top_logprobs"] = [
                    None,
                    *([[logp, token, None] for token, logp in more] for more in likely),
                ]
            answer = {"text": "", "output_ids": [0], "meta_info": facts}
        if self.mangle is not None and self.mangles_base:
            self.mangle(answer)
        return 200, answer

    @torch.no_grad()
    def _likely(self, model: Any, ids: list[int], body: dict[str, Any]) -> list[list[tuple[int, float]]]:
        """The most likely tokens at each place after the first, as many as are asked for."""
        count = body.get("prompt_logprobs") or body.get("top_logprobs_num") or 0
        if not count:
            return []
        best = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1).topk(count)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [list(zip(tokens, logps, strict=True)) for tokens, logps in pairs]

    @torch.no_grad()
    def _of_text(self, model: Any, ids: list[int]) -> list[float | None]:
        """The log-probability of each token of a text, at temperature 1 as both servers give it."""
        logps = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return [None, *logps[range(len(ids) - 1), ids[1:]].tolist()]

    def _told(self, tokens: list[int], logps: list[float], rows: list[Tensor], body: dict[str, Any]) -> dict[str, Any]:
        """The log-probabilities of a choice: of each token, and of the likeliest by their texts."""

        def text(token: int) -> str:
            if body.get("return_tokens_as_token_ids"):
                return f"token_id:{token}"
            return str(self._tokenizer.decode([token]))

        top = []
        for token, row in zip(tokens, rows, strict=True):
            shown = [token, *row.argsort(descending=True)[: body["logprobs"]].tolist()]
            top.append({text(one): float(row[one]) for one in shown})
        offsets = list(range(len(tokens)))
        names = [text(one) for one in tokens]
        return {"text_offset": offsets, "token_logprobs": logps, "tokens": names, "top_logprobs": top}

    @torch.no_grad()
    def _sampled(
        self, model: Any, ids: list[int], longest: int, seed: int | None, temperature: float, ends: set[int],
        given: Sequence[int] | None,
    ) -> tuple[list[int], list[float], list[Tensor]]:  # fmt: skip
        """Tokens, the log-probability of each, and those of all in its place."""
        noise = np.random.default_rng(seed)
        tokens: list[int] = []
        logps, rows = [], []
        known: Tensor | None = None
        if given is not None:
            known = model(torch.tensor([[*ids, *given]])).logits[0, len(ids) - 1 :]
        for place in range(longest if given is None else len(given)):
            logits = model(torch.tensor([[*ids, *tokens]])).logits[0, -1] if known is None else known[place]
            hot = (logits / temperature).log_softmax(-1)
            said = hot if self.scaled else logits.log_softmax(-1)
            drawn = int(np.searchsorted(np.cumsum(hot.double().exp().numpy()), noise.random()))
            token = min(drawn, len(hot) - 1) if given is None else given[place]
            tokens.append(token)
            logps.append(float(said[token]))
            rows.append(said)
            if given is None and token in ends:
                break
        return tokens, logps, rows


def _error(status: int, kind: str, message: str) -> Reply:
    """An answer of vLLM's that is none."""
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}
