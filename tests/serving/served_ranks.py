"""Clients of a backend over several ranks, and what becomes of their adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from engine.config.parallel import ParallelOptions
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from rankfold.serving.commands import Saved
from rankfold.serving.exchange import Outcome, ServedModel, Task
from rankfold.serving.folder import ServerFolder
from rankfold.serving.protobuf import encode
from rankfold.serving.tenant_backend import TenantBackend
from tests.serving.bodies import adam, datum, forward_backward, random_datum, read_output, read_samples, sample
from tests.serving.traced import traced
from tests.tenants.test_shared_base import SMALLER


class Client(NamedTuple):
    """A model of a client, and the loss that it trains with."""

    lora: Mapping[str, Any]
    loss: str
    numbers: Mapping[str, Any] = {}


CLIENTS = {
    "s:train:0": Client({"rank": 1, "seed": 3}, "cross_entropy"),
    "s:train:1": Client({"rank": 4, "seed": 9, "train_unembed": False}, "importance_sampling"),
    "s:train:2": Client({"rank": 8, "seed": 5, "train_mlp": False}, "ppo", {"clip_low_threshold": 0.9}),
    "s:train:3": Client({"rank": 16, "seed": 6, "train_attn": False, "train_unembed": False}, "gspo"),
    "s:train:4": Client({"rank": 64, "seed": 7}, "dro", {"beta": 0.1}),
    "s:train:5": Client({"rank": 2, "seed": 1}, "custom"),
}
"""Models with ranks, parts, seeds and losses of their own; the last one with a traced loss and two targets a token."""
_LOSS = "s:loss:0"
_ASKED = {"topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 2, "prompt_logprobs": True}


def _soft(logprobs: Tensor, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -(logprobs * wanted).sum()
    return loss, {"custom/wanted:mean": wanted.mean()}


class Layout(NamedTuple):
    """Ranks, options of `parallel`, and further ones of the model."""

    world: int
    parallel: Mapping[str, Any]
    model: Mapping[str, Any] = {}


ONE_RANK = Layout(1, {})


class Served:
    """This rank's backend."""

    def __init__(self, base: Path, state: Path, layout: Layout) -> None:
        launch = Launch(rank=0, world_size=1, device=torch.device("cpu"))
        if dist.is_initialized():
            launch = Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
        model = ServedModel(
            path=base,
            dtype="float32",
            tokens=40,
            slots=4,
            parallel=ParallelOptions(**layout.parallel),
            ranks=layout.world,
            **layout.model,
        )
        self.backend = TenantBackend(model, ServerFolder(state), launch, Log(1))
        self.seq = dict.fromkeys(CLIENTS, 0)
        self.answers: list[Any] = []

    def task(self, model: str, kind: str, body: bytes) -> Task:
        """Returns a model's next command."""
        seq = self.seq[model]
        self.seq[model] += 1
        return Task(request=f"{model}:{seq}", kind=kind, target=model, seq=seq, body=body)

    def do(self, kind: str, bodies: Mapping[str, bytes]) -> list[Outcome]:
        """Executes a command of some models at once."""
        outcomes = self.backend.execute([self.task(model, kind, body) for model, body in bodies.items()])
        assert all(one.good for one in outcomes), [one.body for one in outcomes if not one.good]
        return outcomes

    def create(self, models: Sequence[str]) -> None:
        body = json.dumps({"session_id": "s", **traced(_soft, logprobs=2, wanted=2)}).encode()
        task = Task(request=_LOSS, kind="create_custom_loss", target=_LOSS, seq=0, body=body)
        assert self.backend.execute([task])[0].good
        for model in models:
            self.do("create_model", {model: json.dumps({"lora_config": dict(CLIENTS[model].lora)}).encode()})

    def steps(self, models: Sequence[str], steps: Sequence[int]) -> None:
        """Takes steps of some models, whose rows are multiplied together."""
        for step in steps:
            found = self.do("forward_backward", {model: self.body(model, step) for model in models})
            if self.backend.ranks.is_first:
                self.answers += [read_output(one.body) for one in found]
            for model in models:
                self.do("optim_step", {model: adam(model, self.seq[model], learning_rate=1e-2, grad_clip_norm=0.5)})

    def body(self, model: str, step: int) -> bytes:
        """Returns a forward_backward request of a step."""
        client, number = CLIENTS[model], int(model[-1])
        more = {} if client.loss == "cross_entropy" else {"logprobs": -4.0, "advantages": 0.7}
        data = []
        for place, length in enumerate((11, 25, 17, 3 + number)):
            seed = 1000 * number + 10 * step + place
            if client.loss == "custom":
                drawn = np.random.default_rng(seed)
                ids, targets = (drawn.integers(3, SMALLER["vocab_size"], size) for size in (length, (length, 2)))
                data.append(datum(ids.tolist(), targets, wanted=drawn.random((length, 2))))
            else:
                inputs = {name: [value] * length for name, value in more.items()}
                data.append(random_datum(length, seed, SMALLER["vocab_size"], **inputs))
        if client.loss != "custom":
            return forward_backward(model, self.seq[model], data, client.loss, **client.numbers)
        message = {
            "model_id": model, "seq_id": self.seq[model], "data": data, "loss_fn": "custom",
            "loss_fn_config_v2": {"loss_id": {"text": _LOSS}},
        }  # fmt: skip
        return encode("ForwardBackwardRequest", message)

    def scored(self, model: str) -> Any:
        """Returns samples of a model's weights as they are, and the whole answer, which has scores."""
        body = json.dumps({"path": f"a{self.seq[model]}"}).encode()
        (saved,) = self.do("save_weights_for_sampler", {model: body})
        path = json.loads(saved.body)["path"]
        asked = sample("t", 0, [5, 6, 7], 3, max_tokens=6, seed=8, stop=[])
        body = json.dumps({**json.loads(asked), **_ASKED}).encode()
        task = Task(request="t:0", kind="asample", target=path, seq=0, body=body)
        (outcome,) = self.backend.execute([task])
        assert outcome.good, outcome
        sequences, _ = read_samples(outcome.body) if self.backend.ranks.is_first else ([], [])
        return sequences, outcome.body


def trained_in(base: Path, state: Path, layout: Layout, models: Sequence[str], steps: Sequence[int]) -> Any:
    """Restores these models, or creates them where the folder has none, takes steps and samples.

    Returns:
        On rank 0 losses and log-probabilities of each step and model, samples of each, and whether restored models are
        written again as they were read, bit for bit.
    """
    served, again = Served(base, state, layout), True
    for model in models:
        restored = served.backend.restore(model)
        if restored is None:
            served.create([model])
            continue
        served.seq[model] = restored.seq + 1
        (saved,) = served.do("save_weights", {model: json.dumps({"path": f"r{served.seq[model]}"}).encode()})
        if served.backend.ranks.is_first:
            _, _, _, _, name = json.loads(saved.body)["path"].split("/")
            folder = served.backend._folder
            written = load_file(folder.saved(Saved(model=model, kind="weights", name=name)))
            before = load_file(folder.model(model))
            again &= before.keys() == written.keys()
            again &= all(torch.equal(written[one], tensor) for one, tensor in before.items())
    served.steps(models, steps)
    samples = [served.scored(model) for model in models]
    if not served.backend.ranks.is_first:
        return None
    losses = [loss for loss, _ in served.answers]
    logps = [torch.from_numpy(np.concatenate(own).copy()) for _, own in served.answers]
    return {"losses": losses, "logps": logps, "samples": samples, "again": again}


def kept(state: Path) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of each model's file."""
    folder = ServerFolder(state)
    return {model: load_file(folder.model(model)) for model in CLIENTS if folder.model(model).exists()}
