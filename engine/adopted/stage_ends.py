"""What a body runs before its first layer and behind its last, which a part without that end leaves out.

Norms behind the table of tokens and tables of positions come before the first layer; norms beside the one that the
head's input goes through come behind the last. They are found by running a small model of the same make and looking
which modules are called when; whether a part without them computes the same is for the proof to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.adopted.forms import seeded, small_model
from engine.adopted.structure import find_structure, quiet

_TOKENS = 5


class Nothing(nn.Module):
    """Adds nothing to the residual stream, in the place of a table of positions."""

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        given = next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)
        return torch.zeros((), device=None if given is None else given.device)  # of no dimension: takes on any dtype


class Unchanged(nn.Module):
    """Returns the residual stream as it is, in the place of a module that has run in another part."""

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return x


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEnds:
    """The modules at a body's two ends, by their names inside it.

    Args:
        added: before the first layer, whose output is added to the stream.
        before: before the first layer, which take the stream and return it.
        behind: behind the last layer, which take the stream and return it.
    """

    added: tuple[str, ...]
    before: tuple[str, ...]
    behind: tuple[str, ...]

    def left_out(self, *, is_first: bool, is_last: bool) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules that a part leaves out, and what stands in for each."""
        if not is_first:
            yield from ((name, Nothing()) for name in self.added)
            yield from ((name, Unchanged()) for name in self.before)
        if not is_last:
            yield from ((name, Unchanged()) for name in self.behind)


@lru_cache(maxsize=8)
def stage_ends(config_text: str) -> StageEnds:
    """Returns the ends of the body of a `config.json`, given as text."""
    hf_config = json.loads(config_text)
    model = small_model(hf_config)
    parts = find_structure(model, hf_config)
    body = model.get_submodule(parts.body)
    layers = body.get_submodule(parts.layers)
    calls: list[_Call] = []
    open_calls: list[str] = []
    with ExitStack() as hooks, torch.no_grad(), quiet(), seeded(0):
        for name, module in body.named_modules():
            if not name or name == parts.layers or name.startswith(f"{parts.layers}."):
                continue
            hooks.callback(module.register_forward_pre_hook(partial(_enters, open_calls, name)).remove)
            hooks.callback(module.register_forward_hook(partial(_leaves, open_calls, calls), with_kwargs=True).remove)
        for layer in layers.children():
            marked = partial(_marked, calls)
            hooks.callback(layer.register_forward_pre_hook(marked).remove)
        width = body.get_submodule(parts.embedding).embedding_dim
        body(inputs_embeds=torch.randn(1, _TOKENS, width), use_cache=False)
        places = [place for place, call in enumerate(calls) if call.name is None]
        before, behind = calls[: places[0]], calls[places[-1] + 1 :]
    with torch.no_grad(), quiet():
        roles = [(call.name, call.role(body, width)) for call in before]
        last = [call.name for call in behind if call.name != parts.norm and call.role(body, width) == "stream"]
    return StageEnds(
        added=tuple(name for name, role in roles if name and role == "added"),
        before=tuple(name for name, role in roles if name and role == "stream"),
        behind=tuple(name for name in last if name),
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module that no other one's call is around.

    Args:
        name: of the module inside the body; None for a layer.
        arguments, named: of the call.
        out: what it returned.
    """

    name: str | None
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] | None = None
    out: Any = None

    def role(self, body: nn.Module, width: int) -> str | None:
        """Returns "stream" where the output is made of the stream, "added" where it has its shape and is made of
        something else, and else None."""
        assert self.name is not None
        out = self.out
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.shape[-2:] != (_TOKENS, width):
            return None
        first = self.arguments[0] if self.arguments else None
        if not isinstance(first, Tensor) or first.shape != out.shape or not first.is_floating_point():
            return "added"
        module = body.get_submodule(self.name)
        again = module(torch.randn_like(first), *self.arguments[1:], **(self.named or {}))
        return "added" if torch.equal(again, out) else "stream"


def _enters(open_calls: list[str], name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    open_calls.append(name)


def _leaves(
    open_calls: list[str],
    calls: list[_Call],
    module: nn.Module,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    out: Any,
) -> None:
    name = open_calls.pop()
    if not open_calls:
        calls.append(_Call(name, arguments, named, out))


def _marked(calls: list[_Call], module: nn.Module, arguments: tuple[Any, ...]) -> None:
    calls.append(_Call(None))
