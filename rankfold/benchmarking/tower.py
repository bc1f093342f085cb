"""Section `tower`: a vision tower against transformers' own, with the same weights on the same images.

The tower is SigLIP's, which transformers has too. Forward alone is the cost of a frozen tower, and forward with
backward to all weights that of one trained in full. Both sides are plain modules in torch; a run's additions (adapters,
recomputation and the division of tiles) are not measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.models.dtypes import TORCH_DTYPES
from engine.vision.towers.timm_vit import SIGLIP_SO400M_384, TimmViT
from rankfold.benchmarking.machine import choose_device, describe
from rankfold.benchmarking.peak_memory import peak_above_now
from rankfold.benchmarking.processes import in_new_process
from rankfold.benchmarking.sections import TowerOptions
from rankfold.benchmarking.table import Table
from rankfold.benchmarking.timing import interleave, paired_ratio, summarise

ENGINE, TRANSFORMERS = "engine", "transformers"
FORWARD, TRAINING = "forward", "forward and backward"
_SAME = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of features, of the largest feature: another order of sums, once for each block."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both towers, and the arguments of each.

    Args:
        modules: of each side.
        features: side -> its features of the images, [images * patches, width].
    """

    modules: dict[str, nn.Module]
    features: dict[str, Callable[[], Tensor]]


def build_pair(options: TowerOptions, device: torch.device) -> Pair:
    """Builds both towers with the same drawn weights, and checks that their features agree."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    patch, dtype = SIGLIP_SO400M_384.patch, TORCH_DTYPES[options.dtype]
    grid = (options.side // patch,) * 2
    config = replace(SIGLIP_SO400M_384, width=options.width, num_heads=options.heads, mlp_width=options.mlp,
                     depth=options.layers, table_side=grid[0])  # fmt: skip
    torch.manual_seed(0)
    ours = TimmViT(config)
    theirs = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=config.width, intermediate_size=config.mlp_width, num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads, image_size=grid[0] * patch, patch_size=patch, hidden_act="gelu",
            vision_use_head=False,
        )
    )  # fmt: skip
    # transformers 4 has them one level deeper
    weights = {name.removeprefix("vision_model."): value for name, value in theirs.named_parameters()}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parts = [weights[part] for part in _names(name)]
            parameter.copy_(torch.cat(parts).view(parameter.shape))
    pixels = torch.randn(options.images, 3, grid[0] * patch, grid[1] * patch)
    patches = nn.functional.unfold(pixels, patch, stride=patch).transpose(1, 2).to(device, dtype)
    pixels = pixels.to(device, dtype)
    ours, theirs = ours.to(device, dtype), theirs.to(device, dtype)
    grids = (grid,) * options.images
    pair = Pair(
        {ENGINE: ours, TRANSFORMERS: theirs},
        {
            ENGINE: lambda: ours(patches, grids).flatten(0, 1),
            TRANSFORMERS: lambda: theirs(pixel_values=pixels).last_hidden_state.flatten(0, 1),
        },
    )
    with torch.no_grad():
        one, other = (pair.features[side]().float() for side in (ENGINE, TRANSFORMERS))
    off = float((one - other).abs().max() / other.abs().max())
    assert off < _SAME[dtype], f"the towers compute different features: {off:.1e}"
    return pair


def _names(name: str) -> list[str]:
    """Names of the parameters of transformers' tower whose rows one of ours has."""
    plain = {
        "patch_embed.proj": "embeddings.patch_embedding", "pos_embed": "embeddings.position_embedding.weight",
        "norm": "post_layernorm",
    }  # fmt: skip
    owner, _, leaf = name.rpartition(".")
    if name in plain:
        return [plain[name]]
    if owner in plain:
        return [f"{plain[owner]}.{leaf}"]
    _, number, rest = owner.split(".", 2)
    inner = {
        "norm1": ["layer_norm1"], "norm2": ["layer_norm2"], "attn.proj": ["self_attn.out_proj"],
        "attn.qkv": [f"self_attn.{part}_proj" for part in "qkv"], "mlp.fc1": ["mlp.fc1"], "mlp.fc2": ["mlp.fc2"],
    }  # fmt: skip
    return [f"encoder.layers.{number}.{part}.{leaf}" for part in inner[rest]]


def _works(pair: Pair) -> dict[tuple[str, str], Callable[[], None]]:
    """Returns the calls to measure, by side and kind."""

    def forward(side: str) -> None:
        with torch.no_grad():
            pair.features[side]()

    def training(side: str) -> None:
        pair.features[side]().float().square().mean().backward()
        pair.modules[side].zero_grad(set_to_none=True)

    kinds = {FORWARD: forward, TRAINING: training}
    return {
        (side, kind): (lambda side=side, work=work: work(side))
        for kind, work in kinds.items()
        for side in (ENGINE, TRANSFORMERS)
    }


def _peak(options: TowerOptions, side: str, kind: str) -> int | None:
    """Returns the bytes by which one work raises the memory of a new process."""
    device = choose_device(options.device)
    work = _works(build_pair(options, device))[side, kind]
    return peak_above_now(work, device)


def run(options: TowerOptions) -> Table:
    """Times both sides in turns, and measures the peak of each in a process of its own."""
    device = choose_device(options.device)
    works = _works(build_pair(options, device))
    named = {f"{side}, {kind}": work for (side, kind), work in works.items()}
    samples = interleave(named, repeats=options.repeats, warmup=options.warmup, device=device, turn=lambda done: None)
    seconds = {name: [one.seconds for one in of] for name, of in samples.items()}
    peaks = {key: in_new_process(_peak, options, *key) for key in works}
    rows = []
    for kind in (FORWARD, TRAINING):
        ours, theirs = (f"{side}, {kind}" for side in (ENGINE, TRANSFORMERS))
        ratio = paired_ratio(seconds[theirs], seconds[ours])
        of_ours, of_theirs = (peaks[side, kind] for side in (ENGINE, TRANSFORMERS))
        bytes_ratio = "-" if not of_ours or not of_theirs else f"{of_theirs / of_ours:.2f}"
        rows.append((
            kind, f"{1e3 * summarise(seconds[ours]).median:.1f}", f"{1e3 * summarise(seconds[theirs]).median:.1f}",
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})", _mib(of_ours), _mib(of_theirs), bytes_ratio,
        ))  # fmt: skip
    return Table(
        title=f"A SigLIP tower of {options.layers} blocks of width {options.width} on {options.images} images of "
        f"{options.side} pixels, {options.dtype}",
        columns=(
            "",
            "engine ms",
            "transformers ms",
            "times as fast",
            "engine MiB",
            "transformers MiB",
            "ratio",
        ),
        rows=tuple(rows),
        findings=("Features agree. Memory is the peak above weights and images, each in a process of its own.",),
        machine=describe(device, ("transformers",)),
        data={"seconds": seconds, "peaks": {f"{side}, {kind}": peak for (side, kind), peak in peaks.items()}},
    )


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f}"
