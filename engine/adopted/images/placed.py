"""Features of images among the tokens of a micro-batch, put there by transformers' own forward.

The module that takes images is run with a stand-in for the body in it, which notes what the body would be given: the
residual stream with features in it, positions, what later layers add. With that the body runs afterwards, layer by
layer.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from engine.adopted.images.arguments import forward_arguments
from engine.adopted.modules import Adopted
from engine.adopted.rows import Rows
from engine.adopted.structure import Structure


class Noted(nn.Module):
    """Stands in for a body: notes what it is called with, and returns the embeddings.

    Args:
        body: whose attributes are read in its place.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.__dict__["given"] = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["body"], name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        given = inspect.signature(self.__dict__["body"].forward).bind(*arguments, **named).arguments
        given.update(given.pop("kwargs", {}))
        self.__dict__["given"] = given
        return _output(given["inputs_embeds"])


def _output(x: Tensor) -> Any:
    """Returns what a body would, with nothing beside the residual stream, whatever a module looks for in it."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return Output(last_hidden_state=x)


class PlacedImages:
    """What a part of an adopted model does with images.

    Args:
        whole: transformers' module without memory.
        structure: its parts.
        around: the module that takes images, with the body's stand-in in it; None where the body takes them, or on a
            part without the embedding.
        noted: the stand-in.
    """

    def __init__(self, whole: nn.Module, structure: Structure, around: Adopted | None, noted: Noted | None) -> None:
        assert structure.images is not None
        self._module = copy.copy(whole.get_submodule(structure.images))
        """For what needs no weights; its methods may set attributes."""
        self.around, self._noted = around, noted

    def arguments(self, rows: Rows, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the arguments that the images of the rows are."""
        found = forward_arguments(self._module, rows.tokens_BS, rows.images)
        return {name: one.to(dtype) if one.is_floating_point() else one for name, one in found.items()}

    def told(self, rows: Rows, body: nn.Module) -> dict[str, Any]:
        """Returns what a later part's body takes beside the residual stream: what is told of tokens of images."""
        if rows.images is None:
            return {}
        taken = inspect.signature(body.forward).parameters
        found = forward_arguments(self._module, rows.tokens_BS, None)
        return {name: one for name, one in found.items() if name in taken}

    def place(self, rows: Rows, positions: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        """Returns what the body is given where there are images. Embeddings of the tokens are looked up.

        Args:
            positions: the argument that positions are, or none.
            dtype: of pixels.
        """
        assert self.around is not None and self._noted is not None
        self.around.module(input_ids=rows.tokens_BS, use_cache=False, **positions, **self.arguments(rows, dtype))
        given: dict[str, Any] = self._noted.__dict__["given"]
        self._noted.__dict__["given"] = None
        return given

    @property
    def counts_positions(self) -> bool:
        """Whether positions of images are in time, height and width."""
        return hasattr(self._module, "compute_3d_position_ids")

    def positions(self, rows: Rows, lengths: Sequence[int]) -> Tensor | None:
        """Returns int64 [kinds, B, S], where positions of images are in time, height and width; None where they are
        counted as those of text.

        Args:
            lengths: of the documents in the rows.
        """
        if not self.counts_positions or rows.images is None:
            return None
        compute = self._module.compute_3d_position_ids
        tokens = pad_sequence(list(rows.tokens_BS.flatten().split(list(lengths))), batch_first=True)
        taken = inspect.signature(compute).parameters
        given: dict[str, Any] = {"input_ids": tokens, **forward_arguments(self._module, tokens, rows.images)}
        needed = [name for name, one in taken.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
        found = compute(**{**dict.fromkeys(needed), **{name: one for name, one in given.items() if name in taken}})
        if found is None:
            return None
        kept = [found[:, row, :length] for row, length in enumerate(lengths)]
        return torch.cat(kept, dim=1).view(-1, *rows.tokens_BS.shape)
