"""Causal attention over packed documents in one call, with the documents' boundaries read on the device.

A call for each document (`engine.ops.attention.packed`) launches as many kernels as there are documents, of shapes that
change from batch to batch: slow where documents are short, and nothing that a graph could replay.
torch.nn.attention.varlen takes all documents at once: their cumulative lengths lie on the device, and the host gives
only an upper bound of their lengths. It runs torch's own flash kernel, even where cuDNN is available. Gradients are
torch's.

Empty documents cost an idle block of threads and add nothing, so offsets may be padded by repeating the last. Only the
choice of a run's attention is here; nothing here looks at a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from engine.kernels.records import Documents
from engine.ops.kernels import Kernels

LARGEST_HEAD = 256
"""Features of a head that torch's flash kernel takes."""

CAUSAL = (-1, 0)
"""varlen_attn's window of a query: any distance back, nothing ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VarlenAttention:
    """A backend's attention by one call for all documents.

    Args:
        attend: torch.nn.attention.varlen.varlen_attn.
        shares_heads: whether it takes fewer key/value heads than query heads; torch 2.11 does not say that it does.
    """

    attend: Callable[..., Tensor]
    shares_heads: bool

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
        """See engine.ops.kernels.Attention."""
        assert documents.offsets is not None, "one call for all documents needs their offsets on the device"
        copies = q_THD.shape[1] // k_TKD.shape[1]
        options = {"enable_gqa": True} if copies > 1 and self.shares_heads else {}
        if copies > 1 and not self.shares_heads:
            k_TKD, v_TKD = (x.repeat_interleave(copies, dim=1) for x in (k_TKD, v_TKD))
        offsets, longest = documents.offsets, documents.max_length
        return self.attend(
            q_THD, k_TKD, v_TKD, offsets, offsets, longest, longest, scale=scale, window_size=CAUSAL, **options
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """The choice of a run's attention over documents.

    Args:
        kernels: with that attention in them.
        on_device: whether it reads the documents' boundaries on the device alone, as a graph needs it.
        sentence: what it is and why.
    """

    kernels: Kernels
    on_device: bool
    sentence: str


def choose_attention(
    kernels: Kernels, *, device: torch.device, dtype: torch.dtype, head_dim: int, packed: bool
) -> AttentionChoice:
    """Chooses a run's attention, once, when the model is built.

    Args:
        kernels: the backend of the run; the reference keeps its own attention, because it was asked for by name.
        packed: whether rows hold several documents. Where they do not, all documents of a micro-batch are equally long
            and are one call anyway.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    why = why_not_varlen(kernels, device=device, dtype=dtype, head_dim=head_dim, capability=capability)
    if why is None and not packed:
        why = "rows hold one document each, which share a call"
    if why is not None:
        return AttentionChoice(kernels=kernels, on_device=False, sentence=f"attention: {_by_document(kernels)}; {why}")
    attention = torch_varlen()
    return AttentionChoice(
        kernels=replace(kernels, attention=attention),
        on_device=True,
        sentence="attention: one call for all documents (torch's flash kernel), boundaries read on the device",
    )


def _by_document(kernels: Kernels) -> str:
    return f"{'compiled kernel' if kernels.name == 'native' else 'torch'}, by document"


def torch_varlen() -> VarlenAttention:
    """Returns torch's function, and whether this version of it shares key/value heads."""
    from torch.nn.attention.varlen import varlen_attn  # absent before torch 2.10, and looked for by `why_not_varlen`

    return VarlenAttention(attend=varlen_attn, shares_heads="enable_gqa" in inspect.signature(varlen_attn).parameters)


def why_not_varlen(
    kernels: Kernels, *, device: torch.device, dtype: torch.dtype, head_dim: int, capability: tuple[int, int]
) -> str | None:
    """Returns why one call for all documents cannot run here; None where it can.

    Args:
        capability: the GPU's compute capability; not looked at on another device.
    """
    if device.type != "cuda":
        return f"one call for all documents needs a CUDA device, not {device.type}"
    if kernels.name == "reference":
        return "the reference backend was asked for"
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no attention over documents of several lengths"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"torch's flash kernel computes in bfloat16 or float16, not in {dtype}"
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        return f"torch's flash kernel wants a head size that is a multiple of 8 up to {LARGEST_HEAD}, not {head_dim}"
    if capability < (8, 0):
        return f"torch's flash kernel wants compute capability 8.0 or more, not {capability[0]}.{capability[1]}"
    if 192 < head_dim <= 224 and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)):
        return f"torch's flash kernel has no backward for heads of {head_dim} on a GPU of capability {capability[0]}.x"
    return None
