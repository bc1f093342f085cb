"""Head and loss together, chunk by chunk, against torch's linear, cross_entropy and autograd; whole and in shards."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import reference_fused
from engine.kernels.linear_cross_entropy import Combine, LossKernels, linear_cross_entropy
from tests.kernels.comparing import assert_as_exact_as_torch, interpreted_only, random_rows

REFERENCE = LossKernels(statistics=reference_fused.local_statistics, gradient=reference_fused.local_gradient)
NUM_TOKENS, HIDDEN, NUM_IDS = 11, 24, 50


def _triton_kernels() -> LossKernels:
    from engine.kernels.triton import cross_entropy

    return LossKernels(statistics=cross_entropy.local_statistics, gradient=cross_entropy.local_gradient)


def _backends() -> list[object]:
    absent = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
    single, half = torch.float32, torch.bfloat16
    return [
        pytest.param(lambda: REFERENCE, ("cpu", single), id="reference-float32"),
        pytest.param(lambda: REFERENCE, ("cpu", torch.float64), id="reference-float64"),
        pytest.param(lambda: REFERENCE, ("cpu", half), id="reference-bfloat16"),
        pytest.param(_triton_kernels, ("cpu", single), marks=[absent, interpreted_only], id="triton-float32"),
        pytest.param(_triton_kernels, ("cuda", single), marks=[absent, pytest.mark.gpu], id="triton-cuda-float32"),
        pytest.param(_triton_kernels, ("cuda", half), marks=[absent, pytest.mark.gpu], id="triton-cuda-bfloat16"),
    ]


backends = pytest.mark.parametrize(("kernels", "place"), _backends())


def _problem(place, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = random_rows(place, num_tokens, HIDDEN, gap=2)
    weight = random_rows(place, NUM_IDS, HIDDEN, seed=1)
    labels = torch.arange(num_tokens, device=place[0]) * 17 % NUM_IDS
    labels[num_tokens // 2 :: 3] = -100
    return hidden, weight, labels, torch.linspace(0.2, 1.0, num_tokens, device=place[0])


def _torchs(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Losses and input gradient by torch: products in `dtype`, the loss in fp32 or wider, as transformers does it."""
    leaf = hidden.detach().to(dtype).requires_grad_()
    logits = leaf @ weight.to(dtype).t()
    logits = logits if dtype == torch.float64 else logits.float()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    (gradient,) = torch.autograd.grad((loss * scale.to(loss.dtype)).sum(), leaf)
    return loss.detach(), gradient


@backends
@pytest.mark.parametrize("chunk", [4, 11, 1000])
def test_whole_vocabulary(kernels: Callable[[], LossKernels], place, chunk: int) -> None:
    problem = _problem(place)
    exact_loss, exact_gradient = _torchs(*problem, torch.float64)
    torch_loss, torch_gradient = _torchs(*problem, place[1])
    loss, gradient = linear_cross_entropy(*problem, kernels(), chunk_tokens=chunk)
    assert (loss[problem[2] < 0] == 0).all()
    assert_as_exact_as_torch(loss, torch_loss, exact_loss, "loss")
    assert gradient is not None and gradient.is_contiguous()
    assert_as_exact_as_torch(gradient, torch_gradient, exact_gradient, "dHidden")
    alone, nothing = linear_cross_entropy(*problem[:3], None, kernels(), chunk_tokens=chunk)
    assert torch.equal(alone, loss) and nothing is None


class _Shards:
    """Threads that stand for ranks: `combine` reduces over all of them.

    One runs at a time, and hands over where it waits for the others: the interpreter cannot run two kernels at once.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.turn = threading.Lock()
        self.parts: list[Tensor | None] = [None] * size

    def combine(self, rank: int, reduce: Callable[[Tensor], Tensor]) -> Combine:
        def run(tensor: Tensor) -> Tensor:
            self.parts[rank] = tensor
            self._wait()
            result = reduce(torch.stack([part for part in self.parts if part is not None]))
            self._wait()  # nobody may leave its next part before all have read this one
            return result

        return run

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


@backends
def test_vocabulary_in_three_shards(kernels: Callable[[], LossKernels], place) -> None:
    """Rows do not divide evenly, and the last shard holds padding alone."""
    hidden, weight, labels, scale = _problem(place)
    exact_loss, exact_gradient = _torchs(hidden, weight, labels, scale, torch.float64)
    torch_loss, torch_gradient = _torchs(hidden, weight, labels, scale, place[1])
    padding = torch.full((30, HIDDEN), 1e3, dtype=place[1], device=place[0])
    padded, shards, made = torch.cat((weight, padding)), _Shards(3), kernels()
    bounds, results = [(0, 27, 27), (27, 54, 23), (54, 80, 0)], [None] * 3

    def one_rank(rank: int) -> None:
        first, last, num_ids = bounds[rank]
        results[rank] = linear_cross_entropy(
            hidden,
            padded[first:last],
            labels,
            scale,
            made,
            first_id=first,
            num_ids=num_ids,
            combine_max=shards.combine(rank, lambda parts: parts.amax(0)),
            combine_sum=shards.combine(rank, lambda parts: parts.sum(0)),
            chunk_tokens=4,
        )

    _run_in_turns(one_rank, shards)
    losses, gradients = zip(*results, strict=True)
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
    assert_as_exact_as_torch(losses[0], torch_loss, exact_loss, "loss")
    # the sum over ranks rounds once more than one product does: summed wide, rounded once
    total = torch.stack([gradient.double() for gradient in gradients]).sum(0).to(place[1])
    assert_as_exact_as_torch(total, torch_gradient, exact_gradient, "dHidden")
    assert (gradients[2] == 0).all()


def _run_in_turns(one_rank: Callable[[int], None], shards: _Shards) -> None:
    """Runs the ranks as threads, and raises the first failure in the test's own thread."""
    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            with shards.turn:
                one_rank(rank)
        except Exception as failure:
            failures.append(failure)
            shards.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@backends
def test_no_tokens(kernels: Callable[[], LossKernels], place) -> None:
    hidden, weight, labels, scale = _problem(place, num_tokens=1)
    loss, gradient = linear_cross_entropy(hidden[:0], weight, labels[:0], scale[:0], kernels())
    assert loss.shape == (0,) and gradient is not None and gradient.shape == (0, HIDDEN)


def test_never_holds_all_logits() -> None:
    """The largest product written is one chunk's."""
    problem, written = _problem(("cpu", torch.float32)), []

    def recorded(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        written.append(tuple(out.shape))
        return torch.mm(left, right, out=out)

    linear_cross_entropy(*problem, replace(REFERENCE, product=recorded), chunk_tokens=4)
    assert written == [(4, NUM_IDS), (4, HIDDEN), (4, NUM_IDS), (4, HIDDEN), (3, NUM_IDS), (3, HIDDEN)]
