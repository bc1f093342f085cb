"""Sizes of one rank's model, read from a model on the meta device: no formula here knows how a weight is laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod

import torch
from torch import nn

from engine.kernels.formats import Format
from engine.layers.branch import LinearShape
from engine.layers.context import LORA_LEAVES, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import EncodedStorage, encoded_entries, encoded_memories
from engine.layers.host_storage import STAYS_BELOW, is_kept_in_host_memory
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.merged_codes import merging_storages
from engine.layers.module import ShardEntry, shard_entries
from engine.models.decoder import Decoder, Part, build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.decoder_layer import DecoderLayer
from engine.models.layer_kinds import layer_kinds
from engine.optim.flat_layout import ALIGNMENT

_LINEARS = (ColumnParallelLinear, RowParallelLinear)

WIDE = 4
"""Bytes of statistics, and of the numbers in which norms, losses and the optimizer compute."""

RegionKey = tuple[str, tuple[str, ...], tuple[str, ...], bool]
"""The key of one region of the optimizer, which begins with the axis that gradients are summed over; see
engine.optim.flat_layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One decoder layer on one rank.

    Args:
        attention, between, mlp: the linears of its branches, see `Branch.linear_shapes`; `between`, those of branches
            beside attention or behind it, may be empty. Of a layer without branches, `attention` and `mlp` are all of
            its linears.
        kv_width: features of the keys on this rank; 0 for a layer that attends to none.
        trains: whether anything of it does.
        routes_local_tokens: each tensor rank has tokens of its own before whole experts; see
            engine.experts.layers.routed_experts.
        has_shared: whether all tokens share an expert beside those that a router chooses.
    """

    attention: tuple[LinearShape, ...]
    mlp: tuple[LinearShape, ...]
    kv_width: int
    trains: bool
    between: tuple[LinearShape, ...] = ()
    routes_local_tokens: bool = False
    has_shared: bool = False

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return (*self.attention, *self.mlp, *self.between)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Parameters of a layer or an end: elements stored in the model's dtype, and in the optimizer.

    Args:
        data: name of the axis of the ranks that hold copies of them, see `ShardSpec.data`.
        base: elements of weights, norms and biases, but for those that are stored encoded.
        adapters: elements of A and B, folded columns and their padding included.
        trained: region of the optimizer -> elements, each parameter aligned.
        largest: elements of the largest tensor, encoded ones included.
        moved: elements of the storages that are offloaded, where frozen weights are.
        copied: of those, the trained ones, of which the device keeps a copy.
        encoded: bytes of the weights that are stored encoded.
        encoded_moved: of those, bytes of the storages that are offloaded, where frozen weights are.
        merged: of `encoded`, bytes of the storages with a weight that takes adapters before it is rounded.
        merged_moved: of those, what is offloaded, where frozen weights are.
        whole: elements, of `base` and `adapters`, that stay on every rank where weights are sharded.
    """

    data: str
    base: int
    adapters: int
    trained: dict[RegionKey, int]
    largest: int
    moved: int = 0
    copied: int = 0
    encoded: int = 0
    encoded_moved: int = 0
    merged: int = 0
    merged_moved: int = 0
    whole: int = 0

    def base_bytes(self, itemsize: int) -> int:
        """Returns the bytes of weights, norms and biases."""
        return self.base * itemsize + self.encoded

    def gathered_bytes(self, itemsize: int, copies: int) -> int:
        """Returns the bytes that a rank gathers to use them, where weights are sharded.

        Args:
            copies: the number of ranks that they are sharded over; nothing is gathered where it is 1.
        """
        return 0 if copies == 1 else self.base_bytes(itemsize) + (self.adapters - self.whole) * itemsize

    def moved_bytes(self, itemsize: int) -> int:
        """Returns the bytes that are offloaded, where frozen weights are."""
        return self.moved * itemsize + self.encoded_moved


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A whole model as one tensor-parallel rank would hold it.

    Args:
        kinds: for each layer the number of the first one that is like it.
        layer_parameters: of each layer; of one with experts that are spread over other ranks, the others and theirs.
        embedding_trains: whether the embedding's matrix, an adapter on it, or anything else before the layers does.
        carried_trains: whether anything of a front does whose features stand beside the stream.
        embedding_parameters: of the embedding, and of all that is beside it on the first stage, such as a vision model.
        decoded_experts: bytes in which experts that a router chooses are decoded; 0 where they are stored plainly.
        encodings: names of those in which weights of the layers are stored, each once.
        rounding: formats of those whose products are of codes and rounded inputs, each once.
    """

    hidden: int
    layers: tuple[LayerShape, ...]
    kinds: tuple[int, ...]
    layer_parameters: tuple[tuple[Parameters, ...], ...]
    embedding_trains: bool
    carried_trains: bool
    embedding_parameters: Parameters
    head_parameters: Parameters
    tied: bool
    decoded_experts: int = 0
    encodings: tuple[str, ...] = ()
    rounding: tuple[Format, ...] = ()

    @property
    def first_trainable_layer(self) -> int:
        """The number of layers where only the norm or head after them trains; 0 where the embedding does."""
        if self.embedding_trains or self.carried_trains:
            return 0
        return next((index for index, layer in enumerate(self.layers) if layer.trains), len(self.layers))

    def needs_backward(self, index: int) -> bool:
        """Returns whether a layer has a backward even if its input needs no gradient."""
        return self.carried_trains or self.layers[index].trains

    @property
    def layers_are_frozen(self) -> bool:
        """Whether no matrix of a layer trains, adapters aside."""
        return not any(linear.trained_rows for layer in self.layers for linear in layer.linears)

    def trained_elements(self) -> dict[str, int]:
        """Returns the number of trained elements on this rank, alignment included, by the axis that their gradients are
        summed over."""
        elements: dict[str, int] = {}
        for group in (*chain(*self.layer_parameters), self.embedding_parameters, self.head_parameters):
            elements[group.data] = elements.get(group.data, 0) + sum(group.trained.values())
        return elements


def model_shape(
    config: DecoderConfig, plan: TrainingPlan, layout: TensorLayout, device_type: str, dtype: torch.dtype
) -> ModelShape:
    """Builds the two ends and one layer of each kind on the meta device, the first beside the ends, and reads them.

    Args:
        config, plan: of the model.
        layout: of this rank.
        device_type: whose products must take encoded weights.
        dtype: of weights and activations, on which folding depends.

    Raises:
        UserError: the model's sizes do not fit the layout, or the encoding does not fit them.
    """
    build = partial(build_decoder, config, layout=layout, plan=plan, device=torch.device("meta"), dtype=dtype)
    kinds = layer_kinds(config, plan, None if layout.base is None else layout.base.formats)
    ends = build(part=Part(first=0, last=1))
    parts = {0: ends}
    for kind in sorted({*kinds} - {0}):
        parts[kind] = build(part=Part(first=kind, last=kind + 1, embedding=False, head=False))
    for part in parts.values():
        _check_products(part, device_type)
    kv_width = config.num_kv_heads // (layout.tp.size // layout.kv_replica.size) * config.head_dim
    layers = {kind: _layer(part.layers[0], kv_width) for kind, part in parts.items()}
    parameters = {kind: _layer_parameters(part.layers[0]) for kind, part in parts.items()}
    assert ends.embedding is not None and ends.head is not None
    before = (ends.embedding, ends.fronts, ends.layers, *ends.beside_embedding)
    behind = [module for module in ends.children() if not any(module is one for one in before)]
    operands = ends.embedding.operands
    vision = [entry for front in ends.fronts if not front.stays_whole for entry in shard_entries(front)]
    encoder = [entry for front in ends.fronts if front.stays_whole for entry in shard_entries(front)]
    beside = [entry for module in ends.beside_embedding for entry in shard_entries(module)]
    front_trains = any(entry.sink is not None for entry in (*vision, *beside))
    whole = _parameters(encoder)
    front = _parameters([*shard_entries(ends.embedding), *beside, *vision, *encoder])
    return ModelShape(
        hidden=config.hidden,
        layers=tuple(layers[kind] for kind in kinds),
        kinds=kinds,
        layer_parameters=tuple(parameters[kind] for kind in kinds),
        embedding_trains=operands.sink is not None or operands.a_RV is not None or front_trains,
        carried_trains=ends.carried_trains,
        embedding_parameters=replace(front, whole=whole.base + whole.adapters, moved=front.moved - whole.moved),
        head_parameters=_parameters(chain.from_iterable(map(shard_entries, behind))),
        tied=config.tied_embeddings,
        decoded_experts=0 if layout.base is None or not config.num_experts else layout.base.scratch.num_bytes,
        encodings=tuple(dict.fromkeys(one.encoding.name for part in parts.values() for one in encoded_entries(part))),
        rounding=tuple(dict.fromkeys(chain.from_iterable(map(_rounding, parts.values())))),
    )


def _layer(layer: nn.Module, kv_width: int) -> LayerShape:
    """Reads a layer; `kv_width` is that of one without branches."""
    trains = any(entry.sink is not None for entry in shard_entries(layer))
    if not isinstance(layer, DecoderLayer):
        linears = tuple(shape for one in layer.modules() if isinstance(one, _LINEARS) for shape in one.shapes)
        return LayerShape(attention=linears, mlp=linears, kv_width=kv_width, trains=trains)
    attention, mlp = layer.attention, layer.mlp
    cached = None if attention is None else attention.cached
    first, *beside = (None,) if attention is None else attention.parts
    return LayerShape(
        attention=() if first is None else first.linear_shapes,
        mlp=() if mlp is None else mlp.linear_shapes,
        between=tuple(shape for branch in (*beside, *layer.between, *layer.behind) for shape in branch.linear_shapes),
        kv_width=0 if cached is None else cached.num_kv_heads * cached.head_dim,
        trains=trains,
        routes_local_tokens=mlp is not None and mlp.routes_local_tokens,
        has_shared=mlp is not None and mlp.has_shared,
    )


def _rounding(model: Decoder) -> Iterator[Format]:
    """Yields the formats of the linears whose products are of codes and rounded inputs."""
    for module in model.modules():
        if isinstance(module, EncodedStorage) and module.rounds_inputs and module.encoding.format is not None:
            yield module.encoding.format


def _check_products(model: Decoder, device_type: str) -> None:
    device = torch.device(device_type)
    for layer in model.layers:
        if isinstance(layer, DecoderLayer) and layer.mlp is not None:
            layer.mlp.check_products(device_type)
    for module in model.modules():
        if isinstance(module, EncodedStorage):
            module.check_products(device)


def _layer_parameters(layer: nn.Module) -> tuple[Parameters, ...]:
    """Returns a layer's parameters, with those stored encoded, by the ranks that hold copies."""
    plain, memories, encoded = (
        list(each) for each in (shard_entries(layer), encoded_memories(layer), encoded_entries(layer))
    )
    groups = []
    for data in dict.fromkeys(entry.spec.data for entry in (*plain, *memories)):
        found = _parameters([entry for entry in plain if entry.spec.data == data], data)
        sizes = [entry.parameter.nbytes for entry in memories if entry.spec.data == data]
        merging = [one.memory.nbytes for one in merging_storages((layer,)) if one.entry.spec.data == data]
        largest = [prod(entry.spec.local_shape) for entry in encoded if entry.spec.data == data]
        groups.append(
            replace(
                found,
                encoded=sum(sizes),
                encoded_moved=_moved(sizes),
                merged=sum(merging),
                merged_moved=_moved(merging),
                largest=max([found.largest, *largest]),
            )
        )
    return tuple(groups)


def _moved(sizes: Iterable[int]) -> int:
    """Returns the bytes of those storages of bytes that are offloaded, where frozen weights are."""
    return sum(size for size in sizes if size >= STAYS_BELOW)


def _parameters(entries: Iterable[ShardEntry], data: str = "dp_cp") -> Parameters:
    """Counts each storage once: sections share one, and the columns of folded adapters lie in it."""
    storages: dict[int, int] = {}
    sharing: dict[int, list[ShardEntry]] = {}
    base = largest = 0
    trained: dict[RegionKey, int] = {}
    for entry in entries:
        storage = entry.parameter.data.untyped_storage()
        storages[storage._cdata] = storage.nbytes() // entry.parameter.element_size()
        sharing.setdefault(storage._cdata, []).append(entry)
        size = prod(entry.spec.local_shape)
        largest = max(largest, size)
        if entry.name.rpartition(".")[2] not in LORA_LEAVES:
            base += size
        if entry.sink is not None:
            key = data, entry.spec.grad_reduce, entry.spec.replicated, len(entry.spec.global_shape) < 2
            trained[key] = trained.get(key, 0) + -(-size // ALIGNMENT) * ALIGNMENT
    moved = [key for key, held in sharing.items() if is_kept_in_host_memory(held)]
    return Parameters(
        data=data,
        base=base,
        adapters=sum(storages.values()) - base,
        trained=trained,
        largest=largest,
        moved=sum(storages[key] for key in moved),
        copied=sum(one.parameter.numel() for key in moved for one in sharing[key] if one.sink is not None),
    )
