"""What a body runs before its first layer and behind its last, which a part without that end leaves out.

Norms behind the table of tokens and tables of positions come before the first layer; norms beside the one that the
head's input goes through come behind the last. They are found by running a small model of the same make and looking
which modules are called when. A part takes its stream past whatever else a body does at an end that it does not have;
whether it computes the same is for the proof to say.
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
from engine.adopted.structure import find_structure, hidden_size, quiet

_TOKENS = 5


class Nothing(nn.Module):
    """Adds nothing to the residual stream, in the place of a table of positions."""

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        given = next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)
        return torch.zeros((), device=None if given is None else given.device)  # of no dimension: takes on any dtype


class Unchanged(nn.Module):
    """Returns the residual stream as it is, in the place of a module that has run in another part.

    Args:
        argument: under which the module is given it; a number is a place.
    """

    def __init__(self, argument: int | str) -> None:
        super().__init__()
        self._argument = argument

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return arguments[self._argument] if isinstance(self._argument, int) else named[self._argument]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEnds:
    """The modules at a body's two ends, by their names inside it.

    Args:
        added: before the first layer, whose output is added to the stream.
        before: before the first layer, which take the stream and return it, and under which argument.
        behind: behind the last layer, likewise.
        copies: of the residual stream, which some bodies have between their layers.
        apart: whether they have a dimension of their own.
    """

    added: tuple[str, ...]
    before: tuple[tuple[str, int | str], ...]
    behind: tuple[tuple[str, int | str], ...]
    copies: int
    apart: bool

    def left_out(self, *, is_first: bool, is_last: bool) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules that a part leaves out, and what stands in for each."""
        if not is_first:
            yield from ((name, Nothing()) for name in self.added)
            yield from ((name, Unchanged(argument)) for name, argument in self.before)
        if not is_last:
            yield from ((name, Unchanged(argument)) for name, argument in self.behind)


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
            if not name or f"{parts.layers}.".startswith(f"{name}.") or name.startswith(f"{parts.layers}."):
                continue  # the layers, and what is around them
            hooks.callback(module.register_forward_pre_hook(partial(_enters, open_calls, name)).remove)
            hooks.callback(module.register_forward_hook(partial(_leaves, open_calls, calls), with_kwargs=True).remove)
        for layer in layers.children():
            marked = partial(_marked, calls)
            hooks.callback(layer.register_forward_pre_hook(marked, with_kwargs=True).remove)
        width = body.get_submodule(parts.embedding).embedding_dim
        body(inputs_embeds=torch.randn(1, _TOKENS, width), use_cache=False)
    places = [place for place, call in enumerate(calls) if not call.name]
    stream, hidden = calls[places[0]].out, hidden_size(model.config, width)
    widths = width, stream.shape[-1]
    ends = calls[: places[0]], calls[places[-1] + 1 :]
    with torch.no_grad(), quiet():
        first, last = (
            {call.name: call.stream(body, widths) for call in end if _is_stream(call.out, widths)} for end in ends
        )
    for name in {str(parts.norm), *(first.keys() & last)}:  # a module at both ends stays there
        first.pop(name, None)
        last.pop(name, None)
    return StageEnds(
        added=tuple(name for name, argument in first.items() if argument is None),
        before=tuple((name, argument) for name, argument in first.items() if argument is not None),
        behind=tuple((name, argument) for name, argument in last.items() if argument is not None),
        copies=stream[0, 0].numel() // hidden,
        apart=stream.dim() > 3,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module that no other one's call is around.

    Args:
        name: of the module inside the body; empty for a layer.
        arguments: of the call, by place or name.
        out: what it returned, and of a layer what it was given.
    """

    name: str
    arguments: dict[Any, Any]
    out: Any

    def stream(self, body: nn.Module, widths: tuple[int, ...]) -> int | str | None:
        """Returns the argument that is the stream; None where the output is made of something else, and added."""
        module = body.get_submodule(self.name)
        key: int | str
        for key, given in self.arguments.items():
            if _is_stream(given, widths):
                changed = self.arguments | {key: torch.randn_like(given)}
                placed = [changed[place] for place in range(len(changed)) if place in changed]
                again = module(*placed, **{name: one for name, one in changed.items() if isinstance(name, str)})
                if not torch.equal(again, self.out):
                    return key
        return None


def _is_stream(value: Any, widths: tuple[int, ...]) -> bool:
    """Returns whether a value is features of every token, as many as of an embedding or of what enters layers."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape[-2:-1] == (_TOKENS,)
        and value.shape[-1] in widths
    )


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
        calls.append(_Call(name, dict((*enumerate(arguments), *named.items())), out))


def _marked(
    calls: list[_Call], module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    calls.append(_Call("", {}, arguments[0]))
    return arguments, with_tokens(named, torch.zeros(1, _TOKENS, dtype=torch.int64))


def with_tokens(named: dict[str, Any], tokens_BS: Tensor) -> dict[str, Any]:
    """Returns a layer's arguments with the tokens, where it takes them and its body was given embeddings."""
    return {**named, "input_ids": tokens_BS} if named.get("input_ids", tokens_BS) is None else named
