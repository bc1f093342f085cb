"""Traces of the memory that the pieces of a model take for one micro-batch, by running the engine's own code once.

A piece is a layer, the embedding, or norm, head and loss. It is built as a run builds it, for one rank and on the meta
device, runs forward and backward under a recording, and is dropped. Layers that are alike share a trace, and so do all
layouts, schedules and numbers of layers of a search that do not change the piece. What cannot run without a device is
in `engine.ops.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config.parallel import ParallelOptions
from engine.distributed.mesh import Axis, ExpertAxes, ExpertRows, Unconnected, shape_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.context import TensorLayout
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.recompute import SELECTIVE, Level, MemoryPlan
from engine.layers.saved import SavedTensors
from engine.models.decoder import Decoder, Part, build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.expert_ranks import check_expert_ranks
from engine.models.front_module import Carried
from engine.ops.attention.token_context import TokenContext
from engine.ops.gradients import GradientSink
from engine.ops.kernels import shape_backend
from engine.planning import traced_batch
from engine.planning.launches import LaunchCounter, PieceLaunches, TorchAttention, counted_base, counted_kernels
from engine.planning.ledger import ACTIVATIONS, COMMUNICATION, Parts
from engine.planning.rank_layout import Workload
from engine.planning.recording import Recording
from engine.planning.shapes import ModelShape, model_shape
from engine.planning.stand_ins import shape_base, shape_blocks
from engine.planning.traced_batch import META, expert_rows
from engine.seams import resolve
from engine.zigzag import rank_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The memory of one piece for one micro-batch, beside earlier allocations.

    Args:
        forward: at the peak of forward, beside the piece's input.
        kept: between forward and backward, without the output.
        keeps_input: whether the input is among it.
        backward: at the peak of backward, beside `kept` and the output's gradient: by whether the caller holds the
            input, and that gradient, until backward ends.
        left: after a backward that defers the weight gradients.
        away: bytes that are offloaded to host memory.
        launches: of its operations; of a backward that defers the weight gradients, without those.
    """

    forward: Parts
    kept: Parts
    keeps_input: bool = False
    backward: dict[tuple[bool, bool], Parts] = field(default_factory=dict)
    left: Parts = field(default_factory=dict)
    away: int = 0
    launches: PieceLaunches = field(default_factory=lambda: PieceLaunches(forward=()))


class _Start(torch.autograd.Function):
    """Makes the input of a piece, which no earlier node holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> None:
        return None


class _End(torch.autograd.Function):
    """Stands for the pieces that follow: makes the gradient of its output, and reports it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.arrived = y.shape, y.dtype, arrived
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        dy = torch.empty(ctx.shape, dtype=ctx.dtype, device=META)
        ctx.arrived(dy)
        return dy, None


class _UncountedTransfer:
    """An offload whose memory is not counted; see engine.layers.host_copies.Transfer."""

    def __init__(self) -> None:
        self.nbytes = 0

    def send(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.nbytes += tensor.nbytes
        return tensor.shape, tensor.dtype

    def fetch(self, sent: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(sent[0], dtype=sent[1], device=META)

    def wait(self, fetched: Tensor) -> Tensor:
        return fetched


_FOREIGN: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Raised where modules of transformers miss numbers; of the engine's own code an operation of torch alone does."""
_Calls = list[Callable[[Tensor], Tensor]]
_Body = Callable[[Decoder, Batch, TokenContext, Tensor, _Calls], Tensor]
"""Computes a piece: from the model, a micro-batch, its coordinates, the input and the model's layers, the output."""


class RankModel:
    """A model as one tensor-parallel rank has it: its sizes, and its pieces, each traced once.

    Args:
        workload: the training.
        parallel: of it the tensor and the context axis matter, and whether there is a pipeline.

    Attributes:
        shape: its parameters.
        tokens: of a micro-batch, after context parallelism.
        stream: bytes of the residual stream between two pieces.
        encoded: bytes of the encoded images of a micro-batch that all layers attend to.
        pixels: bytes of a micro-batch's patches, for all towers, on the rank that encodes most.

    Raises:
        UserError: the model's sizes do not fit the ranks.
    """

    def __init__(self, workload: Workload, parallel: ParallelOptions) -> None:
        check_expert_ranks(
            workload.decoder, expert=parallel.expert, tensor=parallel.tensor, folds=parallel.has_expert_mesh
        )
        self._workload, self._parallel = workload, parallel
        self.shape = _rank_shape(replace(workload, routing="balanced"), parallel)
        columns = sum(span.length for span in rank_columns(workload.seq_length, parallel.context, 0))
        self.tokens = workload.micro_batch * columns
        local = self.tokens // parallel.tensor if parallel.sequence_parallel else self.tokens
        self.stream = local * workload.decoder.hidden * workload.dtype.itemsize
        fronts, rows = workload.decoder.fronts, traced_batch.example_rows(workload, parallel.context)
        self._batch = traced_batch.batch(workload, parallel.context)
        images = sum(front.num_carried(self._batch) * front.carried_width for front in fronts)
        self.encoded = workload.dtype.itemsize * images
        self.pixels = sum(front.input_bytes(rows, parallel.tensor * parallel.context) for front in fronts)
        self._layers: dict[tuple[object, ...], Trace] = {}
        # the ends are the same however experts are divided
        self._ends = _end_traces(replace(workload, routing="balanced"), _without_experts(parallel))

    def levels(self, layer: int) -> int:
        """Returns how many features for a layer and later ones come in with the stream, each as large as it."""
        return sum(front.num_levels(self._batch, layer) for front in self._workload.decoder.fronts)

    def beside(self, layer: int) -> int:
        """Returns the bytes of what stands beside the stream that enters a layer."""
        shapes = self._workload.decoder.beside_stream(self.tokens, self._parallel.tensor, layer)
        return self.encoded + self._workload.dtype.itemsize * sum(map(prod, shapes))

    def waiting(self, layer: int) -> int:
        """Returns the bytes of gradients that layers behind this one left beside that of the stream."""
        decoder, behind = self._workload.decoder, layer + 1
        shapes = decoder.beside_stream(self.tokens, self._parallel.tensor, behind)
        counted = shapes[: decoder.num_beside_with_stream(behind)]
        return self._workload.dtype.itemsize * sum(map(prod, counted))

    @property
    def message(self) -> int:
        """The most bytes that one stage sends the next for a micro-batch, without `levels`."""
        return self.stream + max(map(self.beside, range(1, self._workload.decoder.num_layers + 1)))

    def _once(self, key: tuple[object, ...], part: Part, body: _Body, **options: Any) -> Trace:
        known = self._layers if part.last > part.first else self._ends
        if key not in known:
            untraceable = _FOREIGN if self._workload.decoder.all_linears else (RuntimeError,)
            try:
                known[key] = self._trace(part, body, **options)
            except UserError:
                raise
            except untraceable as error:
                raise UserError(
                    f"the planner cannot follow {key[0]} of this model with torch {torch.__version__}: {error}"
                ) from error
        return known[key]

    def _trace(
        self,
        part: Part,
        body: _Body,
        *,
        needs: bool,
        saved: bool,
        memory: MemoryPlan = SELECTIVE,
        defers: bool = False,
        decoder: DecoderConfig | None = None,
        has_logits: bool = False,
    ) -> Trace:
        workload = self._workload if decoder is None else replace(self._workload, decoder=decoder)
        tracer = _tracer(workload, self._parallel, part, memory)
        return tracer.trace(body, needs=needs, saved=saved, defers=defers, has_logits=has_logits)

    def layer(self, kind: int, memory: MemoryPlan, *, needs: bool, saved: bool = True, defers: bool = False) -> Trace:
        """Traces a decoder layer.

        Args:
            kind: the number of a layer that is like it.
            memory: its `recompute` is the layer's level, and `offload` whether the layer's activations are offloaded.
            needs: whether its input needs a gradient.
            saved: whether there is a backward.
            defers: whether that defers the weight gradients.
        """

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor, calls: _Calls) -> Tensor:
            # of two layers, the last of which would keep everything here
            layers = model.saved.layers(2, context, model.layers.parameters())
            with next(layers):
                out: Tensor = calls[0](x)
            return out

        part = Part(first=kind, last=kind + 1, embedding=False, head=False)
        key = ("a layer", kind, memory, needs, saved, defers)
        return self._once(key, part, body, memory=memory, needs=needs, saved=saved, defers=defers)

    def embedding(self, level: Level, *, saved: bool) -> Trace:
        """Traces the embedding, from token ids and the images' patches to the residual stream.

        Args:
            level: of the first layer, which a vision model follows.
        """

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor, calls: _Calls) -> Tensor:
            x = model.embed(batch, step=context.step)
            if not model.beside_embedding:
                return x
            return model.run_layers(x, model.context(batch, context.step, training=True))  # of which there are none

        decoder = self._workload.decoder
        decoder = replace(decoder, fronts=tuple(front for front in decoder.fronts if not front.carried_width))
        return self._front("the embedding", decoder, body, level, saved=saved and self.shape.embedding_trains)

    def encoder(self, level: Level, *, saved: bool) -> Trace:
        """Traces the encoder of the images that layers attend to, from their patches.

        Args:
            level: of the first layer, which the encoder follows.
        """

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor, calls: _Calls) -> Tensor:
            found = model.context(batch, context.step, training=True).part(Carried)
            assert found is not None
            (rows,) = found.rows
            assert rows is not None
            return rows

        decoder = self._workload.decoder
        decoder = replace(decoder, fronts=tuple(front for front in decoder.fronts if front.carried_width))
        return self._front("the encoder", decoder, body, level, saved=saved and self.shape.carried_trains)

    def _front(self, name: str, decoder: DecoderConfig, body: _Body, level: Level, *, saved: bool) -> Trace:
        """Traces the piece before the layers; where it keeps nothing, recomputation makes no difference."""
        memory = MemoryPlan(recompute=level if saved else "selective")
        options = {"memory": memory, "needs": False, "saved": saved, "decoder": decoder}
        return self._once((name, memory, saved), Part(first=0, last=0), body, **options)

    def head(self, *, needs: bool, saved: bool, defers: bool) -> Trace:
        """Traces norm, head and loss; of an objective's loss, the part that grows with the tokens.

        Args:
            needs, saved, defers: as of a layer.
        """
        answers, samples = self._workload.answers, self._workload.samples
        options: dict[str, Any] = {}
        if samples is not None:
            options = {"temperature": samples.options.temperature, "entropies": samples.entropies if saved else "none"}

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor, calls: _Calls) -> Tensor:
            figures = model.token_figures(x, batch, context, **options)
            losses = figures.losses_T * batch.loss_weights_BS.flatten()
            if figures.entropies_T is not None and figures.entropies_T.requires_grad:
                losses = losses - figures.entropies_T * batch.loss_weights_BS.flatten()
            if answers:
                numbers = torch.arange(answers, device=META)
                losses = torch.where(batch.tokens_BS.flatten() == numbers[:, None], losses, 0.0)
            return losses.sum()

        traced = {"needs": needs, "saved": saved, "defers": defers, "has_logits": True}
        return self._once(("the head", needs, saved, defers), self._ends_part, body, **traced)

    def tables(self) -> Trace:
        """Traces the rotary tables of a micro-batch, which all layers share."""

        made: list[Any] = []

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor, calls: _Calls) -> Tensor:
            context = model.context(batch, context.step, training=True)
            made.append((context, model.layer_calls(x, context)))
            return x.new_empty(())

        return self._once(("the positions",), self._shared_part, body, needs=False, saved=False)

    @property
    def _shared_part(self) -> Part:
        """The part that makes what all layers read: of adopted models, that with the first layer of each kind."""
        if not self._workload.decoder.all_linears:
            return self._ends_part
        return Part(first=0, last=max(self.shape.kinds) + 1, embedding=False, head=False)

    @property
    def _ends_part(self) -> Part:
        """The model without layers, and without an embedding that a vision model stands behind: that is built apart."""
        return Part(first=0, last=0, embedding=not self._workload.decoder.fronts)


class _Tracer:
    """Builds a part of the model, and runs pieces of it forward and backward."""

    def __init__(self, workload: Workload, parallel: ParallelOptions, part: Part, memory: MemoryPlan) -> None:
        self._workload, self._part, self._memory = workload, part, memory
        self._away, self._recording = _UncountedTransfer(), Recording()
        self._exchanged: list[int] = []
        """Bytes of each exchange of rows for experts since the last look."""
        self._counter = LaunchCounter(packed=workload.packs_documents, merges=workload.device_type == "cuda")
        self._layout = counted_layout(shape_layout(workload, parallel, self._on_receive), self._counter)
        self._batch = partial(traced_batch.batch, workload, parallel.context)
        with self._recording:
            self._model = self._build()

    def trace(self, body: _Body, *, needs: bool, saved: bool, defers: bool, has_logits: bool) -> Trace:
        """Traces forward and, where there is one, backward.

        Args:
            needs, saved, defers: as of `RankModel.layer`.
            has_logits: whether matrices as wide as the vocabulary are logits.
        """
        recording, counter, model, arrived = self._recording, self._counter, self._model, []
        attention = TorchAttention(counter)
        self._away.nbytes = 0
        recording.widths = _logit_widths(model) if has_logits else frozenset()
        counter.weights.clear()
        for sink in self._sinks:
            sink.deferred = [] if defers else counter.deferred
        # one thread, which the recording sees
        with recording, counter, attention, torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            batch = self._batch()
            context = self._context(model, batch, needs)
            for _ in model.saved.layers(0, context, model.layers.parameters()):
                pass  # the first micro-batch is over, which alone is measured
            x = self._input(batch, needs)
            calls = model.layer_calls(x, context)
            before, given, begin = recording.alive(), recording.number(x), len(recording.events)
            counter.launches.clear()
            self._exchanged.clear()
            with nullcontext() if saved else torch.no_grad():
                y = body(model, batch, context, x, calls)
            goes_back = saved and y.requires_grad
            forward = PieceLaunches(forward=tuple(counter.launches), exchanged_forward=tuple(self._exchanged))
            end = _End.apply(y, lambda dy: arrived.append((recording.number(dy), len(recording.events))))
            made = {recording.number(y), recording.number(end)}
            del x, y
            found = recording.alive()
            kept = (found - before - made) | (found & {given})
            recording.name(kept, ACTIVATIONS)
            trace = Trace(
                forward=recording.peak(begin),
                kept=recording.held(kept),
                keeps_input=given in kept,
                away=self._away.nbytes,
                launches=forward,
            )
            if not goes_back:
                return trace
            counter.launches.clear()
            self._exchanged.clear()
            end.backward()
            ((gradient, begin),) = arrived
            backward = {
                (holds_x, holds_dy): recording.peak(begin, [given] * holds_x + [gradient] * holds_dy)
                for holds_x, holds_dy in product((False, True), repeat=2)
            }
            left = recording.held(recording.alive() - before - made)
            launches = replace(
                forward,
                backward=tuple(counter.launches),
                weights=tuple(counter.weights),
                exchanged_backward=tuple(self._exchanged),
            )
            return replace(trace, backward=backward, left=left, launches=launches)

    def _build(self) -> Decoder:
        """Builds the part, with everything that a second micro-batch would find."""
        workload, memory = self._workload, self._memory
        model = build_decoder(
            workload.decoder,
            layout=self._layout,
            plan=workload.plan,
            device=META,
            dtype=workload.dtype,
            part=self._part,
            memory=replace(memory, offload=False),
        )
        model.inverse_frequencies = tuple(one.to(META) for one in model.inverse_frequencies)
        if memory.offload:
            model.saved = SavedTensors(memory, META, model.saved.shapes, self._away)
        self._sinks = _bind_buffers(shard_entries(model))
        if self._layout.base is not None:
            self._layout.base.scratch.take((0,), torch.uint8, META)
        return model

    def _context(self, model: Decoder, batch: Batch, needs: bool) -> TokenContext:
        """Makes the coordinates; pieces behind the embedding find there what stands beside the stream.

        Args:
            needs: whether the stream needs a gradient.
        """
        step = torch.zeros((), dtype=torch.int64, device=META)
        variants = self._workload.decoder.variants if self._workload.balances else ()
        balances = [loss for one in variants if (loss := one.auxiliary_loss(1.0, META)) is not None]
        for loss in balances:
            loss.begin(counts_alone=False)
        tenants, choice = self._workload.tenants, None
        if tenants:
            choice = resolve("engine.tenants.planned:even_spans")(model, batch.num_tokens, tenants)
        if model.embedding is not None:  # no layer reads it
            return model.context(replace(batch, parts=()), step, training=True, parts=balances, choice=choice)
        carried: list[Tensor | None] = []
        first = self._part.first
        for index, shape in enumerate(model.carried_shapes(batch, first)):
            rows = torch.empty(shape, dtype=self._workload.dtype, device=META) if shape[0] else None
            trains = model.carried_trains or (needs and index < model.config.num_beside_with_stream(first))
            if rows is not None and trains:
                rows = _Start.apply(rows.requires_grad_())
            carried.append(rows)
        return model.context(batch, step, training=True, carried=carried, parts=balances, choice=choice)

    def _input(self, batch: Batch, needs: bool) -> Tensor:
        """Makes the residual stream of this rank's tokens."""
        tokens = batch.num_tokens // (self._layout.tp.size if self._layout.splits_tokens else 1)
        x = torch.empty(tokens, self._workload.decoder.hidden, dtype=self._workload.dtype, device=META)
        if not needs:
            return x
        started: Tensor = _Start.apply(x.requires_grad_())
        return started

    def _on_receive(self, axis: str, tensor: Tensor) -> None:
        self._recording.name([self._recording.number(tensor)], COMMUNICATION)
        if axis == "ep":
            self._exchanged.append(tensor.nbytes)


def _bind_buffers(entries: Iterable[ShardEntry]) -> list[GradientSink]:
    """Gives the gradient sink of each trained parameter a buffer, all of one shape from one storage; returns them."""
    alike: dict[torch.Size, list[GradientSink]] = {}
    for entry in entries:
        if entry.sink is not None:
            alike.setdefault(entry.sink.shape, []).append(entry.sink)
    for shape, sinks in alike.items():
        buffers = torch.empty(len(sinks), *shape, dtype=torch.float32, device=META)
        for sink, buffer in zip(sinks, buffers.unbind(), strict=True):
            sink.bind(buffer, lambda: None)
    return [sink for sinks in alike.values() for sink in sinks]


def _logit_widths(model: Decoder) -> frozenset[int]:
    pieces = model.vocab_spec.pieces
    return frozenset((model.vocab_spec.local_shape[0], pieces[0].length if pieces else 0))


def shape_layout(
    workload: Workload, parallel: ParallelOptions, on_receive: Callable[[str, Tensor], None] | None = None
) -> TensorLayout:
    """Returns the build context of a rank; `on_receive` is called with the axis and what its other ranks would
    write."""
    decoder = workload.decoder
    mesh = shape_mesh(RankGrid(tp=parallel.tensor, cp=parallel.context), num_kv_heads=decoder.num_kv_heads)

    def joined(axis: Axis, rows: ExpertRows | None = None) -> Axis:
        if axis.size == 1 or on_receive is None:
            return axis
        return replace(axis, group=Unconnected(axis.size, partial(on_receive, axis.name), rows))

    tp, experts = joined(mesh.tp), None
    if decoder.divided_experts:
        per_token = round(decoder.expert_share * decoder.divided_experts)
        rows = expert_rows(workload.routing, per_token=per_token, ranks=parallel.expert)
        experts = ExpertAxes(
            ep=joined(Axis("ep", parallel.expert), rows),
            tp=tp if parallel.shards_experts else Axis("tp"),
            data="edp" if parallel.has_expert_mesh else "dp_cp",
        )
    return TensorLayout.over(
        mesh,
        tp=tp,
        cp=joined(mesh.cp),
        experts=experts,
        # a tied head lies on another pipeline rank than the embedding
        pp_ends=Axis("pp_ends", 2 if decoder.tied_embeddings and parallel.pipeline > 1 else 1),
        sequence_parallel=parallel.sequence_parallel,
        joint_reduce=parallel.lora_reduce == "joint",
        kernels=shape_backend(workload.kernels),
        context_method=parallel.context_method,
        attention_blocks=shape_blocks(workload.device_type, workload.dtype, decoder.head_dims[-1]),
        base=shape_base(workload.formats, workload.kernels, rounds_inputs=workload.rounds_inputs),
        fold=not workload.tenants,
    )


def counted_layout(layout: TensorLayout, counter: LaunchCounter) -> TensorLayout:
    """Returns a build context whose kernels are counted."""
    kernels, base, blocks = layout.kernels, layout.base, layout.attention_blocks
    return replace(
        layout,
        kernels=counted_kernels(kernels, counter),
        base=None if base is None else counted_base(base, kernels.name, counter),
        attention_blocks=blocks if blocks.name == "reference" else counter.blocks(blocks),
    )


def _without_experts(parallel: ParallelOptions) -> ParallelOptions:
    return replace(parallel, expert=1, expert_tensor=parallel.tensor)


def rank_model(workload: Workload, parallel: ParallelOptions) -> RankModel:
    """Returns the model on a rank of a layout, made once for all layouts in which it is the same.

    Raises:
        UserError: the model's sizes do not fit the ranks.
    """
    alike = replace(
        workload, global_batch=0, beside=0, companions=(), offload_weights=False, offload_optimizer=False, graphed=False
    )
    ends = ParallelOptions(
        tensor=parallel.tensor,
        sequence=parallel.sequence_parallel and workload.decoder.splits_tokens,
        pipeline=min(parallel.pipeline, 2),
        context=parallel.context,
        context_method=parallel.context_method,
        lora_reduce=parallel.lora_reduce,
        expert=parallel.expert,
        expert_tensor=parallel.tensor if parallel.shards_experts else 1,
    )
    return _rank_model(alike, ends if workload.decoder.tied_embeddings else replace(ends, pipeline=1))


@lru_cache(maxsize=256)
def _rank_shape(workload: Workload, parallel: ParallelOptions) -> ModelShape:
    layout = shape_layout(workload, parallel)
    return model_shape(workload.decoder, workload.plan, layout, workload.device_type, workload.dtype)


@lru_cache(maxsize=256)
def _end_traces(workload: Workload, parallel: ParallelOptions) -> dict[tuple[object, ...], Trace]:
    return {}


_rank_model = lru_cache(maxsize=256)(RankModel)
_tracer = lru_cache(maxsize=1)(_Tracer)
"""A layer is traced twice in a row, as the first one, whose input needs no gradient, and as any other; so are the
positions and the ends."""
