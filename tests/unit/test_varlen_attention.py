"""Attention over packed documents in one call: what torch's function is given, and when it is taken.

On a CPU torch's function has no kernel, so a stand-in in plain torch computes, itself held to torch's attention
document by document; that torch takes the call as it is made is seen with tensors that have shapes alone. On a GPU it
runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.kernels.records import Documents
from engine.ops.attention.varlen import VarlenAttention, choose_attention, torch_varlen, why_not_varlen
from engine.ops.kernels import REFERENCE
from engine.ops.native_backend import NATIVE
from tests.torch_attention import torch_by_document
from tests.varlen_stand_in import varlen_attn

DOCUMENTS = [(7,), (5, 5, 5), (1, 9, 1, 1, 3), (4, 6, 6, 2)]
HEADS = [(4, 4), (6, 2), (3, 1)]
GPU = torch.device("cuda")
FAST = replace(REFERENCE, name="triton")


def _documents(lengths: tuple[int, ...], *, padded: int = 0, device: torch.device | None = None) -> Documents:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    offsets = torch.cat((offsets, offsets[-1:].expand(padded))).to(torch.int32)
    return Documents(lengths=(), offsets=offsets.to(device), max_length=max(lengths) + padded)


def _inputs(
    lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype = torch.float64, *, size: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(lengths), num, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for num in (heads[0], heads[1], heads[1])
    ]


def _gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(out, inputs, dy.to(out))


@pytest.mark.parametrize("shares_heads", [True, False])
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_one_call_equals_torch_by_document(
    lengths: tuple[int, ...], heads: tuple[int, int], padded: int, shares_heads: bool
):
    inputs = _inputs(lengths, heads)
    attend = varlen_attn if shares_heads else partial(varlen_attn, enable_gqa=False)
    attention = VarlenAttention(attend=attend, shares_heads=shares_heads)
    ours = attention(*inputs, _documents(lengths, padded=padded), scale=0.3)
    theirs = torch_by_document(*inputs, lengths, 0.3)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(_gradients(ours, inputs), _gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, other)


def test_padded_offsets_change_no_bit():
    inputs = _inputs((3, 9, 4), (4, 2), torch.float32)
    attention = VarlenAttention(attend=varlen_attn, shares_heads=True)
    exact, padded = (attention(*inputs, _documents((3, 9, 4), padded=count), scale=0.3) for count in (0, 5))
    assert torch.equal(exact, padded)


def test_heads_are_copied_where_torch_cannot_share_them():
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object) -> Tensor:
        seen.append((k.shape[1], v.shape[1], "enable_gqa" in options))
        return q

    inputs = _inputs((4,), (6, 2))
    for shares_heads in (True, False):
        VarlenAttention(attend=attend, shares_heads=shares_heads)(*inputs, _documents((4,)), scale=1.0)
    assert seen == [(2, 2, True), (6, 6, False)]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_torch_takes_the_call(heads: tuple[int, int]):
    """With tensors that have a shape, but no content: arguments and gradients, through torch's own op."""
    meta = torch.device("meta")
    q, k, v = (
        torch.empty(12, num, 16, dtype=torch.bfloat16, device=meta, requires_grad=True)
        for num in (heads[0], heads[1], heads[1])
    )
    offsets = torch.empty(5, dtype=torch.int32, device=meta)
    out = torch_varlen()(q, k, v, Documents(lengths=(), offsets=offsets, max_length=12), scale=0.25)
    assert out.shape == q.shape and out.dtype == q.dtype
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


WHY_NOT = [
    ({"device": torch.device("cpu")}, "needs a CUDA device, not cpu"),
    ({"kernels": REFERENCE}, "reference backend was asked for"),
    ({"dtype": torch.float32}, "not in torch.float32"),
    ({"head_dim": 12}, "multiple of 8 up to 256, not 12"),
    ({"head_dim": 264}, "multiple of 8 up to 256, not 264"),
    ({"capability": (7, 5)}, "8.0 or more, not 7.5"),
    ({"head_dim": 224, "capability": (8, 9)}, "no backward for heads of 224"),
    ({"head_dim": 200, "capability": (12, 0)}, "no backward for heads of 200"),
]
CAN = [{}, {"dtype": torch.float16}, {"head_dim": 256, "capability": (8, 6)}, {"head_dim": 224}]
SETTING = {"kernels": FAST, "device": GPU, "dtype": torch.bfloat16, "head_dim": 128, "capability": (9, 0)}


@pytest.mark.parametrize(("changed", "sentence"), WHY_NOT)
def test_what_cannot_run_is_said(changed: dict, sentence: str):
    assert sentence in (why_not_varlen(**{**SETTING, **changed}) or "")


@pytest.mark.parametrize("changed", CAN)
def test_what_can_run(changed: dict):
    assert why_not_varlen(**{**SETTING, **changed}) is None


@pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=lambda kernels: kernels.name)
def test_a_cpu_keeps_its_backends_attention(kernels):
    choice = choose_attention(kernels, device=torch.device("cpu"), dtype=torch.float32, head_dim=64, packed=True)
    assert choice.kernels is kernels and not choice.on_device
    assert "by document; one call for all documents needs a CUDA device, not cpu" in choice.sentence


def test_a_gpu_takes_one_call_for_packed_documents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    setting = {"device": GPU, "dtype": torch.bfloat16, "head_dim": 128}
    choice = choose_attention(FAST, **setting, packed=True)
    assert choice.on_device and isinstance(choice.kernels.attention, VarlenAttention)
    assert choice.kernels.name == "triton" and choice.kernels.norm_forward is FAST.norm_forward
    apart = choose_attention(FAST, **setting, packed=False)
    assert apart.kernels is FAST and not apart.on_device and "one document each" in apart.sentence


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [0, 40])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", [64, 128])
def test_torchs_kernel_on_a_gpu(heads: tuple[int, int], size: int, padded: int):
    """Error against fp64 of at most twice that of torch's attention document by document in the same dtype."""
    lengths, device = (1, 200, 57, 126), torch.device("cuda")
    exact = _inputs(lengths, heads, torch.bfloat16, size=size)
    exact = [x.detach().double().requires_grad_() for x in exact]
    half = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in exact]
    answer = torch_by_document(*exact, lengths, size**-0.5)
    answers = (answer, *_gradients(answer, exact))
    documents = _documents(lengths, padded=padded, device=device)
    ours = torch_varlen()(*half, documents, scale=size**-0.5)
    theirs = torch_by_document(*half, lengths, size**-0.5)
    for mine, other, right in zip(
        (ours, *_gradients(ours, half)), (theirs, *_gradients(theirs, half)), answers, strict=True
    ):
        error, allowed = ((x.cpu().double() - right).norm() for x in (mine, other))
        assert error <= 2 * allowed
