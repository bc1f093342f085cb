"""The tensors of a Hugging Face folder in few bits, by the names and shapes of the numbers that they mean.

`q_proj.weight_packed` and its scales are one tensor here, `q_proj.weight`, whose view is decoded. So readers of a
folder need not know of encodings, except those that want codes: they ask for a `StoredMatrix`. Scales of activations
and of a key-value cache are of no use here; their names are kept, to be said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content, FileRange, MemoryBytes, StoredBytes
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.hf_tensors import HfTensors
from engine.checkpoint.reader import WEIGHT_DTYPES
from engine.checkpoint.safetensors_file import num_bytes
from engine.errors import UserError
from engine.models.stacked_parts import ExpertPart, StackedPart
from engine.quantization.shipped.config import ShippedEncoding
from engine.quantization.shipped.floats import Floats
from engine.quantization.shipped.integers import Gptq
from engine.quantization.shipped.spelling import Spelling, StoredMatrix
from engine.sentences import as_written, listed
from engine.telemetry.format import counted

_OF_ACTIVATIONS = (
    "input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale", "q_scale", "k_scale",
    "v_scale", "prob_scale", "q_global_scale", "k_global_scale", "v_global_scale", "k_zero_point", "v_zero_point",
)  # fmt: skip
_PACKED = (".weight_packed", ".qweight")
"""Endings of the names of codes of which several are in one number."""
_ZERO_POINT = ".weight_zero_point"
_KEPT_DECODED = 2


class _Encoded(NamedTuple):
    """A matrix in few bits, or one for each expert.

    Args:
        module: its name in the checkpoint.
        spelling: of its tensors.
        shape: rows and columns.
        experts: how many there are; 0 for one matrix.
    """

    module: str
    spelling: Spelling
    shape: tuple[int, int]
    experts: int

    def stored(self) -> dict[str, str]:
        """Returns ending -> name of each stored tensor."""
        return {one.ending: f"{self.module}{one.ending}" for one in self.spelling.layouts}


class EncodedTensors:
    """All tensors of a folder, as `HfTensors` has them, with decoded ones in the place of codes and scales.

    Args:
        folder: of the files.
        encoding: what config.json says; None for a folder without.

    Raises:
        UserError: there are no safetensors files, one is missing or truncated, or tensors are not as `encoding` says.
    """

    def __init__(self, folder: Path, encoding: ShippedEncoding | None) -> None:
        self._files = HfTensors(folder)
        self.folder, self.encoding = folder, encoding
        self._encoded: dict[str, _Encoded] = {}
        self._sorted: set[str] = set()
        self._spellings: dict[Spelling, Spelling] = {}
        self.unread: list[str] = []
        """Names of stored tensors that no number depends on: scales of activations and of a key-value cache, and biases
        and zero points that are all 0."""
        if encoding is not None:
            stored = set(self._files.names())
            for found in self._find(encoding, stored):
                name = found.module + found.spelling.weight
                if name in stored and name not in found.stored().values():
                    raise UserError(
                        f"{folder} has {name} both as numbers and in {found.spelling.name}: use a copy with one."
                    )
                self._encoded[name] = found
            self.unread = sorted(name for name in stored if self._is_unread(name))
            self._refuse_other_codes(encoding, stored)
        hidden = {name for one in self._encoded.values() for name in one.stored().values()}.union(self.unread)
        self._names = [*(name for name in self._files.names() if name not in hidden), *self._encoded]
        self._known = set(self._names)
        self._decoded = lru_cache(maxsize=_KEPT_DECODED)(self._decode)

    def names(self) -> list[str]:
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def is_encoded(self, name: str) -> bool:
        """Returns whether a tensor is stored in few bits."""
        return name in self._encoded

    def encoded_names(self) -> list[str]:
        """Returns the names of all tensors in few bits."""
        return list(self._encoded)

    def drop_empty_bias(self, name: str) -> bool:
        """Returns whether a tensor is a bias of zeros beside a matrix in few bits, as GPTQ's linears have one whatever
        the model has; it is then one of `unread`."""
        module = name.removesuffix(".bias")
        if module == name or not self.is_encoded(f"{module}.weight") or bool(self._files.view(name).any()):
            return False
        self.unread.append(name)
        return True

    def spelling(self, name: str) -> Spelling:
        """Returns the spelling of a tensor in few bits."""
        found = self._encoded[name]
        if isinstance(found.spelling, Gptq) and name not in self._sorted:
            groups = self._files.view(found.stored()[".g_idx"])
            self._encoded[name] = found = found._replace(spelling=found.spelling.sorted_as(groups))
            self._sorted.add(name)
        return found.spelling

    def stored_names(self, name: str) -> list[str]:
        """Returns the names of the tensors in the files that one is read from."""
        found = self._encoded.get(name)
        return [name] if found is None else list(found.stored().values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns its shape; of a matrix for each expert, [experts, rows, columns]."""
        found = self._encoded.get(name)
        if found is None:
            return self._files.shape(name)
        return (found.experts, *found.shape) if found.experts else found.shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns its dtype; of a decoded tensor that of most of the others."""
        return self.decoded_dtype if name in self._encoded else self._files.dtype(name)

    @cached_property
    def decoded_dtype(self) -> torch.dtype:
        """The dtype of most tensors that are stored as numbers: a released config.json may say none, or another."""
        dtypes = Counter(self._files.dtype(name) for name in self._names if name not in self._encoded)
        return max(WEIGHT_DTYPES, key=lambda dtype: dtypes[dtype])

    def notes(self) -> list[str]:
        """Returns remarks for the user of an export of what is decoded here."""
        if not self._encoded:
            return []
        dtype = str(self.decoded_dtype).removeprefix("torch.")
        return [f"{self._stored_in()}, and were decoded: they are {dtype} here, and quantization_config is gone"]

    def note(self, *, decodes: bool) -> str | None:
        """Returns a line for the log of a run; None without tensors in few bits.

        Args:
            decodes: the run computes with decoded ones.
        """
        if not self._encoded:
            return None
        dtype = str(self.decoded_dtype).removeprefix("torch.")
        decoded = f", decoded to {dtype} as they are read (model.base_dtype stored keeps them encoded)"
        assert self.encoding is not None
        aside = [] if (unknown := self.encoding.unknown) is None else [unknown]
        tensors = counted(len(self.unread), "tensor")
        unread = f"; {tensors} of no effect not read: {listed(self.unread, most=2)}"
        read = f"{self._stored_in()}{decoded if decodes else ''}{unread if self.unread else ''}"
        return "; ".join([f"note: {read}", *aside])

    def _stored_in(self) -> str:
        found = Counter(one.spelling.name for one in self._encoded.values())
        each = [f"{counted(number, 'tensor')} in {name}" for name, number in sorted(found.items())]
        return f"weights are stored in few bits ({listed(each)})"

    def view(self, name: str) -> Tensor:
        """Returns a view of the mapped file, or the decoded tensor."""
        return self._decoded(name) if name in self._encoded else self._files.view(name)

    def stored_views(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns views of tensors by their names in the files, those of `unread` and `stored_names` too."""
        return {name: self._files.view(name) for name in names}

    def content(self, name: str) -> Content:
        """Returns the contents of a tensor, which is decoded where it is stored in few bits."""
        if name in self._encoded:
            return _Decoded(self, name)
        return StoredBytes([FileRange(*self.stored_at(name), num_bytes(self.dtype(name), self.shape(name)))])

    def stored_at(self, name: str) -> tuple[Path, int]:
        """Returns the file that holds the tensor, and where in it the tensor's bytes, or the codes', begin."""
        return self._files.stored_at(self.stored_names(name)[0])

    def matrix(self, name: str, first_row: int, num_rows: int | None, expert: ExpertPart | None) -> StoredMatrix:
        """Returns the codes of a matrix, or of rows or of an expert's part of it.

        Args:
            name: of a tensor in few bits.
            first_row, num_rows: of the rows; None for all.
            expert: where the tensor has a matrix for each.
        """
        found = self._encoded[name]
        tensors = {ending: self._files.view(stored) for ending, stored in found.stored().items()}
        rows, columns = found.shape
        if expert is not None:
            straight = expert.part._replace(transposed=False)  # codes are by rows whatever the numbers are
            tensors = {ending: straight.of(tensor[expert.expert]) for ending, tensor in tensors.items()}
            rows = next(iter(tensors.values())).shape[0]
        return StoredMatrix(
            spelling=self.spelling(name),
            tensors=tensors,
            shape=(rows, columns),
            first_row=first_row,
            num_rows=rows if num_rows is None else num_rows,
        )

    def _decode(self, name: str) -> Tensor:
        (rows, columns), experts = self._encoded[name].shape, self._encoded[name].experts
        out = torch.empty(self.shape(name), dtype=self.decoded_dtype)
        for expert in range(experts or 1):
            place = ExpertPart(expert, StackedPart("", "")) if experts else None
            into = out[expert] if experts else out
            self.matrix(name, 0, None, place).decode(into, slice(0, rows), slice(0, columns))
        return out

    def _find(self, encoding: ShippedEncoding, stored: set[str]) -> Iterator[_Encoded]:
        """Yields all matrices in few bits."""
        spellings = encoding.spellings()
        seen = set()
        for spelling in spellings:
            ending = spelling.layouts[0].ending
            for name in self._files.names():
                module = name.removesuffix(ending)
                if not name.endswith(ending) or module in seen or self._is_plain(name, module, spellings, stored):
                    continue
                seen.add(module)
                yield self._found(module, encoding.spelling(module), spellings, stored)

    def _is_plain(self, name: str, module: str, spellings: list[Spelling], stored: set[str]) -> bool:
        """Returns whether a tensor that may be codes by its name is numbers, with no scale beside it."""
        if not name.endswith(".weight") or self._files.dtype(name) not in WEIGHT_DTYPES:
            return False
        return not any(f"{module}{one.ending}" in stored for spelling in spellings for one in spelling.layouts[1:])

    def _found(self, module: str, said: Spelling | None, spellings: list[Spelling], stored: set[str]) -> _Encoded:
        """Returns a module's matrix in the spelling that the config says, or else in the one that its tensors have."""
        fitting = [one for one in spellings if self._flaw(module, one, stored) is None]
        if said is not None and said in fitting:
            spelling = said
        elif len(fitting) == 1:
            spelling = fitting[0]
        elif said is not None:
            raise UserError(f"{self.folder} {self._flaw(module, said, stored)}: copy the model again.")
        else:
            raise UserError(
                f"{self.folder} stores {module} in few bits, but quantization_config in config.json does not say how: "
                "correct it or copy the model again."
            )
        names = {one.ending: f"{module}{one.ending}" for one in spelling.layouts}
        shapes = {ending: self._files.shape(name) for ending, name in names.items()}
        experts = 0 if spelling.weight else shapes[spelling.layouts[0].ending][0]
        dtypes = {ending: self._files.dtype(name) for ending, name in names.items()}
        known = spelling.known(dtypes, shapes)
        return _Encoded(module, self._spellings.setdefault(known, known), self._shape(module, spelling), experts)

    def _shape(self, module: str, spelling: Spelling) -> tuple[int, int]:
        names = {one.ending: f"{module}{one.ending}" for one in spelling.layouts}
        shapes = {ending: self._files.shape(name) for ending, name in names.items()}
        if not spelling.weight:  # of all experts
            shapes = {ending: shape[1:] for ending, shape in shapes.items()}
        small = {ending: self._files.view(name) for ending, name in names.items() if shapes[ending] == (2,)}
        return spelling.shape(shapes, small)

    def _flaw(self, module: str, spelling: Spelling, stored: set[str]) -> str | None:
        """Returns what keeps a module's tensors from being in a spelling; None where they are."""
        names = {f"{module}{one.ending}": one for one in spelling.layouts}
        if missing := [name for name in names if name not in stored]:
            return f"lacks {listed(missing)}, which its quantization_config calls for"
        for name, layout in names.items():
            if (dtype := self._files.dtype(name)) not in layout.dtypes:
                called = str(dtype).removeprefix("torch.")
                return f"stores {name} as {called}, which is not what its quantization_config calls for"
        rows, columns = self._shape(module, spelling)
        experts = {self._files.shape(name)[:1] for name in names} if not spelling.weight else {()}
        if rows < 1 or columns < 1 or len(experts) > 1:
            first = next(iter(names))
            return f"has {first} with shape {list(self._files.shape(first))}, of which no matrix is made"
        for name, layout in names.items():
            shape = self._files.shape(name)
            found = shape if spelling.weight else shape[1:]
            if not layout.fits(found, rows, columns) and not _is_one_scale(layout.columns, found, spelling):
                wanted = [*next(iter(experts)), *layout.shape(rows, columns)]
                return f"has {name} with shape {list(shape)}, but its quantization_config calls for {wanted}"
        return None

    def _refuse_other_codes(self, encoding: ShippedEncoding, stored: set[str]) -> None:
        """Refuses packed codes where the config says that codes have another name.

        Raises:
            UserError: there are such tensors.
        """
        read = {name for one in self._encoded.values() for name in one.stored().values()}
        for name in sorted(stored - read):
            ending = next((one for one in _PACKED if name.endswith(one)), None)
            said = None if ending is None else encoding.spelling(name.removesuffix(ending))
            if ending is not None and said is not None:
                wanted = f"{name.removesuffix(ending)}{said.layouts[0].ending}"
                form = "" if encoding.raw.get("format") is None else f" of format {as_written(encoding.raw['format'])}"
                raise UserError(
                    f"{self.folder} stores packed numbers, {name}, but its quantization_config{form} calls for "
                    f"{wanted}: correct config.json, or copy the model again."
                )

    def _is_unread(self, name: str) -> bool:
        """Returns whether a tensor is a scale that is not of weights, or zero points that are all 0."""
        if name.rpartition(".")[2] in _OF_ACTIVATIONS:
            return True
        module = name.removesuffix(_ZERO_POINT)
        found = self._encoded.get(f"{module}.weight")
        if found is None or module == name or _ZERO_POINT in found.stored():
            return False
        return not bool(self._files.view(name).any())


class _Decoded(Content):
    """The numbers of a tensor in few bits, which is decoded when they are asked for.

    Args:
        tensors, name: of which tensor.
    """

    def __init__(self, tensors: EncodedTensors, name: str) -> None:
        self._tensors, self._name = tensors, name

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        yield from MemoryBytes(self._tensors.view(self._name)).blocks(scratch, unit)


def _is_one_scale(columns: int, shape: tuple[int, ...], spelling: Spelling) -> bool:
    """Returns whether a scale of a whole matrix stands where a config may say one for each row."""
    if not isinstance(spelling, Floats) or columns or not spelling.kind.is_rowwise:
        return False
    return all(size == 1 for size in shape)
