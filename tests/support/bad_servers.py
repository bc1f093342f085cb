"""Servers of completions with a fault each, as `tests.support.completion_stand_in` computes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.completion_stand_in import StandIn

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class Late(StandIn):
    """A server whose fault begins with a later adapter.

    Args:
        right: adapters that it computes with as it should.
    """

    right: int = 0
    given: list[Any] = field(default_factory=list)
    """The models with each adapter."""

    def opened(self, folder: str) -> Any:
        self.given.append(super().opened(folder))
        return self.given[-1] if len(self.given) <= self.right else self.instead()

    def instead(self) -> Any:
        """The model that it computes with in place of the last one."""
        raise NotImplementedError


class Ignoring(Late):
    """Takes every adapter, and computes without."""

    def instead(self) -> Any:
        return self._base


class Behind(Late):
    """Computes with the adapter that it was given before the last one."""

    def instead(self) -> Any:
        return self.given[-2] if len(self.given) > 1 else self._base


class Swapped(Late):
    """Computes with the adapter before that its `other` was given."""

    other: Swapped

    def instead(self) -> Any:
        return self.other.given[len(self.given) - 2] if len(self.given) > 1 else self._base


class Mixed(StandIn):
    """Two servers behind one address, of which one gets no adapters."""

    def _probe(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, known = self.adapter_of(body), self._models
        ids = body["prompt" if self.kind == "vllm" else "input_ids"]
        if name is not None and sum(ids) % 2:
            self._models = dict.fromkeys(known, self._base)
        try:
            return super()._probe(body)
        finally:
            self._models = known


@dataclass
class Partial(StandIn):
    """Applies what `change` leaves of an adapter's tensors."""

    change: Change = dict

    def opened(self, folder: str) -> Any:
        with tempfile.TemporaryDirectory() as copied:
            copy = Path(copied, "adapter")
            shutil.copytree(folder, copy)
            file = copy / "adapter_model.safetensors"
            save_file(self.change(load_file(file)), file)
            return super().opened(str(copy))


def _without(tensors: dict[str, torch.Tensor], left_out: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    # a B of zeros is a module without adapter
    return {key: torch.zeros_like(one) if "lora_B" in key and left_out(key) else one for key, one in tensors.items()}


PARTS: dict[str, Change] = {
    "half of the layers": lambda given: _without(given, lambda key: ".layers.0." in key or ".layers.1." in key),
    "attention alone": lambda given: _without(given, lambda key: "self_attn" not in key),
    "A scaled": lambda given: {key: 2 * one if "lora_A" in key else one for key, one in given.items()},
    "B missing": lambda given: _without(given, lambda key: "q_proj" in key or "down_proj" in key),
}


class Retokenising(StandIn):
    """Makes tokens of text again: two that follow each other become one, of another id."""

    def read(self, ids: list[int]) -> list[int]:
        return ids if len(ids) < 2 else [*ids[:-2], (ids[-2] + ids[-1]) % self._base.config.vocab_size]


class SilentlyRetokenising(Retokenising):
    """The same, and its answers do not show the tokens of the prompt, nor their count."""

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = super()._complete(body)
        if status == 200:
            answer.pop("usage", None)
            answer.get("meta_info", {}).pop("prompt_tokens", None)
            for choice in answer.get("choices", ()):
                choice.pop("prompt_token_ids", None)
        return status, answer


def other_output(answer: dict[str, Any]) -> None:
    """Changes the tokens of a completion as if its text had been made into tokens again."""
    holder, name = (answer["choices"][0], "token_ids") if "choices" in answer else (answer, "output_ids")
    holder[name] = [holder[name][0], *((token + 1) % 3 for token in holder[name][1:])]


def renamed(answer: dict[str, Any]) -> None:
    """Changes the name of the model that a completion is of."""
    answer["model"] = "another"
