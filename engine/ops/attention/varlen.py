"""Causal attention over packed documents in one call, with the documents' boundaries read on the device.

A call for each document (`engine.ops.attention.packed`) launches as many kernels as there are documents, of shapes that
change from batch to batch: slow where documents are short, and impossible to replay as a graph.
torch's flash op takes all documents at once: their cumulative lengths lie on the device, and the host gives only an
upper bound of their lengths. Gradients are torch's.

Empty documents cost an idle block of threads and add nothing, so offsets may be padded by repeating the last. Only the
choice of a run's attention is here; it does not depend on a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.records import Documents
from engine.ops.attention.flash_calls import flash_varlen, whole_blocks, why_not_torchs_ops
from engine.ops.attention.mergeable import InOneCall, merged_attention
from engine.ops.kernels import Attention, Kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class VarlenAttention:
    """A backend's attention by one call for all documents.

    Args:
        attend: q [T, H, D], k and v [T, K, D], int32 offsets [D + 1], a bound of the documents' lengths, scale ->
            [T, H, D]; see `flash_varlen`.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor] = flash_varlen

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
        """See engine.ops.kernels.Attention."""
        assert documents.offsets is not None, "one call for all documents needs their offsets on the device"
        if documents.levels:
            return merged_attention(q_THD, k_TKD, v_TKD, documents, scale=scale, attention=InOneCall())
        assert not documents.has_branches, "documents that continue others need their levels on the device"
        longest = whole_blocks(documents.max_length)
        return self.attend(q_THD, k_TKD, v_TKD, documents.offsets, longest, scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionByWidth:
    """A backend's attention by one call for all documents where a flash kernel takes the heads, and document by
    document in the layers whose heads are wider.

    Args:
        widest: the most features of a head for one call.
        wide: the attention of wider heads.
    """

    widest: int
    wide: Attention
    narrow: Attention = VarlenAttention()

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float) -> Tensor:
        """See engine.ops.kernels.Attention."""
        chosen = self.narrow if q_THD.shape[2] <= self.widest else self.wide
        return chosen(q_THD, k_TKD, v_TKD, documents, scale=scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """The choice of a run's attention over documents.

    Args:
        kernels: with that attention in them.
        on_device: whether it reads the documents' boundaries on the device alone, as a graph needs it.
        sentence: for the log: the choice and its reason.
    """

    kernels: Kernels
    on_device: bool
    sentence: str


def choose_attention(
    kernels: Kernels,
    wanted: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    packed: bool,
    narrower: tuple[int, ...] = (),
) -> AttentionChoice:
    """Chooses a run's attention, once, when the model is built.

    Args:
        kernels: the backend of the run; the reference keeps its own attention, because it was asked for by name.
        wanted: "auto", or the name of a flash kernel (see `choose_flash`), which is then taken for all rows.
        head_dim: of the widest heads.
        packed: whether rows hold several documents. Where they do not, all documents of a micro-batch are equally long
            and are one call anyway.
        narrower: features of the heads of other layers, which may be one call where the widest cannot.

    Raises:
        UserError: a flash kernel was asked for by name that cannot run here.
    """
    why = why_not_varlen(kernels, device=device, dtype=dtype)
    if why is not None and wanted != "auto":
        raise UserError(f"model.attention is {wanted}, but {why}: set model.attention to auto.")
    if why is None and not packed and wanted == "auto":
        why = "rows hold one document each, which share a call; the first of a length may wait for cuDNN's plan"
    if why is None:
        from engine.ops.attention.flash import choose_flash

        capability = torch.cuda.get_device_capability(device)
        flash, title = choose_flash(wanted, head_dim=head_dim, capability=capability)
        if flash is not None:
            return AttentionChoice(
                kernels=replace(kernels, attention=VarlenAttention()),
                on_device=True,
                sentence=f"attention: one call for all documents, boundaries read on the device, by {title}",
            )
        why = title
        for width in sorted(narrower, reverse=True):
            flash, title = choose_flash(wanted, head_dim=width, capability=capability)
            if flash is not None:
                return AttentionChoice(
                    kernels=replace(kernels, attention=AttentionByWidth(widest=width, wide=kernels.attention)),
                    on_device=False,
                    sentence=f"attention: one call for all documents by {title} in layers with heads of up to {width} "
                    f"features; {_by_document(kernels)} in the others: {why}",
                )
    return AttentionChoice(kernels=kernels, on_device=False, sentence=f"attention: {_by_document(kernels)}; {why}")


def _by_document(kernels: Kernels) -> str:
    return f"{'compiled kernel' if kernels.name == 'native' else 'torch'}, by document"


def why_not_varlen(kernels: Kernels, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why one call for all documents cannot run here, whatever the kernel and the GPU; None where it can."""
    if device.type != "cuda":
        return f"one call for all documents needs a CUDA device, not {device.type}"
    if kernels.name == "reference":
        return "the reference backend was asked for"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash kernels compute in bfloat16 or float16, not in {dtype}"
    return why_not_torchs_ops()
