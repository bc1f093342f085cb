"""One layer of a decoder, and the plain attention and MLP that it has where its config says nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from engine.distributed.sharding import ShardSpec
from engine.layers.attention import Attention, Heads, attention_linears
from engine.layers.branch import Branch
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.layers.recompute import SELECTIVE, MemoryPlan, apply_level, recomputed
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import GivenInput, LinearInput, Stream

_Attention = TypeVar("_Attention", bound=Attention)
_MLP = TypeVar("_MLP", bound=MLP)


def config_heads(config: DecoderConfig) -> Heads:
    """Returns the heads of attention that the config has for layers without others."""
    return Heads(queries=config.num_heads, keys=config.num_kv_heads, dim=config.head_dim)


def placed_linears(
    place: LayerPlace, heads: Heads, sections: Mapping[str, ShardSpec], *, fuses: bool = True
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Builds the linears of a layer's attention, of these heads and sections; see `attention_linears`."""
    config = place.config
    return attention_linears(
        f"{place.prefix}.attention",
        heads,
        config.hidden,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        first_site=place.attention_site,
        build=place.build,
        sections=sections,
        fuses=fuses,
    )


def plain_attention(
    place: LayerPlace,
    linears: tuple[nn.Module, nn.Module] | None = None,
    *,
    make: Callable[..., _Attention] = Attention,  # type: ignore[assignment]  # which is one of them
    heads: Heads | None = None,
) -> _Attention:
    """Builds grouped-query attention, with these linears in place of its own.

    Args:
        make: makes it; takes the arguments of `Attention`.
        heads: None for those of the config.
    """
    config = place.config
    heads = heads or config_heads(config)
    return make(
        f"{place.prefix}.attention",
        hidden=config.hidden,
        num_heads=heads.queries,
        num_kv_heads=heads.keys,
        head_dim=heads.dim,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        first_site=place.attention_site,
        kind=config.attention_kind(place.index),
        linears=linears,
        build=place.build,
    )


def plain_mlp(
    place: LayerPlace,
    name: str = "mlp",
    *,
    make: Callable[..., _MLP] = MLP,  # type: ignore[assignment]  # which is one of them
) -> _MLP:
    """Builds a gated MLP of this name inside the layer.

    Args:
        make: makes it; takes the arguments of `MLP`.
    """
    config = place.config
    return make(
        f"{place.prefix}.{name}",
        hidden=config.hidden,
        intermediate=config.intermediate,
        bias=config.mlp_bias,
        first_site=place.mlp_site,
        activation=config.activation,
        build=place.build,
    )


def _given(branches: Sequence[Branch | None]) -> Branch | None:
    """Returns the branch that a variant builds, if one does."""
    return next((branch for branch in branches if branch is not None), None)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or one of these alone; `memory` says what stays for backward.

    Families may have norms on what is added to x too, or there alone, and a factor on it. The config's variants may
    put something else in the place of attention and MLP, and a branch between or behind the two.
    """

    def __init__(
        self, index: int, config: DecoderConfig, *, build: LayerContext, memory: MemoryPlan = SELECTIVE
    ) -> None:
        super().__init__()
        place = LayerPlace(index=index, config=config, build=build)
        variants = config.variants_at(index)
        lacking = {variant.lacks(index) for variant in variants}
        self.residual_multiplier = config.multipliers.branch
        norms = next((one for variant in variants if (one := variant.norms()) is not None), config.norms)

        def norm(name: str, where: Literal["inputs", "outputs"]) -> RMSNorm | None:
            if norms not in (where, "both"):
                return None
            own = build
            for variant in variants if where == "inputs" else ():
                own = variant.norm_context(own, name)
            name = f"{place.prefix}.{name}"
            return RMSNorm(name, config.hidden, config.norm_eps, offset=config.norm_offset, build=own)

        self.input_norm = norm("input_norm", "inputs")
        self.attention: Branch | None = None
        if "attention" not in lacking:
            self.attention = _given([variant.attention(place) for variant in variants]) or plain_attention(place)
        self.attention_output_norm = norm("attention_output_norm", "outputs")
        between = [branch for variant in variants if (branch := variant.between(place)) is not None]
        self.between = nn.ModuleList(between)
        self.mlp: Branch | None = None
        self.post_attention_norm = self.input_norm
        if "mlp" not in lacking:
            if "attention" not in lacking:
                self.post_attention_norm = norm("post_attention_norm", "inputs")
            self.mlp = _given([variant.mlp(place) for variant in variants]) or plain_mlp(place)
        behind = [branch for variant in variants if (branch := variant.behind(place)) is not None]
        self.behind = nn.ModuleList(behind)
        self.mlp_output_norm = norm("mlp_output_norm", "outputs")
        self.level = memory.level(index)
        if self.mlp_output_norm is None or self.level == "none":
            # a norm on the output of a recomputed region reads its last product, which so must be recomputed too
            apply_level(self.level, (self.attention, *between, self.mlp))

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        if self.level == "full":
            return recomputed(self._whole, x, context)
        if self.level == "attention" and self.attention is not None:
            return self._with_mlp(Stream(recomputed(self._with_attention, x, context)), context)
        return self._whole(x, context)

    def _whole(self, x: Tensor, context: TokenContext) -> Tensor:
        if self.attention is not None and self._sums_in_mlp:
            return self._with_mlp(self._attended(self.attention, x, context), context)
        return self._with_mlp(Stream(self._with_attention(x, context)), context)

    @property
    def _sums_in_mlp(self) -> bool:
        """Whether the MLP's first linear adds attention's output to the stream."""
        mlp, norm = self.mlp, self.post_attention_norm
        sums = mlp is not None and mlp.sums_stream and mlp.reads_once
        return sums and norm is not None and not self.between and self.residual_multiplier == 1.0

    def _with_attention(self, x: Tensor, context: TokenContext) -> Tensor:
        if self.attention is not None:
            x = self._sum(self._attended(self.attention, x, context))
        for branch in self.between:
            x = branch.joined(x, context, self.residual_multiplier)
        return x

    def _attended(self, attention: Branch, x: Tensor, context: TokenContext) -> Stream:
        return _around(attention, Stream(x), self.input_norm, self.attention_output_norm, context)

    def _with_mlp(self, stream: Stream, context: TokenContext) -> Tensor:
        if self.mlp is not None:
            stream = _around(self.mlp, stream, self.post_attention_norm, self.mlp_output_norm, context)
        x = self._sum(stream)
        for branch in self.behind:
            x = branch.joined(x, context, self.residual_multiplier)
        return x

    def _sum(self, stream: Stream) -> Tensor:
        return stream.x if stream.added is None else torch.add(stream.x, stream.added, alpha=self.residual_multiplier)


def _around(
    branch: Branch, stream: Stream, input_norm: RMSNorm | None, output_norm: RMSNorm | None, context: TokenContext
) -> Stream:
    """Returns the stream behind a branch, whose output is still to be added to it."""
    source: LinearInput = GivenInput()
    if input_norm is not None:
        source = input_norm.as_input(around=stream if branch.reads_once else None)
    added = branch(stream.x, source, context)
    assert stream.added is None, "a branch that leaves out what stands beside the stream"
    return Stream(stream.x, added if output_norm is None else output_norm.of_output(added))
