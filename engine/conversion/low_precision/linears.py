"""How an export stores its linears in few bits: which matrices, in whose spelling, and what rounds them.

All linears of the layers are rounded, each expert's among them. The head, embeddings, norms, routers and vision models
stay as they are, and config.json lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Concatenated, Content, MemoryBytes
from engine.checkpoint.copying.file_writers import Piece
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.weight_source import WeightSource
from engine.choices import STORED, ExportDType, QuantMethod
from engine.conversion.decoded_base import encoded_names
from engine.conversion.low_precision.matrices import (
    Coder,
    Latest,
    Matrix,
    Member,
    PackedContent,
    PackedMatrix,
    Parts,
    Store,
)
from engine.conversion.low_precision.scales import ScaleCoder
from engine.conversion.low_precision.shared_scales import SharedScales
from engine.conversion.low_precision.spellings import (
    COMPRESSED_TENSORS,
    DEEPSEEK,
    quantization_config,
    rounds_inputs,
    spelling_of,
)
from engine.conversion.merged_model import MergedSource
from engine.errors import UserError
from engine.kernels.formats import Format
from engine.kernels.reference_formats import block_decode
from engine.models.families import family_of
from engine.models.names import NameMap
from engine.quantization.shipped.config import KEY, without_encoding
from engine.quantization.shipped.spelling import Spelling
from engine.sentences import listed
from engine.telemetry.format import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecision:
    """The low precision of an export.

    Args:
        dtype: the format, as the command line has it.
        method: config.json's quant_method.
        spelling: logical name of a weight -> how it is stored; None for numbers.
        coder: makes the parts.
        config: modules whose weights are numbers -> config.json's quantization_config.
        notes: remarks for the user, a sentence each.
        identity: settings that decide the values, as JSON.
        keeps: scales are the base's, and parts of weights that did not change are the base's own.
        is_trained: the rounded model is the one that training computed with.
        nested: config.json has what it says of the weights in the language model's part.
        beside: further tensors of the base that readers of the format look for, by name.
        outside: names of tensors that are not the language model's and that `beside` has as they are stored.
        decoded: names of weights that are rounded too, of which the numbers are written because no reader takes codes.
    """

    dtype: ExportDType
    method: str
    spelling: Callable[[str], Spelling | None]
    coder: Coder
    config: Callable[[Sequence[str]], Mapping[str, Any]]
    notes: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False
    is_trained: bool = False
    nested: bool = False
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()
    decoded: frozenset[str] = frozenset()
    _latest: Latest = field(default_factory=Latest)

    @property
    def name(self) -> str:
        """The format, as a user reads it."""
        return "the base's format" if self.dtype == STORED else self.dtype

    def holds(self, names: Sequence[str]) -> bool:
        """Returns whether a tensor of the checkpoint, of these logical ones, is stored in few bits."""
        return all(self.spelling(name) is not None for name in names)

    def rounds(self, names: Sequence[str]) -> bool:
        """Returns whether a tensor of the checkpoint, of these logical ones, is rounded, whatever is stored of it."""
        return self.holds(names) or all(name in self.decoded for name in names)

    def pieces(
        self, source: WeightSource, places: NameMap, hf_name: str, names: Sequence[str], order: int
    ) -> list[Piece]:
        """Returns the tensors to write in place of one that consists of these logical ones."""
        spelling = self.spelling(names[0])
        module = hf_name.removesuffix(".weight" if spelling is None else spelling.weight)
        experts: dict[int, list[str]] = {}
        for name in names:
            place = places.to_hf(name).expert
            experts.setdefault(-1 if place is None else place.expert, []).append(name)
        matrices = []
        for own in experts.values():
            matrix = matrix_of(source, module, own, places)
            store: Store = partial(stored_numbers, self.coder.format(matrix), source.dtype(own[0]))
            store = store if spelling is None else spelling.store
            matrices.append(PackedMatrix(matrix=matrix, coder=self.coder, store=store, latest=self._latest))
        found = []
        for place, (ending, (shape, dtype)) in enumerate(matrices[0].declared().items()):
            contents: list[Content] = [PackedContent(one, ending, reports=place == 0) for one in matrices]
            is_stack = -1 not in experts
            found.append(
                Piece(
                    key=module + ending,
                    dtype=dtype,
                    shape=(len(matrices), *shape) if is_stack else shape,
                    content=Concatenated(contents) if is_stack else contents[0],
                    order=order,
                )
            )
        return found

    def beside_pieces(self, order: int) -> list[Piece]:
        """Returns the further tensors to write, from this order on."""
        return [
            Piece(
                key=name,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                content=MemoryBytes(tensor),
                order=order + place,
            )
            for place, (name, tensor) in enumerate(self.beside.items())
        ]

    def full_config(self, config: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
        """Returns config.json with what it says of the weights.

        Args:
            config: with or without such a part.
            ignored: modules whose weights are numbers.
        """
        plain, found = without_encoding(config), {KEY: dict(self.config(ignored))}
        return {**plain, "text_config": {**plain["text_config"], **found}} if self.nested else {**plain, **found}


def stored_numbers(kind: Format, dtype: torch.dtype, parts: Parts, columns: int) -> Parts:
    """Returns the tensor of the numbers that the parts of a matrix stand for, by the ending of its name."""
    out = torch.empty(parts["codes"].shape[0], columns, dtype=dtype, device=parts["codes"].device)
    if not out.is_meta:
        block_decode(kind, parts, out)
    return {".weight": out}


def matrix_of(source: WeightSource, module: str, names: Sequence[str], places: NameMap | None = None) -> Matrix:
    """Returns the matrix that consists of these logical weights, one after another but where `places` says else."""
    members, first = [], 0
    for name in names:
        count = source.shape(name)[0]
        expert = None if places is None else places.to_hf(name).expert
        alternates = expert is not None and expert.part.alternates
        half = 0 if expert is None or expert.part.half is None else expert.part.half
        members.append(
            Member(
                name=name,
                count=count,
                first=half if alternates else first,
                step=2 if alternates else 1,
                rows=source.exact_rows(name),
                update_norm=source.update_norm(name),
            )
        )
        first += count
    return Matrix(module=module, members=tuple(members), columns=source.shape(names[0])[1])


def unstacked(model: ModelFolder, names: NameMap) -> NameMap:
    """Returns where an export in few bits places tensors: each expert's by itself, as servers look for them.

    Raises:
        UserError: the family has its experts in one tensor only.
    """
    if not names.is_stacked:
        return names
    family = family_of(model.hf_config, model.implementation)[0]
    if family.names.is_stacked:
        raise UserError(
            f"{model.family} has all experts of a layer in one tensor, and no reader of such a model knows experts in "
            "these formats: leave --dtype out."
        )
    plain = replace(family.names, body=names.body, head=names.head, vision=names.vision)
    return plain.fuse(names.fused)


def low_precision(source: WeightSource, dtype: ExportDType, method: QuantMethod | None) -> LowPrecision:
    """Returns how to store a model's linears in `dtype`, with the scales that hold each block's largest number.

    Raises:
        UserError: there is no such way, or no linear fits.
    """
    method = method or COMPRESSED_TENSORS
    if method == DEEPSEEK and dtype != "fp8_block":
        raise UserError(f"--quant-method fp8 is DeepSeek's way to store fp8_block, not {dtype}: leave it out.")
    check_family(source, dtype)
    spelling = spelling_of(dtype, method)
    # readers have no groups that end within a matrix; blocks of rows and columns are cut at its edges
    group = 1 if dtype == "fp8_block" else spelling.group or 1
    sharing = linears_of(source)
    linears = sorted(sharing)
    packed = frozenset(name for name in linears if source.shape(name)[1] % group == 0)
    if not packed:
        raise UserError(
            f"none of the model's linears can be stored as {dtype}, whose groups are {group} columns: choose another "
            "--dtype."
        )
    notes = []
    base = source.base if isinstance(source, MergedSource) else source
    if base is not None and base.encoding is not None:
        notes.append(
            "the base is in few bits already: its numbers are rounded a second time, from their decoded values"
        )
    if left := [name.removesuffix(".weight") for name in linears if name not in packed]:
        notes.append(
            f"left as they are, because their columns are no multiple of the {group} in a group: "
            f"{counted(len(left), 'linear')}: {listed(left)}"
        )
    if rounds_inputs(dtype):
        notes.append("servers round the inputs of these linears to 8 bits too, which losses here do not show")
    shared = SharedScales(lambda name: matrix_of(source, name, [name]), sharing) if dtype == "nvfp4" else None
    return LowPrecision(
        dtype=dtype,
        method=method,
        spelling=lambda name: spelling if name in packed else None,
        coder=ScaleCoder(kind=spelling.format, shared=shared),
        config=lambda ignored: quantization_config(dtype, method, ignored),
        notes=tuple(notes),
        identity={"dtype": dtype, "quant_method": method},
    )


def linears_of(source: WeightSource) -> dict[str, tuple[str, ...]]:
    """Returns the weights that exports round: name -> those that have one scale of scales with it."""
    found = encoded_names(source.model.decoder, "nvfp4")
    return {name: group for name, group in found.items() if name.startswith("layers.")}


def check_family(source: WeightSource, dtype: ExportDType) -> None:
    """Refuses models whose linears an export cannot name.

    Raises:
        UserError: it has transformers' own modules.
    """
    if source.model.names.pieces:
        raise UserError(
            f"--dtype {dtype} is for the engine's own families, and this {source.model.decoder.family} model has "
            "transformers' modules: leave it out."
        )
