"""What the planner counts as partial sums is what the Triton functions allocate, at training's shapes on 132
multiprocessors. Their kernels are not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from engine.kernels.records import AdapterSection
from engine.kernels.triton import launch, lora, output_gradients, swiglu
from engine.ops.kernels import backend, shape_backend

TRITON = backend("triton")


class _Allocated(TorchDispatchMode):
    """Lists the elements of each fp32 tensor that is allocated inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "new_empty")) and out.dtype == torch.float32:
            self.sizes.append(out.numel())
        return out


class _NotRun:
    """Stands for a kernel that is launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_processors", lambda device: 132)
    monkeypatch.setattr(swiglu, "multiplies_in_shared_memory", lambda device: True)
    for module, names in {
        lora: ("_project_kernel", "_a_gradient_kernel"),
        output_gradients: ("_output_gradients_kernel",),
        swiglu: ("_project_kernel", "_forward_kernel", "_backward_kernel", "_backward_adapted_kernel"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, _NotRun())
        for name in ("sum_all", "sum_partials"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *args, **kwargs: None)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _sections(inputs: int, outputs: tuple[int, ...], ranks: int, count: int) -> list[AdapterSection]:
    column = 0
    sections = []
    for index, columns in enumerate(outputs):
        trains = index < count
        sections.append(
            AdapterSection(
                first_row=index * ranks,
                num_ranks=ranks,
                first_column=column,
                num_columns=columns,
                scale=1.0,
                b=_meta(columns, ranks),
                da=_meta(ranks, inputs, dtype=torch.float32) if trains else None,
                db=_meta(columns, ranks, dtype=torch.float32) if trains else None,
            )
        )
        column += columns
    return sections


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("tokens", [512, 8192, 8200])
@pytest.mark.parametrize("ranks", [8, 16, 48, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_partial_sums(tokens: int, ranks: int, dtype: torch.dtype) -> None:
    """With the sums of one product left out of the planner, or tiles of half the size, nothing here is equal."""
    inputs, outputs, planned = 4096, (4096, 1024, 1024), shape_backend("triton")
    x, dy = _meta(tokens, inputs, dtype=dtype), _meta(tokens, sum(outputs), dtype=dtype)
    a, h = _meta(3 * ranks, inputs, dtype=dtype), _meta(tokens, 3 * ranks, dtype=dtype)
    gate_up, down = _meta(tokens, 2 * inputs, dtype=dtype), _meta(ranks, inputs, dtype=dtype)
    rstd, weight = _meta(tokens, 1, dtype=torch.float32), _meta(inputs, dtype=dtype)
    calls: dict[str, Callable[[Any], Any]] = {
        "project": lambda one: one.project(x, a, None, 1.0, (), h),
        "swiglu_project": lambda one: one.swiglu_project(gate_up, x, down, None, 1.0, (), h[:, :ranks]),
    }
    for count in (1, 3):
        sections = _sections(inputs, outputs, ranks, count)
        calls |= {
            f"a_gradient of {count}": lambda one, given=sections: one.a_gradient(h, x, None, 1.0, given),
            f"norm_a_gradient of {count}": lambda one, given=sections: one.norm_a_gradient(
                h, x, rstd, weight, None, 1.0, given
            ),
            f"b_gradient of {count}": lambda one, given=sections: one.b_gradient(dy, h, given),
            f"swiglu_backward_adapted of {count}": lambda one, given=sections: one.swiglu_backward_adapted(
                x, gate_up, None, h, None, 1.0, given
            ),
            f"output_gradients of {count}": lambda one, given=sections: one.output_gradients(dy, h, given, dh_out=h),
        }
    for name, call in calls.items():
        sizes = []
        for kernels in (TRITON, planned):
            with _Allocated() as allocated:
                call(kernels)
            sizes.append(sorted(allocated.sizes))
        assert sizes[0] == sizes[1], f"{name}: allocated {sizes[0]}, planned {sizes[1]}"
