"""Every backend of FlatAdamW against torch.optim.AdamW, and against each other's saved state; which one is chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.optim import OptimOptions
from engine.distributed.mesh import single_process_mesh
from engine.distributed.sharding import replicated_spec
from engine.errors import UserError
from engine.kernels.native.loader import NativeStatus, native_status
from engine.layers.module import ShardEntry
from engine.ops.apex import apex_status
from engine.ops.gradients import GradientSink
from engine.optim import backends
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import APEX, NATIVE, TORCH, OptimizerBackend, choose_backend
from engine.optim.flat import FlatParameters
from tests.support.saved_training import save_training
from tests.unit.apex_stand_in import NVIDIA, OTHER_PROJECT, Install, install

__all__ = ["install"]

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SHAPES = {
    "first.weight": (7, 5),
    "norm.weight": (9,),
    "second.weight": (33, 21),
    "second.lora_B": (33, 4),
    "second.bias": (33,),
    "large.weight": (150, 131),
    "last.weight": (1, 1),
}
BETAS, EPS, DECAY = (0.9, 0.95), 1e-6, 0.1
SKIPPED = (0, 7)
"""Steps with a gradient that is not finite; the first one among them, before which nothing was ever counted."""

needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)
needs_apex = pytest.mark.skipif(not apex_status().available, reason=apex_status().reason)
BACKENDS = [
    pytest.param(TORCH, id="torch"),
    pytest.param(NATIVE, id="native", marks=needs_native),
    pytest.param(APEX, id="apex stand-in"),
]


stand_in = pytest.mark.usefixtures("apex")


@pytest.fixture
def apex(install: Install) -> None:
    install(NVIDIA)


@pytest.fixture(autouse=True)
def small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the native kernel write some of the weights here itself, and leave some to be copied."""
    monkeypatch.setattr(backends, "_SMALLEST_WRITTEN", 100)


def _values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _entry(name: str, value: Tensor, device: torch.device) -> ShardEntry:
    """lora_B lies in rows with gaps, as it does beside its frozen matrix."""
    storage = torch.full((value.shape[0], value.shape[1] + 6), 5.0, dtype=value.dtype) if "lora_B" in name else value
    storage = storage.to(device)
    data = storage[:, 6:].copy_(value) if "lora_B" in name else storage.clone()
    sink = GradientSink(value.shape, device)
    return ShardEntry(name, nn.Parameter(data), replicated_spec(tuple(value.shape), rank=0, size=1), sink)


def _build(
    backend: OptimizerBackend,
    dtype: torch.dtype = torch.float32,
    clip: float = 0.7,
    device: torch.device = CPU,
    factors: Mapping[str, float] = {},
) -> FlatAdamW:
    entries = [_entry(name, value.to(dtype), device) for name, value in _values(0).items()]
    flat = FlatParameters(entries, device, lr_factor=lambda name: factors.get(name, 1.0))
    for shard in flat.master_shards():
        shard.tensor.copy_(_values(0)[shard.name])
    flat.publish()
    return FlatAdamW(
        flat, single_process_mesh(), betas=BETAS, eps=EPS, weight_decay=DECAY, clip_grad_norm=clip, backend=backend
    )


def _set_gradients(optimizer: FlatAdamW, values: dict[str, Tensor]) -> None:
    for slot in optimizer.flat.slots:
        slot.view(optimizer.flat.gradient).copy_(values[slot.entry.name])


def _gradients(step: int) -> dict[str, Tensor]:
    values = _values(100 + step)
    if step in SKIPPED:
        values["second.weight"][3, 2] = math.inf if step else math.nan
    return values


def _masters(optimizer: FlatAdamW) -> dict[str, Tensor]:
    return {shard.name: shard.tensor for shard in optimizer.flat.master_shards()}


def _lr(step: int) -> float:
    return 1e-2 / (1 + step)


class Peer:
    """torch.optim.AdamW, one tensor at a time, that is not asked to take the steps that are to be skipped."""

    def __init__(self, clip: float, device: torch.device = CPU, factors: Mapping[str, float] = {}) -> None:
        self.leaves = {name: value.to(device).requires_grad_() for name, value in _values(0).items()}
        self._clip = clip
        groups = [
            {
                "params": [leaf],
                "weight_decay": DECAY if leaf.dim() > 1 else 0.0,
                "factor": factors.get(name, 1.0),
            }
            for name, leaf in self.leaves.items()
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, foreach=False)

    def step(self, step: int) -> Tensor:
        for name, leaf in self.leaves.items():
            leaf.grad = _gradients(step)[name].to(leaf.device)
        norm = torch.nn.utils.clip_grad_norm_(self.leaves.values(), self._clip if self._clip > 0 else math.inf)
        for group in self._optimizer.param_groups:
            group["lr"] = _lr(step) * group["factor"]
        if step not in SKIPPED:
            self._optimizer.step()
        return norm

    def state(self, key: str) -> dict[str, Tensor]:
        return {name: self._optimizer.state[leaf][key] for name, leaf in self.leaves.items()}


def _compare_with_torch(
    backend: OptimizerBackend,
    dtype: torch.dtype,
    clip: float,
    device: torch.device,
    rtol: float,
    factors: Mapping[str, float] = {},
) -> None:
    optimizer, peer = _build(backend, dtype, clip, device, factors), Peer(clip, device, factors)
    for step in range(20):
        _set_gradients(optimizer, _gradients(step))
        before = {name: master.clone() for name, master in _masters(optimizer).items()}
        expected, norm = peer.step(step), optimizer.step(_lr(step))
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, equal_nan=True)
        assert not optimizer.flat.gradient.any(), "the next step would start from this one's gradient"
        assert optimizer.skip.item() == (step in SKIPPED)
        masters = _masters(optimizer)
        for slot in optimizer.flat.slots:
            name, parameter = slot.entry.name, slot.entry.parameter.data
            torch.testing.assert_close(masters[name], peer.leaves[name].detach(), rtol=rtol, atol=2e-7, msg=name)
            assert parameter.dtype == dtype and torch.equal(parameter, masters[name].to(dtype)), f"{name} is stale"
            assert torch.equal(masters[name], before[name]) == (step in SKIPPED), name
    assert optimizer.step_count.item() == 18 and optimizer.skipped.item() == 2
    shards = {shard.name: shard.tensor for shard in optimizer.state_shards()}
    for key in ("exp_avg", "exp_avg_sq"):
        for name, value in peer.state(key).items():
            # gradients of up to 4 cancel in exp_avg: a rounding of one is 2^-24 * 4
            torch.testing.assert_close(shards[f"optim.{key}/{name}"], value, rtol=5e-6, atol=1e-6, msg=f"{key} {name}")
    low_rank = next(slot.entry.parameter.data for slot in optimizer.flat.slots if slot.entry.name == "second.lora_B")
    beside = torch.as_strided(low_rank, (33, 6), (low_rank.stride(0), 1), 0)
    assert (beside == 5.0).all(), "what lies beside the adapter was written"


@stand_in
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6])
def test_twenty_steps_equal_torch(backend: OptimizerBackend, dtype: torch.dtype, clip: float) -> None:
    # a step rounds a weight three times at most, 2^-24 of it each, in another order than torch
    _compare_with_torch(backend, dtype, clip, CPU, rtol=20 * 3 * 2**-24)


RATES = {"second.weight": 10.0, "second.lora_B": 10.0, "norm.weight": 0.1, "second.bias": 10.0, "first.weight": 0.1}
"""Factors of learning rates: some for parameters that decay and for others, `large.weight` and the last without."""


@stand_in
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rates_of_their_own_are_those_of_torchs_parameter_groups(backend: OptimizerBackend, dtype: torch.dtype) -> None:
    """Where all had one rate, weights would move by up to 1e-2 a step in place of 1e-1 or 1e-3."""
    _compare_with_torch(backend, dtype, 0.7, CPU, rtol=20 * 3 * 2**-24, factors=RATES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [pytest.param(TORCH, id="torch"), pytest.param(APEX, id="apex", marks=needs_apex)])
def test_twenty_steps_equal_torch_on_a_gpu(backend: OptimizerBackend, dtype: torch.dtype) -> None:
    # apex takes the powers of beta in fp32: 1 - beta^t has lost up to four bits when t is 1
    _compare_with_torch(backend, dtype, 0.7, CUDA, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [pytest.param(TORCH, id="torch"), pytest.param(APEX, id="apex", marks=needs_apex)])
def test_a_step_does_not_wait_for_the_gpu(backend: OptimizerBackend) -> None:
    optimizer = _build(backend, torch.bfloat16, device=CUDA)
    optimizer.step(1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@stand_in
def test_apex_gets_pieces_it_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole the buffer would have more elements than a 32-bit index reaches; here the limit is made small."""
    monkeypatch.setattr(backends, "_LARGEST_PIECE", 1000)
    _compare_with_torch(APEX, torch.bfloat16, 0.7, CPU, rtol=20 * 3 * 2**-24)
    pieces = [p for group in _fused_adam().param_groups for p in group["params"]]
    assert max(piece.numel() for piece in pieces) == 1000 and len(pieces) > 20


def _fused_adam() -> torch.optim.Optimizer:
    """What was built last."""
    return sys.modules["apex.optimizers"].BUILT[-1]


@stand_in
def test_how_fused_adam_is_built() -> None:
    optimizer = _build(APEX)
    fused = _fused_adam()
    assert fused.arguments == {"capturable": True, "adam_w_mode": True, "master_weights": False}
    decaying, plain = fused.param_groups
    assert (decaying["weight_decay"], plain["weight_decay"]) == (DECAY, 0.0)
    assert all(group["lr"] is optimizer.lr and group["eps"] == EPS for group in fused.param_groups)
    assert all(group["betas"] == BETAS and group["step"].dtype == torch.int32 for group in fused.param_groups)
    flat = optimizer.flat
    held = [(p, p.grad, fused.state[p]["exp_avg"], fused.state[p]["exp_avg_sq"]) for p in decaying["params"]]
    held += [(p, p.grad, fused.state[p]["exp_avg"], fused.state[p]["exp_avg_sq"]) for p in plain["params"]]
    for views, buffer in zip(
        zip(*held, strict=True), (flat.master, flat.gradient, optimizer.exp_avg, optimizer.exp_avg_sq), strict=True
    ):
        assert sum(view.numel() for view in views) == buffer.numel()
        storage = buffer.untyped_storage().data_ptr()
        assert all(view.untyped_storage().data_ptr() == storage for view in views), "a copy of a buffer"


def _save(optimizer: FlatAdamW, folder: Path) -> Path:
    return save_training(
        folder, step=5, tensors=optimizer.state_shards(), state={"updates": float(optimizer.step_count)},
        run_config="train: {}\n", base={"path": "base", "fingerprint": "f"}, lora={}, layout={"tensor": 1}, rank=0,
    )  # fmt: skip


def _open(optimizer: FlatAdamW, path: Path) -> None:
    checkpoint = TrainingCheckpoint(path)
    for name, tensor, spec in optimizer.state_shards():
        checkpoint.read(name, spec, out=tensor)
    optimizer.flat.publish()
    optimizer.step_count.fill_(checkpoint.state["updates"])


@stand_in
@pytest.mark.parametrize("reader", BACKENDS)
@pytest.mark.parametrize("writer", BACKENDS)
def test_a_checkpoint_of_one_opens_with_another(
    writer: OptimizerBackend, reader: OptimizerBackend, tmp_path: Path
) -> None:
    first = _build(writer, torch.bfloat16)
    for step in range(5):
        _set_gradients(first, _gradients(step))
        first.step(_lr(step))
    path = _save(first, tmp_path)
    second = _build(reader, torch.bfloat16)
    _set_gradients(second, _gradients(3))
    second.step(0.3)  # nothing of what went before may be left
    _open(second, path)
    for one, other in zip(first.state_shards(), second.state_shards(), strict=True):
        assert one.name == other.name and torch.equal(one.tensor, other.tensor), one.name
    # the first step after opening is skipped: what is published then must be what was opened
    for step in (7, 8, 9):
        for optimizer in (first, second):
            _set_gradients(optimizer, _gradients(step))
            optimizer.step(_lr(step))
        for slot in second.flat.slots:
            assert torch.equal(slot.entry.parameter.data, slot.view(second.flat.master).bfloat16()), slot.entry.name
    same = {"rtol": 0, "atol": 0} if writer is reader else {"rtol": 2e-6, "atol": 2e-7}
    for one, other in zip(first.state_shards(), second.state_shards(), strict=True):
        torch.testing.assert_close(one.tensor, other.tensor, **same, msg=one.name)
    assert first.step_count.item() == second.step_count.item() == 6


@needs_native
def test_native_takes_one_pass_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large dense bf16 weights are written by the kernel itself; small ones, and rows with gaps apart from them, are
    copied after it."""
    optimizer = _build(NATIVE, torch.bfloat16)
    copied: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, source: (copied.append(len(to)), copy(to, source)))
    before = optimizer.flat.gradient._version
    optimizer.step(1e-3)
    assert copied == [len(SHAPES) - 3, 1] and optimizer.flat.gradient._version == before, (
        "torch wrote what the kernel writes"
    )


@stand_in
@pytest.mark.parametrize("name", ["torch", "native", "apex", "auto"])
def test_choice_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_native(monkeypatch, NativeStatus(available=True, reason="", instruction_set="avx2"))
    backend, sentence = choose_backend(name, device=CUDA if name == "apex" else CPU)
    assert OptimOptions(backend=name).backend == name
    assert (backend, sentence) == {
        "torch": (TORCH, "optimizer: torch (fused AdamW), as asked for"),
        "native": (NATIVE, "optimizer: native (avx2, one pass over memory)"),
        "apex": (APEX, "optimizer: apex (FusedAdam of NVIDIA apex), as asked for"),
        "auto": (NATIVE, "optimizer: native (avx2, one pass over memory)"),
    }[name]


def _pretend_native(monkeypatch: pytest.MonkeyPatch, status: NativeStatus) -> None:
    monkeypatch.setattr(backends, "native_status", lambda: status)


def test_auto_says_why_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("auto", device=CUDA) == (
        TORCH,
        "optimizer: torch (fused AdamW): the native AdamW runs on a CPU, not on cuda",
    )
    _pretend_native(monkeypatch, NativeStatus(available=False, reason="it is not built"))
    assert choose_backend("auto", device=CPU) == (TORCH, "optimizer: torch (fused AdamW): it is not built")


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("native", CPU, "it is not built"),
        ("native", CUDA, "the native AdamW runs on a CPU, not on cuda"),
        ("apex", CPU, "FusedAdam runs on a GPU, not on cpu"),
    ],
)
def test_what_cannot_run_is_refused(
    name: str, device: torch.device, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend_native(monkeypatch, NativeStatus(available=False, reason="it is not built"))
    with pytest.raises(UserError) as refusal:
        choose_backend(name, device=device)
    assert str(refusal.value) == f"optim.backend is {name}, but {reason}: set optim.backend to auto or torch."


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (OTHER_PROJECT, "is not NVIDIA's (the package index gives"),
        ({}, "NVIDIA apex is not installed"),
        ({"apex/__init__.py": "", "apex/optimizers/__init__.py": ""}, "without its CUDA code (amp_C is missing)"),
    ],
)
def test_apex_is_refused_with_what_is_wrong_with_it(files: dict[str, str], words: str, install: Install) -> None:
    install(files)
    with pytest.raises(UserError) as refusal:
        choose_backend("apex", device=CUDA)
    assert str(refusal.value).startswith("optim.backend is apex, but ") and words in str(refusal.value)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UserError, match="optim.backend is 'fused', but it must be one of auto, torch, native, apex"):
        OptimOptions(backend="fused")
