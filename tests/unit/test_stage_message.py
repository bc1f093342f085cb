"""A message between parts of a model holds the stream and what stands beside it, and gives both back with gradients."""

from __future__ import annotations

import torch

from engine.models.stage_message import pack, rows_below, unpack


def test_a_message_gives_back_what_it_holds() -> None:
    """The second of three fronts has no rows in this micro-batch."""
    x_RH, first_KC, last_KC = torch.randn(5, 4), torch.randn(3, 6), torch.randn(2, 1)
    shapes = [(3, 6), (0, 2), (2, 1)]
    message = pack(x_RH, [first_KC, None, last_KC]).requires_grad_()
    assert message.shape == (5 + sum(rows_below(*shape, 4) for shape in shapes), 4)
    stream, (first, second, last) = unpack(message, shapes)
    assert torch.equal(stream, x_RH) and second is None
    assert torch.equal(first, first_KC) and torch.equal(last, last_KC)
    (first.sum() + 2 * last.sum() + 3 * stream.sum()).backward()
    gradient, (of_first, _, of_last) = unpack(message.grad, shapes)
    assert (gradient == 3).all() and (of_first == 1).all() and (of_last == 2).all()


def test_a_message_without_rows_beside_the_stream_is_the_stream() -> None:
    x_RH = torch.randn(5, 4)
    assert unpack(x_RH, [])[0] is x_RH and unpack(x_RH, [(0, 6)])[0] is x_RH
