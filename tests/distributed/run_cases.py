"""The models of whole runs on several ranks, and which of their weights train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.experts.layers.attention_sinks import AttentionSinks
from engine.experts.layers.routed_experts import RoutedSizes
from engine.experts.ops.routing import RoutingRule
from engine.hybrids.layers.gated_attention import GatedHeads
from engine.hybrids.layers.gated_delta_net import DeltaSizes
from engine.models.decoder_config import DecoderConfig
from engine.models.layer_records import LayerKind, Multipliers
from engine.models.ropes import Rope
from engine.vision.layers.bidirectional import BidirectionalImages
from engine.vision.layers.cross_attention import CrossAttentionSizes
from engine.vision.layers.fronts import ImageEncoder, ImageTower
from engine.vision.layers.token_experts import TokenExperts
from engine.vision.towers.clip import ClipConfig
from engine.vision.towers.gemma3 import Gemma3VisionConfig
from engine.vision.towers.internvl import InternVLVisionConfig
from engine.vision.towers.llava import LlavaVisionConfig, ProjectorConfig
from engine.vision.towers.llava_tiles import TiledLlavaConfig
from engine.vision.towers.minicpm_v4_6 import MiniCPMV46VisionConfig
from engine.vision.towers.qwen2_5_vl import Qwen25VisionConfig
from engine.vision.towers.qwen3_vl import Qwen3VisionConfig
from engine.vision.towers.siglip import SiglipConfig
from tests.distributed.cases import Case, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.toy_vision import ToyVisionConfig

_TRIPLED = Multipliers(embedding=3.0)


EVERY_EXPERT = r"layers\..*_proj|lm_head|embed_tokens"


FUSED_EXPERTS = r"layers\..*experts\.\d+\.(gate_up_proj|down_proj)"


EXPERTS_AND_ROUTER = r"layers\..*experts\.\d+\.(gate|up|down)_proj|layers\..*router"


SMALL = small_config(num_layers=2)


BLOCKS = small_config(num_layers=2, hidden=128, intermediate=256, head_dim=16)
"""Two ranks cut it at multiples of 64."""


WIDE = small_config(num_layers=3, hidden=96, intermediate=160, vocab_size=259)
"""So wide that padding is less than a hundredth of what a rank holds."""


IMAGES = small_config(num_layers=2, multipliers=_TRIPLED, fronts=(ImageTower(model=ToyVisionConfig()),))


DEEPSTACK = small_config(
    num_layers=4,
    ropes=(Rope(theta=10000.0, axes=(2, 0, 1)),),
    fronts=(ImageTower(model=ToyVisionConfig(hidden=4 * 32), deepstack=3),),
)
"""Rotated by time, height and width, with images' features for three layers."""


EXPERTS = small_config(num_layers=2, variants=(TokenExperts(qkv_bias=True),))


ROUTED = small_config(
    num_layers=2,
    variants=(
        RoutedSizes(
            rule=RoutingRule(num_experts=5, per_token=2, renormalises=True, rounds=True), intermediate=20, shared=12
        ),
    ),
)


GROUPED = small_config(
    num_layers=2,
    variants=(RoutedSizes(
        rule=RoutingRule(
            num_experts=8, per_token=2, renormalises=True, rounds=False, scores="sigmoid", num_groups=4, kept_groups=2,
            factor=1.7, has_correction=True, wide=True,
        ),
        intermediate=20, shared=12, gates_shared=False,
    ),),
)  # fmt: skip
"""As GLM-4-MoE routes."""


BIASED = small_config(
    num_layers=2,
    layer_kinds=(LayerKind(window=5), LayerKind()),
    variants=(AttentionSinks(), RoutedSizes(
        rule=RoutingRule(
            num_experts=4, per_token=2, renormalises=False, rounds=True, scores="softmax of chosen", has_bias=True
        ),
        intermediate=20, has_biases=True, clamp=(1.702, 0.8),
    ),),
)  # fmt: skip
"""As gpt-oss has experts and attention."""


EVEN = replace(
    ROUTED,
    variants=(
        replace(ROUTED.variants[0], rule=RoutingRule(num_experts=4, per_token=2, renormalises=True, rounds=True)),
    ),
)
"""Experts that divide over two and four ranks."""


NARROW = replace(EVEN, variants=(replace(EVEN.variants[0], activation="relu2", latent=12, gates_shared=False),))
"""As Nemotron-H has experts of a stream that is narrower than the model's."""


ROUTED_BLOCKS = small_config(
    num_layers=2,
    hidden=128,
    intermediate=256,
    head_dim=16,
    variants=(replace(EVEN.variants[0], intermediate=128, shared=128),),
)
"""Two ranks cut it at multiples of 64."""


_PROJECTOR = ProjectorConfig(inputs=24, width=32, bias=True, activation="gelu")


LLAVA = LlavaVisionConfig(
    tower=ClipConfig(
        width=24, mlp_width=36, num_heads=3, num_layers=2, stored_layers=3, patch=2, side=2, activation="quick_gelu",
        norm_eps=1e-5,
    ),
    projector=_PROJECTOR, states=(2,), first=1,
)  # fmt: skip


ONEVISION = TiledLlavaConfig(
    tiles=replace(
        LLAVA,
        tower=SiglipConfig(
            width=24, mlp_width=36, num_heads=3, num_layers=2, stored_layers=2, patch=2, side=2,
            activation="gelu_pytorch_tanh", norm_eps=1e-6, has_last_norm=False,
        ),
        first=0,
    )
)  # fmt: skip


NEXT = TiledLlavaConfig(tiles=LLAVA)


INTERNVL = InternVLVisionConfig(
    width=24, mlp_width=36, num_heads=3, num_layers=2, stored_layers=2, patch=2, side=4, activation="gelu",
    norm="layer_norm", norm_eps=1e-6, qkv_bias=True, qk_norm=True, has_positions=True, last_norm=True, first=1,
    together=2, projector=replace(_PROJECTOR, inputs=96),
)  # fmt: skip


GEMMA3 = Gemma3VisionConfig(
    tower=SiglipConfig(
        width=24, mlp_width=36, num_heads=3, num_layers=2, stored_layers=2, patch=2, side=4,
        activation="gelu_pytorch_tanh", norm_eps=1e-6, has_last_norm=True,
    ),
    side=2, width=32,
)  # fmt: skip


QWEN2_5_VL = Qwen25VisionConfig(
    width=24, mlp_width=20, num_heads=2, num_layers=2, patch=2, merge=2, window=1, whole=(1,), hidden=32, theta=100.0
)


QWEN3_VL = Qwen3VisionConfig(
    width=24, mlp_width=20, num_heads=2, num_layers=3, patch=2, merge=2, table_side=3, deepstack=(1, 0), hidden=32,
    theta=100.0,
)  # fmt: skip


MINICPM_V4_7 = MiniCPMV46VisionConfig(
    width=24, mlp_width=20, num_heads=2, num_layers=3, stored_layers=3, patch=2, side=5, activation="gelu_pytorch_tanh",
    norm_eps=1e-5, window_behind=1, hidden=32,
)  # fmt: skip


_HYBRID: dict[str, Any] = {
    "norm_eps": 0.1,  # a document's first output is a multiple of one value, which the norm after it takes away
    "variants": (
        DeltaSizes(layers=(0,), key_heads=2, value_heads=4, key_dim=6, value_dim=5, taps=4, stored="apart"),
        GatedHeads(layers=(1,)),
    ),
}


_BY_GRID: dict[str, Any] = {"ropes": (Rope(theta=10000.0, axes=(2, 0, 1)),)}


TOWERS: dict[str, DecoderConfig] = {
    "llava": small_config(num_layers=2, multipliers=_TRIPLED, fronts=(ImageTower(model=LLAVA),)),
    "internvl": small_config(num_layers=2, multipliers=_TRIPLED, fronts=(ImageTower(model=INTERNVL),)),
    "llava_next": small_config(num_layers=2, multipliers=_TRIPLED, fronts=(ImageTower(model=NEXT),)),
    "llava_onevision": small_config(num_layers=2, multipliers=_TRIPLED, fronts=(ImageTower(model=ONEVISION),)),
    "gemma3": small_config(
        num_layers=2,
        multipliers=_TRIPLED,
        fronts=(ImageTower(model=GEMMA3),),
        variants=(BidirectionalImages(),),
        layer_kinds=(LayerKind(window=3), LayerKind()),
    ),
    "qwen2_5_vl": small_config(num_layers=2, qkv_bias=True, fronts=(ImageTower(model=QWEN2_5_VL),), **_BY_GRID),
    "qwen3_vl": small_config(num_layers=2, qk_norm=True, fronts=(ImageTower(model=QWEN3_VL, deepstack=2),), **_BY_GRID),
    "minicpmv4_7": small_config(
        num_layers=2, qk_norm=True, fronts=(ImageTower(model=MINICPM_V4_7),), **_BY_GRID, **_HYBRID
    ),
}
"""Models with towers of transformers."""


GRIDS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "llava": lambda slot, number: (2, 2),
    "internvl": lambda slot, number: (4, 4),
    # one tile, one of two whose padding is cut, and one that is scaled down
    "llava_onevision": lambda slot, number: ((2, 2), (6, 2, 1, 2, 2, 2, 2, 2), (6, 2, 2, 1, 4, 2, 3, 1))[
        (slot + number) % 3
    ],
    # one tile beside the whole, and two of which padding is cut on either side
    "llava_next": lambda slot, number: ((4, 2, 1, 1, 2, 2, 2, 2), (6, 2, 1, 2, 2, 2, 2, 2), (6, 2, 2, 1, 2, 2, 2, 2))[
        (slot + number) % 3
    ],
    "gemma3": lambda slot, number: (4, 4),
    "qwen2_5_vl": lambda slot, number: (2 + 2 * (slot % 2), 4),
    "qwen3_vl": lambda slot, number: (2 + 2 * (slot % 2), 4),
    "minicpmv4_7": lambda slot, number: (4 + 4 * (slot % 2), 8),
}
"""First word of a case -> patches of an image of a row."""


TOWER_LINEARS = r"vision\.(vision_tower|visual\.blocks)\..*(q_proj|v_proj|fc2|qkv)"


PROJECTORS = r"vision\.(multi_modal_projector|merger|visual\.(deepstack_)?merger.*)\..*"


ENCODED: dict[str, Any] = {
    "variants": (CrossAttentionSizes(encoded=12, width=32),),
    "fronts": (ImageEncoder(model=ToyVisionConfig(hidden=12), width=12),),
}


CASES = {
    "adapters": Case(config=SMALL, adapters=EVERY_LINEAR),
    "everything": Case(config=replace(SMALL, qkv_bias=True, qk_norm=True), trained=".*"),
    "tied": Case(config=replace(SMALL, tied_embeddings=True), trained=".*"),
    "head and adapters": Case(config=SMALL, adapters=r"layers\.1\..*_proj|embed_tokens", trained="lm_head|norm"),
    "upper adapters": Case(config=SMALL, adapters=r"layers\.1\..*_proj"),
    "deep, last adapters": Case(config=small_config(num_layers=4), adapters=r"layers\.3\..*_proj"),
    "deep, last layer": Case(config=small_config(num_layers=4), trained=r"layers\.3\..*|norm|lm_head"),
    "deep, first adapters": Case(config=small_config(num_layers=4), adapters=r"layers\.0\..*_proj"),
    "deep, adapters": Case(config=small_config(num_layers=4), adapters=EVERY_LINEAR),
    "deep, layers": Case(config=small_config(num_layers=4), adapters=r"layers\..*_proj"),
    "deep, everything": Case(config=small_config(num_layers=4), trained=".*"),
    "deep, tied": Case(config=small_config(num_layers=4, tied_embeddings=True), trained=".*"),
    "wide, everything": Case(config=WIDE, trained=".*"),
    "blocks, adapters": Case(config=BLOCKS, adapters=EVERY_LINEAR),
    "blocks, part": Case(config=BLOCKS, adapters=r"layers\.1\..*_proj", trained=r"layers\.1\.attention\.q_proj"),
    "wide, adapters": Case(config=WIDE, adapters=EVERY_LINEAR),
    "vision in full": Case(config=IMAGES, adapters=EVERY_LINEAR, trained=r"vision\..*"),
    "vision's adapters": Case(config=IMAGES, adapters=r"vision\.blocks\..*_proj", trained=r"vision\.resampler"),
    "experts in full": Case(config=EXPERTS, trained=".*"),
    "experts' adapters": Case(config=EXPERTS, adapters=EVERY_EXPERT),
    "experts' adapters, unfolded": Case(config=EXPERTS, adapters=EVERY_EXPERT, fold=False),
    "vision experts' fused adapters": Case(
        config=EXPERTS, adapters=r".*\.vision\.(qkv|gate_up)_proj", fused=r".*\.vision\.(qkv|gate_up)_proj"
    ),
    "routed, adapters": Case(config=ROUTED, adapters=EVERY_EXPERT, trained=r".*router|.*shared_expert_gate"),
    "routed, one A for gate and up": Case(config=ROUTED, adapters=FUSED_EXPERTS, fused=FUSED_EXPERTS),
    "routed, shared outer": Case(config=ROUTED, adapters=EXPERTS_AND_ROUTER, experts="shared_outer"),
    "routed, shared": Case(config=ROUTED, adapters=FUSED_EXPERTS, fused=FUSED_EXPERTS, experts="shared"),
    "routed, ranks": Case(
        config=ROUTED,
        adapters=EXPERTS_AND_ROUTER,
        ranks=((r".*experts\.[13]\..*", 5), (r".*experts\.0\.down.*", 2)),
    ),
    "routed, in full": Case(config=ROUTED, trained=".*"),
    "routed, attention's adapters": Case(config=ROUTED, adapters=r".*attention\..*_proj"),
    "grouped, adapters": Case(config=GROUPED, adapters=rf"{EVERY_EXPERT}|.*router"),
    "grouped, in full": Case(config=GROUPED, trained=".*"),
    "biased, adapters": Case(config=BIASED, adapters=rf"{EVERY_EXPERT}|.*router", trained=".*sinks"),
    "biased, in full": Case(config=BIASED, trained=".*"),
    "narrow, adapters": Case(config=NARROW, adapters=rf"{EVERY_EXPERT}|.*latent_proj"),
    "narrow, in full": Case(config=NARROW, trained=".*"),
    "routed blocks, adapters": Case(config=ROUTED_BLOCKS, adapters=EVERY_EXPERT, trained=".*router"),
    "routed blocks, part": Case(
        config=ROUTED_BLOCKS, adapters=EVERY_EXPERT, trained=r"layers\.0\.mlp\.experts\.3\.up_proj"
    ),
    "four experts, adapters": Case(config=EVEN, adapters=EVERY_EXPERT, trained=r".*router|.*shared_expert_gate"),
    "four experts, shared outer": Case(config=EVEN, adapters=EXPERTS_AND_ROUTER, experts="shared_outer"),
    "four experts, one A for gate and up": Case(config=EVEN, adapters=FUSED_EXPERTS, fused=FUSED_EXPERTS),
    "four experts, shared": Case(config=EVEN, adapters=FUSED_EXPERTS, fused=FUSED_EXPERTS, experts="shared"),
    "four experts, in full": Case(config=EVEN, trained=".*"),
    "four experts, adapters of one": Case(config=EVEN, adapters=r"layers\.\d\.mlp\.experts\.0\.(gate|down)_proj"),
    "deep, deepstack": Case(config=DEEPSTACK, adapters=r"layers\.2\..*_proj", trained=r"vision\..*"),
    **{
        f"{name} {kind}": Case(
            config=config,
            adapters=adapters,
            trained=trained,
        )
        for name, config in TOWERS.items()
        for kind, adapters, trained in (
            ("in full", EVERY_LINEAR, r"vision\..*"),
            ("adapters", rf"{EVERY_LINEAR}|{TOWER_LINEARS}", PROJECTORS),
            ("frozen", EVERY_LINEAR, ""),
        )
    },
    "llava blocks": Case(
        config=replace(
            BLOCKS, fronts=(ImageTower(model=replace(LLAVA, projector=replace(_PROJECTOR, width=BLOCKS.hidden))),)
        ),
        adapters=EVERY_LINEAR,
        trained=PROJECTORS,
    ),
    "frozen vision": Case(config=IMAGES, adapters=EVERY_LINEAR),
    "encoded images": Case(config=small_config(num_layers=2, **ENCODED), trained=r"(vision|layers)\..*"),
    "frozen encoder": Case(
        config=small_config(num_layers=2, **ENCODED),
        adapters=r"layers\..*(_proj|query|dense)",
        trained=r"layers\.0\.cross_attention\.(key|value)",
    ),
}
