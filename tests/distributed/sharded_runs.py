"""Whole training runs on the ranks of a Gloo group, at a chosen level of sharding and in a chosen layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.data.collate import context_part
from engine.distributed.mesh import Axis, Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.experts.layers.attention_sinks import AttentionSinks
from engine.experts.layers.routed_experts import RoutedSizes
from engine.experts.ops.routing import RoutingRule
from engine.hybrids.layers.gated_attention import GatedHeads
from engine.hybrids.layers.gated_delta_net import DeltaSizes
from engine.kernels.native.product import multiply
from engine.layers.context import TensorLayout
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.host_copies import host_memory
from engine.layers.recompute import Level, MemoryPlan
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Part, build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.layer_records import LayerKind, Multipliers
from engine.models.ropes import Rope
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.attention.blocks import CPU_BLOCKS
from engine.ops.backends import NATIVE
from engine.ops.encoded_weight import BaseEncoding
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import TORCH, OptimizerBackend
from engine.optim.flat import FlatParameters
from engine.optim.flat_layout import same_rate
from engine.optim.reduce import GradientReducer
from engine.optim.state_sharding import Sharding, ShardLevel
from engine.pipeline.schedules import ScheduleChoice
from engine.quantization.encoding import encoding
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from engine.vision.batch_parts import BidirectionalSpans, CrossImages, ExpertTokens, Images
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
from tests.distributed.cases import Case, make_batch, small_config, whole_tensor
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.shared_scales import encoded_whole
from tests.support.toy_vision import ToyVisionConfig, toy_grid, with_grid_positions, with_images

CPU = torch.device("cpu")
LEVELS: tuple[ShardLevel, ...] = ("none", "optimizer", "gradients", "parameters")
BUCKET_ELEMENTS = 700
"""So that a run has several buckets, most of several parameters, and rows and parameters are cut."""
PIECE_ELEMENTS = 96
"""Elements of offloaded state that are updated together: so few that parameters and rows are cut here, too."""
GLOBAL_ROWS = 8
SEQ_LENGTH = 24
CLIP = 0.3

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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks are used, and for what.

    Args:
        case: a key of CASES, or a case of the caller's own.
        layers: of each pipeline stage.
        schedule: of a pipeline.
        first: the first stage that trains anything; those below have no backward.
        accumulation: micro-batches a step.
        recompute: what backward makes again.
        dtype: of the weights that the model computes with.
        stored: dtype in which activations are kept for backward; None keeps theirs.
        base: the encoding in which frozen weights of the layers are stored.
        rounds_inputs: their products are of codes, and of inputs rounded in groups.
        merge_aware: such weights take their adapters before they are rounded.
        rounded: frozen weights of the layers have the values that this encoding gives them, but are stored plain.
        plain: regular expression over the names of weights that are neither encoded nor rounded.
        balance: coefficient of the routers' auxiliary loss.
        compiled: by the compiled kernels, also where they would leave so small products to torch, of whose a row's bits
            depend on how many rows there are.
    """

    case: str | Case
    grid: RankGrid
    layers: tuple[int, ...] = (2,)
    schedule: str = "1f1b"
    first: int = 0
    sequence: bool = False
    accumulation: int = 2
    dropout: float = 0.1
    recompute: Level = "selective"
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    base: str | None = None
    rounds_inputs: bool = False
    merge_aware: bool = False
    rounded: str | None = None
    plain: str = ""
    balance: float = 0.0
    compiled: bool = False

    def value(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        """The whole tensor that a parameter starts with, of all whose shapes are given."""
        whole = whole_tensor(name, shapes[name])
        if self.rounded is None or not name.endswith("_proj.weight") or re.fullmatch(self.plain, name):
            return whole
        decoded = torch.empty_like(whole)
        codec = encoding(self.rounded)
        codec.decode(encoded_whole(codec, name, shapes, whole_tensor), decoded)
        return decoded


class Trained(NamedTuple):
    """What one rank saw in its run."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    masters: list[NamedShard]
    weights: list[NamedShard]


class Run:
    """A layout on this rank, with weights that are functions of their names."""

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        level: ShardLevel,
        *,
        backend: OptimizerBackend = TORCH,
        offload_weights: bool = False,
        offload_optimizer: bool = False,
        bucket_elements: int = BUCKET_ELEMENTS,
        clip: float = CLIP,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        lr_factor: Callable[[str], float] = same_rate,
    ) -> None:
        case = layout.case if isinstance(layout.case, Case) else CASES[layout.case]
        case = replace(
            case, sequence_parallel=layout.sequence, dropout=layout.dropout, balance=layout.balance,
            merge_aware=layout.merge_aware,
        )  # fmt: skip
        self.balance = case.load_balance(mesh)
        self.layout, self.mesh, self.case = layout, mesh, case
        virtual = len(layout.layers) // mesh.pp.size
        choice = ScheduleChoice(
            name=layout.schedule, num_ranks=mesh.pp.size, virtual=virtual, first_trainable_stage=layout.first
        )
        stage_rank = choice.schedule(layout.accumulation).stage_rank
        more: dict[str, Any] = {"kernels": replace(NATIVE, product=multiply)} if layout.compiled else {}
        if (kind := case.config.attention_kind(0)).bidirectional or kind.sinks:  # which ring attention does not have
            more |= {"context_method": "ulysses", "attention_blocks": CPU_BLOCKS}
        named = None if layout.base is None else BaseEncoding.named(layout.base)
        base = None if named is None else replace(named, rounds_inputs=layout.rounds_inputs)
        tensors = TensorLayout(
            tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=layout.sequence, cp=mesh.cp,
            pp_ends=Axis("pp_ends") if stage_rank[0] == stage_rank[-1] else mesh.pp_ends,
            experts=mesh.experts, fold=case.fold,
            base=base, **more,
        )  # fmt: skip
        host = host_memory(CPU)
        self.kept = WeightPlacement(
            mesh.dp_cp if level == "parameters" else Axis("dp_cp"), host=host if offload_weights else None,
            expert_axis=mesh.edp if level == "parameters" else None,
        )  # fmt: skip
        self.stages = Stages(self._build_stages(stage_rank, tensors), mesh.pp, choice, self.balance)
        sharding = Sharding(
            level=level, axis=mesh.dp_cp, expert_axis=mesh.edp, bucket_elements=bucket_elements, weights=self.kept
        )
        self.entries = self.stages.entries()
        self.flat = FlatParameters(
            self.entries, CPU, sharding=sharding, host=host if offload_optimizer else None, lr_factor=lr_factor
        )
        self._fill_weights()
        self.flat.publish()
        self.optimizer = FlatAdamW(
            self.flat, mesh, betas=(0.9, 0.99), eps=eps, weight_decay=weight_decay, clip_grad_norm=clip,
            backend=backend, piece_elements=PIECE_ELEMENTS,
        )  # fmt: skip
        self.reducer = GradientReducer(self.flat, mesh, bucket_bytes=4 * bucket_elements)
        self.step = TrainStep(self.stages, self.reducer, self.optimizer, mesh)

    def _build_stages(self, stage_rank: Sequence[int], tensors: TensorLayout) -> dict[int, ModelStage]:
        """This rank's parts of the model, empty."""
        layout, case = self.layout, self.case
        memory = MemoryPlan(recompute=layout.recompute, stored_dtype=layout.stored)
        stages: dict[int, ModelStage] = {}
        step, embedding, first = torch.zeros((), dtype=torch.int64), None, 0
        for number, count in enumerate(layout.layers):
            part = Part(
                first=first, last=first + count, embedding=number == 0, head=number == len(layout.layers) - 1
            )  # fmt: skip
            first += count
            if stage_rank[number] != self.mesh.pp.rank:
                continue
            model = build_decoder(
                case.config, layout=tensors, plan=case.plan(), device=CPU, dtype=layout.dtype, part=part,
                embedding_weight=embedding, weights=self.kept, memory=memory,
            )  # fmt: skip
            embedding = model.embedding.weight if model.embedding is not None else embedding
            stages[number] = ModelStage(
                model, LanguageModeling(), CPU, trains=number >= layout.first, gives_gradient=number > layout.first,
                step=step, balance=self.balance,
            )  # fmt: skip
        return stages

    def _fill_weights(self) -> None:
        """Weights and masters by their names."""
        frozen = [shard for entry in self.entries if entry.sink is None for shard in self.kept.parts(entry)]
        shapes = {entry.name: entry.spec.global_shape for entry in self.entries}
        _fill(frozen, lambda name, shape: self.layout.value(name, shapes))
        _fill(self.flat.master_shards(), whole_tensor)
        self.encoded = [entry for model in self.stages.models() for entry in encoded_entries(model)]
        fill_encoded(
            self.encoded,
            lambda entry: take(whole_tensor(entry.name, entry.spec.global_shape), entry.spec),
            holding=self.kept.materialize,
        )

    def batches(self, step: int) -> tuple[list[Batch], float]:
        """This rank's micro-batches, and the targets of the global batch."""
        mesh = self.mesh
        size = GLOBAL_ROWS // self.layout.accumulation
        share = size // mesh.dp.size
        common = {
            "row_length": SEQ_LENGTH, "seq_length": SEQ_LENGTH, "vocab_size": SMALL.vocab_size, "seed": step,
        }  # fmt: skip
        mine, total = [], 0.0
        for index in range(self.layout.accumulation):
            rows = [(slot, _documents(step, slot)) for slot in range(index * size, (index + 1) * size)]
            total += float(make_batch(rows, **common).loss_weights_BS.sum())
            own = rows[mesh.dp.rank * share : (mesh.dp.rank + 1) * share]
            whole = make_batch(own, **common)
            if (tower := self.case.config.front(ImageTower)) is not None:
                assert isinstance(self.layout.case, str)
                grid_of = GRIDS.get(self.layout.case.partition(" ")[0], toy_grid)
                slots = [slot for slot, _ in own]
                whole = with_images(whole, slots, seed=step, vision=tower.model, grid_of=grid_of)
                if self.case.config.attention_kind(0).bidirectional:
                    whole = with_spans(whole)
            if self.case.config.rope_axes:
                whole = with_grid_positions(whole)
            if self.case.config.variant(CrossAttentionSizes) is not None:
                # of two data ranks, one has none in the first micro-batch and the other in the second; a context rank
                # may have no token of a document with images
                whole = with_images(
                    whole, [slot if slot in (2, 5) else 0 for slot, _ in own], seed=step, kind=CrossImages
                )
            if self.case.config.variant(TokenExperts) is not None:
                whole = with_experts(whole, [slot for slot, _ in own])
            mine.append(context_part(whole, size=mesh.cp.size, rank=mesh.cp.rank))
        return mine, total

    def train(self, first: int, last: int, lr: float = 1e-3) -> tuple[list[float], list[float]]:
        """Steps first ... last; losses and norms before clipping."""
        losses, norms = [], []
        for step in range(first, last + 1):
            result = self.step(*self.batches(step), lr)
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())
        return losses, norms

    def weights(self) -> list[NamedShard]:
        """What of the model's weights this rank keeps, trained ones and frozen ones, as they will be read next."""
        self.flat.publish()
        parts = [part for entry in self.entries for part in self.kept.parts(entry)]
        return [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in parts]

    def gradients(self, step: int) -> list[NamedShard]:
        """The global batch's summed gradient of a step that is not taken, as far as this rank has it."""
        self.step.gradients(*self.batches(step))
        shards = [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in self.flat.gradient_shards()]
        self.flat.gradient.zero_()
        return shards

    def trained(self, num_steps: int) -> Trained:
        """A run that is interrupted by an evaluation half way."""
        half = num_steps // 2
        first = self.train(1, half)
        evaluation = self.stages.figures(self.batches(99)[0])[0].item()
        second = self.train(half + 1, num_steps)
        masters = [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in self.flat.master_shards()]
        return Trained(first[0] + second[0], first[1] + second[1], evaluation, masters, self.weights())


def trained_layouts(
    layouts: Mapping[str, tuple[Layout, ShardLevel]], kinds: Sequence[str], steps: int
) -> dict[tuple[str, str], Trained]:
    """Trains each kind of model in each layout; on all ranks."""
    seen = {}
    for name, (layout, level) in layouts.items():
        mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
        for kind in kinds:
            seen[name, kind] = Run(replace(layout, case=kind), mesh, level).trained(steps)
    return seen


def with_spans(batch: Batch) -> Batch:
    """Tokens of images beside each other see each other, as far as their document goes."""
    assert batch.part(Images) is not None
    places, spans = set(batch.part(Images).places_K.tolist()), list[list[int]]()
    starts = {0, *torch.tensor(batch.document_lengths).cumsum(0).tolist()}
    for place in sorted(places):
        if spans and spans[-1][1] == place and place not in starts:
            spans[-1][1] += 1
        else:
            spans.append([place, place + 1])
    return batch.with_parts(BidirectionalSpans.of((start, stop) for start, stop in spans))


def with_experts(batch: Batch, slots: Sequence[int]) -> Batch:
    """Gives some rows tokens of images, by their slots in the global batch; a rank may have none in a step."""
    row_of, column_of = (
        torch.arange(batch.num_tokens) // batch.row_length,
        torch.arange(batch.num_tokens) % batch.row_length,
    )
    count = torch.tensor([3 * (slot % 4) if slot % 4 >= 2 else 0 for slot in slots])
    is_vision = (column_of >= 2) & (column_of < 2 + count[row_of])
    return batch.with_parts(ExpertTokens(vision_V=is_vision.nonzero()[:, 0], language_L=(~is_vision).nonzero()[:, 0]))


def _documents(step: int, slot: int) -> tuple[int, ...]:
    return ((9, 1, 14), (24,), (5, 5, 11), (21,))[(slot + step) % 4]


def _fill(shards: list[NamedShard], value: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """From whole tensors, cut as each shard says."""
    for name, tensor, spec in shards:
        tensor.copy_(take(value(name, spec.global_shape), spec))


def take(whole: Tensor, spec: ShardSpec) -> Tensor:
    """This shard of a whole tensor; padding is zero."""
    local = torch.zeros(spec.local_shape, dtype=whole.dtype)
    put(local, whole, spec, out_of_whole=True)
    return local


def put(local: Tensor, whole: Tensor, spec: ShardSpec, *, out_of_whole: bool) -> None:
    """Copies between a shard and the whole tensor."""
    if spec.dim is None:
        source, target = (whole, local) if out_of_whole else (local, whole)
        target.copy_(source)
        return
    for piece in spec.pieces:
        here, there = local.narrow(spec.dim, piece.local_offset, piece.length), whole
        for dim in range(whole.dim()):
            run = piece if dim == spec.dim else spec.runs(dim)[0]
            there = there.narrow(dim, run.global_offset, run.length)
        source, target = (there, here) if out_of_whole else (here, there)
        target.copy_(source)


def assemble(ranks: list[list[NamedShard]]) -> dict[str, Tensor]:
    """Whole tensors of all ranks' shards; every element is there, and equal wherever it is twice."""
    whole: dict[str, Tensor] = {}
    for shards in ranks:
        for name, tensor, spec in shards:
            known = whole.setdefault(name, torch.full(spec.global_shape, torch.nan, dtype=tensor.dtype))
            before = take(known, spec)
            assert torch.equal(before[~before.isnan()], tensor[~before.isnan()]), f"{name} differs between ranks"
            put(tensor, known, spec, out_of_whole=False)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"nobody has all of {name}"
    return whole
