"""Causal attention, forward and backward, on documents of one length, on rows of mixed lengths, and on rows in which
documents continue another one.

Legend: T tokens, H query heads, K key/value heads, D head dimension, S tokens of a document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engine.branches import Parents, first_positions, paths, shifted
from engine.document_levels import device_levels
from engine.kernels.records import Documents
from engine.ops.attention.flash import FLASH2, FLASH_KERNELS, FlashKernel, activate
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.kernels import Attention
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.model import mixed_lengths
from rankfold.benchmarking.oracles import attention_by_document, with_gradients

_DOCUMENTS = 10
"""Documents in a row of several."""
_BRANCHES = 8
"""Documents that continue one."""
_SDPA = {
    "torch, flash": SDPBackend.FLASH_ATTENTION,
    "torch, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch, efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _dense(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention by torch's own choice of a kernel; [T, H, D] in and out."""
    num = q.shape[0] // length
    q4, k4, v4 = (x.unflatten(0, (num, -1)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """Documents, and attention's inputs.

    Args:
        documents: on the host and on the device.
        first: q, k, v, [T, heads, D].
        leaves: copies that require a gradient.
        dout: [T, H, D].
    """

    documents: Documents
    first: list[Tensor]
    leaves: list[Tensor]
    dout: Tensor

    def contestant(self, attend: Callable[..., Tensor], kernel: FlashKernel = FLASH2, note: str = "") -> Contestant:
        """Returns forward and backward of `attend`, with `kernel` as torch's flash ops."""

        def run() -> Results:
            out = attend(*self.leaves)
            return out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)

        return Contestant(run=run, reset=lambda: _activate(kernel), note=note)


def _activate(kernel: FlashKernel) -> None:
    why = activate(kernel)
    assert why is None, why


def _problem(setting: Setting, name: str, lengths: tuple[int, ...], parents: Parents = ()) -> _Problem:
    options, draws = setting.options, setting.draws(name)
    first = [
        draws.normal(options.tokens, heads, options.head_dim)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    ]
    return _Problem(
        documents=_documents(setting, lengths, parents),
        first=first,
        leaves=[tensor.clone().requires_grad_() for tensor in first],
        dout=draws.normal(*first[0].shape),
    )


def _documents(setting: Setting, lengths: tuple[int, ...], parents: Parents = ()) -> Documents:
    offsets = torch.tensor([0, *lengths], device=setting.device).cumsum(0).to(torch.int32)
    found = device_levels(lengths, parents, setting.device) if setting.device.type == "cuda" else ()
    return Documents(lengths=lengths, offsets=offsets, max_length=max(lengths), parents=parents, levels=found)


def _engine(
    setting: Setting, problem: _Problem, of_attention: Callable[[Attention], Callable[..., Tensor]] | None = None
) -> dict[str, Contestant]:
    """Returns each backend's attention by document, and one call for all documents by each flash kernel there is.

    Args:
        of_attention: makes what is timed of an attention; None for the attention of the problem's documents.
    """
    documents, scale = problem.documents, setting.options.head_dim**-0.5

    def plain(attention: Attention) -> Callable[..., Tensor]:
        return lambda q, k, v: attention(q, k, v, documents, scale=scale)

    attend = of_attention or plain
    found = setting.contestants(lambda kernels: problem.contestant(attend(kernels.attention)))
    for kernel in _flash_kernels(setting):
        found[f"one call, {kernel.title}"] = problem.contestant(attend(VarlenAttention()), kernel)
    return found


def _flash_kernels(setting: Setting) -> list[FlashKernel]:
    """Returns the kernels that can run here, with torch's own active."""
    if setting.device.type != "cuda" or setting.dtype == torch.float32:
        return []
    where = {
        "head_dim": setting.options.head_dim,
        "capability": torch.cuda.get_device_capability(setting.device),
    }
    found = [kernel for kernel in FLASH_KERNELS if kernel.why_not(**where) is None and activate(kernel) is None]
    _activate(FLASH2)
    return found


def causal(setting: Setting) -> Case:
    options = setting.options
    problem = _problem(setting, "attention", (options.length,) * (options.tokens // options.length))
    contestants = _engine(setting, problem)
    if TORCH in setting.peers:
        contestants[TORCH] = problem.contestant(lambda *qkv: _dense(options.length, *qkv))
        for name, backend in _usable(setting, problem.leaves):
            contestants[name] = problem.contestant(_pinned(setting, backend))
    if "flash-attn" in setting.peers:
        from flash_attn import flash_attn_func

        contestants["flash-attn"] = problem.contestant(_flash(setting, flash_attn_func))
    if "flash-attn-4" in setting.peers:
        from flash_attn.cute import flash_attn_func as newer

        newest = _flash(setting, lambda *qkv, causal: newer(*qkv, causal=causal)[0])
        contestants["flash-attn-4"] = problem.contestant(newest)
    return _case(setting, problem, f"{options.tokens // options.length}x{options.length}", contestants)


def packed(setting: Setting) -> Case:
    """Returns the case of rows of several documents of mixed lengths."""
    options = setting.options
    generator = torch.Generator().manual_seed(0)
    count = min(_DOCUMENTS, options.length // 2)
    rows = [mixed_lengths(options.length, count, generator) for _ in range(options.tokens // options.length)]
    problem = _problem(setting, "packed attention", tuple(length for row in rows for length in row))
    contestants = _engine(setting, problem)
    lengths = problem.documents.lengths
    if TORCH in setting.peers:
        contestants[TORCH] = problem.contestant(
            lambda *qkv: attention_by_document(*qkv, lengths), note="a call for each document"
        )
        if setting.device.type == "cuda" and setting.dtype != torch.float32:
            contestants["torch, varlen_attn"] = problem.contestant(partial(_varlen_attn, problem.documents))
    return _case(setting, problem, f"{len(lengths)} of {min(lengths)} to {max(lengths)}", contestants)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    """Branches written out: each with all that it continues.

    Args:
        lengths: of the texts.
        index: int64, the token of the rows that each of theirs is.
        first: int64 [T], the first of theirs that each token of the rows is.
    """

    lengths: tuple[int, ...]
    index: Tensor
    first: Tensor

    @classmethod
    def of(cls, documents: Documents) -> _Texts:
        ends, index, lengths = [0, *accumulate(documents.lengths)], [], []
        for leaf, path in enumerate(paths(documents.parents, len(documents.lengths))):
            if leaf not in documents.parents:
                text = [token for number in (*path, leaf) for token in range(ends[number], ends[number + 1])]
                index += text
                lengths.append(len(text))
        first = {token: place for place, token in reversed(list(enumerate(index)))}
        places = torch.tensor([first[token] for token in range(ends[-1])])
        device = None if documents.offsets is None else documents.offsets.device
        return cls(lengths=tuple(lengths), index=torch.tensor(index, device=device), first=places.to(device))

    def through(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns attention of the rows' tokens by attention of the texts."""
        return lambda *qkv: attend(*(x[self.index] for x in qkv))[self.first]


def branches(setting: Setting) -> Case:
    """Returns the case of rows in which several documents continue one that has half of the tokens."""
    options = setting.options
    half = options.length // 2
    count = min(_BRANCHES, options.length - half)
    rows = options.tokens // options.length
    ends = [half + number * (options.length - half) // count for number in range(count + 1)]
    row = (half, *(stop - start for start, stop in pairwise(ends)))
    one = (-1, *(0,) * count)
    parents = tuple(chain.from_iterable(shifted(one, len(row), number * len(row)) for number in range(rows)))
    problem = _problem(setting, "attention of branches", row * rows, parents)
    texts, scale = _Texts.of(problem.documents), options.head_dim**-0.5
    whole = _documents(setting, texts.lengths)

    def apart(attention: Attention) -> Callable[..., Tensor]:
        return texts.through(lambda q, k, v: attention(q, k, v, whole, scale=scale))

    contestants = _engine(setting, problem)
    contestants |= {f"{name}, whole texts": one for name, one in _engine(setting, problem, apart).items()}
    by_text = texts.through(partial(attention_by_document, lengths=texts.lengths))
    if TORCH in setting.peers:
        contestants[TORCH] = problem.contestant(by_text, note="a call for each branch with what it continues")
    return _case(
        setting,
        problem,
        f"{rows} of {half} and {count} branches of {options.length - half} tokens",
        contestants,
        answer=lambda: with_gradients(by_text, problem.first, [problem.dout]),
    )


def _varlen_attn(documents: Documents, *qkv: Tensor) -> Tensor:
    """Runs torch's function for documents of several lengths, by the kernel of its own choice."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no such argument, and takes fewer key/value heads without it
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    offsets, longest = documents.offsets, documents.max_length
    return varlen_attn(*qkv, offsets, offsets, longest, longest, window_size=(-1, 0), **grouped)


def _case(
    setting: Setting,
    problem: _Problem,
    size: str,
    contestants: dict[str, Contestant],
    answer: Callable[[], Results] | None = None,
) -> Case:
    options = setting.options
    return Case(
        size=f"{size}, {options.heads}/{options.kv_heads} heads of {options.head_dim}",
        demand=_demand(setting, problem.documents),
        contestants=contestants,
        answer=answer or (lambda: _answer(problem)),
        trace=True,
    )


def _answer(problem: _Problem) -> Results:
    """Computes the answer in float64 by plain products, one document at a time, since all its scores are kept."""
    parts = []
    for *qkv, dout in zip(*(x.split(problem.documents.lengths) for x in (*problem.first, problem.dout)), strict=True):
        with sdpa_kernel(SDPBackend.MATH):
            parts.append(with_gradients(partial(attention_by_document, lengths=[len(dout)]), qkv, [dout]))
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def _demand(setting: Setting, documents: Documents) -> Demand:
    """Returns the demand. Half of each document's square is masked: 2 S^2 H D operations forward, and 4 S H D for each
    token that the document continues; backward recomputes scores and has 2.5 times as many. Forward reads q, k, v and
    writes out; backward reads those and dout and writes three gradients.
    """
    options = setting.options
    query = options.tokens * options.heads * options.head_dim
    key = options.tokens * options.kv_heads * options.head_dim
    before = first_positions(documents.lengths, documents.parents)
    pairs = sum(length * (length + 2 * first) for length, first in zip(documents.lengths, before, strict=True))
    return Demand(
        moved=(6 * query + 6 * key) * setting.itemsize,
        operations=7 * pairs * options.heads * options.head_dim,
    )


def _usable(setting: Setting, leaves: list[Tensor]) -> list[tuple[str, SDPBackend]]:
    """Returns torch's kernels that take this problem; it has one on a CPU."""
    if setting.device.type != "cuda":
        return []
    found = []
    for name, backend in _SDPA.items():
        try:
            _pinned(setting, backend)(*leaves)
        except RuntimeError:  # "No available kernel": this GPU, dtype or head size has none
            continue
        found.append((name, backend))
    return found


def _pinned(setting: Setting, backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(*qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _dense(setting.options.length, *qkv)

    return attend


def _flash(setting: Setting, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapts a package's function, which takes [B, S, H, D]."""
    num = setting.options.tokens // setting.options.length

    def attend(*qkv: Tensor) -> Tensor:
        out = function(*(x.unflatten(0, (num, -1)) for x in qkv), causal=True)
        return out.flatten(0, 1)

    return attend


CASES = {
    "causal attention, forward and backward": causal,
    "causal attention of packed documents, forward and backward": packed,
    "causal attention of branches of documents, forward and backward": branches,
}
