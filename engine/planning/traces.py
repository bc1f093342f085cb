"""What the pieces of a model hold of one micro-batch: found by running the engine's own code on them once.

A piece is a layer, the embedding, or norm, head and loss. It is built as a run builds it, for one rank and on the meta
device, goes forward and backward while a recording is made, and is forgotten. Only what has no numbers in it has to be
told apart beforehand: the layers of a model that are alike share a trace, and so do the layouts, schedules and numbers
of layers of a search. What cannot run without a device is in `shape_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Axis, Mesh, Unconnected, shape_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.module import shard_entries
from engine.layers.plan import TensorLayout, TrainingPlan
from engine.layers.recompute import MemoryPlan
from engine.layers.saved import SavedTensors
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder, Part
from engine.ops.context import TokenContext
from engine.planning.kernels import KernelMemory
from engine.planning.ledger import ACTIVATIONS, COMMUNICATION, Parts
from engine.planning.recording import Recording
from engine.planning.shape_kernels import shape_base, shape_blocks, shape_kernels
from engine.zigzag import ContextLayout, make_plan, rank_columns

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """What a piece holds of one micro-batch, beside what was there before.

    Args:
        forward: at the fullest moment of forward, beside the piece's input.
        kept: between forward and backward, without the output.
        keeps_input: whether the input is among it.
        backward: at the fullest moment of backward, beside `kept` and the output's gradient: by whether somebody else
            holds on to the input, and to that gradient, until backward is over.
        left: after backward, where it puts the weights' gradients off.
        away: bytes that are kept in host memory.
    """

    forward: Parts
    kept: Parts
    keeps_input: bool = False
    backward: dict[tuple[bool, bool], Parts] = field(default_factory=dict)
    left: Parts = field(default_factory=dict)
    away: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All that a trace depends on beside the piece itself.

    Args:
        decoder, plan: of the model.
        dtype: of weights and activations.
        rows, row_length: of a micro-batch, in tokens of whole rows.
        document_length: of each document.
        answers: of a micro-batch, where the objective compares answers; else 0.
        base_dtype: how frozen weights of the layers are stored.
        kernels: the backend.
        device_type: whose attention the context axis uses.
        tensor, context: ranks of these axes.
        context_method, sequence_parallel, joint_reduce: see engine.config.parallel.
        tied_ends: a tied head lies on another pipeline rank than the embedding.
    """

    decoder: DecoderConfig
    plan: TrainingPlan
    dtype: torch.dtype
    rows: int
    row_length: int
    document_length: int
    answers: int
    base_dtype: str | None
    kernels: KernelMemory
    device_type: str
    tensor: int
    context: int
    context_method: str
    sequence_parallel: bool
    joint_reduce: bool
    tied_ends: bool


class _Start(torch.autograd.Function):
    """The input of a piece, which no node before it holds on to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> None:
        return None


class _End(torch.autograd.Function):
    """What follows a piece: it makes the gradient of the output, and says so."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.arrived = y.shape, y.dtype, arrived
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        dy = torch.empty(ctx.shape, dtype=ctx.dtype, device=META)
        ctx.arrived(dy)
        return dy, None


class _Away:
    """A transfer to where nothing is counted; see engine.layers.offload.Transfer."""

    def __init__(self) -> None:
        self.nbytes = 0

    def send(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.nbytes += tensor.nbytes
        return tensor.shape, tensor.dtype

    def fetch(self, sent: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(sent[0], dtype=sent[1], device=META)

    def wait(self, fetched: Tensor) -> Tensor:
        return fetched


_Body = Callable[[Decoder, Batch, TokenContext, Tensor], Tensor]
"""The piece: model, micro-batch, its coordinates and the input to the output."""


class Traces:
    """The pieces of one model on one rank, each traced once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._known: dict[tuple[object, ...], Passage] = {}

    def _once(self, key: tuple[object, ...], part: Part, body: _Body, **options: Any) -> Passage:
        if key not in self._known:
            self._known[key] = _Tracing(self._setting, part, **options).passage(body)
        return self._known[key]

    def layer(self, kind: int, memory: MemoryPlan, *, needs: bool, saved: bool = True, defers: bool = False) -> Passage:
        """A decoder layer.

        Args:
            kind: the number of a layer that is like it.
            memory: whose `recompute` is that of the layer, and `offload` whether it sends away what it keeps.
            needs: whether its input needs a gradient.
            saved: whether there is a backward.
            defers: whether that leaves the weights' gradients for later.
        """

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor) -> Tensor:
            # of two layers, the last of which would keep everything here
            layers = model.saved.layers(2, context, model.layers.parameters())
            with next(layers):
                out: Tensor = model.layers[0](x, context)
            return out

        part = Part(first=kind, last=kind + 1, embedding=False, head=False)
        key = ("layer", kind, memory, needs, saved, defers)
        return self._once(key, part, body, memory=memory, needs=needs, saved=saved, defers=defers)

    def embedding(self, *, saved: bool) -> Passage:
        """From token ids to the residual stream."""

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor) -> Tensor:
            return model.embed(batch)

        part = Part(first=0, last=0, embedding=True, head=False)
        return self._once(("embedding", saved), part, body, needs=False, saved=saved)

    def head(self, *, needs: bool, saved: bool, defers: bool) -> Passage:
        """Norm, head and loss, which is that of `engine.objectives` in as much as it grows with the tokens.

        Args:
            needs, saved, defers: as of a layer.
        """
        answers = self._setting.answers

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor) -> Tensor:
            losses = model.token_losses(x, batch, context) * batch.loss_weights_BS.flatten()
            if answers:
                numbers = torch.arange(answers, device=META)
                losses = torch.where(batch.tokens_BS.flatten() == numbers[:, None], losses, 0.0)
            return losses.sum()

        last = self._setting.decoder.num_layers
        part = Part(first=last, last=last, embedding=False, head=True)
        return self._once(
            ("head", needs, saved, defers), part, body, needs=needs, saved=saved, defers=defers, ends=True
        )

    def tables(self) -> Passage:
        """Rotary tables of a micro-batch, which all layers share."""

        made: list[TokenContext] = []

        def body(model: Decoder, batch: Batch, context: TokenContext, x: Tensor) -> Tensor:
            made.append(model.context(batch, context.step, training=True))
            return x.new_empty(())

        part = Part(first=0, last=0, embedding=False, head=False)
        return self._once(("tables",), part, body, needs=False, saved=False)


class _Tracing:
    """One piece on its way through forward and backward."""

    def __init__(
        self, setting: Setting, part: Part, *, memory: MemoryPlan | None = None, needs: bool, saved: bool,
        defers: bool = False, ends: bool = False,
    ) -> None:  # fmt: skip
        self._setting, self._part, self._memory = setting, part, memory or MemoryPlan()
        self._needs, self._saved, self._defers, self._ends = needs, saved, defers, ends
        self._away = _Away()
        self._recording = Recording()

    def passage(self, body: _Body) -> Passage:
        with self._recording as recording, torch.autograd.set_multithreading_enabled(False):
            model = self._model()
            if self._ends:
                recording.widths = _logit_widths(model)
            batch = _batch(self._setting)
            context = model.context(batch, torch.zeros((), dtype=torch.int64, device=META), training=True)
            for _ in model.saved.layers(0, context, model.layers.parameters()):
                pass  # the first micro-batch is over, which alone is measured
            x = self._input(model)
            before, given, begin = recording.alive(), recording.number(x), len(recording.events)
            with nullcontext() if self._saved else torch.no_grad():
                y = body(model, batch, context, x)
            forward, made = recording.peak(begin, len(recording.events)), recording.number(y)
            goes_back, arrived = self._saved and y.requires_grad, []
            end = _End.apply(y, lambda dy: arrived.append((recording.number(dy), len(recording.events))))
            del x, y
            kept = (recording.alive() - before | {given}) & recording.alive() - {made, recording.number(end)}
            recording.name(kept, ACTIVATIONS)
            keeps, held = given in kept, recording.held(kept)
            if not goes_back:
                return Passage(forward=forward, kept=held, keeps_input=keeps, away=self._away.nbytes)
            end.backward()
            (gradient, start), last = arrived[0], len(recording.events)
            del end
            left = recording.held(recording.alive() - before - {given})
            backward = {
                (x_held, dy_held): recording.peak(start, last, [given] * x_held + [gradient] * dy_held)
                for x_held in (False, True)
                for dy_held in (False, True)
            }
        return Passage(
            forward=forward, kept=held, keeps_input=keeps, backward=backward, left=left, away=self._away.nbytes
        )

    def _model(self) -> Decoder:
        """The part, with everything made that a second micro-batch would find."""
        setting, memory = self._setting, self._memory
        layout = _layout(setting, self._arrives)
        plain = replace(memory, offload=False)
        model = Decoder(
            setting.decoder, layout=layout, plan=setting.plan, device=META, dtype=setting.dtype, part=self._part,
            memory=plain,
        )  # fmt: skip
        model.inverse_frequencies = tuple(one.to(META) for one in model.inverse_frequencies)
        if memory.offload:
            model.saved = SavedTensors(memory, META, model.saved.shapes, self._away)
        for entry in shard_entries(model):
            if entry.sink is not None:
                assert entry.sink.buffer.is_meta
                entry.sink.deferred = [] if self._defers else None
        if layout.base is not None:
            layout.base.scratch.take((0,), torch.uint8, META)
        return model

    def _input(self, model: Decoder) -> Tensor:
        """The residual stream of this rank's tokens."""
        setting = self._setting
        tokens = num_tokens(setting) // (setting.tensor if model.layout.splits_tokens else 1)
        x = torch.empty(tokens, setting.decoder.hidden, dtype=setting.dtype, device=META)
        if not self._needs:
            return x
        started: Tensor = _Start.apply(x.requires_grad_())
        return started

    def _arrives(self, tensor: Tensor) -> None:
        self._recording.name([self._recording.number(tensor)], COMMUNICATION)


def _logit_widths(model: Decoder) -> frozenset[int]:
    pieces = model.vocab_spec.pieces
    return frozenset((model.vocab_spec.local_shape[0], pieces[0].length if pieces else 0))


def num_tokens(setting: Setting) -> int:
    """Of a micro-batch on a context rank."""
    return setting.rows * _columns(setting)


def _columns(setting: Setting) -> int:
    return sum(span.length for span in rank_columns(setting.row_length, setting.context, 0))


def _batch(setting: Setting) -> Batch:
    """Full rows of documents of one length."""
    shape = setting.rows, _columns(setting)
    lengths = (setting.document_length,) * (setting.rows * setting.row_length // setting.document_length)
    plan = None
    if setting.context > 1:
        whole = ContextLayout(
            size=setting.context, num_rows=setting.rows, row_length=setting.row_length, document_lengths=lengths
        )
        plan = make_plan(whole, 0)

    def numbers(dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return Batch(
        tokens_BS=numbers(torch.int64), labels_BS=numbers(torch.int64), positions_BS=numbers(torch.int64),
        token_index_BS=numbers(torch.int64), loss_weights_BS=numbers(torch.float32),
        document_offsets=torch.empty(len(lengths) + 1, dtype=torch.int32, device=META), document_lengths=lengths,
        context_plan=plan,
    )  # fmt: skip


def _layout(setting: Setting, arrives: Callable[[Tensor], None]) -> TensorLayout:
    decoder = setting.decoder
    mesh: Mesh = shape_mesh(RankGrid(tp=setting.tensor, cp=setting.context), num_kv_heads=decoder.num_kv_heads)

    def joined(axis: Axis) -> Axis:
        return replace(axis, group=Unconnected(axis.size, arrives)) if axis.size > 1 else axis

    return TensorLayout(
        tp=joined(mesh.tp),
        kv_replica=mesh.kv_replica,
        pp_ends=Axis("pp_ends", 2) if setting.tied_ends else Axis("pp_ends"),
        sequence_parallel=setting.sequence_parallel,
        joint_reduce=setting.joint_reduce,
        kernels=shape_kernels(setting.kernels),
        cp=joined(mesh.cp),
        context_method=setting.context_method,
        attention_blocks=shape_blocks(setting.device_type, setting.dtype, decoder.head_dim),
        base=shape_base(setting.base_dtype, setting.kernels),
    )


@lru_cache(maxsize=256)
def traces(setting: Setting) -> Traces:
    """Those of a setting, which one process traces once."""
    return Traces(setting)
