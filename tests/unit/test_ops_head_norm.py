"""Norm and rotation of query and key heads by the plain and the compiled kernels, against torch; Triton's have a test
beside the others."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.native.loader import native_status
from engine.ops.backends import NATIVE
from engine.ops.gradients import GradientSink
from engine.ops.head_norm import HeadNorms, norm_rotate
from engine.ops.kernels import REFERENCE, Kernels
from rankfold.benchmarking.oracles import EPS
from tests.support.head_norms import SHAPES, expected, problem

needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)
BACKENDS = [
    pytest.param(REFERENCE, torch.float64, id="reference-float64"),
    pytest.param(REFERENCE, torch.bfloat16, id="reference-bfloat16"),
    pytest.param(NATIVE, torch.float32, id="native-float32", marks=needs_native),
    pytest.param(NATIVE, torch.bfloat16, id="native-bfloat16", marks=needs_native),
]


@pytest.mark.parametrize(("kernels", "dtype"), BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_norm_rotate(kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int, int, int], trained: bool) -> None:
    given = problem(shape, device="cpu", dtype=dtype)
    wide = expected(given, torch.float64)
    peers = expected(given, dtype)
    sinks = [GradientSink(weight.shape, weight.device) if trained else None for weight in given.weights]
    weights = [weight.clone().requires_grad_(trained) for weight in given.weights]
    norms = HeadNorms(q_weight=weights[0], k_weight=weights[1], q_sink=sinks[0], k_sink=sinks[1], eps=EPS)
    leaf = given.qkv.detach().requires_grad_()
    cos, sin = (table.to(torch.promote_types(dtype, torch.float32)) for table in (given.cos, given.sin))
    q, k, v = norm_rotate(leaf, norms, cos, sin, *given.sizes, kernels)
    (dqkv,) = torch.autograd.grad((q, k, v), leaf, given.gradients)
    assert torch.equal(v, peers["v"])
    assert v.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr(), "v stays where it is"
    found = {"q": q, "k": k, "dqkv": dqkv}
    named = zip(("dw of q", "dw of k"), sinks, strict=True)
    found |= {name: sink.buffer for name, sink in named if sink is not None}
    assert len(found) == (5 if trained else 3)
    for name, ours in found.items():
        if ours.numel() == 0:
            continue
        error, allowed = ((x.detach().double() - wide[name]).abs().max() for x in (ours, peers[name]))
        # twice torch's error at the same dtype, and a rounding for where torch is right by luck
        assert error <= 2 * allowed + torch.finfo(ours.dtype).eps * 8 * wide[name].abs().max(), name


def test_a_frozen_weight_has_no_gradient() -> None:
    given = problem(SHAPES[0], device="cpu", dtype=torch.float64)
    sink = GradientSink(given.weights[1].shape, torch.device("cpu"))
    key_weight = given.weights[1].clone().requires_grad_()
    norms = HeadNorms(q_weight=given.weights[0], k_weight=key_weight, q_sink=None, k_sink=sink, eps=EPS)
    leaf = given.qkv.detach().requires_grad_()
    parts = norm_rotate(leaf, norms, given.cos.double(), given.sin.double(), *given.sizes, REFERENCE)
    torch.autograd.grad(parts, leaf, given.gradients)
    torch.testing.assert_close(sink.buffer.double(), expected(given, torch.float64)["dw of k"], rtol=1e-6, atol=1e-6)


def test_weights_of_families_that_add_to_them() -> None:
    """Gemma's w + 1: as if the weight were larger by one."""
    given = problem(SHAPES[0], device="cpu", dtype=torch.float64)
    tables = (given.cos.double(), given.sin.double())
    common = {"q_sink": None, "k_sink": None, "eps": EPS}
    plain = HeadNorms(q_weight=given.weights[0], k_weight=given.weights[1], **common)
    less = HeadNorms(q_weight=given.weights[0] - 1, k_weight=given.weights[1] - 1, offset=1.0, **common)
    found, wanted = (norm_rotate(given.qkv, norms, *tables, *given.sizes, REFERENCE) for norms in (less, plain))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
