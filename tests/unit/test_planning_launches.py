"""What the planner counts of a step's kernels: against torch's own count of a step that runs, and by hand."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.choices import RECOMPUTE_LEVELS
from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.train import TrainOptions
from engine.layers.recompute import Level, MemoryPlan
from engine.planning.kernel_times import KernelTime, kernel_times, lora_tax
from engine.planning.machine import MACHINES
from engine.planning.rank_layout import Layout, Workload
from engine.planning.step_time import predict_time
from rankfold.planning import time_by_kernel
from rankfold.planning.memory_examples import LLAMA_3_8B
from rankfold.planning.memory_question import answer_for
from tests.distributed.cases import Case, make_batch, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.memory_models import build_with
from tests.unit.test_planning_search import SMALL, _config, _workload

H100 = MACHINES["h100-80"]
LENGTH = 24
IN_PLACE = dict.fromkeys(
    (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_), lambda _, left, right, **__: 2 * prod(left) * right[-1]
)
"""Products that torch's counter leaves out by itself."""


@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
@pytest.mark.parametrize(
    "adapters, trained", [(EVERY_LINEAR, ".*norm"), ("nothing", ".*")], ids=["adapters", "everything"]
)
def test_products_are_those_that_torch_counts(level: Level, adapters: str, trained: str) -> None:
    """Exactly, over a whole step of plain torch, in which torch does not count a CPU's fused attention."""
    config = small_config(num_layers=3)
    case = Case(config=config, adapters=adapters, trained=trained)
    memory = MemoryPlan(recompute=level)
    built = build_with(case, memory)
    rows = [(0, (LENGTH,)), (1, (LENGTH,))]
    batch = make_batch(rows, row_length=LENGTH, seq_length=LENGTH, vocab_size=config.vocab_size, seed=0)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        built.step([batch], 1.0, 1e-3)
    workload = Workload(
        decoder=config, plan=case.plan(), dtype=torch.float32, micro_batch=2, global_batch=2, seq_length=LENGTH,
        kernels="reference", device_type="cpu",
    )  # fmt: skip
    found = kernel_times(workload, Layout(), memory, H100)
    assert sum(one.flops for one in found if "attention" not in one.launch.kind) == counter.get_total_flops()


def _kernels(**changes: object) -> dict[tuple[str, str, str], list[KernelTime]]:
    config = _config(4096, 2, train=TrainOptions(micro_batch_size=2, global_batch_size=2), **changes)
    found: dict[tuple[str, str, str], list[KernelTime]] = {}
    for one in kernel_times(_workload(LLAMA_3_8B, config), Layout(), MemoryPlan(), H100):
        found.setdefault((*one.part, one.launch.name), []).append(one)
    return found


def test_bytes_and_operations_of_kernels() -> None:
    """Llama-3-8B in bf16, 8192 tokens: bytes that a kernel cannot avoid, arithmetic of its products."""
    found = _kernels(lora=LoraOptions(rank=16, dropout=0.1))
    tokens, hidden, inner, layers = 8192, 4096, 14336, 32
    norms, sums = found["layers", "forward", "norm_forward"]
    assert norms.count == sums.count == layers
    assert norms.launch.nbytes == 2 * tokens * 2 * hidden + 2 * hidden + 4 * tokens  # x, y, weight, 1 / rms
    assert sums.launch.nbytes == norms.launch.nbytes + 2 * tokens * 2 * hidden  # what is added to x, their sum
    assert found["layers", "forward", "add"][0].count == layers  # the sums behind MLPs
    assert ("layers", "backward", "add") not in found and ("layers", "forward", "copy_") not in found
    (swiglu,) = found["layers", "forward", "swiglu_project"]
    assert swiglu.count == layers
    # [gate | up] and y, their mask's bits, A, the columns with H in them; 128 ranges of 64 tokens are fewer than two
    # programs for each of 132 multiprocessors, so there are three partial sums of H, written and read
    rest = tokens * inner // 8 + 2 * 16 * inner + 2 * tokens * 64 + 2 * 3 * 4 * tokens * 16
    assert swiglu.launch.nbytes == 2 * tokens * 3 * inner + rest
    assert swiglu.launch.flops == 2 * tokens * inner * 16
    (attention,) = found["layers", "forward", "attention forward"]
    assert attention.flops == layers * 2 * 4 * 4096 * 4097 / 2 * hidden  # two rows, two products, half of the scores
    assert found["layers", "backward", "attention backward"][0].flops == 2.5 * attention.flops
    projections = {one.launch.flops for one in found["layers", "forward", "project"]}
    assert projections == {2 * tokens * width * rank for width, rank in ((4096, 48), (4096, 16), (4096, 32))}
    # 4 N operations a token, and little more for columns of folded adapters
    products = sum(one.flops for rows in found.values() for one in rows if one.launch.result is not None)
    weights = layers * (hidden * (2 * 4096 + 2 * 1024) + 3 * hidden * inner) + hidden * 128_256
    assert 1.0 < products / (4 * tokens * weights) < 1.02


def test_ranks_that_no_kernel_takes_at_once_make_it_two() -> None:
    """Above 64 ranks SwiGLU's output is read again for H, and written in backward to be read for dA."""
    tokens, inner, layers = 8192, 14336, 32
    ranks, columns = 80, 128  # of H, with its padding
    found = _kernels(lora=LoraOptions(rank=ranks, targets=("down_proj",)))
    assert ("layers", "forward", "swiglu_project") not in found
    (swiglu,) = found["layers", "forward", "swiglu_forward"]
    (project,) = found["layers", "forward", "project"]
    assert (swiglu.count, project.count) == (layers, layers)
    assert swiglu.launch.nbytes == 2 * tokens * 3 * inner
    # y and A read, H written; 128 ranges of 64 tokens, as above
    assert project.launch.nbytes == 2 * tokens * inner + 2 * ranks * inner + 2 * tokens * columns + 2 * 3 * 4 * (
        tokens * ranks
    )
    assert project.launch.flops == 2 * tokens * inner * ranks
    assert ("layers", "backward", "swiglu_backward_adapted") not in found
    (backward,) = found["layers", "backward", "swiglu_backward"]
    (da,) = found["layers", "backward", "a_gradient"]
    assert backward.launch.nbytes >= 2 * tokens * (2 + 1 + 2 + 1) * inner  # [gate | up], dy; their gradients, y
    assert da.launch.nbytes >= 2 * tokens * (inner + ranks)
    few = _kernels(lora=LoraOptions(rank=64, targets=("down_proj",)))
    assert ("layers", "forward", "swiglu_forward") not in few


def test_adapters_alone_are_the_tax() -> None:
    config = _config(512, lora=LoraOptions(rank=16))
    workload = _workload(SMALL, config)
    tax = lora_tax(workload, Layout(), MemoryPlan(), H100)
    assert tax is not None and 1.1 < tax < 3
    full = _workload(SMALL, _config(512, lora=LoraOptions(rank=0), trainable=("*",)))
    assert lora_tax(full, Layout(), MemoryPlan(), H100) is None


def test_the_page_sums_to_the_predicted_step() -> None:
    """All that a step takes on one GPU beside its kernels is the update, where the host launches in time."""
    graphs = {"data": DataOptions(seq_length=512, packing=True), "memory": MemoryOptions(cuda_graph="step")}
    config = _config(512, lora=LoraOptions(rank=16), **graphs)
    answer = answer_for(SMALL, config, devices=1, gpu_memory=80, reserve=0, machine="h100-80", document_length=128)
    best = answer.found.fitting[0]
    assert best.workload.document_length == 128
    page = time_by_kernel.report(best, answer.machine)
    rows = [line.split() for line in page.splitlines()]
    (total,) = (float(row[-2]) for row in rows if row[0] == "sum")
    time = predict_time(best.workload, best.layout, best.memory, answer.machine)
    assert total == pytest.approx(1e3 * (time.step - time.update), rel=0.005)
    assert "The layers take" in page
    assert "of the speed of products, counting" in page


def test_a_share_of_faster_products_says_of_which_it_is_one() -> None:
    """Beside those in 16 bits, a step with products in FP8 can come to more than all of their speed."""
    config = _config(512, lora=LoraOptions(rank=16), model=ModelOptions(path="m", dtype="bfloat16", base_dtype="fp8"))
    answer = answer_for(SMALL, config, devices=1, gpu_memory=80, reserve=0, machine="h100-80")
    page = time_by_kernel.report(answer.found.fitting[0], answer.machine)
    assert " TFLOP/s (1," in page and " in FP8), " in page and "of the speed of products in 16 bits, counting" in page
