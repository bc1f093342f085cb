"""A vision model in front of the first layer: its features take the places of the tokens that stand for them.

    x[t] <- features[i]    for each token t that stands for feature row i

Where a vision model has features for later layers too, they are stacked after x along dim 0: rows [k T, (k + 1) T) of
the result are those of number k, and 0 at tokens of text. So they travel with the residual stream wherever it goes, and
the gradient of each comes back in its place.

The vision model is a `PlainModule`, whole on every tensor and context rank. The tiles of a micro-batch are dealt out to
these ranks, contiguous and with about as many patches each; each rank encodes its own, and features are gathered once.
Backward brings the gradient of each feature row to the rank that made it. Ranks without tiles run the same
collectives, and report to the same gradient sinks.

It follows the embedding and not the first layer, because token embeddings may be scaled and features are not, and it
comes before tokens are sharded over tensor ranks: with sequence parallelism each rank places the features of its own
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor, nn

from engine.batch import InputRank
from engine.choices import VISION
from engine.distributed.collectives import all_gather, all_reduce, local_part
from engine.distributed.mesh import Axis
from engine.layers.context import LayerContext
from engine.layers.module import ShardEntry
from engine.layers.plain_module import PlainModule, TileDropout
from engine.models.front_module import FrontModule
from engine.ops.gradients import past_unused
from engine.vision.batch_parts import Images
from engine.vision.tile_shares import TileShare, deal_out

Grid = tuple[int, ...]
"""(rows, columns) in patches, and behind that what else a vision model has to know of a tile."""


class VisionConfig(Protocol):
    """A vision model's sizes, and how it is built."""

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""

    @property
    def usual_tile(self) -> Grid:
        """The size of a tile that the family cuts most images into."""

    def build(self) -> nn.Module:
        """Returns the model: (patches_PF, grids) -> features [K, hidden], tile after tile; with features for later
        layers [K, levels * hidden], those side by side."""

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile of (rows, columns) patches."""

    def flops(self, grids: tuple[Grid, ...]) -> int:
        """Returns the FLOPs of these tiles in forward."""


@dataclass(frozen=True, slots=True)
class _Share(TileShare):
    """What one rank encodes of a micro-batch, with the range of its feature rows within those of all tiles."""

    features: slice


class _How(NamedTuple):
    """How adapters take part: whether at all, and the step that their dropout is a function of; None drops nothing."""

    adapters: bool
    step: Tensor | None


class VisionEncoder(FrontModule):
    """The vision model of a decoder, and the placing of its features.

    Args:
        config: of the vision model.
        width: of a feature row.
        num_levels: features of each token: that which takes the place of its embedding, and those for later layers.
        first_site: dropout site of its first linear's adapter.
        build: what trains, and the ranks that tiles are dealt out to.
        recompute: whether blocks keep their inputs alone for backward.
    """

    def __init__(
        self,
        config: VisionConfig,
        width: int,
        *,
        first_site: int,
        build: LayerContext,
        recompute: bool,
        num_levels: int = 1,
    ) -> None:
        super().__init__()
        self._config, self._layout, self._dtype = config, build.layout, build.dtype
        self.num_levels = num_levels
        self._width = self.num_levels * width
        self.model = PlainModule(VISION, config.build, build=build, recompute=recompute, first_site=first_site)
        self._leaves = [entry.parameter for entry in self.model.trained]

    @property
    def trained(self) -> list[ShardEntry]:
        return self.model.trained

    def forward(
        self, x_TH: Tensor, images: Images | None, *, adapters: bool = True, step: Tensor | None = None
    ) -> Tensor:
        """Places the features of `images`, of which every rank has the patches of its share.

        Args:
            x_TH: token embeddings, [T, hidden] or this rank's [T / tp, hidden] with sequence parallelism.
            adapters: False leaves the vision model's adapters out.
            step: int64 0-dim, the optimizer step, a coordinate of what its adapters drop; None drops nothing.

        Returns:
            x_TH with the features in their places. Where there are images and features for later layers, these lie
            below: [levels * T, hidden].
        """
        if not self._leaves and (images is None or not images.grids):
            return x_TH
        return _PlaceFeatures.apply(x_TH, self, images, _How(adapters, step), *self._leaves)

    def encoded(self, images: Images, *, adapters: bool = True, step: Tensor | None = None) -> Tensor:
        """Returns the features of all tiles, [K, width], for layers to attend to; on every rank all of them.

        Each tensor rank's gradient of them is the whole one, each context rank's that of its tokens.

        Args:
            adapters, step: as of `forward`.
        """
        return _Encode.apply(self, images, _How(adapters, step), *self._leaves)

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return self._config.num_features(grid)

    def not_run(self, x: Tensor) -> Tensor:
        """Returns x, in whose backward the vision model's sinks report that nothing is added to them."""
        return past_unused(x, [entry.sink for entry in self.model.trained if entry.sink is not None], self._leaves)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """The ranks that share the tiles, the inner ones first."""
        return self._layout.tp, self._layout.cp

    def shares(self, images: Images) -> list[_Share]:
        """Returns what each rank encodes, tensor rank by tensor rank of each context rank."""
        tp, cp = self.axes
        shares, feature = [], 0
        for share in deal_out(images.grids, tp.size * cp.size):
            first, feature = feature, feature + sum(map(self._config.num_features, images.grids[share.tiles]))
            shares.append(_Share(share.tiles, share.patches, slice(first, feature)))
        return shares

    def own(self, shares: Sequence[_Share]) -> _Share:
        """Returns this rank's share."""
        tp, cp = self.axes
        place = InputRank.at(tensor=tp.rank, tensor_size=tp.size, context=cp.rank, context_size=cp.size)
        assert place.rank is not None
        return shares[place.rank]

    def encode(self, images: Images, share: _Share, how: _How) -> Tensor:
        """Returns the features of a share, [k, hidden]."""
        grids = images.grids[share.tiles]
        if not grids:
            return images.patches_PF.new_empty(0, self._width, dtype=self._dtype)
        first, end = share.patches.start - images.first_patch, share.patches.stop - images.first_patch
        assert first >= 0 and end <= len(images.patches_PF), "patches of another rank's share"
        patches = images.patches_PF[first:end].to(self._dtype)
        if how.step is None or not how.adapters or not self.model.drops:
            return self.model.run(patches, grids, adapters=how.adapters)
        assert images.tile_index_N is not None, "dropout without coordinates of tiles"
        return self._encode_with_dropout(patches, grids, images.tile_index_N[share.tiles], how.step)

    def _encode_with_dropout(self, patches_PF: Tensor, grids: Sequence[Grid], index_N: Tensor, step: Tensor) -> Tensor:
        """Returns the features of tiles, in runs over those of one size: there a row's tile follows from its place."""
        patches = patches_PF.split([grid[0] * grid[1] for grid in grids])
        features: list[Tensor] = [patches_PF] * len(grids)
        for grid in dict.fromkeys(grids):
            places = [place for place, other in enumerate(grids) if other == grid]
            dropout = TileDropout(tile_index_N=torch.stack([index_N[place] for place in places]), step=step)
            found = self.model.run(
                torch.cat([patches[place] for place in places]), (grid,) * len(places), dropout=dropout
            )
            for place, rows in zip(places, found.split(self._config.num_features(grid)), strict=True):
                features[place] = rows
        return torch.cat(features)

    def gather(self, features_kH: Tensor, shares: Sequence[_Share]) -> Tensor:
        """Returns the features of all ranks, [K, hidden], from this rank's."""
        counts = [share.features.stop - share.features.start for share in shares]
        if len(counts) == 1:
            return features_kH
        most = max(counts)  # what is gathered has one length on all ranks
        padded = features_kH.new_zeros(most, self._width)
        padded[: features_kH.shape[0]] = features_kH
        for axis in self.axes:
            padded = all_gather(padded, axis)
        rows = padded.view(len(counts), most, self._width)
        return torch.cat([rows[rank, :count] for rank, count in enumerate(counts)])

    def feature_of_token(self, images: Images, num_tokens: int) -> Tensor:
        """Returns int64 [T], or this rank's [T / tp] with sequence parallelism: the feature row that stands at each
        token, K where none does."""
        places, rows = images.places_K, images.features_K
        total = sum(self._config.num_features(grid) for grid in images.grids)
        if rows is None:
            rows = torch.arange(total, device=places.device)
        tp = self._layout.tp if self._layout.splits_tokens else Axis("tp")
        index = torch.full((num_tokens * tp.size,), total, dtype=torch.int64, device=places.device)
        index[places] = rows
        return local_part(index, tp)

    def complete(self, gradient_KH: Tensor) -> Tensor:
        """Sums a gradient of all features over the ranks that hold different tokens."""
        gradient_KH = all_reduce(gradient_KH, self._layout.cp)
        return all_reduce(gradient_KH, self._layout.tp) if self._layout.splits_tokens else gradient_KH

    def add_gradients(self, features_kH: Tensor | None, gradient_kH: Tensor | None) -> None:
        """Adds the gradients of what trains, given the gradient of this rank's features; without any, only reports."""
        found: Sequence[Tensor | None] = [None] * len(self._leaves)
        if features_kH is not None and features_kH.requires_grad:
            found = torch.autograd.grad(features_kH, self._leaves, gradient_kH, allow_unused=True)
        for entry, gradient in zip(self.model.trained, found, strict=True):
            assert entry.sink is not None
            if gradient is None:
                entry.sink.added()
            else:
                entry.sink.add(gradient)


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, encoder: VisionEncoder, images: Images, how: _How, *leaves: Tensor) -> Tensor:
        ctx.encoder, ctx.num_leaves, ctx.shares = encoder, len(leaves), encoder.shares(images)
        with torch.set_grad_enabled(any(ctx.needs_input_grad[3:])):
            ctx.features = encoder.encode(images, encoder.own(ctx.shares), how)
        return encoder.gather(ctx.features.detach(), ctx.shares)

    @staticmethod
    def backward(ctx: Any, gradient_KC: Tensor) -> tuple[Any, ...]:
        encoder: VisionEncoder = ctx.encoder
        cp = encoder.axes[1]
        if cp.size > 1:
            gradient_KC = all_reduce(gradient_KC.clone(), cp)  # another node may read it
        encoder.add_gradients(ctx.features, gradient_KC[encoder.own(ctx.shares).features])
        ctx.features = None
        return (None,) * (3 + ctx.num_leaves)


class _PlaceFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, encoder: VisionEncoder, images: Images | None, how: _How, *leaves: Tensor
    ) -> Tensor:
        ctx.encoder, ctx.num_leaves, ctx.features, ctx.shares = encoder, len(leaves), None, None
        if images is None or not images.grids:
            return x_TH.view_as(x_TH)
        shares = encoder.shares(images)
        with torch.set_grad_enabled(any(ctx.needs_input_grad[4:])):
            own = encoder.encode(images, encoder.own(shares), how)
        features_KW = encoder.gather(own.detach(), shares)
        index_T = encoder.feature_of_token(images, x_TH.shape[0])
        is_text_T1 = (index_T == features_KW.shape[0])[:, None]
        padded_KW = torch.cat([features_KW, features_KW.new_zeros(1, features_KW.shape[1])])
        y_LTH = rearrange(padded_KW, "k (l h) -> l k h", l=encoder.num_levels).index_select(1, index_T)
        torch.where(is_text_T1, x_TH, y_LTH[0], out=y_LTH[0])
        ctx.save_for_backward(index_T, is_text_T1)
        ctx.features, ctx.shares = own, shares
        return y_LTH.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        encoder: VisionEncoder = ctx.encoder
        nothing = (None,) * (3 + ctx.num_leaves)
        if ctx.shares is None:
            encoder.add_gradients(None, None)
            return dy, *nothing
        index_T, is_text_T1 = ctx.saved_tensors
        dy_LTH = dy.unflatten(0, (encoder.num_levels, -1))
        if ctx.num_leaves:
            total = ctx.shares[-1].features.stop
            # every feature row has one place; what other tokens give goes to a row that is not read
            gradient_KLH = dy.new_zeros(total + 1, encoder.num_levels, dy.shape[1])
            gradient_KLH[index_T] = rearrange(dy_LTH, "l t h -> t l h")
            gradient_KW = encoder.complete(gradient_KLH[:total].flatten(1))
            encoder.add_gradients(ctx.features, gradient_KW[encoder.own(ctx.shares).features])
            ctx.features = None
        return (dy_LTH[0] * is_text_T1 if ctx.needs_input_grad[0] else None), *nothing
