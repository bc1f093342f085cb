"""Packages that stand in for NVIDIA apex, which needs a GPU, and for the other package of that name.

The stand-in's FusedAdam and RMSNorm do in plain torch what apex's do on a GPU, as far as the engine relies on it:
which arguments there are, what is read from a gradient scaler, when a step is counted, what a skipped step leaves
alone, and which dtypes and layouts the kernels take. So they hold the engine to that contract; they do not show that
apex keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MODULES = ("apex", "amp_C", "fused_layer_norm_cuda")

FUSED_ADAM = """
import torch

BUILT = []


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, master_weights=False):
        assert capturable and adam_w_mode and bias_correction and not (amsgrad or master_weights)
        super().__init__(params, {"lr": torch.tensor(lr), "betas": betas, "eps": eps, "weight_decay": weight_decay})
        BUILT.append(self)
        self.arguments = {"capturable": capturable, "adam_w_mode": adam_w_mode, "master_weights": master_weights}
        # a flag that is still set from the last group of the last step
        self._dummy_overflow_buf = torch.ones(1, dtype=torch.int32)

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.ones(1, dtype=torch.int32)
            else:
                group["step"] += (self._dummy_overflow_buf != 1).to(torch.int32)
            device = group["params"][0].device
            self._dummy_overflow_buf.copy_(grad_scaler._check_inf_per_device(self)[device])
            factor = grad_scaler._get_scale_async().double().reciprocal().float()
            # what the kernel reads through raw pointers
            assert group["lr"].dtype == factor.dtype == torch.float32 and group["step"].dtype == torch.int32
            assert group["lr"].numel() == factor.numel() == group["step"].numel() == 1
            if self._dummy_overflow_buf.item() == 1:
                continue
            beta1, beta2 = group["betas"]
            count = group["step"].item()
            for p in group["params"]:
                assert p.dtype == p.grad.dtype == torch.float32 and p.is_contiguous() and p.grad.is_contiguous()
                p.grad.mul_(factor)
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = (m / (1 - beta1**count)) / ((v / (1 - beta2**count)).sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
"""

NORMS = """
import torch


def rms_forward_affine(x, shape, weight, eps):
    assert x.is_contiguous() and weight.is_contiguous() and tuple(shape) == tuple(x.shape[-1:]), shape
    rstd = (x.float().square().mean(-1) + eps).rsqrt()
    return (x.float() * rstd[..., None] * weight.float()).to(x.dtype), rstd.flatten()


def rms_backward_affine(dy, rstd, x, shape, weight, eps, memory_efficient):
    assert dy.is_contiguous() and rstd.is_contiguous() and x.is_contiguous() and not memory_efficient
    lifted = torch.where(weight < 0, weight.float().clamp(max=-eps), weight.float().clamp(min=eps))
    normed, g = x.float() * rstd[:, None], dy.float() * lifted
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dy.float() * normed).sum(0).to(weight.dtype)
"""

NVIDIA = {
    "apex/__init__.py": "from . import optimizers\n",
    "apex/optimizers/__init__.py": FUSED_ADAM,
    "amp_C.py": "",
    "fused_layer_norm_cuda.py": NORMS,
}
"""Files of an apex with its CUDA code."""

OTHER_PROJECT = {"apex/__init__.py": "raise RuntimeError('the other project was run')\n", "apex/models/__init__.py": ""}
"""The web toolkit: it has no optimizers, and must not be imported to find that out."""

Install = Callable[[dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes packages to a folder on sys.path; they are forgotten after the test."""

    def write(files: dict[str, str]) -> None:
        for name, source in files.items():
            path = tmp_path / "packages" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / "packages")

    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        monkeypatch.delitem(sys.modules, name)
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]
