"""What the towers of Qwen2.5-VL and Qwen3-VL share.

Both take images of any size, whose patches come in blocks that are merged into one feature row each, block after
block. Blocks of transformers' towers are taken, all but how attention runs: theirs takes one window or image after
the other, and reads lengths that lie on the device; here those of one length that follow each other are one batch, and
lengths are on the host.

Legend: P patches of all images, V width, N heads, D features of a head, m side of a merged block in patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from engine.errors import UserError
from engine.vision.towers.sizes import Grid, Grids, counts_from_hf, number_from_hf

Segments = tuple[tuple[int, int], ...]
"""(number, length) of sequences that attention keeps apart, those of one length that follow each other together."""

FRAMES = 2
"""Times that an image stands in a patch: as that many equal frames of a video."""
_SIZES = (
    "hidden_size", "intermediate_size", "depth", "num_heads", "patch_size", "spatial_merge_size", "out_hidden_size",
)  # fmt: skip
_SETTINGS = {"temporal_patch_size": FRAMES, "in_channels": 3, "in_chans": 3}
KEPT_TABLES = 64
"""Sizes of images whose tables on the host are kept; those of an image of 640 x 480 have 0.1 MB."""
_USUAL_IMAGE = (480, 640)
"""Pixels; images keep their size, within the processor's limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedImages:
    """Sizes that the towers have in common.

    Args:
        width, mlp_width, num_heads, num_layers: of its blocks.
        patch: pixels on a side of a patch.
        merge: patches on a side of what becomes a feature row.
        hidden: of the language model.
        theta: base of the rotary embedding.
    """

    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    patch: int
    merge: int
    hidden: int
    theta: float

    @property
    def num_levels(self) -> int:
        """Feature rows beside each other, the first for the embedding, the others for later layers."""
        return 1

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return 3 * FRAMES * self.patch**2

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of an image of 640 x 480 pixels."""
        rows, columns = (round(side / self.patch / self.merge) * self.merge for side in _USUAL_IMAGE)
        return rows, columns

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of an image."""
        return grid[0] * grid[1] // self.merge**2

    @property
    def stock(self) -> dict[str, Any]:
        """The arguments of transformers' configurations of its blocks."""
        return {
            "depth": self.num_layers,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_heads": self.num_heads,
        }


def segments_of(lengths: Sequence[int]) -> Segments:
    """Returns the segments of consecutive sequences of these lengths."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        same = runs and runs[-1][1] == length
        runs[-1:] = [(runs[-1][0] + 1, length)] if same else [*runs[-1:], (1, length)]
    return tuple(runs)


@lru_cache(maxsize=KEPT_TABLES)
def block_places(grid: tuple[int, int], merge: int) -> Tensor:
    """Returns the row and column of each patch, in the order of merged blocks: int64 [patches, 2], on the host, to be
    read only."""
    rows, columns = (torch.arange(count, device="cpu") for count in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
    return rearrange(places, "(r a) (c b) xy -> (r c a b) xy", a=merge, b=merge)


def merged_from_hf(vision: Mapping[str, Any], activation: str, hidden: int) -> dict[str, Any]:
    """Reads the arguments of `MergedImages` from `vision_config`, which leaves nothing out.

    Args:
        activation: of the tower's MLPs.
        hidden: of the language model, which the tower's features must have.

    Raises:
        UserError: a size is missing or does not fit, or the tower differs from what is built here.
    """
    sizes = counts_from_hf(vision, _SIZES, "vision_config")
    for key, value in (("hidden_act", activation), *_SETTINGS.items()):
        if vision.get(key, value) != value:
            raise UserError(
                f"config.json has vision_config.{key} {vision[key]!r}, but this model's tower has {value!r}: use a "
                "model with that."
            )
    if sizes["hidden_size"] % (4 * sizes["num_heads"]):
        raise UserError(
            f"config.json has vision_config.hidden_size {sizes['hidden_size']}, which does not divide into "
            f"{sizes['num_heads']} heads that are rotated by rows and columns: correct it or copy it again."
        )
    if sizes["out_hidden_size"] != hidden:
        raise UserError(
            f"config.json has vision_config.out_hidden_size {sizes['out_hidden_size']} for a language model of "
            f"{hidden} features: correct it or copy it again."
        )
    return {
        "width": sizes["hidden_size"],
        "mlp_width": sizes["intermediate_size"],
        "num_heads": sizes["num_heads"],
        "num_layers": sizes["depth"],
        "patch": sizes["patch_size"],
        "merge": sizes["spatial_merge_size"],
        "hidden": hidden,
        "theta": _rope_theta(vision),
    }


def _rope_theta(vision: Mapping[str, Any]) -> float:
    """Returns the base of the tower's rotary embedding.

    Raises:
        UserError: it is no number above 0.
    """
    rope = vision.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("rope_theta") is None:
        return 10000.0
    return number_from_hf(rope, "rope_theta", "vision_config.rope_parameters")


class PatchEmbed(nn.Module):
    """A convolution over patches that come flattened: [P, 3 * FRAMES * patch ** 2] -> [P, V]."""

    def __init__(self, width: int, patch: int, *, bias: bool) -> None:
        super().__init__()
        kernel = (FRAMES, patch, patch)
        self.proj = nn.Conv3d(3, width, kernel_size=kernel, stride=kernel, bias=bias)

    def forward(self, patches_PF: Tensor) -> Tensor:
        return linear(patches_PF, self.proj.weight.flatten(1), self.proj.bias)


class AxialRotation(nn.Module):
    """Angles of patches: of each half of a head's pairs, the first quarter turns by the row, the second by the column.

    Args:
        head_dim: D.
        theta: base of the wavelengths.
    """

    inverse_frequencies: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        half = head_dim // 2
        frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float) / half))
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, places_P2: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, fp32 [P, D], of int64 rows and columns."""
        angles = rearrange(places_P2.float()[..., None] * self.inverse_frequencies, "p xy d -> p (xy d)")
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


class SegmentAttention(nn.Module):
    """Attention of each segment to itself, with the linears of transformers' own.

    Args:
        theirs: whose place it takes in a block.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

        self.qkv, self.proj = theirs.qkv, theirs.proj
        self._num_heads, self._rotate = int(theirs.num_heads), apply_rotary_pos_emb_vision

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Segments, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """Returns [P, V]; the arguments have the names by which blocks hand them on."""
        q, k, v = rearrange(self.qkv(hidden_states), "p (x n d) -> x p n d", x=3, n=self._num_heads)
        q, k = self._rotate(q, k, *position_embeddings)
        parts, start = [], 0
        for number, length in cu_seqlens:
            rows = slice(start, start + number * length)
            batch = [rearrange(y[rows], "(s l) n d -> s n l d", s=number) for y in (q, k, v)]
            parts.append(rearrange(scaled_dot_product_attention(*batch), "s n l d -> (s l) (n d)"))
            start = rows.stop
        return self.proj(torch.cat(parts))  # type: ignore[no-any-return]


def segment_blocks(kind: Callable[[Any], Any], stock: Any, count: int) -> nn.ModuleList:
    """Builds transformers' blocks with `SegmentAttention` in place of their attention.

    Args:
        kind: of the blocks.
        stock: their configuration.
    """
    blocks = nn.ModuleList()
    for _ in range(count):
        block = kind(stock)
        block.attn = SegmentAttention(block.attn)
        blocks.append(block)
    return blocks


class MergedVision(nn.Module):
    """A tower, below the name that it has in the checkpoint."""

    def __init__(self, config: MergedImages, tower: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.visual = tower

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all images, and beside them those for later layers: [K, levels * decoder's
        width].

        Args:
            patches_PF: image after image, in merged blocks, flattened as (channel, frame, y, x), normalised.
            grids: rows and columns of each, in patches.

        Raises:
            ValueError: an image does not divide into merged blocks.
        """
        config = self.config
        if not grids:
            return patches_PF.new_empty(0, config.num_levels * config.hidden)
        for rows, columns in grids:
            if rows % config.merge or columns % config.merge:
                raise ValueError(
                    f"an image of {rows} x {columns} patches came to a tower that merges {config.merge} x "
                    f"{config.merge}"
                )
        return self.visual(patches_PF, grids)  # type: ignore[no-any-return]
