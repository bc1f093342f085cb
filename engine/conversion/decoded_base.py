"""A quantized base as the run computed with it: frozen linears encoded and decoded again, some rows at a time.

An adapter trained beside a base in NF4 or FP8 has learned to compensate for that base's own errors. So the model that
trained is the decoded base with the adapter, and a merge gives that one unless the 16-bit weights are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content, row_blocks
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box
from engine.checkpoint.rows import ReadRows, Rows
from engine.checkpoint.weight_source import WeightSource, WrappedSource
from engine.conversion.add_adapter import MergedRows
from engine.distributed.sharding import ShardSpec
from engine.layers.context import TrainingPlan
from engine.layers.encoded_storage import encoded_entries, sharing_scales
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import meta_model
from engine.ops.encoded_weight import BaseEncoding
from engine.quantization.encoded_parts import WholeMatrix, largest_of
from engine.quantization.encoding import encoding

_KEPT_MAXIMA = 8


def encoded_names(
    config: DecoderConfig, base_dtype: str, trained_in_full: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Returns the weights that a run stores encoded, linears of the layers but for those that it trains: logical name
    -> the names of those that have one scale of scales with it, itself among them.
    """
    modules = {name.rpartition(".")[0] for name in trained_in_full}
    plan = TrainingPlan(trains=lambda module: module in modules)
    model = meta_model(config, plan=plan, base=BaseEncoding.named(base_dtype))
    groups = [tuple(entry.name for entry in together) for together in sharing_scales(encoded_entries(model))]
    return {name: group for group in groups for name in group}


class DecodedSource(WrappedSource):
    """The weights of a base as `base_dtype` keeps them.

    Args:
        base: the weights before they were encoded.
        base_dtype: name of the encoding.
        trained_in_full: names of the weights that the run trained, which it kept in numbers.
    """

    def __init__(self, base: WeightSource, base_dtype: str, trained_in_full: Collection[str] = ()) -> None:
        super().__init__(base, base.model, has_tied_head=base.has_tied_head)
        self.base_dtype, self._names = base_dtype, encoded_names(base.model.decoder, base_dtype, trained_in_full)
        self._encoding = encoding(base_dtype)
        self._absmax = lru_cache(maxsize=_KEPT_MAXIMA)(self._find_absmax)

    def boxes(self, name: str) -> Sequence[Box]:
        return (Box(),) if name in self._names else self.base.boxes(name)

    def view(self, name: str, index: int) -> Tensor:
        """Returns a decoded weight, fp32 [rows, columns], decoded again at each call."""
        if name not in self._names:
            return self.base.view(name, index)
        out = torch.empty(self.shape(name), dtype=torch.float32)
        for first, last in row_blocks(self.shape(name), out.itemsize):
            self._decode(name, first, last, out[first:last])
        return out

    def read(self, name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        if name not in self._names or spec.dim != 0 or len(spec.pieces) != 1 or spec.is_padded or any(spec.offsets):
            return TensorReader.read(self, name, spec, out)
        self.require(name, spec.global_shape)
        first, count = spec.pieces[0].global_offset, spec.pieces[0].length
        out = torch.empty(spec.local_shape, dtype=self.dtype(name)) if out is None else out
        self._decode(name, first, first + count, out)
        return out

    def contents(self, name: str, wanted: Sequence[Box]) -> list[Content]:
        if name not in self._names:
            return self.base.contents(name, wanted)
        assert list(wanted) == [Box()], wanted
        return [MergedRows(name, self.rows(name), torch.float32, self.dtype(name), None)]

    def rows(self, name: str) -> Rows:
        if name not in self._names:
            return self.base.rows(name)
        return ReadRows(self, name)

    def identity(self) -> dict[str, Any]:
        return {"base_dtype": self.base_dtype, "encoded": sorted(self._names)}

    def changed_names(self) -> list[str]:
        return [name for name in self.tensor_names() if name in self._names]

    @property
    def encoded(self) -> frozenset[str]:
        """The names of the weights that are encoded."""
        return frozenset(self._names)

    def parts(self, name: str, granule: int) -> dict[str, Tensor]:
        """Returns the parts of an encoded weight.

        Args:
            granule: rows to a row of scales, see `Format`.
        """
        return self._encoding.stacked([granule]).encode(self.base.read_whole(name), self._whole(name))

    def _decode(self, name: str, first: int, last: int, out: Tensor) -> None:
        height = 1 if self._encoding.format is None else self._encoding.format.rows
        low, high = first // height * height, min(-(-last // height) * height, self.shape(name)[0])
        rows = self.base.read_rows(name, low, high)  # whole blocks, of which some rows may be asked for
        parts = self._encoding.encode(rows, replace(self._whole(name), first_row=low))
        if (low, high) == (first, last):
            self._encoding.decode(parts, out)
            return
        whole = torch.empty(high - low, rows.shape[1], dtype=out.dtype)
        self._encoding.decode(parts, whole)
        out.copy_(whole[first - low : last - low])

    def _whole(self, name: str) -> WholeMatrix:
        group = self._names[name]
        largest = largest_of(*map(self._absmax, group)) if len(group) > 1 else None
        return WholeMatrix(absmax=self._absmax(name), largest=largest)

    def _find_absmax(self, name: str) -> Tensor:
        blocks = row_blocks(self.shape(name), self.dtype(name).itemsize)
        return self._encoding.join([self._encoding.absmax(self.base.read_rows(name, *block)) for block in blocks], 0)
