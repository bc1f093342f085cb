"""Tiny hybrids under a chosen layout, on packed rows and on the documents of these rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.branches import Parents, shifted
from engine.data.collate import context_part
from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.hybrids.families.falcon import falcon_h1
from engine.hybrids.families.kimi import kimi_linear
from engine.hybrids.families.lfm2 import lfm2
from engine.hybrids.families.mamba import granite_hybrid
from engine.hybrids.families.nemotron import nemotron_h
from engine.hybrids.families.olmo import olmo_hybrid
from engine.hybrids.families.qwen import qwen3_5, qwen3_next
from engine.models.decoder_config import DecoderConfig
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import Case, make_batch
from tests.distributed.sharded_runs import Layout, Run

EVERY_LINEAR = r"layers\..*(_proj|in_proj_[a-z]+|router)|lm_head|embed_tokens"
_COMMON = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 0.1, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_DELTA = {
    **_COMMON, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 9, "linear_value_head_dim": 5,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "layer_types": [
        "linear_attention", "linear_attention", "full_attention", "linear_attention"
    ],
}  # fmt: skip
_WIDE = {
    **_DELTA, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_GRANITE = {
    **_COMMON, "head_dim": None, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20,
    "shared_intermediate_size": 44, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "position_embedding_type": "rope",
}  # fmt: skip
_FALCON = {
    **_COMMON, "mamba_n_heads": 6, "mamba_d_head": 9, "mamba_d_ssm": 54, "mamba_n_groups": 1, "mamba_d_state": 10,
    "embedding_multiplier": 5.7, "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.45, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.6, 1.7], "ssm_multipliers": [1.4, 0.9, 0.7, 1.2, 0.35],
}  # fmt: skip
_KIMI = {
    **_COMMON, "num_key_value_heads": 4, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "linear_head_dim": 9, "linear_num_heads": 4, "layer_types": _DELTA["layer_types"],
    "moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
}  # fmt: skip
_LFM2 = {
    **_COMMON, "head_dim": None, "norm_eps": 0.1, "conv_L_cache": 3, "conv_bias": True, "block_multiple_of": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}  # fmt: skip
_OLMO = {**_DELTA, "head_dim": None, "linear_num_value_heads": 4}
_NEMOTRON = {
    **_COMMON, "layer_norm_epsilon": 0.1, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 8, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28,
}  # fmt: skip
MODELS: dict[str, DecoderConfig] = {
    "qwen3.5": qwen3_5({**_DELTA, "model_type": "qwen3_5_text"}),
    "qwen3.5 wide": qwen3_5({**_WIDE, "model_type": "qwen3_5_text"}),
    "qwen3 next": qwen3_next({**_DELTA, **_EXPERTS, "mlp_only_layers": [1], "model_type": "qwen3_next"}),
    "granite hybrid": granite_hybrid({**_GRANITE, "model_type": "granitemoehybrid"}),
    "falcon h1": falcon_h1({**_FALCON, "model_type": "falcon_h1"}),
    "lfm2": lfm2({**_LFM2, "model_type": "lfm2"}),
    "nemotron h": nemotron_h({**_NEMOTRON, "model_type": "nemotron_h"}),
    "olmo hybrid": olmo_hybrid({**_OLMO, "model_type": "olmo_hybrid"}),
    "kimi linear": kimi_linear({**_KIMI, "model_type": "kimi_linear"}),
}
"""The wide one has linears that two ranks cut at multiples of 64."""
ROWS: dict[str, tuple[int, tuple[tuple[int, ...], ...]]] = {
    # borders of chunks lie inside the document of 700
    "long": (1024, ((700, 1, 2, 3, 5, 64, 128, 65, 56), (1, 1, 322, 700))),
    # columns 64, 128, ... are borders of chunks of four ranks, and every second of two
    "at borders": (512, ((64, 64, 128, 1, 127, 128), (128, 256, 63, 65))),
    "odd": (709, ((700, 1, 2, 6), (3, 4, 5, 697))),
    # chunks of four ranks have three tokens, fewer than the convolution's taps reach back
    "short": (23, ((17, 1, 5), (23,), (1, 1, 1, 20))),
    # on context ranks documents continue ones that end on another, and ones shorter than the taps reach back
    "branches": (240, ((100, 3, 30, 2, 25, 1, 40, 39), (1, 1, 2, 60, 100, 1, 35, 40))),
}
"""Name -> length of rows, and the documents in each."""
PARENTS = {"branches": ((-1, 0, 0, 2, 2, 0, -1, 6), (-1, 0, 1, 2, 2, 2, -1, 6))}
"""Rows -> the document that each document of a row continues."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A layout of a model.

    Args:
        model: a key of MODELS.
        trains: adapters on every linear, or everything in full.
        rows: a key of ROWS.
        more: of `Layout`.
        level: of sharding.
        offload: what waits in host memory; frozen weights do not where they are sharded.
    """

    model: str
    grid: RankGrid
    rows: str = "long"
    trains: str = "adapters"
    dropout: float = 0.1
    layers: tuple[int, ...] = (4,)
    schedule: str = "1f1b"
    sequence: bool = False
    recompute: Any = "selective"
    base: str | None = None
    level: ShardLevel = "none"
    offload: Literal["nothing", "optimizer", "both"] = "nothing"

    @property
    def layout(self) -> Layout:
        """That of a run in float64, in which a sum in another order is far from a wrong one; gradients are fp32."""
        full = self.trains == "everything"
        case = Case(
            config=MODELS[self.model],
            adapters="" if full else EVERY_LINEAR,
            trained=".*" if full else r".*(A_log|dt_bias|conv1d|\.conv|norm|\.D)",
        )
        return Layout(
            case=case, grid=self.grid, layers=self.layers, schedule=self.schedule, sequence=self.sequence,
            dropout=self.dropout, recompute=self.recompute, base=self.base, dtype=torch.float64,
        )  # fmt: skip


class Seen(NamedTuple):
    """A step on one rank."""

    loss: Tensor
    gradients: list[NamedShard]


class HybridRun(Run):
    """A place on this rank."""

    def __init__(self, place: Place, mesh: Mesh) -> None:
        self.place = place
        super().__init__(
            place.layout, mesh, place.level, offload_weights=place.offload == "both",
            offload_optimizer=place.offload != "nothing",
        )  # fmt: skip

    def batches(self, step: int) -> tuple[list[Batch], float]:
        """This data rank's micro-batches, and the targets of all."""
        mesh, every = self.mesh, micro_batches(self.place.rows)
        total = sum(float(batch.loss_weights_BS.sum()) for batch in every)
        own = every[mesh.dp.rank :: mesh.dp.size]
        return [context_part(batch, size=mesh.cp.size, rank=mesh.cp.rank) for batch in own], total


def micro_batches(rows: str) -> list[Batch]:
    """Returns two micro-batches, of one of these rows each, or of two where they are short."""
    length, documents = ROWS[rows]
    count, found = 1 if length > 600 else 2, []
    for number in range(2):
        chosen = [(number + slot) % len(documents) for slot in range(count)]
        batch = make_batch(
            [(count * number + slot, documents[row]) for slot, row in enumerate(chosen)],
            row_length=length,
            seq_length=length,
            vocab_size=67,
            seed=3,
        )
        if rows in PARENTS:
            parents: Parents = ()
            for row in chosen:
                parents += shifted(PARENTS[rows][row], len(documents[row]), len(parents))
            batch = replace(batch, document_parents=parents)
            for path in _paths(batch):  # positions continue
                batch.positions_BS.view(-1)[path] = torch.arange(len(path))
        found.append(batch)
    return found


def _paths(batch: Batch) -> list[Tensor]:
    """Returns the tokens of each document behind those that it continues."""
    parents = batch.document_parents or (-1,) * len(batch.document_lengths)
    found: list[Tensor] = []
    for tokens, parent in zip(torch.arange(batch.num_tokens).split(batch.document_lengths), parents, strict=True):
        found.append(tokens if parent < 0 else torch.cat((found[parent], tokens)))
    return found


def alone(batch: Batch) -> Iterator[Batch]:
    """Yields each document of a micro-batch as one of its own, whose tokens keep their coordinates, behind those that
    it continues, which have no loss there."""
    fields = ("tokens_BS", "labels_BS", "positions_BS", "token_index_BS", "loss_weights_BS")
    for length, path in zip(batch.document_lengths, _paths(batch), strict=True):
        held = {name: getattr(batch, name).flatten()[None, path] for name in fields}
        held["labels_BS"][:, :-length], held["loss_weights_BS"][:, :-length] = IGNORE_LABEL, 0.0
        offsets = torch.tensor([0, len(path)], dtype=torch.int32)
        yield replace(
            batch, **held, document_offsets=offsets, document_lengths=(len(path),), document_parents=(), parts=()
        )


def step(place: Place) -> Seen:
    """The loss of a step of this layout, and the gradients that this rank has."""
    one = place.grid.world_size == 1
    run = HybridRun(place, single_process_mesh() if one else build_mesh(place.grid, device_type="cpu", num_kv_heads=2))
    return _seen(run, *run.batches(1))


def step_of_documents(place: Place) -> Seen:
    """The same on one process, which computes each document by itself."""
    run = HybridRun(place, single_process_mesh())
    batches, total = run.batches(1)
    return _seen(run, [document for batch in batches for document in alone(batch)], total)


def _seen(run: HybridRun, batches: list[Batch], total: float) -> Seen:
    loss = run.step.gradients(batches, total)
    return Seen(loss, [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in run.flat.gradient_shards()])
