"""Attention over packed documents in one call: what torch's function is given, and when it is taken.

On a CPU torch's op has no kernel, so a stand-in in plain torch computes, itself held to torch's attention document by
document; that torch takes the call as it is made is seen with tensors that have shapes alone. On a GPU it runs.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from engine.errors import UserError
from engine.kernels.records import Documents
from engine.ops.attention.flash import FLASH2, FLASH3, FLASH4, choose_flash
from engine.ops.attention.varlen import (
    AttentionByWidth,
    AttentionChoice,
    VarlenAttention,
    choose_attention,
    why_not_varlen,
)
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE
from rankfold.benchmarking.oracles import attention_by_document
from tests.support.varlen_stand_in import varlen_attn

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


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_one_call_equals_torch_by_document(lengths: tuple[int, ...], heads: tuple[int, int], padded: int):
    inputs = _inputs(lengths, heads)
    ours = VarlenAttention(attend=varlen_attn)(*inputs, _documents(lengths, padded=padded), scale=0.3)
    theirs = attention_by_document(*inputs, lengths, 0.3)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(_gradients(ours, inputs), _gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, other)


def test_padded_offsets_change_no_bit():
    inputs = _inputs((3, 9, 4), (4, 2), torch.float32)
    attention = VarlenAttention(attend=varlen_attn)
    exact, padded = (attention(*inputs, _documents((3, 9, 4), padded=count), scale=0.3) for count in (0, 5))
    assert torch.equal(exact, padded)


@pytest.mark.parametrize(("longest", "given"), [(1, 128), (128, 128), (129, 256), (4000, 4096)])
def test_the_bound_of_the_lengths_is_whole_blocks(longest: int, given: int):
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bound: int, scale: float) -> Tensor:
        seen.append(bound)
        return q

    documents = Documents(lengths=(), offsets=torch.tensor([0, 4], dtype=torch.int32), max_length=longest)
    VarlenAttention(attend=attend)(*_inputs((4,), (2, 2)), documents, scale=1.0)
    assert seen == [given]


@pytest.mark.parametrize(("lengths", "longest"), [((3, 9, 4, 16), 16), ((3, 5, 4, 4), 5), ((), 16)])
def test_the_longest_document_is_known_where_the_host_knows_the_lengths(lengths: tuple[int, ...], longest: int):
    """Two rows of 16 tokens; in a graph only the device knows what they hold."""
    assert Documents.of_rows(lengths, row_length=16).max_length == longest


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_torch_takes_the_call(heads: tuple[int, int]):
    """With tensors that have a shape, but no content: arguments, what is kept and gradients, through torch's own op."""
    meta, kept = torch.device("meta"), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append((tensor.shape, tensor.dtype))
        return tensor

    q, k, v = (
        torch.empty(12, num, 16, dtype=torch.bfloat16, device=meta, requires_grad=True)
        for num in (heads[0], heads[1], heads[1])
    )
    offsets = torch.empty(5, dtype=torch.int32, device=meta)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = VarlenAttention()(q, k, v, Documents(lengths=(), offsets=offsets, max_length=12), scale=0.25)
    assert out.shape == q.shape and out.dtype == q.dtype
    shapes = sorted(tuple(shape) for shape, dtype in kept if dtype == torch.bfloat16)
    assert shapes == sorted(tuple(x.shape) for x in (q, k, v, out))
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


WHY_NOT = [
    ({"device": torch.device("cpu")}, "needs a CUDA device, not cpu"),
    ({"kernels": REFERENCE}, "reference backend was asked for"),
    ({"dtype": torch.float32}, "not in torch.float32"),
]
SETTING = {"kernels": FAST, "device": GPU, "dtype": torch.bfloat16}


@pytest.mark.parametrize(("changed", "sentence"), WHY_NOT)
def test_what_cannot_run_is_said(changed: dict, sentence: str):
    assert sentence in (why_not_varlen(**{**SETTING, **changed}) or "")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("_flash_attention_forward", torch.ops.aten._flash_attention_backward),
        ("_flash_attention_backward", torch.ops.aten._flash_attention_forward),
        ("_flash_attention_forward", None),
    ],
)
def test_another_torchs_ops_are_not_called(name: str, taken: object, monkeypatch: pytest.MonkeyPatch):
    """They are private, so that their arguments may change; packed rows then go document by document, and say why."""
    monkeypatch.setattr(torch.ops.aten, name, taken, raising=False)
    choice = _choose("auto")
    assert choice.kernels is FAST and not choice.on_device and f"has another aten.{name} than torch" in choice.sentence
    with pytest.raises(UserError, match=f"model.attention is flash2, but torch .* has another aten.{name}"):
        _choose("flash2")


@pytest.mark.parametrize("changed", [{}, {"dtype": torch.float16}])
def test_what_can_run(changed: dict):
    assert why_not_varlen(**{**SETTING, **changed}) is None


@pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=lambda kernels: kernels.name)
def test_a_cpu_keeps_its_backends_attention(kernels):
    setting = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64, "packed": True}
    choice = choose_attention(kernels, "auto", **setting)
    assert choice.kernels is kernels and not choice.on_device
    assert "by document; one call for all documents needs a CUDA device, not cpu" in choice.sentence
    with pytest.raises(UserError, match=r"model\.attention is flash2, but .* not cpu: set model\.attention to auto"):
        choose_attention(kernels, "flash2", **setting)


# The choice of a kernel, with a package in the place of FlashAttention-3 that registers ops of its names.


@pytest.fixture
def torchs_own_kernel() -> Iterator[None]:
    yield
    if nn.attention.current_flash_attention_impl() is not None:
        nn.attention.restore_flash_attention_impl()


def _install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def flash3(monkeypatch: pytest.MonkeyPatch, torchs_own_kernel: None) -> Iterator[None]:
    """A package whose kernels do not compute anything, but that torch takes for FlashAttention-3."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define("fwd(Tensor x) -> Tensor")
    library.define("bwd(Tensor x) -> Tensor")
    _install(monkeypatch, "flash_attn_interface")
    yield
    library._destroy()
    vars(torch.ops).pop("flash_attn_3", None)


def _choose(wanted: str, *, packed: bool = True, capability: tuple[int, int] = (9, 0)) -> AttentionChoice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return choose_attention(FAST, wanted, device=GPU, dtype=torch.bfloat16, head_dim=128, packed=packed)


def test_wider_heads_than_flash_kernels_take_go_document_by_document(torchs_own_kernel: None):
    """One model has heads of 512 and of 256 features: each layer's queries say which they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        choice = choose_attention(
            FAST, "auto", device=GPU, dtype=torch.bfloat16, head_dim=512, packed=True, narrower=(64, 256)
        )
    found = choice.kernels.attention
    assert isinstance(found, AttentionByWidth) and found.wide is FAST.attention and not choice.on_device
    assert "FlashAttention-2" in choice.sentence and "in layers with heads of up to 256 features" in choice.sentence
    assert "by document in the others" in choice.sentence and "512" in choice.sentence
    called = []
    found = replace(
        found, narrow=lambda *_, scale: called.append("one call"), wide=lambda *_, scale: called.append("by document")
    )
    for width in (256, 64, 512):
        q = torch.empty(3, 2, width)
        found(q, q, q, Documents.of_rows((3,), row_length=3), scale=1.0)
    assert called == ["one call", "one call", "by document"]


def test_a_gpu_takes_one_call_for_packed_documents(torchs_own_kernel: None):
    choice = _choose("auto")
    assert choice.on_device and isinstance(choice.kernels.attention, VarlenAttention)
    assert choice.kernels.name == "triton" and choice.kernels.norm_forward is FAST.norm_forward
    assert "by FlashAttention-2; FlashAttention-3 needs the package flash_attn_interface" in choice.sentence
    apart = _choose("auto", packed=False)
    assert apart.kernels is FAST and not apart.on_device and "one document each" in apart.sentence


@pytest.mark.usefixtures("flash3")
def test_the_newest_kernel_of_a_gpu_is_taken_where_it_is_installed():
    assert _choose("auto").sentence.endswith("by FlashAttention-3")
    assert nn.attention.current_flash_attention_impl() == "FA3"
    assert _choose("auto", capability=(8, 0)).sentence.endswith("by FlashAttention-2")
    assert nn.attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("flash3")
def test_a_kernel_that_is_named_is_taken_for_all_rows():
    assert _choose("flash3", packed=False).on_device
    assert nn.attention.current_flash_attention_impl() == "FA3"
    assert _choose("flash2", packed=False).sentence.endswith("by FlashAttention-2")
    assert nn.attention.current_flash_attention_impl() is None


def test_a_package_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch, torchs_own_kernel: None):
    _install(monkeypatch, "flash_attn_interface")  # without its ops
    assert "by FlashAttention-2; FlashAttention-3 does not load from flash_attn_interface" in _choose("auto").sentence
    with pytest.raises(UserError, match="model.attention is flash3, but FlashAttention-3 does not load"):
        _choose("flash3")


CANNOT = [
    (FLASH2, 128, (7, 5), "compute capability 8.x or 9.x or 10.x or 11.x or 12.x, not 7.5"),
    (FLASH2, 12, (9, 0), "multiple of 8 up to 256, not 12"),
    (FLASH2, 264, (9, 0), "multiple of 8 up to 256, not 264"),
    (FLASH2, 224, (8, 9), "no backward for heads of 224"),
    (FLASH2, 200, (12, 0), "no backward for heads of 200"),
    (FLASH3, 128, (10, 0), "compute capability 9.x, not 10.0"),
    (FLASH3, 128, (9, 0), "needs the package flash_attn_interface, which is not installed"),
    (FLASH4, 128, (8, 0), "compute capability 9.x or 10.x, not 8.0"),
    (FLASH4, 192, (10, 0), "multiple of 8 up to 128, not 192"),
    (FLASH4, 128, (10, 0), "needs the package flash_attn.cute, which is not installed"),
]


@pytest.mark.parametrize(("kernel", "head_dim", "capability", "sentence"), CANNOT)
def test_a_kernel_that_cannot_run_is_refused(kernel, head_dim: int, capability: tuple[int, int], sentence: str):
    with pytest.raises(UserError, match=f"model.attention is {kernel.name}, but .*set model.attention to auto") as why:
        choose_flash(kernel.name, head_dim=head_dim, capability=capability)
    assert sentence in str(why.value)


@pytest.mark.parametrize(("head_dim", "capability"), [(128, (9, 0)), (256, (8, 6)), (224, (9, 0)), (128, (12, 0))])
def test_torchs_own_kernel_can_run(head_dim: int, capability: tuple[int, int]):
    assert choose_flash("flash2", head_dim=head_dim, capability=capability)[0] is FLASH2


def test_where_no_kernel_runs_documents_are_calls_of_their_own():
    choice = _choose("auto", capability=(7, 5))
    assert choice.kernels is FAST and "by document; no flash kernel runs on compute capability 7.5" in choice.sentence


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
    answer = attention_by_document(*exact, lengths, size**-0.5)
    answers = (answer, *_gradients(answer, exact))
    documents = _documents(lengths, padded=padded, device=device)
    ours = VarlenAttention()(*half, documents, scale=size**-0.5)
    theirs = attention_by_document(*half, lengths, size**-0.5)
    for mine, other, right in zip(
        (ours, *_gradients(ours, half)), (theirs, *_gradients(theirs, half)), answers, strict=True
    ):
        error, allowed = ((x.cpu().double() - right).norm() for x in (mine, other))
        assert error <= 2 * allowed


def test_a_package_that_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To find a part of a package is to import the package, which fails where it was built for another torch."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernel, sentence = choose_flash("auto", head_dim=128, capability=(10, 0))
    assert kernel is FLASH2
    assert sentence == ("FlashAttention-2; FlashAttention-4 does not load from flash_attn.cute (undefined symbol)")
