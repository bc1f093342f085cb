"""Sizes of one rank's model, read from a model on the meta device: no formula here knows how a weight is laid out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch

from engine.distributed.mesh import Axis, shape_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.embedding import VocabParallelEmbedding
from engine.layers.encoded_storage import encoded_entries, encoded_memories
from engine.layers.host_storage import STAYS_BELOW, is_kept_in_host_memory
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.module import ShardedModule, ShardEntry, shard_entries
from engine.layers.norm import RMSNorm
from engine.layers.plan import LORA_LEAVES, TensorLayout, TrainingPlan
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.products import FOLDED
from engine.ops.quantized_products import require_product_sizes
from engine.optim.flat import ALIGNMENT
from engine.quantization.encoding import encoding

DECODED = ("nf4", "int8")
"""Encodings whose numbers are needed for a product; the others multiply with their codes."""

RegionKey = tuple[tuple[str, ...], tuple[str, ...], bool]
"""What parameters of one region of the optimizer have in common; see engine.optim.flat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One parallel linear on one rank.

    Args:
        inputs, outputs: I and O of this rank.
        extra: columns added to the weight for folded adapters.
        rank: rows of the stacked A; 0 without adapters.
        joint: dH crosses the ranks along with dX.
        folded: B lies beside W.
        drops: the adapters' input is dropped out.
        trained_rows: output rows of each weight that trains.
        trains: a weight or a bias trains.
        adapter_products: elements of the largest A or B, whose gradient is a product of its own.
        encoding: how the weight is stored; None for the model's dtype.
        stacked: the largest number of rows of the matrices that are stacked in it, where it is encoded.
    """

    inputs: int
    outputs: int
    extra: int
    rank: int
    joint: bool
    folded: bool
    drops: bool
    trained_rows: tuple[int, ...]
    trains: bool
    adapter_products: int
    encoding: str | None = None
    stacked: int = 0

    @property
    def is_decoded(self) -> bool:
        """Whether products need its numbers first, see engine.ops.encoded_weight."""
        return self.encoding in DECODED

    @property
    def has_leaves(self) -> bool:
        """Whether anything of it trains, so that its output needs a gradient whatever its input does."""
        return self.trains or self.rank > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One decoder layer on one rank; heads are those of this rank.

    A family may have norms on the inputs of attention and MLP, on their outputs, or on both, and on queries and keys;
    its attention may see a window, or cap its scores.
    """

    qkv: LinearShape
    out: LinearShape
    gate_up: LinearShape
    down: LinearShape
    input_norms: bool
    output_norms: bool
    trains_input_norm: bool
    trains_post_norm: bool
    trains_output_norms: bool
    trains_head_norms: bool
    qk_norm: bool
    qk_norm_over_all: bool
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: bool

    @property
    def width(self) -> int:
        """Features of the queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return (self.qkv, self.out, self.gate_up, self.down)

    @property
    def trains(self) -> bool:
        """Whether anything of it trains."""
        norms = (self.trains_input_norm, self.trains_post_norm, self.trains_output_norms, self.trains_head_norms)
        return any(norms) or any(linear.has_leaves for linear in self.linears)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndShape:
    """The embedding, or norm and head.

    Args:
        rows: vocabulary rows here, padding included.
        ids: of them, rows that stand for a token.
        trains: the matrix trains.
        trains_norm: of the head: the norm before it trains.
        caps_logits: of the head: its loss is plain torch in any backend.
        rank: of the embedding's adapter; the head's is in `linear`.
        linear: the head.
    """

    rows: int
    ids: int
    trains: bool
    trains_norm: bool = False
    caps_logits: bool = False
    rank: int = 0
    linear: LinearShape | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Of a layer or an end: elements stored in the model's dtype, and what the optimizer holds of them.

    Args:
        base: elements of weights, norms and biases, but for those that are stored encoded.
        adapters: elements of A and B, folded columns and their padding included.
        trained: region of the optimizer -> elements, each parameter aligned.
        largest: elements of the largest tensor, encoded ones included.
        moved: elements of the storages that wait in host memory, where frozen weights do.
        copied: of those, the trained ones, of which the device keeps a copy.
        encoded: bytes of the weights that are stored encoded.
        encoded_moved: of those, bytes of the storages that wait in host memory, where frozen weights do.
    """

    base: int
    adapters: int
    trained: dict[RegionKey, int]
    largest: int
    moved: int = 0
    copied: int = 0
    encoded: int = 0
    encoded_moved: int = 0

    def base_bytes(self, itemsize: int) -> int:
        """Of weights, norms and biases."""
        return self.base * itemsize + self.encoded

    def moved_bytes(self, itemsize: int) -> int:
        """Of what waits in host memory, where frozen weights do."""
        return self.moved * itemsize + self.encoded_moved


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A whole model as one tensor-parallel rank would hold it. Layers that are alike are one object."""

    hidden: int
    layers: tuple[LayerShape, ...]
    layer_parameters: tuple[Parameters, ...]
    embedding: EndShape
    embedding_parameters: Parameters
    head: EndShape
    head_parameters: Parameters
    tied: bool
    scales_embeddings: bool
    num_ropes: int
    rotary_dim: int

    @property
    def first_trainable_layer(self) -> int:
        """The number of layers where only the norm or head after them trains; 0 where the embedding does."""
        if self.embedding.trains or self.embedding.rank:
            return 0
        return next((index for index, layer in enumerate(self.layers) if layer.trains), len(self.layers))

    @property
    def layers_are_frozen(self) -> bool:
        """Whether no matrix of a layer trains, adapters aside."""
        return not any(linear.trained_rows for layer in self.layers for linear in layer.linears)

    def trained_elements(self) -> int:
        """On this rank, alignment included."""
        groups = (*self.layer_parameters, self.embedding_parameters, self.head_parameters)
        return sum(sum(group.trained.values()) for group in groups)


def model_shape(
    config: DecoderConfig,
    plan: TrainingPlan,
    *,
    tensor_size: int = 1,
    tensor_rank: int = 0,
    sequence_parallel: bool = False,
    joint_reduce: bool = False,
    tied_ends: bool = False,
    base_dtype: str | None = None,
    device_type: str = "meta",
) -> ModelShape:
    """Builds the model on the meta device and reads it.

    Args:
        tied_ends: a tied head lies on another pipeline rank than the embedding.
        base_dtype: how frozen weights of the layers are stored; None for the model's dtype.
        device_type: whose products must take what is stored encoded.

    Raises:
        UserError: the model's sizes do not fit `tensor_size`, or the encoding does not fit them.
    """
    mesh = shape_mesh(RankGrid(tp=tensor_size), tensor_rank, config.num_kv_heads)
    layout = TensorLayout(
        tp=mesh.tp,
        kv_replica=mesh.kv_replica,
        pp_ends=Axis("pp_ends", 2) if tied_ends else Axis("pp_ends"),
        sequence_parallel=sequence_parallel,
        joint_reduce=joint_reduce,
        base=None if base_dtype is None else BaseEncoding(encoding=encoding(base_dtype)),
    )
    model = Decoder(config, layout=layout, plan=plan, device=torch.device("meta"), dtype=torch.float32)
    _check_products(model, device_type)
    assert model.embedding is not None and model.head is not None and model.norm is not None
    return ModelShape(
        hidden=config.hidden,
        layers=_layers(model),
        layer_parameters=tuple(_layer_parameters(layer) for layer in model.layers),
        embedding=_embedding(model, model.embedding),
        embedding_parameters=_parameters(shard_entries(model.embedding)),
        head=_head(model, model.norm, model.head, caps_logits=config.logits_softcap is not None),
        head_parameters=_parameters([*shard_entries(model.norm), *shard_entries(model.head)]),
        tied=config.tied_embeddings,
        scales_embeddings=model.embedding_multiplier != 1.0,
        num_ropes=len(config.ropes),
        rotary_dim=config.rotary_dim or config.head_dim,
    )


def _embedding(model: Decoder, embedding: VocabParallelEmbedding) -> EndShape:
    operands = embedding.operands
    rows, ids = _vocabulary(model)
    rank = 0 if operands.a_RV is None else operands.a_RV.shape[0]
    return EndShape(rows=rows, ids=ids, trains=operands.sink is not None, rank=rank)


def _head(model: Decoder, norm: RMSNorm, head: ColumnParallelLinear, *, caps_logits: bool) -> EndShape:
    linear = _linear(head)
    rows, ids = _vocabulary(model)
    return EndShape(
        rows=rows,
        ids=ids,
        trains=linear.trains,
        trains_norm=_trains(norm),
        caps_logits=caps_logits,
        linear=linear,
    )


def _vocabulary(model: Decoder) -> tuple[int, int]:
    """Vocabulary rows of this rank, and those of them that stand for a token."""
    pieces = model.vocab_spec.pieces
    return model.vocab_spec.local_shape[0], pieces[0].length if pieces else 0


def _layers(model: Decoder) -> tuple[LayerShape, ...]:
    """Layers that are alike are one object."""
    known: dict[LayerShape, LayerShape] = {}
    return tuple(known.setdefault(shape, shape) for shape in map(_layer, model.layers))


def _linear(linear: ColumnParallelLinear | RowParallelLinear) -> LinearShape:
    operands = linear.operands
    low_rank = operands.low_rank
    outputs, columns = operands.extended_OE.shape
    adapters = low_rank.adapters if low_rank is not None else ()
    products = [adapter.b_OR.numel() for adapter in adapters]
    products += [adapter.b_OR.shape[1] * operands.in_features for adapter in adapters]
    return LinearShape(
        inputs=operands.in_features,
        outputs=outputs,
        extra=columns - operands.in_features,
        rank=low_rank.rank if low_rank is not None else 0,
        joint=operands.joint,
        folded=operands.backward_way is FOLDED,
        drops=low_rank is not None and low_rank.dropout is not None,
        trained_rows=tuple(sink.count for sink in operands.sinks if sink.weight is not None),
        trains=bool(operands.sinks),
        adapter_products=max(products, default=0),
        encoding=None if linear.encoded is None else linear.encoded.weight.encoding.name,
        stacked=0 if linear.encoded is None else max(linear.encoded.weight.sections),
    )


def _layer(layer: DecoderLayer) -> LayerShape:
    attention, mlp = layer.attention, layer.mlp
    head_norms = [
        norm for norm in (attention.q_norm, attention.k_norm, attention.qk_norm) if isinstance(norm, ShardedModule)
    ]
    return LayerShape(
        qkv=_linear(attention.qkv),
        out=_linear(attention.o_proj),
        gate_up=_linear(mlp.gate_up),
        down=_linear(mlp.down),
        input_norms=layer.input_norm is not None,
        output_norms=layer.mlp_output_norm is not None,
        trains_input_norm=_trains(layer.input_norm),
        trains_post_norm=_trains(layer.post_attention_norm),
        trains_output_norms=_trains(layer.attention_output_norm) or _trains(layer.mlp_output_norm),
        trains_head_norms=any(entry.sink is not None for norm in head_norms for entry in norm.entries),
        qk_norm=bool(head_norms),
        qk_norm_over_all=attention.qk_norm is not None,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        window=attention.kind.window,
        softcap=attention.kind.softcap is not None,
    )


def _trains(norm: RMSNorm | None) -> bool:
    return norm is not None and norm.weight.sink is not None


def _check_products(model: Decoder, device_type: str) -> None:
    device = torch.device(device_type)
    for entry in encoded_entries(model):
        rows, columns = entry.spec.local_shape
        require_product_sizes(entry.encoding.name, rows, columns, device, entry.name)


def _layer_parameters(layer: DecoderLayer) -> Parameters:
    """With what of it is stored encoded."""
    found = _parameters(shard_entries(layer))
    sizes = [entry.parameter.nbytes for entry in encoded_memories(layer)]
    largest = [prod(entry.spec.local_shape) for entry in encoded_entries(layer)]
    return replace(
        found,
        encoded=sum(sizes),
        encoded_moved=sum(size for size in sizes if size >= STAYS_BELOW),
        largest=max([found.largest, *largest]),
    )


def _parameters(entries: Iterable[ShardEntry]) -> Parameters:
    """Storages are counted once each: what sections share, and the columns of folded adapters, lie in one."""
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
            key = entry.spec.grad_reduce, entry.spec.replicated, len(entry.spec.global_shape) < 2
            trained[key] = trained.get(key, 0) + -(-size // ALIGNMENT) * ALIGNMENT
    moved = [key for key, held in sharing.items() if is_kept_in_host_memory(held)]
    return Parameters(
        base=base,
        adapters=sum(storages.values()) - base,
        trained=trained,
        largest=largest,
        moved=sum(storages[key] for key in moved),
        copied=sum(one.parameter.numel() for key in moved for one in sharing[key] if one.sink is not None),
    )
