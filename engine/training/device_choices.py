"""Chooses a run's implementations on this device: kernels, attention, AdamW, products of an encoded base.

Nothing here needs data or weights, so a run does it first: options that the device cannot satisfy are refused before
anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config.run import RunConfig
from engine.errors import UserError
from engine.layers.saved import check_offload
from engine.models.decoder_config import DecoderConfig
from engine.models.dtypes import TORCH_DTYPES
from engine.ops.attention.blocks import REFERENCE_BLOCKS, AttentionBlocks, choose_attention_blocks
from engine.ops.attention.varlen import AttentionChoice, choose_attention
from engine.ops.backends import choose_kernels
from engine.ops.encoded_weight import BaseEncoding, Formats
from engine.optim.backends import OptimizerBackend, choose_backend
from engine.seams import resolve
from engine.training.base_encoding import base_encoding


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoices:
    """The choices for one device.

    Args:
        optimizer, attention, blocks, base: the results of the functions that choose them.
        sentences: which they are and why, for the log.
    """

    optimizer: OptimizerBackend
    attention: AttentionChoice
    blocks: AttentionBlocks
    base: BaseEncoding | None
    sentences: tuple[str, ...]


def choose_for_device(
    config: RunConfig, device: torch.device, decoder: DecoderConfig, formats: Formats | None = None
) -> DeviceChoices:
    """Chooses for `decoder` on `device`.

    Args:
        formats: in which the checkpoint has its weights; None where they are drawn.

    Raises:
        UserError: an implementation was asked for by name that cannot run on this device, or with the installed
            packages.
    """
    optimizer, which_optimizer = choose_backend(config.optim.backend, device=device)
    # also where a row is cut out of samples end to end: a graph still needs its boundaries read on the device.
    apart = any(one.packs_rows for one in decoder.variants)
    kind = config.objective.kind
    # completions share rows where they share a prompt, and so do prompts that are prefilled
    packed = config.data.fills_rows or kind.group > 1 or kind.samples or apart
    attention, which_kernels = choose_model_kernels(config, device, decoder, packed=packed)
    if config.memory.cuda_graph != "none":
        resolve("engine.training.cuda_graph.build:check_graphs")(config, device, attention, decoder)
    if config.memory.offload_activations:
        check_offload(device)
    own = decoder.own_attention
    sentences = [which_optimizer, which_kernels, attention.sentence if own is None else f"attention: {own}"]
    if (recomputed := decoder.recomputations.get(config.memory.recompute)) is not None:
        sentences.append(f"memory.recompute {config.memory.recompute}: {recomputed}")
    blocks = attention_blocks(config, device, decoder)
    if config.parallel.context > 1:
        sentences.append(f"context parallelism: {config.parallel.context_method} attention, blocks by {blocks.name}")
    said = (one.attention_sentence(attention.kernels.attention, blocks) for one in decoder.variants)
    sentences += [sentence for sentence in said if sentence is not None]
    return DeviceChoices(
        optimizer=optimizer,
        attention=attention,
        blocks=blocks,
        base=base_encoding(config, device, formats),
        sentences=tuple(sentences),
    )


def choose_model_kernels(
    config: RunConfig, device: torch.device, decoder: DecoderConfig, *, packed: bool
) -> tuple[AttentionChoice, str]:
    """Returns the kernels of a model, those of attention among them, and one sentence that says which backend it is and
    why.

    Args:
        packed: rows may hold several documents.

    Raises:
        UserError: kernels, or a kernel of attention, were asked for by name that cannot run here.
    """
    wanted, own = config.model.attention, decoder.own_attention
    if own is not None and wanted != "auto":
        raise UserError(f"model.attention is {wanted}, but attention is {own}: set model.attention to auto.")
    dtype = TORCH_DTYPES[config.model.dtype]
    kernels, sentence = choose_kernels(config.model.kernels, device=device, dtype=dtype)
    attention = choose_attention(
        kernels,
        wanted,
        device=device,
        dtype=dtype,
        head_dim=decoder.head_dims[-1],
        packed=packed,
        narrower=decoder.head_dims[:-1],
    )
    return attention, sentence


def attention_blocks(config: RunConfig, device: torch.device, decoder: DecoderConfig) -> AttentionBlocks:
    """Chooses the kernel that attends between ranks, within images whose tokens see each other, and beside sinks.

    Where neither is needed, and where no other than the reference was asked for, it is the reference.
    """
    ranks, merged = config.parallel.context > 1, any(one.merges_attention for one in decoder.variants)
    if not ranks and (config.model.kernels == "reference" or not merged):
        return REFERENCE_BLOCKS
    dtype = TORCH_DTYPES[config.model.dtype]
    return choose_attention_blocks("auto", device=device, dtype=dtype, head_dim=decoder.head_dims[-1])
