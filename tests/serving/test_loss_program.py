"""Traced losses against torch running the functions themselves; graphs that are too much, or no losses, refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UserError
from rankfold.serving.loss_graph import read_loss
from rankfold.serving.loss_program import LossProgram, gradient_of
from tests.serving.traced import traced

LENGTHS = (7, 12)
Result = tuple[Tensor, dict[str, Tensor]]


def clipped(logprobs: Tensor, advantages: Tensor, old: Tensor) -> Result:
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, bounded * advantages).sum() / logprobs.shape[0]
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/clipped:sum": (ratio != bounded).float().sum()}


def preferred(logprobs: Tensor, advantages: Tensor, old: Tensor) -> Result:
    """Selects by an input, sorts, and gathers with places that depend on log-probabilities."""
    good, bad = logprobs[advantages > 0], logprobs[~(advantages > 0)]
    loss = -F.logsigmoid(good.mean() - bad.mean()) + F.softplus(old).mean()
    order = logprobs.argsort()
    values, places = logprobs.sort(descending=True)
    loss += (old[order] * logprobs).mean() + (values * old.gather(0, places)).sum() / 3
    loss += torch.where(logprobs > -2.0, logprobs, -2.0).logsumexp(0) + F.huber_loss(logprobs, old, reduction="sum")
    return loss, {}


def pairwise(logprobs: Tensor, advantages: Tensor, old: Tensor) -> Result:
    table = logprobs[:, None] - logprobs[None, :]
    weights = torch.tril(torch.ones_like(table))
    loss = (F.relu(1.0 - table) * weights * (advantages.unsqueeze(1) > advantages.unsqueeze(0)).float()).sum()
    both = torch.stack([loss, (logprobs.reshape(-1, 1) @ old.reshape(1, -1)).square().mean()])
    cat = torch.cat((logprobs, old.detach()))[..., 1:-1].to(torch.float64).softmax(dim=-1).square().sum().float()
    zero = torch.zeros(logprobs.size(0), device=logprobs.device).sum()
    loss = both.sum() + abs(cat) ** 2 + zero - (2.0 / logprobs).mean() * math.log(3.0)
    return loss, {"custom/n:sum": both[0].detach()}


LOSSES = (clipped, preferred, pairwise)
RANKS = {"logprobs": 1, "advantages": 1, "old": 1}


def drawn() -> tuple[Tensor, list[list[Tensor]]]:
    torch.manual_seed(1)
    logps = -torch.rand(sum(LENGTHS)) * 4
    return logps, [[torch.randn(length), -torch.rand(length)] for length in LENGTHS]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda one: one.__name__)
def test_values_and_gradients(loss: Callable[..., Result]) -> None:
    logps, inputs = drawn()
    program = LossProgram(read_loss(traced(loss, **RANKS)))
    for number, own in enumerate(logps.split(LENGTHS)):
        program.check(number, torch.full_like(own, -1.0), inputs[number])
    leaf, mine = logps.clone().requires_grad_(), logps.clone().requires_grad_()
    value, metrics = gradient_of(program, mine, LENGTHS, inputs)
    value.backward()
    results = [loss(own, *given) for own, given in zip(leaf.split(LENGTHS), inputs, strict=True)]
    torch.stack([one for one, _ in results]).sum().backward()
    torch.testing.assert_close(value, torch.stack([one for one, _ in results]).sum().detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad, leaf.grad, rtol=1e-6, atol=1e-7)
    assert program.metrics == tuple(results[0][1])
    for name, found in zip(program.metrics, metrics, strict=True):
        torch.testing.assert_close(found.float(), torch.stack([one[name] for _, one in results]).sum().detach())


def test_several_targets() -> None:
    def soft(logprobs: Tensor, wanted: Tensor, scale: Tensor) -> Result:
        return -(wanted * logprobs).sum() * scale, {}

    program = LossProgram(read_loss(traced(soft, logprobs=2, wanted=2, scale=0)))
    logps, wanted = -torch.rand(5, 3), torch.rand(5, 3)
    leaf = logps.clone().requires_grad_()
    value, _ = gradient_of(program, leaf, (2, 3), [[one, torch.tensor(2.0)] for one in wanted.split((2, 3))])
    value.backward()
    torch.testing.assert_close(leaf.grad, -2 * wanted)


def big(logprobs: Tensor) -> Result:
    return (torch.zeros(logprobs.shape[0] * (1 << 37)) * logprobs.sum()).sum(), {}


def wide(logprobs: Tensor) -> Result:
    return logprobs.expand(1 << 30, logprobs.shape[0]).sum(), {}


def power(logprobs: Tensor) -> Result:
    return logprobs.sum() * ((logprobs.shape[0] + 10) ** 60) ** 60, {}


def apart(logprobs: Tensor) -> Result:
    return logprobs.detach().sum(), {}


def compared(logprobs: Tensor) -> Result:
    return (logprobs > 0).float().sum(), {}


def vector(logprobs: Tensor) -> Result:
    return logprobs * 2, {}


def selected(logprobs: Tensor) -> Result:
    return logprobs[logprobs > -1].sum(), {}


def indexed(logprobs: Tensor) -> Result:
    return logprobs[(logprobs * 100).long()].sum(), {}


def past(logprobs: Tensor) -> Result:
    return logprobs[:3][logprobs.argmax()], {}


def far(logprobs: Tensor) -> Result:
    return logprobs[99], {}


def whole(logprobs: Tensor) -> Result:
    return logprobs.sum() * (logprobs.long() // logprobs.long()).sum(), {}


def unlike(logprobs: Tensor) -> Result:
    return (logprobs + torch.ones(3, device=logprobs.device)).sum(), {}


TOO_MUCH: tuple[tuple[Callable[..., Result], str], ...] = (
    (big, "makes 1099511627776 numbers"),
    (wide, "numbers, but at most"),
    (power, "numbers below 2\\*\\*53"),
    (apart, "has no gradient"),
    (compared, "has no gradient"),
    (vector, "no tensor of one number"),
    (selected, "selects by numbers|indexes with numbers"),
    (indexed, "indexes with numbers that depend on logprobs"),
    (past, "has places of 8 numbers, but indexes 3"),
    (far, "out of bounds|out of range"),
    (whole, "divides whole numbers"),
    (unlike, "broadcast a dimension"),
)


@pytest.mark.parametrize(("loss", "sentence"), TOO_MUCH, ids=lambda one: getattr(one, "__name__", ""))
def test_what_cannot_be_computed(loss: Callable[..., Result], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        LossProgram(read_loss(traced(loss, logprobs=1))).check(0, torch.full((8,), -1.0), [])


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A good request with one thing changed."""
    found = copy.deepcopy(traced(clipped, **RANKS))
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return found


EXP = ("graph", "nodes", 4)
WRONG: tuple[tuple[tuple[Any, ...], Any, str], ...] = (
    ((*EXP, "target"), "os.system", "calls os.system"),
    ((*EXP, "target"), "torch.load", "calls torch.load"),
    ((*EXP, "target"), "torch.ops.aten.exp", "calls torch.ops"),
    ((*EXP, "target"), "operator.attrgetter", "calls operator.attrgetter"),
    ((*EXP, "target"), ["torch.exp"], "calls"),
    ((*EXP, "op"), "call_module", "of kind 'call_module'"),
    ((*EXP, "op"), "get_attr", "of kind 'get_attr'"),
    ((*EXP, "name"), "sub", "'sub'"),
    ((*EXP, "name"), "__x y", "with names of their own"),
    ((*EXP, "args"), [{"ref": "later"}], "not read here"),
    ((*EXP, "args"), [{"ref": "sub"}, "text"], "not read here"),
    ((*EXP, "args"), [10**20], "not read here"),
    ((*EXP, "args"), [[[[[[[[[[1]]]]]]]]]], "not read here"),
    ((*EXP, "args"), [{"dtype": "complex64"}], "not read here"),
    ((*EXP, "args"), [{"device": "cuda"}], "not read here"),
    ((*EXP, "args"), {"a": 1}, "no lists of arguments"),
    ((*EXP, "kwargs"), {"out": {"ref": "sub"}}, "with out"),
    ((*EXP, "kwargs"), {"inplace": True}, "with inplace"),
    (("graph", "format"), 2, "of format 1"),
    (("graph", "nodes"), [{}] * 2000, "2000 operations"),
    (("graph", "nodes"), [1, 2], "no object"),
    (("graph", "nodes", -1, "args"), [1], "return \\(loss, metrics\\)"),
    (("inputs",), [{"name": "advantages", "rank": 1}], "begins with logprobs"),
    (("inputs", 0, "rank"), 0, "begins with logprobs"),
    (("inputs", 1, "name"), "other", "other inputs than it names"),
)


@pytest.mark.parametrize(("path", "value", "sentence"), WRONG)
def test_what_is_no_loss(path: tuple[Any, ...], value: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_loss(changed(path, value))


def test_what_torch_refuses_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The datum's loss is not a number, and has no gradient; the other's has."""
    logps, inputs = drawn()
    program = LossProgram(read_loss(traced(clipped, **RANKS)))
    run = program.run

    def fails(leaf: Tensor, given: list[Tensor]) -> Any:
        if len(leaf) == LENGTHS[0]:
            raise RuntimeError("no such operation")
        return run(leaf, given)

    monkeypatch.setattr(program, "run", fails)
    leaf = logps.requires_grad_()
    value, metrics = gradient_of(program, leaf, LENGTHS, inputs)
    value.backward()
    assert value.isnan() and metrics.isnan().all() and leaf.grad is not None
    assert (leaf.grad[: LENGTHS[0]] == 0).all() and leaf.grad[LENGTHS[0] :].count_nonzero()
