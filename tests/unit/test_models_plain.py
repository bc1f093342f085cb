"""One process against the plain decoder in fp64: losses and every gradient, with dropout and non-zero B."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from tests.distributed.cases import SCALE, SEED, build, make_batch, relative_error, whole_parameters
from tests.distributed.gradient_table import CASES
from tests.distributed.plain_decoder import PlainDecoder

# layouts do not matter to one process
NAMES = [name for name in CASES if "sequence" not in name and "joint" not in name]
STEP = 3


def packed_batch() -> Batch:
    """Documents of several lengths, padding, and token indices beyond 2^32."""
    rows = [(0, (9, 1, 14)), (3, (24,)), (2**33, (5, 5, 11))]
    return make_batch(rows, row_length=24, seq_length=32, vocab_size=131, seed=1)


@functools.cache
def _both(name: str) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Token losses and gradients of the engine, then of the plain decoder."""
    case, batch = CASES[name], packed_batch()
    built = build(case)
    losses = built.model(batch, torch.tensor(STEP))
    (losses * batch.loss_weights_BS.flatten()).sum().backward()
    wide = {key: value.double() for key, value in whole_parameters(case).items()}
    trained = {key: wide[key].requires_grad_() for key in built.gradients()}
    plain = PlainDecoder(config=case.config, parameters=wide, scale=SCALE, dropout=case.dropout, seed=SEED)
    expected = plain.token_losses(batch, STEP)
    expected.sum().backward()
    return losses.detach(), built.gradients(), expected.detach(), {key: value.grad for key, value in trained.items()}


@pytest.mark.parametrize("name", NAMES)
def test_token_losses_equal_plain_torch(name: str):
    losses, _, expected, _ = _both(name)
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_plain_torch(name: str):
    _, gradients, _, expected = _both(name)
    errors = {key: relative_error(gradients[key], expected[key]) for key in gradients}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}


def test_dropout_matters_and_stops_in_evaluation():
    built, batch = build(CASES["adapters local"]), packed_batch()
    with torch.no_grad():
        first, other, still = (built.model(batch, torch.tensor(step)) for step in (STEP, STEP + 1, STEP))
        evaluated = built.model(batch, torch.tensor(STEP), training=False)
    assert torch.equal(first, still), "the same coordinates gave another mask"
    assert not torch.allclose(first, other, atol=1e-3), "the step did not change the mask"
    plain = PlainDecoder(
        config=CASES["adapters local"].config,
        parameters=whole_parameters(CASES["adapters local"]),
        scale=SCALE,
        dropout=0.0,
        seed=SEED,
    )
    torch.testing.assert_close(evaluated, plain.token_losses(batch, STEP), rtol=0, atol=1e-5)
