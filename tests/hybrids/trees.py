"""Trees of documents, and recurrences and convolutions of them against each path from its root alone in fp64."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.distributed.mesh import Axis
from engine.distributed.sharding import replicated_spec
from engine.hybrids import reference
from engine.hybrids.kernels import HybridKernels, hybrid_kernels
from engine.hybrids.ops.convolution import causal_convolution
from engine.hybrids.ops.recurrence import Rule, of_tokens, recurrence
from engine.hybrids.ops.rules import DeltaRule, StateSpace
from engine.hybrids.pieces import Pieces
from engine.layers.module import ShardEntry
from engine.ops.gradients import GradientSink
from engine.ops.kernels import backend
from tests.distributed.cases import make_batch

CPU = torch.device("cpu")
NAMES = {
    **dict.fromkeys(("heads", "channels"), "out q k v decay beta"),
    "state space": "out x dt a b c d",
}
"""Kinds of recurrences -> their output and inputs."""
KINDS = tuple(NAMES)


class Tree(NamedTuple):
    """Documents of one row, in depth-first order."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def path(self, number: int) -> list[int]:
        """Returns the tokens of a document behind those that it continues."""
        firsts = [0, *accumulate(self.lengths)]
        own = list(range(firsts[number], firsts[number + 1]))
        return [*(self.path(self.parents[number]) if self.parents[number] >= 0 else ()), *own]

    def pieces(self, device: torch.device) -> Pieces:
        total = sum(self.lengths)
        batch = make_batch([(0, self.lengths)], row_length=total, seq_length=total, vocab_size=5, seed=0)
        return Pieces.of_batch(replace(batch, document_parents=self.parents).to(device))


def random_tree(seed: int, longest: int = 9) -> Tree:
    draw = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []
    for number in range(draw.randint(5, 12)):
        path = path[: draw.randint(0 if number != 1 else 1, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(number)
    return Tree(tuple(draw.choice((1, 2, draw.randint(1, longest))) for _ in parents), tuple(parents))


TREES = {
    "pairs": Tree((18, 3, 17, 20, 1, 2), (-1, 0, 0, -1, 3, 3)),
    "group": Tree((70, 3, 65, 1, 2), (-1, 0, 0, 0, 0)),
    "groups": Tree((5, 70, 2, 1, 9, 9, 4, 2, 66, 1), (-1, 0, 0, -1, 3, 3, 3, -1, -1, 8)),
    # fewer tokens than the convolution reads before one, along several documents
    "short": Tree((1, 1, 1, 3, 1, 2, 1, 6), (-1, 0, 1, 2, 1, 4, 0, 0)),
    # longer than what forward keeps states of
    "long": Tree((500, 250, 9, 241, 100), (-1, 0, 1, 0, -1)),
    **{f"random {seed}": random_tree(seed, longest=80) for seed in range(4)},
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rule_inputs(kind: str, tokens: int) -> list[Tensor | None]:
    """Returns inputs of a rule in fp64."""
    if kind == "state space":
        x, b, c = drawn(tokens, 4, 5, seed=1), drawn(tokens, 2, 6, seed=2), drawn(tokens, 2, 6, seed=3)
        return [x, drawn(tokens, 4, seed=4).exp() * 0.3, -drawn(4, seed=5).exp(), b, c, drawn(4, seed=6)]
    by_channel = [5] if kind == "channels" else []
    q, k, v = drawn(tokens, 1, 5, seed=1), drawn(tokens, 1, 5, seed=2), drawn(tokens, 2, 4, seed=3)
    return [q, k, v, -drawn(tokens, 2, *by_channel, seed=4).exp() * 0.3, drawn(tokens, 2, seed=5).sigmoid()]


def rule_of(kind: str, kernels: HybridKernels) -> Rule:
    return StateSpace(kernels=kernels) if kind == "state space" else DeltaRule(scale=0.5, kernels=kernels)


def _leaves(given: list[Tensor | None], dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
    return [None if one is None else one.to(device, dtype).requires_grad_() for one in given]


def _gradients(out: Tensor, leaves: list[Tensor | None], d_out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, [one for one in leaves if one is not None], d_out.to(out)))


def _errors(names: str, found: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    """Returns the largest errors, relative to the largest numbers."""
    pairs = zip(names.split(), found, wanted, strict=True)
    return {name: ((one.double().cpu() - exact).abs().max() / exact.abs().max()).item() for name, one, exact in pairs}


def assert_small(errors: dict[str, float], bound: float) -> None:
    """Asserts errors within a bound; of decays ten times that: they are sums over tokens of terms that nearly cancel,
    and have this error where no document continues another too."""
    for name, error in errors.items():
        assert error < (10 * bound if name in ("a", "decay") else bound), (name, error)


def rule_errors(kind: str, tree: Tree, name: str, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Returns the errors of a recurrence's output and of the gradients of its inputs."""
    given = rule_inputs(kind, sum(tree.lengths))
    rule, leaves = rule_of(kind, hybrid_kernels(backend(name))), _leaves(given, dtype, device)
    out = recurrence(rule, tuple(leaves), tree.pieces(device), Axis("cp"))  # type: ignore[arg-type]
    d_out = drawn(*out.shape, seed=9)
    exact_rule, exact = rule_of(kind, hybrid_kernels(backend("reference"))), _leaves(given, torch.float64, CPU)
    outs = []
    for number, length in enumerate(tree.lengths):
        path = tree.path(number)
        parts = of_tokens(rule, tuple(exact), torch.tensor(path))  # type: ignore[arg-type]
        outs.append(recurrence(exact_rule, parts, Pieces.of_lengths([len(path)], CPU), Axis("cp"))[-length:])
    expected = torch.cat(outs)
    found, wanted = _gradients(out, leaves, d_out), _gradients(expected, exact, d_out)
    return _errors(NAMES[kind], [out, *found], [expected, *wanted])


def conv_errors(
    taps: int, activation: str | None, tree: Tree, name: str, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Returns the errors of a convolution's output and of the gradients of its input, its weight and its bias."""
    x, weight, bias = drawn(sum(tree.lengths), 6, seed=1), drawn(6, 1, taps, seed=2), drawn(6, seed=3)

    def entry(value: Tensor) -> ShardEntry:
        one = nn.Parameter(value.to(device, dtype))
        spec = replicated_spec(tuple(value.shape), rank=0, size=1)
        return ShardEntry("one", one, spec, GradientSink(one.shape, device))

    own, entries = x.to(device, dtype).requires_grad_(), (entry(weight), entry(bias))
    kernels = hybrid_kernels(backend(name))
    out = causal_convolution(own, *entries, tree.pieces(device), Axis("cp"), activation=activation, kernels=kernels)
    dy = drawn(*out.shape, seed=9)
    out.backward(dy.to(out))
    exact = [one.requires_grad_() for one in (x, weight, bias)]
    outs = []
    for number, length in enumerate(tree.lengths):
        path = tree.path(number)
        one = reference.conv_forward(
            x[path], weight[:, 0], bias, Pieces.of_lengths([len(path)], CPU), None, activation=activation
        )
        outs.append(one[-length:])
    expected = torch.cat(outs)
    assert own.grad is not None
    found = [own.grad, *(one.sink.buffer for one in entries if one.sink is not None)]
    wanted = torch.autograd.grad(expected, exact, dy)
    return _errors("out x weight bias", [out, *found], [expected, *wanted])
