"""A small server that speaks as vLLM's or SGLang's does, on a port of this machine.

It computes with transformers and PEFT alone, from the folders that it is told of: so what it samples, and says of it,
shows that an adapter was written as others read it.
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

Reply = tuple[int, Any]


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
        fault: what a call answers instead of what it should; None for nothing. It is given the path, the JSON and how
            often that path was called.
        seconds: that each completion takes longer.
        listed: changes to the model's entry in the list of models.
        tokens: what /tokenize answers; None tokenizes.
        takes_adapters: whether the paths of adapters are there.
    """

    model: Path
    kind: str = "vllm"
    scaled: bool = True
    script: dict[int, Sequence[int]] | None = None
    fault: Callable[[str, dict[str, Any], int], Reply | None] | None = None
    seconds: float = 0.0
    listed: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None
    takes_adapters: bool = True
    calls: list[Called] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    mangle: Callable[[dict[str, Any]], None] | None = None
    """Changes the answer of a completion."""

    def __enter__(self) -> Self:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._peft = PeftModel
        self._base = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
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

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
            return 200, {"tokens": tokens, "count": len(tokens), "max_model_len": 64}
        if path.endswith("load_lora_adapter"):
            return self._change(path, body)
        if path == {"vllm": "/v1/completions", "sglang": "/generate"}[self.kind]:
            return self._complete(body)
        return 404, {"detail": "Not Found"}

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        card = {"id": name, "object": "model", "owned_by": self.kind, "root": root, "parent": parent}
        return card | {"max_model_len": 64} | self.listed if parent is None else card

    def _change(self, path: str, body: dict[str, Any]) -> Reply:
        name, prefix = body["lora_name"], "/v1" if self.kind == "vllm" else ""
        if path not in (f"{prefix}/load_lora_adapter", f"{prefix}/unload_lora_adapter"):
            return 404, {"detail": "Not Found"}
        if not self.takes_adapters:
            if self.kind == "vllm":
                return 404, {"detail": "Not Found"}
            return 400, {"success": False, "error_message": "LoRA is not enabled. Please set `--enable-lora`."}
        problem = None
        with self._lock:
            if "unload" in path:
                if self.adapters.pop(name, None) is None:
                    problem = f"The lora adapter '{name}' cannot be found."
                self._models.pop(name, None)
            elif name in self.adapters:
                problem = f"The lora adapter '{name}' has already been loaded."
            elif not Path(body["lora_path"], "adapter_config.json").is_file():
                problem = f"Loading lora {name} failed: No adapter found for {body['lora_path']}"
            else:
                self.adapters[name] = body["lora_path"]
                self._models[name] = self._opened(body["lora_path"])
        if self.kind == "sglang":
            return (200 if problem is None else 400), {"success": problem is None, "error_message": problem}
        if problem is None:
            return 200, f"Success: LoRA adapter '{name}' done."
        status = 404 if "cannot be found" in problem else 400
        return status, {"error": {"message": problem, "type": "NotFoundError", "code": status}}

    def _opened(self, folder: str) -> Any:
        from copy import deepcopy

        return self._peft.from_pretrained(deepcopy(self._base), folder).merge_and_unload().eval()

    def adapter_of(self, body: dict[str, Any]) -> str | None:
        """The adapter that a completion is asked of; None for another call."""
        if self.kind == "sglang":
            return body.get("lora_path") if "input_ids" in body else None
        return body["model"] if "prompt" in body and body.get("model") not in (None, "base") else None

    def _complete(self, body: dict[str, Any]) -> Reply:
        time.sleep(self.seconds)
        name = self.adapter_of(body)
        with self._lock:
            if name is not None and name not in self._models:
                return 404, {"error": {"message": f"The model `{name}` does not exist.", "code": 404}}
            model = self._base if name is None else self._models[name]
            if self.kind == "vllm":
                options, ids, longest, seed = body, body["prompt"], body["max_tokens"], body.get("seed")
            else:
                options, ids = body["sampling_params"], body["input_ids"]
                longest, seed = options["max_new_tokens"], options.get("sampling_seed")
            ends = {self._tokenizer.eos_token_id, *options.get("stop_token_ids", ())}
            given = None if self.script is None or name is None else self.script[seed]
            tokens, logps, top = self._sampled(model, ids, longest, seed, options["temperature"], ends, given)
        answer: dict[str, Any]
        if self.kind == "vllm":
            logprobs = {"token_logprobs": logps, "tokens": [], "top_logprobs": [{"x": one} for one in top]}
            choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": "length"}
            if body.get("return_token_ids"):
                choice["token_ids"] = tokens
            answer = {"object": "text_completion", "model": name, "choices": [choice]}
        else:
            facts: dict[str, Any] = {
                "output_token_logprobs": [[p, t, None] for p, t in zip(logps, tokens, strict=True)]
            }
            if body.get("top_logprobs_num"):
                facts["output_top_logprobs"] = [[[one, 0, None]] for one in top]
            answer = {"text": "", "output_ids": tokens, "meta_info": facts}
        if self.mangle is not None and name is not None:
            self.mangle(answer)
        return 200, answer

    @torch.no_grad()
    def _sampled(
        self, model: Any, ids: list[int], longest: int, seed: int | None, temperature: float, ends: set[int],
        given: Sequence[int] | None,
    ) -> tuple[list[int], list[float], list[float]]:  # fmt: skip
        """Tokens, the log-probability of each, and that of the likeliest in its place."""
        noise = np.random.default_rng(seed)
        tokens: list[int] = []
        logps, top = [], []
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
            top.append(float(said.max()))
            if given is None and token in ends:
                break
        return tokens, logps, top
