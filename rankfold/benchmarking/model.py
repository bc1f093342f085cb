"""The random model of all sides of the step and memory sections.

Every tensor is drawn from its Hugging Face name, so that two models built separately start equal without a copy in
between.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.batch import IGNORE_LABEL, Batch
from rankfold.benchmarking.options import ExpertsOptions, ModelOptions, method_of

LEARNING_RATE = 1e-3
FULL_LEARNING_RATE = 1e-5
"""Where all parameters train. AdamW's first updates have this size whatever the gradient's: those of weights that a
step hardly touches have the sign of a rounding error, and 1e-3 would let the sides drift apart by it."""
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Of the optimizer of every side."""
CLIP_GRAD_NORM = 1.0
LORA_ALPHA_OVER_RANK = 2
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
EXPERT_TARGETS = (*ATTENTION, "gate_up_proj", "down_proj")


class Outcome(NamedTuple):
    """The outcome of a step: 0-dim tensors, loss before the update and gradient norm before clipping."""

    loss: Tensor
    grad_norm: Tensor


class Side(Protocol):
    """An implementation of the step. The constructor builds the model with its weights and nothing else."""

    def prepare(self) -> None:
        """Builds the optimizer and the rest of a step; called once."""

    def step(self, ids_BS: Tensor) -> Outcome:
        """Runs forward, backward, clip and update on int64 token ids, without waiting for the device."""

    def checked_step(self, ids_BS: Tensor) -> Outcome:
        """Runs a step whose norm is exact enough to be compared; not timed."""

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor:
        """Returns the loss alone, with its autograd graph; `dropout` False turns dropout off."""


def hf_config(options: ModelOptions) -> dict[str, Any]:
    """Returns the model's Hugging Face `config.json`."""
    return _dense(options) if not isinstance(options, ExpertsOptions) else {**_dense(options), **_mixture(options)}


def _mixture(options: ExpertsOptions) -> dict[str, Any]:
    return {
        "moe_intermediate_size": options.intermediate,
        "num_experts": options.experts,
        "num_experts_per_tok": options.per_token,
        "norm_topk_prob": True,
    }


def _dense(options: ModelOptions) -> dict[str, Any]:
    return {
        "model_type": options.model_type,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.hidden // options.heads,
        "vocab_size": options.vocab,
        "max_position_embeddings": options.length,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "use_cache": False,
        # some types have others of their own
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **dict.fromkeys(("attention_dropout", "residual_dropout"), 0.0),
        **(_delta_nets(options) if options.model_type in _WITH_DELTA_NETS else {}),
    }


_WITH_DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def _delta_nets(options: ModelOptions) -> dict[str, Any]:
    """Returns the sizes of linear attention as Qwen3.5-0.8B relates them to the width: heads of 128, twice as wide as
    the residual stream together."""
    heads = max(1, options.hidden // 64)
    return {"linear_num_key_heads": heads, "linear_num_value_heads": heads}


def packed_batch(ids_BS: Tensor, lengths: Sequence[int]) -> Batch:
    """Returns a batch of rows of documents, the last token of each without a label.

    Args:
        ids_BS: token ids.
        lengths: tokens of all documents, in order.
    """
    device, (rows, length) = ids_BS.device, ids_BS.shape
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    labels = ids_BS.flatten().roll(-1)
    labels[ends[1:] - 1] = IGNORE_LABEL
    labels = labels.view(rows, length)
    return Batch(
        tokens_BS=ids_BS,
        labels_BS=labels,
        positions_BS=torch.cat([torch.arange(one, device=device) for one in lengths]).view(rows, length),
        token_index_BS=torch.arange(rows * length, device=device).view(rows, length),
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=ends.to(torch.int32),
        document_lengths=tuple(lengths),
    )


def padded_documents(ids_BS: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the documents of packed rows, one in a row each, padded on the right with id 0: ids, and int64 ones where
    there is a token. Both have the shape [documents, longest].

    Args:
        ids_BS: token ids.
        lengths: tokens of all documents, in order.
    """
    documents = ids_BS.flatten().split(list(lengths))
    ids_DL = pad_sequence(documents, batch_first=True)
    mask_DL = pad_sequence([torch.ones_like(document) for document in documents], batch_first=True)
    return ids_DL, mask_DL


@torch.no_grad()
def draw(name: str, out: Tensor) -> None:
    """Fills `out` with the values that the tensor `name` has on every side.

    Args:
        name: Hugging Face module and `weight`, `lora_A` or `lora_B`. B is not zero, as it would be in a fresh adapter:
            with B = 0 the losses would agree whatever the adapters do.
        out: the parameter.
    """
    generator = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if name.endswith("lora_A"):
        bound = 1.0 / math.sqrt(out.shape[1])
        values.uniform_(-bound, bound, generator=generator)
    elif out.dim() == 1:
        values.normal_(1.0, 0.1, generator=generator)
    else:
        values.normal_(0.0, 0.02, generator=generator)
    out.copy_(values)


def draw_batches(options: ModelOptions, device: torch.device, count: int) -> list[Tensor]:
    """Returns `count` batches of token ids [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.length)
    return [torch.randint(options.vocab, shape, generator=generator).to(device) for _ in range(count)]


def mixed_lengths(length: int, documents: int, generator: torch.Generator) -> list[int]:
    """Returns the lengths of the documents of a row, cut at random places."""
    cuts = torch.randperm(length - 1, generator=generator)[: documents - 1].sort().values + 1
    return [stop - start for start, stop in pairwise([0, *cuts.tolist(), length])]


def document_lengths(options: ModelOptions) -> tuple[int, ...]:
    """Returns the lengths of all documents of a batch, the same for every batch."""
    generator = torch.Generator().manual_seed(0)
    rows = (mixed_lengths(options.length, options.documents, generator) for _ in range(options.rows))
    return tuple(length for row in rows for length in row)


def learning_rate(options: ModelOptions) -> float:
    """Returns the learning rate of all sides."""
    return FULL_LEARNING_RATE if method_of(options) == "full" else LEARNING_RATE


def operations_per_weight(options: ModelOptions) -> int:
    """Returns the floating-point operations per weight and token: forward, input gradient, and where all parameters
    train the weight's gradient."""
    return 6 if method_of(options) == "full" else 4


def step_operations(options: ModelOptions) -> int:
    """Returns the floating-point operations of a step in any implementation, without adapters.

    Those per weight and token over all linears and the head, and causal attention's 6 L s h a token of a document of s,
    forward and backward. That beside adapters nothing is needed below the first layer is not subtracted, as it is not
    in published figures.
    """
    hidden, kv_width = options.hidden, options.kv_width
    mlp = 3 * hidden * options.intermediate
    if isinstance(options, ExpertsOptions):
        mlp = mlp * options.per_token + hidden * options.experts
    layer = hidden * (2 * hidden + 2 * kv_width) + mlp
    weights = options.layers * layer + hidden * options.vocab
    squares = sum(length * length for length in document_lengths(options))
    return operations_per_weight(options) * options.tokens * weights + 6 * options.layers * squares * hidden


def attention_kernel(loss: Tensor) -> str:
    """Returns the names of the attention nodes in a loss's autograd graph, without their decoration."""
    found, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "attention" in node.name().lower():
            found.add(node.name().removesuffix("0").removesuffix("Backward"))
        waiting += [parent for parent, _ in node.next_functions]
    return ", ".join(sorted(found)) or "unfused"
