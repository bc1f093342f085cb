"""Frozen weights of a linear, stored encoded: fewer bytes a number than the model computes with.

Each section of a linear (q, k, v; gate, up) is encoded by itself, so that its parts (codes, scales) depend on its own
tensor alone, and lies in rows of its own in the parts of the linear, which one product reads. All parts of a linear
are views of one piece of memory, which can be spread over ranks or wait elsewhere like any storage. They are no
parameters: nothing trains or initialises them, and no checkpoint writes them. What fills them is the tensor that the
shard record names, read as it is stored, encoded and dropped, one at a time.

A rank encodes its own cut of a tensor, with the bits that cutting the encoded whole would give: what the whole's scales
are made from is gathered over the tensor-parallel ranks. Sections of one linear, of one expert where it has several's,
share NVFP4's scale of scales, because servers that put them into one matrix keep one: they are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn

from engine.distributed.collectives import all_gather
from engine.distributed.mesh import Axis
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError
from engine.layers.module import ShardEntry
from engine.ops.encoded_weight import BaseEncoding, EncodedWeight
from engine.ops.merged_weight import Factors, MergedRows, MergedWeight, MergeState, merge_in_place, merged_rows
from engine.ops.quantized_products import QuantizedWeight, require_product_sizes
from engine.ops.scaled_products import has_gradient, is_scaled, require_scaled_device, require_scaled_sizes
from engine.ops.scaled_weight import ScaledWeight
from engine.quantization.encoded_parts import WholeMatrix, largest_of
from engine.quantization.encoding import Encoding, part_rows

ALIGNMENT = 256
"""Bytes; every part begins at a multiple of it, as kernels like it."""
ENCODED_AT_ONCE = 1 << 24
"""Numbers; bounds the memory that encoding takes beside the weight and its parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedEntry:
    """A frozen weight on this rank.

    Args:
        name: logical name of the weight.
        spec: its shard; `encoding` says how the parts mean it.
        parts: views of `memory`, by the encoding's names.
        encoding: what fills and reads them.
        memory: the bytes of all parts of the linear.
        tp: the ranks that the weight is cut over.
    """

    name: str
    spec: ShardSpec
    parts: Mapping[str, Tensor]
    encoding: Encoding
    memory: Tensor
    tp: Axis

    @property
    def num_bytes(self) -> int:
        """The bytes of the parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def granule(self) -> int:
        """Rows of the weight to a row of its scales."""
        return self.spec.local_shape[0] // self.parts["scales"].shape[0]

    @property
    def _divides(self) -> bool:
        """Whether the matrix's scale divides the blocks', so that it may not be 0."""
        return self.encoding.format is not None and self.encoding.format.divides

    @torch.no_grad()
    def fill(self, parts: Mapping[str, Tensor]) -> None:
        """Copies parts that were stored as such.

        Raises:
            UserError: a number that they mean is not finite.
        """
        for name, part in self.parts.items():
            found = parts[name]
            assert found.shape == part.shape and found.dtype == part.dtype, (self.name, name, found, part)
            part.copy_(found)
            if _has_no_number(name, part) or (name == "tensor_scale" and self._divides and bool((part == 0).any())):
                raise UserError(
                    f"{self.name} has {name} that are not finite as it is stored: use another copy of the model."
                )

    @torch.no_grad()
    def encode(self, weight: Tensor, whole: WholeMatrix | None = None) -> None:
        """Fills the parts. Collective over `tp` where the weight is cut and `whole` is not given.

        Args:
            weight: [spec.local_shape], any float dtype.
            whole: as `of_whole` gives it; None to find it.

        Raises:
            UserError: a number is not finite.
        """
        columns, height = self.spec.local_shape[1], self._height
        whole = self.of_whole(weight) if whole is None else whole
        for piece in self.spec.runs(0):
            ahead = piece.global_offset - piece.local_offset
            for run in _runs(piece.local_offset, piece.local_offset + piece.length, height):
                place = replace(whole, first_row=ahead + run.start)
                there = part_rows(self.encoding, run, columns)
                for name, encoded in self.encoding.encode(weight[run], place).items():
                    self.parts[name][there[name]].copy_(encoded)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Returns the numbers that the parts mean, [spec.local_shape]."""
        out = torch.empty(self.spec.local_shape, dtype=dtype, device=self.memory.device)
        self.encoding.decode(self.parts, out)
        return out

    @torch.no_grad()
    def of_whole(self, weight: Tensor) -> WholeMatrix:
        """Returns what the scales of the whole matrix are made from. Collective over `tp` where the weight is cut.

        Args:
            weight: as of `encode`.

        Raises:
            UserError: a number is not finite.
        """
        rows, height = self.spec.local_shape[0], self._height
        try:
            here = self.encoding.join([self.encoding.absmax(weight[run]) for run in _runs(0, rows, height)], 0)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error
        return self._whole(here)

    @property
    def _height(self) -> int:
        """Rows that are encoded at once."""
        rows, columns = self.spec.local_shape
        together = max((rows // part.shape[0] for part in self.parts.values() if part.shape[0]), default=1)
        return max(1, ENCODED_AT_ONCE // columns // together) * together

    def _whole(self, here: Tensor) -> WholeMatrix:
        """Returns the whole matrix, from what this rank's cut of it adds to its scales."""
        spec, size = self.spec, self.tp.size
        if spec.dim is None:
            return WholeMatrix(absmax=here)
        if spec.dim == 1:
            shards = all_gather(here, self.tp).chunk(size)
            # ranks that hold the same columns are neighbours: each of them once
            copies = size * spec.local_shape[1] // spec.global_shape[1]
            absmax = self.encoding.join(shards[::copies], 1)
            return WholeMatrix(absmax=absmax, first_column=spec.pieces[0].global_offset)
        # a rank's rows may be several runs of the whole's, in any order, and scales of scales depend on that order
        rows = torch.cat([torch.arange(one.length) + one.global_offset for one in spec.pieces]).to(here.device)
        local = torch.cat([torch.arange(one.length) + one.local_offset for one in spec.pieces]).to(here.device)
        absmax = here.new_empty(spec.global_shape[0], here.shape[1])
        absmax[all_gather(rows, self.tp)] = all_gather(here[local], self.tp)
        return WholeMatrix(absmax=absmax)


_NAN_E4M3, _NAN_E8M0 = 0x7F, 0xFF
"""Codes that are no number; the first with either sign."""


def _has_no_number(name: str, part: Tensor) -> bool:
    """Returns whether a part of numbers or exponents has one that is not finite."""
    if part.dtype == torch.float8_e4m3fn:
        return bool((part.view(torch.uint8) & _NAN_E4M3 == _NAN_E4M3).any())
    if part.is_floating_point():
        return not bool(torch.isfinite(part).all())
    return name == "scales" and part.dtype == torch.uint8 and bool((part == _NAN_E8M0).any())


def _runs(first: int, last: int, height: int) -> Iterator[slice]:
    """Yields the rows from `first` to before `last`, at most `height` at a time."""
    for start in range(first, last, height):
        yield slice(start, min(start + height, last))


class EncodedStorage(nn.Module):
    """The encoded sections of one linear, and their memory.

    Args:
        sections: name and shard of each weight [out, in], in output order; frozen.
        encoding: of all of them.
        base: has the memory that they are decoded to, and the makers of operands.
        tp: the ranks that the weights are cut over.
        device: of the memory.
        rounds_inputs: whether products are of codes, where the format has such.

    Raises:
        UserError: a cut between ranks goes through columns that share a scale, or the device's products do not take
            matrices of these sizes.
    """

    def __init__(
        self,
        sections: Sequence[tuple[str, ShardSpec]],
        encoding: Encoding,
        base: BaseEncoding,
        *,
        tp: Axis,
        device: torch.device,
        rounds_inputs: bool = False,
    ) -> None:
        super().__init__()
        encoding = encoding.stacked(_bounds([spec for _, spec in sections]))
        for name, spec in sections:
            _check_columns(name, spec, encoding, tp)
        self.encoding = encoding
        self.rounds_inputs = rounds_inputs and is_scaled(encoding.format)
        """Whether products are of codes, and of inputs rounded in groups."""
        self.sizes = tuple((name, *spec.local_shape) for name, spec in sections)
        """Names of the sections, with their rows and columns."""
        self.check_products(device)
        if self.rounds_inputs and encoding.format is not None:
            require_scaled_device(encoding.format, device, sections[0][0])
        rows, columns = sum(spec.local_shape[0] for _, spec in sections), sections[0][1].local_shape[1]
        places, num_bytes = {}, 0
        for part, (shape, dtype) in encoding.parts(rows, columns).items():
            places[part] = num_bytes, shape, dtype
            num_bytes += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.register_buffer("memory", memory, persistent=False)
        self.entry = ShardEntry(
            name=f"{sections[0][0]}.encoded",
            parameter=nn.Parameter(memory, requires_grad=False),
            spec=ShardSpec(global_shape=(num_bytes,), local_shape=(num_bytes,), data=sections[0][1].data),
            sink=None,
        )
        """The memory as a parameter like any other, for who moves memory around."""
        parts = {part: _view(memory, *place) for part, place in places.items()}
        heights = tuple(spec.local_shape[0] for _, spec in sections)
        self._scratch = base.scratch
        self.weight = QuantizedWeight(
            encoding=encoding, parts=parts, in_features=columns, sections=heights, operands=base.operands
        )
        entries, first = [], 0
        for name, spec in sections:
            rows_here = part_rows(encoding, slice(first, first + spec.local_shape[0]), columns)
            entries.append(
                EncodedEntry(
                    name=f"{name}.weight",
                    spec=replace(spec, encoding=encoding.name),
                    parts={part: whole[rows_here[part]] for part, whole in parts.items()},
                    encoding=encoding,
                    memory=memory,
                    tp=tp,
                )
            )
            first += spec.local_shape[0]
        self.entries = tuple(entries)
        self.merged: list[str] = []
        """Names of the weights that take adapters before they are rounded."""
        self.state = MergeState()
        self._merging: list[MergedRows] = []

    @property
    def is_decoded(self) -> bool:
        """Whether a product decodes the weight first."""
        format = self.weight.encoding.format
        return self.weight.is_decoded and not (self.rounds_inputs and format is not None and has_gradient(format))

    @property
    def may_fold(self) -> bool:
        """Whether adapters may lie beside the weight in its products."""
        return self.weight.is_decoded and not self.rounds_inputs

    def check_products(self, device: torch.device) -> None:
        """Checks that a device has products of these sizes.

        Raises:
            UserError: it has none.
        """
        for name, rows, columns in self.sizes:
            require_product_sizes(self.encoding.name, rows, columns, device, name)
        if self.rounds_inputs and self.encoding.format is not None:
            (name, _, columns), height = self.sizes[0], sum(rows for _, rows, _ in self.sizes)
            require_scaled_sizes(self.encoding.format, height, columns, device, name)

    def operand(self, dtype: torch.dtype, extra: int) -> EncodedWeight:
        """Returns what products read.

        Args:
            dtype: of the decoded numbers.
            extra: E, the columns of folded adapters.
        """
        weight = self.weight
        if self.is_decoded:
            self._scratch.announce((weight.out_features, weight.in_features + extra), dtype)
        kind = ScaledWeight if self.rounds_inputs else EncodedWeight
        return kind(weight=weight, dtype=dtype, scratch=self._scratch)

    def merged_sections(self, adapters: Sequence[Factors], which: slice = slice(None)) -> tuple[MergedRows, ...]:
        """Returns sections with the adapters over them.

        Args:
            adapters: their rows are counted from the first of these sections.
            which: the sections.

        Raises:
            UserError: numbers that share a scale lie on several ranks.
        """
        entries = self.entries[which]
        sections = merged_rows(((entry.spec.local_shape[0], entry.parts) for entry in entries), adapters)
        for entry, section in zip(entries, sections, strict=True):
            if section.own is not None:
                _check_whole_scales(entry)
                self.merged.append(entry.name)
                self._merging.append(section)
        return sections

    def merged_operand(self, dtype: torch.dtype, adapters: Sequence[Factors]) -> MergedWeight:
        """Returns what products read where the weight takes these adapters before it is rounded.

        Raises:
            UserError: numbers that share a scale lie on several ranks.
        """
        sections = self.merged_sections(adapters)
        self._scratch.announce((self.weight.out_features, self.weight.in_features), dtype)
        return MergedWeight(weight=self.weight, dtype=dtype, scratch=self._scratch, sections=sections, state=self.state)

    def merging_tensors(self) -> list[Tensor]:
        """Returns what `merge_in_place` reads and writes: the memory, and the adapters' factors."""
        return [self.memory, *(x for one in self._merging if one.own is not None for x in (one.own.b_OR, one.own.a_RI))]

    @torch.no_grad()
    def merge_in_place(self) -> None:
        """Writes the codes of merged weights in place of the base's, from the adapters as they are now."""
        assert not self.state.in_codes, "the base's codes are not here"
        merge_in_place(self.weight.encoding, self._merging)
        self.state.in_codes = True


def _view(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _bounds(specs: Sequence[ShardSpec]) -> set[int]:
    """Returns the rows at which a cut of a whole matrix, or a section of the stack, begins or ends."""
    bounds, first = set(), 0
    for spec in specs:
        for piece in spec.runs(0):
            bounds |= {piece.global_offset, piece.local_offset, piece.local_offset + piece.length}
        first += spec.local_shape[0]
        bounds.add(first)
    return bounds


def _check_columns(name: str, spec: ShardSpec, encoding: Encoding, tp: Axis) -> None:
    (columns, held), block = (shape[1] for shape in (spec.global_shape, spec.local_shape)), encoding.block
    if block and held != columns and held % block:
        fitting = [
            size for size in range(1, tp.size) if tp.size % size == 0 and (size == 1 or columns % (size * block) == 0)
        ]
        raise UserError(
            f"a base in {encoding.name} has one scale for {block} input features, but parallel.tensor {tp.size} cuts "
            f"the {columns} input features of {name} into {held} a rank, which divides them: use parallel.tensor "
            f"{' or '.join(map(str, fitting))}, or model.base_dtype null."
        )


def _check_whole_scales(entry: EncodedEntry) -> None:
    """Refuses a weight of whose numbers some share a scale with numbers of other ranks: merged, they would need it."""
    name, spec, format = entry.name.removesuffix(".weight"), entry.spec, entry.encoding.format
    if format is None:
        raise UserError(
            f"lora.merge_aware is true and {name} is stored as {entry.encoding.name}, a format that no merged "
            "checkpoint is written in: use another model.base_dtype, or set lora.merge_aware to false."
        )
    if format.keeps_scales:
        return
    if spec.dim == 1 and not format.group and spec.local_shape != spec.global_shape:
        raise UserError(
            f"lora.merge_aware is true and {name} is stored as {format.name}, with one scale for a row of "
            f"{spec.global_shape[1]} input features, but parallel.tensor {entry.tp.size} cuts its rows: set "
            "parallel.tensor to 1 (the other ways to spread a model work), or add that module to lora.exclude."
        )
    height, end = format.rows, spec.global_shape[0]
    inside = (
        piece.global_offset % height or piece.local_offset % height or (last % height and last < end)
        for piece in spec.runs(0)
        for last in [piece.global_offset + piece.length]
    )
    if any(inside):
        raise UserError(
            f"lora.merge_aware is true and {name} is stored as {format.name}, with one scale for {height} output "
            f"features, but parallel.tensor {entry.tp.size} cuts its {end} into "
            f"{spec.local_shape[0]} a rank: use a parallel.tensor that leaves each rank a multiple of {height} (the "
            "other ways to spread a model work), or add that module to lora.exclude."
        )


def encoded_entries(module: nn.Module) -> Iterator[EncodedEntry]:
    """Yields every encoded weight of the model on this rank, in forward order."""
    for child in module.modules():
        if isinstance(child, EncodedStorage):
            yield from child.entries


def rounding_names(module: nn.Module) -> list[str]:
    """Returns the names of the model's weights on this rank whose products are of codes and rounded inputs."""
    storages = (child for child in module.modules() if isinstance(child, EncodedStorage) and child.rounds_inputs)
    return [entry.name for storage in storages for entry in storage.entries]


def merged_names(module: nn.Module) -> list[str]:
    """Returns the names of the model's weights on this rank that take adapters before they are rounded."""
    return [name for child in module.modules() if isinstance(child, EncodedStorage) for name in child.merged]


def encoded_memories(module: nn.Module) -> Iterator[ShardEntry]:
    """Yields the memory of every linear's encoded weights, in forward order."""
    for child in module.modules():
        if isinstance(child, EncodedStorage):
            yield child.entry


Holding = Callable[[Tensor], AbstractContextManager[None]]
"""Makes the memory of a linear's parts be there, and keeps afterwards what this rank keeps of it."""


def fill_encoded(
    entries: Iterable[EncodedEntry],
    read: Callable[[EncodedEntry], Tensor],
    *,
    holding: Holding = lambda memory: nullcontext(),
) -> None:
    """Encodes each weight, or those with one scale of scales, as soon as they are read, and drops them before the next.

    Collective over the tensor-parallel ranks, see `EncodedEntry.encode`.

    Args:
        entries: in the same order on every rank.
        read: gives a weight's numbers on this rank, [spec.local_shape].
        holding: see `Holding`.
    """

    def encode(linear: Sequence[EncodedEntry]) -> None:
        for together in sharing_scales(linear):
            _encode_together(together, [read(entry) for entry in together])

    _fill(entries, encode, holding)


def _encode_together(entries: Sequence[EncodedEntry], weights: Sequence[Tensor]) -> None:
    """Encodes weights with one scale of scales for all of them, where their format has it."""
    wholes = [entry.of_whole(weight) for entry, weight in zip(entries, weights, strict=True)]
    largest = largest_of(*(whole.absmax for whole in wholes)) if len(wholes) > 1 else None
    for entry, weight, whole in zip(entries, weights, wholes, strict=True):
        entry.encode(weight, replace(whole, largest=largest))


def sharing_scales(entries: Iterable[EncodedEntry]) -> list[list[EncodedEntry]]:
    """Returns encoded weights by the scale of scales that they share; each alone where the format has none."""
    found: dict[tuple[int, str], list[EncodedEntry]] = {}
    for entry in entries:
        module, format = entry.name.removesuffix(".weight"), entry.encoding.format
        shares = format is not None and format.has_tensor_scale
        found.setdefault((id(entry.memory), module.rpartition(".")[0] if shares else module), []).append(entry)
    return list(found.values())


def fill_stored(
    entries: Iterable[EncodedEntry], read: Callable[[EncodedEntry], Mapping[str, Tensor]], *, holding: Holding
) -> None:
    """Copies the parts of each weight as soon as they are read, and drops them before the next one.

    Args:
        read: gives a weight's parts on this rank.
        holding: see `Holding`.
    """

    def copy(linear: Sequence[EncodedEntry]) -> None:
        for entry in linear:
            entry.fill(read(entry))

    _fill(entries, copy, holding)


def _fill(entries: Iterable[EncodedEntry], fill: Callable[[Sequence[EncodedEntry]], None], holding: Holding) -> None:
    for _, group in groupby(entries, key=lambda entry: id(entry.memory)):
        linear = list(group)
        with holding(linear[0].memory):
            fill(linear)
