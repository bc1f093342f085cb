"""The model a run starts from, before anything of it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch

from engine.checkpoint.heads import HeadChange
from engine.checkpoint.model_folder import ModelFolder, open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.weight_source import WeightSource
from engine.config.run import RunConfig
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.layers.context import TrainingPlan
from engine.layers.module import shard_entries
from engine.models.describe import meta_model
from engine.models.dtypes import TORCH_DTYPES
from engine.models.expert_ranks import check_expert_ranks
from engine.models.run_proof import RunProof
from engine.ops.encoded_weight import Formats
from engine.runtime.launch import Launch, ranks_of_this_node
from engine.seams import resolve
from engine.telemetry.format import format_bytes
from engine.telemetry.process_memory import total_memory_bytes
from engine.training.base_encoding import check_base
from engine.training.learning_rates import lr_factors
from engine.training.module_plan import training_plan, trains_apart
from engine.training.stage_layout import Partition, plan_partition


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model that is known, but not built yet.

    Args:
        model: its description.
        weights: its tensors; None when they are drawn anew.
        head_is_copy: the head is a copy of the embedding, to which the model on the disk ties it.
        drawn_formats: in which drawn weights are encoded, where a checkpoint in few bits is measured by such.
    """

    model: ModelFolder
    weights: WeightSource | None
    head_is_copy: bool = False
    drawn_formats: Formats | None = None

    @property
    def formats(self) -> Formats | None:
        """The formats in which the checkpoint has its weights."""
        return self.drawn_formats if self.weights is None else self.weights.format

    def untied(self) -> ModelSource:
        """Returns the same model with a head of its own, a copy of its embedding."""
        from engine.checkpoint.untied import untied

        weights = None if self.weights is None else untied(self.weights)
        return ModelSource(model=self.model.untied(), weights=weights, head_is_copy=True)

    def with_head(self, change: HeadChange, seed: int) -> ModelSource:
        """Returns the same model with the head that an objective trains.

        Raises:
            UserError: it cannot have it.
        """
        if self.weights is None:
            return ModelSource(model=change.folder(self.model), weights=None)
        weights = change.weights(self.weights, seed=seed)
        return ModelSource(model=weights.model, weights=weights)

    def fingerprint(self) -> str | None:
        """Returns the fingerprint of the weights; None when there are none."""
        return self.weights.fingerprint() if self.weights is not None else None

    def fresh_fingerprint(self) -> str | None:
        """Returns the fingerprint, from files that are opened anew where it has to be read: in a thread of its own."""
        if self.weights is None or self.weights.known_fingerprint() is not None:
            return self.fingerprint()
        return open_source(self.model.path, self.model.implementation).fingerprint()

    def agree_on_fingerprint(self, rank: int) -> None:
        """Has rank 0 read the fingerprint, and the others take it over: it is small reads all over the model, which on
        a shared disk each rank would repeat. Collective.
        """
        if self.weights is not None:
            mine = self.weights.fingerprint() if rank == 0 else None
            self.weights.know_fingerprint(cast(str, broadcast_object(mine)))

    def sums(self) -> dict[str, str] | None:
        """Checksums of the whole tensors, once all ranks have read the weights; None when there are none."""
        return self.weights.sums() if self.weights is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """The roles of a model's modules in a run, and their places, found to fit the layout.

    Args:
        modules: the role of each module.
        partition: which layers each pipeline stage holds.
        shapes: the global shape of every parameter of the whole model, adapters included, in forward order.
        trained: the same of those that train.
        lr_factors: trained parameter -> its learning rate as a multiple of `optim.lr`, where it is not that.
        encodings: names of those that the base's weights are stored in.
        proof: that the layout computes the model; None where none was asked for.
    """

    modules: TrainingPlan
    partition: Partition
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    trained: Mapping[str, tuple[int, ...]] = field(repr=False)
    lr_factors: Mapping[str, float] = field(default_factory=dict, repr=False)
    encodings: tuple[str, ...] = ()
    proof: RunProof | None = None

    def lr_factor(self, name: str) -> float:
        """Returns the learning rate of a trained parameter as a multiple of `optim.lr`."""
        return self.lr_factors.get(name, 1.0)

    def num_trained(self) -> int:
        """Trained parameters of the whole model, each once."""
        return sum(map(prod, self.trained.values()))


def model_source(config: RunConfig) -> ModelSource:
    """Opens `model.path`, as the run trains it; reads no weights yet.

    Raises:
        UserError: the folder is not a model the engine knows.
    """
    if config.model.init == "random":
        source = ModelSource(model=open_model(config.model.path, config.model.implementation), weights=None)
    else:
        weights = open_source(config.model.path, config.model.implementation)
        source = ModelSource(model=weights.model, weights=weights)
    if (head := config.objective.kind.head) is not None:
        return source.with_head(resolve(head), config.train.seed)
    source.model.check_tokens()
    return source.untied() if trains_apart(config, source.model.decoder, source.model.names) else source


def check_model(
    config: RunConfig,
    model: ModelFolder,
    world_size: int = 1,
    weights: WeightSource | None = None,
    formats: Formats | None = None,
) -> ModelPlan:
    """Plans the roles of the model's modules, and checks that the model fits the layout.

    Args:
        weights: the model's; needed where the base stays as they are stored.
        formats: see `check_base`.

    Raises:
        UserError: a pattern that matches nothing, sizes that do not divide over the ranks, layers that cannot be
            split into the stages asked for, or a base_dtype that has nothing to encode or does not fit the ranks.
    """
    plan = training_plan(config, model.decoder, model.names)
    parallel, decoder = config.parallel, model.decoder
    check_expert_ranks(decoder, expert=parallel.expert, tensor=parallel.tensor, folds=parallel.has_expert_mesh)
    if parallel.sequence and not decoder.splits_tokens:
        raise UserError(
            f"parallel.sequence is true, but the layers of this {decoder.family} model are transformers' own modules, "
            "which see all tokens of a row: leave parallel.sequence out."
        )
    if config.data.packing is True:  # concatenated, a row is one document
        decoder.check_packing()
    if parallel.context > 1:
        decoder.check_context(parallel.context, parallel.context_method)
    if config.train.router_aux_loss_coef:
        resolve("engine.experts.router_load:check_balance")(config, decoder)
    model_here = meta_model(decoder, tensor_size=parallel.tensor, shards_experts=parallel.shards_experts, plan=plan)
    entries = list(shard_entries(model_here))
    shapes = {entry.name: tuple(entry.spec.global_shape) for entry in entries}
    trained = {entry.name: shapes[entry.name] for entry in entries if entry.sink is not None}
    encodings = check_base(config, decoder, plan, weights, formats)
    partition = plan_partition(config, decoder, trained, world_size)
    if parallel.context > 1 and parallel.context_method == "ulysses":
        from engine.ops.attention.ulysses import check_context_heads

        heads = (decoder.num_heads // parallel.tensor, max(1, decoder.num_kv_heads // parallel.tensor))
        check_context_heads(*heads, parallel.context)
    return ModelPlan(
        modules=plan,
        partition=partition,
        shapes=shapes,
        trained=trained,
        lr_factors=lr_factors(config.optim, model, trained),
        encodings=encodings,
    )


def check_room(config: RunConfig, plan: ModelPlan, launch: Launch) -> None:
    """Checks that a model whose weights are drawn could be held at all: no checkpoint shows that its sizes are meant.

    Counted is what every layout has at least, once over all ranks: the weights, and fp32 gradients of those that train.

    Raises:
        UserError: this machine's ranks have more of that than it has memory.
    """
    weights, trained = (sum(map(prod, shapes.values())) for shapes in (plan.shapes, plan.trained))
    width = TORCH_DTYPES[config.model.dtype].itemsize if config.model.base_dtype is None else _LEAST_ENCODED
    num_here = ranks_of_this_node()
    needed = (weights * width + trained * 4) * num_here / launch.world_size
    room = total_memory_bytes()
    if launch.device.type == "cuda":
        room += num_here * torch.cuda.get_device_properties(launch.device).total_memory
    if needed > room:
        raise UserError(
            f"config.json describes a model of {weights:,} parameters, which takes at least {format_bytes(needed)} on "
            f"this machine, and it has {format_bytes(room)}: draw a smaller model, or use more machines."
        )


_LEAST_ENCODED = 0.5
"""Bytes of an encoded weight, at least."""


def start_adapter(config: RunConfig, source: ModelSource, plan: ModelPlan) -> TensorReader | None:
    """Returns the adapter of lora.init_from, found to fit the adapters that the run trains; None where there is none.

    Raises:
        UserError: as `engine.training.adapter_source.adapter_source`.
    """
    if config.lora.rank == 0 or config.lora.init_from is None:
        return None
    found: TensorReader = resolve("engine.training.adapter_source:adapter_source")(config, source, plan)
    return found
