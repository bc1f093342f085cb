"""Small models under a chosen layout, with the same numbers in every layout; and batches for them.

The numbers are drawn here, per whole tensor, from torch's own generator, and cut by the shard record that each
parameter carries. A wrong record therefore shows in the losses. B factors are never zero.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch, Padding
from engine.choices import ExpertFactors
from engine.distributed.mesh import Mesh, single_process_mesh
from engine.distributed.sharding import ShardSpec
from engine.experts.ops.load_balance import LoadBalance
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.module import ShardEntry, shard_entries
from engine.models.decoder import Decoder, build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.ropes import Rope
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.quantized_backends import choose_quantized
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep

SEED = 11
RANK = 3
SCALE = 1.7


def small_config(**changes: object) -> DecoderConfig:
    """8 heads, 2 key/value heads, an odd vocabulary, head_dim that is not hidden / heads."""
    sizes = {
        "family": "llama", "hidden": 32, "intermediate": 48, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2,
        "head_dim": 6, "vocab_size": 131, "norm_eps": 1e-5, "ropes": (Rope(theta=10000.0),),
    }  # fmt: skip
    return DecoderConfig(**{**sizes, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is trained in it.

    Args:
        config: of the model.
        adapters, trained: regular expressions over module names, matched whole; "" matches nothing.
        sequence_parallel, joint: of the layout; they only matter with tp > 1.
        fused: regular expression over the names of modules that one adapter stands over.
        experts: which factors the experts of a mixture share.
        ranks: regular expression over module names -> rank of their adapters, where it is not the usual one; their
            scale is that of the same alpha.
        fold: whether adapters may lie beside their linear's weight.
        dropout: of the adapters.
        base: the encoding in which frozen weights of the layers are stored.
        merge_aware: such weights take their adapters before they are rounded.
        balance: coefficient of the routers' auxiliary loss.
    """

    config: DecoderConfig
    adapters: str = ""
    trained: str = ""
    sequence_parallel: bool = False
    joint: bool = False
    fused: str = ""
    experts: ExpertFactors = "per_expert"
    ranks: tuple[tuple[str, int], ...] = ()
    fold: bool = True
    dropout: float = 0.1
    base: str | None = None
    merge_aware: bool = False
    balance: float = 0.0

    def load_balance(self, mesh: Mesh) -> LoadBalance | None:
        """The auxiliary loss on this rank."""
        if not self.balance:
            return None
        axes = (mesh.dp_cp, mesh.pp) if mesh.grid.shards_experts else (mesh.dp_cp, mesh.pp, mesh.tp)
        return LoadBalance(self.balance, self.config.num_experts, axes=axes, device=torch.device("cpu"))

    def plan(self) -> TrainingPlan:
        def settings(module: str) -> AdapterSettings | None:
            if not re.fullmatch(self.adapters, module):
                return None
            rank = next((rank for pattern, rank in self.ranks if re.fullmatch(pattern, module)), RANK)
            return AdapterSettings(rank=rank, scale=SCALE * RANK / rank, dropout=self.dropout)

        return TrainingPlan(
            trains=lambda module: re.fullmatch(self.trained, module) is not None,
            adapter=settings,
            fused=lambda module: re.fullmatch(self.fused, module) is not None,
            experts=self.experts,
            merge_aware=self.merge_aware,
            seed=SEED,
        )

    def encoding(self, device: torch.device | None = None) -> BaseEncoding | None:
        """How frozen weights are stored; by the Triton kernels where `device` is a GPU, by plain torch otherwise."""
        if self.base is None:
            return None
        wanted = "triton" if device is not None and device.type == "cuda" else "reference"
        backend = choose_quantized(wanted, device or torch.device("cpu"))
        return BaseEncoding.named(self.base, backend.arithmetic, backend.operands)


@dataclass(kw_only=True)
class Built:
    """A case on this rank."""

    mesh: Mesh
    entries: list[ShardEntry]
    model: Decoder
    flat: FlatParameters
    reducer: GradientReducer
    optimizer: FlatAdamW
    stage: ModelStage
    step: TrainStep
    balance: LoadBalance | None = None

    def gradients(self) -> dict[str, Tensor]:
        """What lies in the flat gradient now, by name, cloned."""
        return {slot.entry.name: slot.view(self.flat.gradient).clone() for slot in self.flat.slots}

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters of this rank, by name, cloned."""
        return {slot.entry.name: slot.entry.parameter.data.clone() for slot in self.flat.slots}

    def specs(self) -> dict[str, ShardSpec]:
        return {slot.entry.name: slot.entry.spec for slot in self.flat.slots}


def whole_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The value of a parameter before any training; a function of its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    leaf = name.rpartition(".")[2]
    if leaf == "lora_B":
        return values * 0.2
    if leaf == "bias":
        return values * 0.1
    if name.endswith(".A_log.weight"):
        return values - 4.0  # states that last for a few tokens, and for hundreds
    if len(shape) == 1:
        return 1.0 + 0.2 * values
    if name.startswith("embed_tokens") and leaf == "lora_A":
        return values * 0.2
    return values * shape[1] ** -0.5


def cut(whole: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's part of a whole tensor; padding is zero."""
    assert tuple(whole.shape) == spec.global_shape
    if spec.dim is None:
        return whole.clone()
    local = torch.zeros(spec.local_shape, dtype=whole.dtype)
    for piece in spec.pieces:
        part = whole.narrow(spec.dim, piece.global_offset, piece.length)
        local.narrow(spec.dim, piece.local_offset, piece.length).copy_(part)
    return local


def uncut(local: Tensor, spec: ShardSpec) -> Tensor:
    """The whole of a tensor of which one rank holds all, in whatever order."""
    if spec.dim is None:
        return local
    whole = torch.full(spec.global_shape, torch.nan, dtype=local.dtype)
    for piece in spec.pieces:
        part = local.narrow(spec.dim, piece.local_offset, piece.length)
        whole.narrow(spec.dim, piece.global_offset, piece.length).copy_(part)
    return whole


def _meta_entries(case: Case) -> list[ShardEntry]:
    device = torch.device("meta")
    model = build_decoder(case.config, layout=TensorLayout(), plan=case.plan(), device=device, dtype=torch.float32)
    return list(shard_entries(model))


def trained_names(case: Case) -> list[str]:
    """Names of the parameters that get a gradient."""
    return [entry.name for entry in _meta_entries(case) if entry.sink is not None]


def whole_parameters(case: Case) -> dict[str, Tensor]:
    """Every parameter of the case by name, whole."""
    return {entry.name: whole_tensor(entry.name, entry.spec.global_shape) for entry in _meta_entries(case)}


def build(
    case: Case,
    mesh: Mesh | None = None,
    *,
    bucket_bytes: int = 2048,
    weight_decay: float = 0.01,
    clip_grad_norm: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Built:
    """The case on this rank of `mesh`, or on one process."""
    mesh = mesh or single_process_mesh()
    layout = TensorLayout(
        tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=case.sequence_parallel, joint_reduce=case.joint,
        fold=case.fold, base=case.encoding(), cp=mesh.cp,
    )  # fmt: skip
    device = torch.device("cpu")
    model = build_decoder(case.config, layout=layout, plan=case.plan(), device=device, dtype=dtype)
    entries = list(shard_entries(model))
    for entry in entries:
        entry.parameter.data.copy_(cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
    encode_base(model)
    flat = FlatParameters(entries, device)
    reducer = GradientReducer(flat, mesh, bucket_bytes=bucket_bytes)
    optimizer = FlatAdamW(
        flat, mesh, betas=(0.9, 0.99), eps=1e-8, weight_decay=weight_decay, clip_grad_norm=clip_grad_norm
    )
    balance = case.load_balance(mesh)
    stage = ModelStage(model, LanguageModeling(), device, balance=balance)
    return Built(
        mesh=mesh, entries=entries, model=model, flat=flat, reducer=reducer, optimizer=optimizer, stage=stage,
        step=TrainStep(Stages.whole(stage, balance), reducer, optimizer, mesh), balance=balance,
    )  # fmt: skip


def encode_base(model: Decoder) -> None:
    """Fills weights that are stored encoded."""
    fill_encoded(
        encoded_entries(model), lambda entry: cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec)
    )


def make_batch(
    rows: Iterable[tuple[int, tuple[int, ...]]], *, row_length: int, seq_length: int, vocab_size: int, seed: int
) -> Batch:
    """A micro-batch with random tokens that depend on the slot alone.

    Args:
        rows: (slot in the global batch, lengths of the documents in the row); what the lengths leave over is padding.
        row_length, seq_length: as in Batch.
        vocab_size: of the tokens.
        seed: of the tokens.
    """
    tokens, labels, positions, index, lengths, padding = [], [], [], [], [], []
    for slot, documents in rows:
        generator = torch.Generator().manual_seed(1000 * seed + slot)
        row = torch.randint(0, vocab_size, (row_length,), generator=generator)
        row_labels = torch.full((row_length,), IGNORE_LABEL)
        start = 0
        row_positions = torch.zeros(row_length, dtype=torch.int64)
        for number, length in enumerate(documents):
            row_labels[start : start + length - 1] = row[start + 1 : start + length]
            last = number == len(documents) - 1
            padded = row_length - start if last else length
            row_positions[start : start + padded] = torch.arange(padded)
            lengths.append(padded)
            start += length
        # as a masked prompt: the first targets of a row carry no loss
        row_labels[: 1 + slot % 3] = IGNORE_LABEL
        padding.append(torch.arange(row_length) >= sum(documents))
        tokens.append(row)
        labels.append(row_labels)
        positions.append(row_positions)
        index.append(slot * seq_length + torch.arange(row_length))
    labels_BS = torch.stack(labels)
    return Batch(
        tokens_BS=torch.stack(tokens),
        labels_BS=labels_BS,
        positions_BS=torch.stack(positions),
        token_index_BS=torch.stack(index),
        loss_weights_BS=(labels_BS != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        document_lengths=tuple(lengths),
        parts=(Padding(padding_BS=torch.stack(padding)),),
    )


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    norm = expected.double().norm().item()
    assert norm > 0, "nothing to compare with"
    return (value.double() - expected.double()).norm().item() / norm
