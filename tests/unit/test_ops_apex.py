"""Which package apex is, and what of it can be used; RMSNorm by apex's functions against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from engine.errors import UserError
from engine.kernels.records import InputUpdate
from engine.ops.apex import ApexStatus, apex_status, fused_adam, with_apex_norms
from engine.ops.kernels import REFERENCE
from tests.unit.apex_stand_in import FUSED_ADAM, NVIDIA, OTHER_PROJECT, Install, install

__all__ = ["install"]

PARTS = ("FusedAdam", "FusedRMSNorm")
MODULE = {"FusedAdam": "amp_C", "FusedRMSNorm": "fused_layer_norm_cuda"}


def _without(name: str) -> dict[str, str]:
    return {path: source for path, source in NVIDIA.items() if path != f"{name}.py"}


def _found(part: str) -> str:
    """Why `part` cannot be used."""
    status = apex_status(part)
    assert not status.available
    return status.reason


@pytest.mark.parametrize("part", PARTS)
def test_apex_with_its_cuda_code_is_available(part: str, install: Install) -> None:
    install(NVIDIA)
    assert apex_status(part) == ApexStatus(available=True, reason=f"{part} of NVIDIA apex")


def test_fused_adam_is_apexs_class(install: Install) -> None:
    install(NVIDIA)
    assert (fused_adam().__module__, fused_adam().__name__) == ("apex.optimizers", "FusedAdam")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "files", [OTHER_PROJECT, {"apex.py": "raise RuntimeError('the other project was run')\n"}, {"apex/a": ""}]
)
def test_the_other_project_is_told_apart_without_running_it(part: str, files: dict[str, str], install: Install) -> None:
    install(files)
    reason = _found(part)
    assert (
        "has no apex.optimizers and so is not NVIDIA's (the package index gives another project of that name)" in reason
    )
    assert "packages/apex" in reason, "which one it is, is not said"


@pytest.mark.parametrize("part", PARTS)
def test_apex_without_cuda_code(part: str, install: Install) -> None:
    install(_without(MODULE[part]))
    assert _found(part) == (
        f"NVIDIA apex was installed without its CUDA code ({MODULE[part]} is missing): install NVIDIA apex from its "
        "source with --cpp_ext and --cuda_ext"
    )


@pytest.mark.parametrize("part", PARTS)
def test_cuda_code_of_another_torch(part: str, install: Install) -> None:
    install(NVIDIA | {f"{MODULE[part]}.py": "raise ImportError('undefined symbol: _ZN2at')\n"})
    assert "NVIDIA apex cannot be loaded (undefined symbol: _ZN2at): install" in _found(part)


def test_old_versions(install: Install) -> None:
    old = FUSED_ADAM.replace(", capturable=False", "").replace("capturable", "amsgrad")
    install(NVIDIA | {"apex/optimizers/__init__.py": old, "fused_layer_norm_cuda.py": "def forward_affine(): ...\n"})
    assert "its FusedAdam has no argument capturable" in _found("FusedAdam")
    assert "it has no RMSNorm" in _found("FusedRMSNorm")


def test_nothing_of_the_name_is_installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    assert _found("FusedAdam").startswith("NVIDIA apex is not installed: install")


def test_asking_for_what_is_missing_is_refused(install: Install) -> None:
    install(_without("fused_layer_norm_cuda"))
    with pytest.raises(UserError, match="FusedRMSNorm was asked for, but NVIDIA apex was installed without"):
        with_apex_norms(REFERENCE)


def _compare_norms(device: str, dtype: torch.dtype) -> None:
    """Odd sizes, rows with gaps, weights of both signs and of zero, an adapter's update, a trained weight."""
    kernels = with_apex_norms(REFERENCE)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, weight, dy, dh, a = draw(37, 140)[:, :123], draw(123), draw(37, 123), draw(37, 5), draw(5, 123)
    weight[3] = 0.0
    peer_x, peer_weight = x.float().requires_grad_(), weight.float().requires_grad_()
    expected = rms_norm(peer_x, (123,), peer_weight, 1e-5)
    expected.backward(dy.float() + 1.5 * dh.float() @ a.float())
    out, gradient = torch.empty(37, 150, device=device, dtype=dtype)[:, :123], torch.ones(123, device=device)
    rstd = kernels.norm_forward(x, weight, 1e-5, out)
    assert rstd.shape == (37, 1) and rstd.dtype == torch.float32
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=None, scale=1.5)
    dx = kernels.norm_backward(dy.clone(), x, weight, rstd, update, None)
    # fp32: sums of 123 terms; bf16: y and dx are rounded once, dy + update once more
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 8e-2}
    torch.testing.assert_close(out.float(), expected.detach(), **tolerance, msg="output")
    torch.testing.assert_close(dx.float(), peer_x.grad, **tolerance, msg="input gradient")

    peer_x.grad = peer_weight.grad = None
    rms_norm(peer_x, (123,), peer_weight, 1e-5).backward(dy.float())
    dx = kernels.norm_backward(dy.clone(), x, weight, rstd, None, gradient)
    torch.testing.assert_close(dx.float(), peer_x.grad, **tolerance, msg="input gradient without adapters")
    # a sum of 37 products in fp32, whatever the dtype of the weight
    torch.testing.assert_close(gradient, peer_weight.grad + 1, rtol=1e-5, atol=1e-5, msg="weight gradient")
    assert kernels.name == "apex" and kernels.swiglu_forward is REFERENCE.swiglu_forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_by_the_stand_in(dtype: torch.dtype, install: Install) -> None:
    install(NVIDIA)
    _compare_norms("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not apex_status("FusedRMSNorm").available, reason=apex_status("FusedRMSNorm").reason)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_by_apex(dtype: torch.dtype) -> None:
    _compare_norms("cuda", dtype)
