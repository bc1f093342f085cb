"""A decoder whose layers are transformers' own modules.

The table of tokens, the head with its loss, and every linear are the engine's; the body's forward, norms, rotations and
activations are transformers'. A part of the model is the same forward over fewer layers, which takes the residual
stream as embeddings of tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.adopted.attention import IMPLEMENTATION, Run, register
from engine.adopted.config import INSIDE, STEM, AdoptedConfig
from engine.adopted.generating import EmptyCache, image_positions, one_token, rows_so_far
from engine.adopted.images.placed import Noted, PlacedImages
from engine.adopted.modules import Adopted
from engine.adopted.rows import Rows, WholeRows, documents_of
from engine.adopted.small import LAYER_COUNTS, list_of_layers
from engine.adopted.stage_ends import stage_ends, with_tokens
from engine.adopted.structure import after_table, around_body, skeleton, stem_of, whole_module
from engine.adopted.tensor_plan import ExpertPlan, TensorPlan
from engine.batch import Batch
from engine.choices import VISION
from engine.errors import UserError
from engine.kernels.records import InputUpdate
from engine.layers.attention import CachedAttention
from engine.layers.context import LayerContext
from engine.layers.module import ShardEntry
from engine.layers.plain_module import replace_module
from engine.layers.recompute import MemoryPlan
from engine.layers.storage import StorageUser
from engine.models.decoder import Decoder
from engine.models.head_figures import is_read_in_backward
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput
from engine.ops.kernels import Kernels
from engine.ops.quantized_products import RowCodes

ATTENTIONS = {"engine": IMPLEMENTATION, "own": "sdpa", "counted": "sdpa"}
"""The implementation that transformers' modules are told."""
_FIRST_SITE, _SITES, _IMAGE_SITES = 1 << 24, 1 << 12, 1 << 23
"""The first dropout site of layers, beyond those of the two ends, and how many a layer has: more than linears; the
first of what is around the body."""


class _Layer(nn.Module):
    """A layer in the list that transformers' forward goes through."""

    def __init__(self, layer: Adopted, *, recompute: bool, run: Run) -> None:
        super().__init__()
        self.__dict__["adopted"], self._recompute, self._run = layer, recompute, run
        self.runs: Any = None
        """What runs a function of the stream with the layer's weights there."""
        self.is_tuple: bool | None = None
        """Whether transformers' layer returns more than the stream; None before its first run."""
        self.gives_more = False
        """Whether there are tensors in it."""
        self.stream: Tensor | None = None
        """What the layer takes in place of what the body makes, where it is the first of a part without embedding."""
        self.tokens_BS: Tensor | None = None
        """The tokens, where the body is given none."""
        self.keeps_out = False
        """Whether `out` is kept, which is what the layer gave last."""
        self.out: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of transformers' layer that its body's forward reads, if it is a word or number."""
        value = getattr(self.__dict__["adopted"].module, name) if "adopted" in self.__dict__ else self
        if isinstance(value, (str, int, float, bool, type(None))):
            return value
        raise AttributeError(f"the body reads {name} of its layers, which is more than a word or a number")

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Any:
        rest: list[Any] = []
        if self.stream is not None:
            x, self.stream = self.stream, None
        if self.tokens_BS is not None:
            named, self.tokens_BS = with_tokens(named, self.tokens_BS), None

        def compute(x: Tensor) -> Tensor:
            layer: Adopted = self.__dict__["adopted"]
            out = layer.module(layer.enter(x), *arguments, **named)
            self.is_tuple = isinstance(out, (tuple, list))
            rest[:] = out[1:] if self.is_tuple else ()
            self.gives_more = any(isinstance(one, Tensor) for one in rest)
            return out[0] if self.is_tuple else out

        y = self.runs(self._twice(compute) if self._recompute else compute, x)
        if self.keeps_out:
            self.out = y
        return (y, *rest) if self.is_tuple else y

    def _twice(self, compute: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute
        context = self._run.now

        def again(x: Tensor) -> Tensor:
            with self._run.within(context):
                return compute(x)

        return lambda x: checkpoint(again, x, use_reentrant=False, preserve_rng_state=False)


class _Stream(nn.Module):
    """Stands in for the table of tokens: what the engine looked up. Bodies look at a table's dtype, and some at a row
    for whose numbers they have no use.

    Args:
        table: whose modules are this one's too.
        dtype, device: of its rows.
    """

    def __init__(self, table: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for name, module in table.named_children():
            self.add_module(name, copy.deepcopy(module))
        shape = table.weight.shape if isinstance(table, nn.Embedding) else (0,)
        self.weight = torch.zeros((), dtype=dtype, device=device).expand(shape)
        self.now: Tensor | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        assert self.now is not None, "a body looks tokens up outside of a run"
        x: Tensor = after_table(self, self.now)
        return x


class _Absent(nn.Identity):
    """Stands in for the last norm, which the head computes; bodies look at a norm's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=dtype)


class _DividedInput(GivenInput):
    """x = u / divisor."""

    __slots__ = ("divisor",)

    def __init__(self, divisor: float) -> None:
        object.__setattr__(self, "divisor", divisor)

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        return torch.div(u, self.divisor, out=out), None

    def fuses_h(self, kernels: Kernels, out: Tensor | None) -> bool:
        return False

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        return *self.make(u, None, kernels), None

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        return super().gradient(dx, u, statistics, update, kernels) / self.divisor


class _HeadInput(nn.Module):
    """Stands in for the last norm, which is computed before the head is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[ShardEntry] = []

    def as_input(self, divisor: float = 1.0) -> GivenInput:
        return GivenInput() if divisor == 1.0 else _DividedInput(divisor)


class AdoptedBody(Decoder):
    """The model of an AdoptedConfig, or a part of it; arguments as of Decoder."""

    config: AdoptedConfig

    def _build(
        self, build: LayerContext, memory: MemoryPlan, embedding_weight: ShardEntry | None
    ) -> Iterator[StorageUser]:
        register()
        config, parts = self.config, self.config.structure
        _check_layout(config, build, memory)
        self._run, self._image_run, self._device = Run(build.layout), Run(build.layout), build.device
        indices = range(self.part.first, self.part.last)
        whole = whole_module(config.hf_config, ATTENTIONS[config.attention])
        body, held = skeleton(whole, parts, indices)
        for name, stand_in in self._left_out():
            replace_module(body, name, stand_in)
        shares_heads = config.attention == "engine"
        plan = None
        if self.layout.tp.size > 1:
            intact = whole.get_submodule(parts.body)
            plan = TensorPlan.of(config.family, intact, parts.layers, shares_heads=shares_heads)
            if plan is None:
                raise UserError(
                    f"parallel.tensor is {self.layout.tp.size}, but transformers declares no tensor plan for "
                    f"{config.family} models, and their linears have no names that say one: set parallel.tensor to 1."
                )
        experts = ExpertPlan.of(body.config)
        if self.part.embedding:
            yield self._build_embedding(build)
        self.layers = nn.ModuleList()
        wrapped = nn.ModuleList()
        for index, layer in zip(indices, held, strict=True):
            adopted = Adopted(
                f"layers.{index}.{INSIDE}",
                layer,
                build=build,
                run=self._run,
                first_site=_FIRST_SITE + index * _SITES,
                plan=plan,
                experts=experts,
                place=f"{parts.layers}.{index}.",
            )
            self.layers.append(adopted)
            wrapped.append(_Layer(adopted, recompute=memory.level(index) == "full", run=self._run))
            yield StorageUser(module=adopted)
        norm: nn.Module = nn.Identity()
        if parts.norm is not None:
            norm = body.get_submodule(parts.norm)
            replace_module(body, parts.norm, _Absent(build.dtype))
        table = whole.get_submodule(parts.embedding_path) if self.part.first == 0 else nn.Identity()
        self._stream = _Stream(table, build.dtype, build.device)
        replace_module(body, parts.embedding, self._stream)
        self._rest = Adopted("", body, build=build, run=self._run)
        replace_module(body, parts.layers, wrapped)
        _set_layers(body, indices, config.num_layers)
        self._wrapped = list(wrapped)
        for last in self._wrapped[-1:]:
            last.keeps_out = not self._ends_layers
        self.__dict__["_body"] = body
        self._images = self._build_images(whole, body, build)
        around = None if self._images is None else self._images.around
        resident = (*self._rest.entries, *(() if around is None else around.entries))
        if self.part.head:
            self._last_norm = Adopted(f"{parts.norm}.", norm, build=build, run=self._run)
            stem = stem_of(whole, parts) if config.has_stem else nn.Identity()
            self._stem = Adopted(f"{STEM}.", stem, build=build, run=self._run)
            self.norm = _HeadInput()  # type: ignore[assignment]
            shared = self._shared_head_weight(build, embedding_weight) if config.tied_embeddings else None
            self.head = self._build_head(build, shared, bias=whole.get_submodule(parts.head).bias is not None)
            yield StorageUser(
                module=self.head,
                borrowed=() if shared is None else (shared,),
                resident=(*resident, *self._last_norm.entries, *self._stem.entries),
                needs_backward=is_read_in_backward(self.head),
                is_last=True,
            )

    def _build_images(self, whole: nn.Module, body: nn.Module, build: LayerContext) -> PlacedImages | None:
        """Builds what is around the body where images are taken there, which stays whole on its ranks."""
        parts = self.config.structure
        if parts.images is None:
            return None
        if not self.part.embedding or parts.images == parts.body:
            return PlacedImages(whole, parts, None, None)
        for name in self.config.vision_linears():
            if (adapter := build.plan.adapter(name)) is not None and adapter.dropout > 0:
                raise UserError(
                    f"lora.dropout is {adapter.dropout:g}, but {name} does not see tokens, so that its mask has no "
                    "coordinates: set lora.dropout to 0, or leave vision modules out of lora.targets."
                )
        noted = Noted(body)
        module = around_body(whole, parts, noted)
        self._around = Adopted(
            VISION,
            module,
            build=replace(build, layout=replace(build.layout, base=None)),
            run=self._image_run,
            first_site=_IMAGE_SITES,
        )
        return PlacedImages(whole, parts, self._around, noted)

    def _carried(self, batch: Batch, *, adapters: bool, step: Tensor | None) -> list[Tensor | None]:
        return []

    def _left_out(self) -> Iterator[tuple[str, nn.Module]]:
        is_first = self.part.first == 0  # also of a part that another one's embedding goes before
        if is_first and self._ends_layers:
            return iter(())
        return stage_ends(self.config.hf_config).left_out(is_first=is_first, is_last=self._ends_layers)

    @property
    def _ends_layers(self) -> bool:
        return self.part.head or self.part.last == self.config.num_layers

    def _rope_tables(self, batch: Batch) -> tuple[Tensor, Tensor]:
        none = torch.empty(0, device=batch.positions_BS.device)
        return none, none  # transformers' modules make their own

    def _head_stream(self, x: Tensor, context: TokenContext) -> Tensor:
        normed: Tensor = self._last_norm.module(self._last_norm.enter(x))
        with self._run.within(context):
            stem: Tensor = self._stem.module(self._stem.enter(normed))
        return stem.to(self.dtype)  # some bodies keep the stream in float32

    def stream_rows(self, batch: Batch, layer: int) -> int:
        inside = 0 < layer < self.config.num_layers
        return batch.num_tokens * (stage_ends(self.config.hf_config).copies if inside else 1)

    def run_layers(self, x: Tensor, context: TokenContext) -> Tensor:
        y = self._run_rows(x.reshape(context.local_token_index.shape[0], -1), context)
        # some layers return more precision than they take; and several copies are as many rows of a message
        return y if self._ends_layers else y.to(self.dtype).view(-1, self.config.hidden)

    def _run_rows(self, x: Tensor, context: TokenContext) -> Tensor:
        rows = context.part(Rows)
        assert rows is not None
        assert not context.documents.has_branches, "a document cannot continue another; see branch_obstacle"
        if self.config.keeps_documents_apart:
            return self._run_body(x, rows, context)
        lengths = context.documents.lengths
        if context.cache is not None:
            if rows.images is not None:
                raise UserError(
                    f"text about images is not generated with {self.config.family} models, whose layers keep more of "
                    "a row than keys and values: leave images out."
                )
            whole = rows_so_far(f"layers.{self.part.first}", x, rows, context)
        elif len(lengths) > rows.positions_BS.shape[0]:  # such as both answers of a pair, which lie in one row
            whole = WholeRows.of(documents_of(x, rows, context), lengths, rows.images)
        else:
            return self._run_body(x, rows, context)
        return self._run_body(whole.x_TH, whole.rows, context.of_tokens(whole.token_index_T))[whole.index]

    @property
    def called_layers(self) -> dict[str, nn.Module]:
        return {f"{name}.{INSIDE}".rstrip("."): layer.module for name, layer in super().called_layers.items()}

    def layer_calls(self, x: Tensor, context: TokenContext) -> list[Callable[[Tensor], Tensor]]:
        """Returns the layers with what transformers' forward gives them; a layer that has run before does not run."""
        rows = context.part(Rows)
        assert rows is not None
        found: list[Callable[[Tensor], Tensor]] = []

        def note(layer: _Layer, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            found.append(partial(self._alone, compute, rows.positions_BS.shape, context))
            return x if layer.is_tuple is not None else compute(x)

        for layer in self._wrapped:
            layer.runs = partial(note, layer)
        self._forward(x, rows, context)
        if any(layer.gives_more for layer in self._wrapped):
            raise RuntimeError("layers hand more than the residual stream to later ones")
        return found

    def _alone(
        self, compute: Callable[[Tensor], Tensor], shape: torch.Size, context: TokenContext, x: Tensor
    ) -> Tensor:
        with self._run.within(context):
            return compute(x.view(*shape, -1)).view(x.shape)

    def _run_body(self, x: Tensor, rows: Rows, context: TokenContext) -> Tensor:
        """Runs transformers' forward over this part's layers.

        Args:
            x: [B S, hidden], the residual stream.
        """
        first = self._num_units_before_layers
        units = self._units[first : first + len(self.layers)]
        saved = self.saved.layers(len(self.layers), context, self._resident)
        for layer, unit, kept in zip(self._wrapped, units, saved, strict=True):
            layer.runs = partial(_run_unit, unit, kept)
        return self._forward(x, rows, context)

    def _forward(self, x: Tensor, rows: Rows, context: TokenContext) -> Tensor:
        self._run.seen = None if context.cache is None else {}
        positions = self._positions(rows, context)
        stream = self._rest.enter(x).view(*rows.positions_BS.shape, -1)
        if self._rest.sinks:  # autograd lets no body change in place what a function returned as a view
            stream = stream.clone()
        taken: dict[str, Any] = {"inputs_embeds": stream, **positions}
        if self.part.embedding:
            self._stream.now, taken = stream, {"input_ids": rows.tokens_BS, **positions}
        elif self.part.first > 0:  # some bodies change what they are given in place
            taken["inputs_embeds"] = stream.detach()[..., : self.config.hidden].clone()
            ends = stage_ends(self.config.hf_config)
            for layer in self._wrapped:
                layer.tokens_BS = rows.tokens_BS
            self._wrapped[0].stream = stream.unflatten(-1, (ends.copies, -1)) if ends.apart else stream
            if self._images is not None:
                taken |= self._images.told(rows, self.__dict__["_body"])
        else:
            taken["inputs_embeds"] = after_table(self._stream, stream)
        try:
            if self.part.embedding and self._images is not None:
                taken = self._with_images(self._images, stream, rows, context, positions) or taken
            with self._run.within(context):
                out = self.__dict__["_body"](**{**taken, "use_cache": False})
        finally:
            self._stream.now = None
        last = out[0] if isinstance(out, tuple) else out.last_hidden_state
        if not self._ends_layers and self._wrapped:
            last, self._wrapped[-1].out = self._wrapped[-1].out, None
        return last.reshape(rows.positions_BS.numel(), -1)

    def _positions(self, rows: Rows, context: TokenContext) -> dict[str, Tensor]:
        """Returns the argument that positions are, or none."""
        if self.config.attention == "counted":
            return {}
        found = None
        if self._images is not None:
            lengths = context.documents.lengths if self.config.keeps_documents_apart else _row_lengths(rows)
            found = self._images.positions(rows, lengths)
            if context.cache is not None and self._images.counts_positions:
                found = image_positions(found, rows, context)
        return {"position_ids": rows.positions_BS if found is None else found}

    def _with_images(
        self, images: PlacedImages, stream: Tensor, rows: Rows, context: TokenContext, positions: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Returns what the body is given where there are images; nothing without any."""
        if rows.images is None:
            if images.around is not None:
                self._stream.now = images.around.pass_by(stream)
            return {}
        if images.around is None:  # the body takes them
            return {"input_ids": rows.tokens_BS, **positions, **images.arguments(rows, self.dtype)}
        nowhere = context.of_tokens(context.token_index[:0])  # rows of a tower have no coordinates
        self._stream.now = images.around.enter(stream)
        with self._image_run.within(nowhere):
            return images.place(rows, positions, self.dtype)

    @property
    def reruns_rows(self) -> str | None:
        if self.config.keeps_documents_apart:
            return None
        return (
            "each token that is decoded runs the whole of its row again, which is slow: layers of "
            f"{self.config.family} models keep more of it than keys and values"
        )

    def cached_attentions(self) -> list[CachedAttention]:
        if not self.config.keeps_documents_apart:
            return []
        batch, step = one_token(self._device), torch.zeros((), dtype=torch.int64, device=self._device)
        with torch.no_grad():
            if self.part.embedding:  # whose features may be fewer than the residual stream's
                x = self.embed(batch)
            else:
                x = torch.zeros(1, self.config.hidden, dtype=self.dtype, device=self._device)
            context = self.context(batch, step, training=False)
            self.run_layers(x, replace(context, cache=EmptyCache()))
        seen, self._run.seen = self._run.seen or {}, None
        return [
            CachedAttention(
                name=name,
                num_kv_heads=one.num_kv_heads,
                head_dim=one.width,
                window=one.kind.window,
                softcap=one.kind.softcap,
                sinks_H=one.sinks_H,
            )
            for name, one in seen.items()
        ]


def _row_lengths(rows: Rows) -> list[int]:
    count, length = rows.tokens_BS.shape
    return [length] * count


def _run_unit(unit: Any, kept: Any, block: Any, x: Tensor) -> Tensor:
    with kept:
        y: Tensor = unit.run(block, x)
    return y


def _set_layers(body: nn.Module, indices: range, whole: int) -> None:
    """Tells a body's forward which layers it has; the layers themselves keep the whole model's config.

    Args:
        whole: layers of the whole model.
    """
    config = body.config = copy.deepcopy(body.config)  # a module's and its text's may be two records
    for record in {id(one): one for one in (body, config, config.get_text_config())}.values():
        for name, value in list(vars(record).items()):
            if name in LAYER_COUNTS and value == whole:
                setattr(record, name, len(indices))
            elif isinstance(value, list):
                setattr(record, name, list_of_layers(name, value, whole, indices, value))


def _check_layout(config: AdoptedConfig, build: LayerContext, memory: MemoryPlan) -> None:
    """Raises UserError for a layout that adopted models lack."""
    assert not build.layout.splits_tokens, "modules see all tokens of a row"
    if build.layout.cp.size > 1:
        config.check_context(build.layout.cp.size, build.layout.context_method)
    if memory.recompute == "attention":
        raise UserError(
            f"memory.recompute is attention, but layers of this {config.family} model are transformers' own modules, "
            "which are recomputed whole: set memory.recompute to full or selective."
        )
