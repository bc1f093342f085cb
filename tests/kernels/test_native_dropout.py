"""The compiled Philox against its plain-torch spec, bit for bit, on every instruction set this processor has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels import philox
from engine.kernels.native import dropout
from engine.kernels.records import DropoutKey
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_same_on_any_threads, unpack_bits, widened

pytestmark = ON_EVERY_INSTRUCTION_SET


def _mask(key: DropoutKey) -> Tensor:
    return unpack_bits(dropout.dropout_bits(key), key.num_features)


@pytest.mark.parametrize(
    ("tokens", "features", "offset"), [(5, 123, 0), (3, 1000, 5), (1, 7, 9), (4, 64, 8), (2, 1, 7), (100, 40, 11)]
)
def test_same_bits_as_torch(tokens: int, features: int, offset: int) -> None:
    token_index = torch.randint(0, 2**40, (tokens,))
    token_index[tokens // 3 :] %= 2**33  # neighbours that share their high word, and some that do not
    where = {"feature_offset": offset, "num_features": features, "seed": 2**32 - 1, "site": 77, "step": torch.tensor(3)}
    key = DropoutKey(token_index=token_index, probability=0.1, **where)
    assert torch.equal(_mask(key), philox.dropout_mask(key))


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_probabilities(probability: float) -> None:
    where = {"feature_offset": 0, "num_features": 4096, "seed": 1, "site": 2, "step": 3}
    mask = _mask(DropoutKey(token_index=torch.arange(16), probability=probability, **where))
    assert torch.equal(
        mask, philox.dropout_mask(DropoutKey(token_index=torch.arange(16), probability=probability, **where))
    )
    # 65536 draws: five standard deviations of the mean are 5 * sqrt(p (1 - p) / 65536) < 0.01
    assert abs(mask.float().mean().item() - (1 - probability)) < 0.01


def test_a_shard_sees_its_part_of_the_whole() -> None:
    where = {"probability": 0.3, "seed": 5, "site": 6, "step": 7}
    whole = _mask(DropoutKey(token_index=torch.arange(9), feature_offset=0, num_features=100, **where))
    part = _mask(DropoutKey(token_index=torch.arange(9), feature_offset=37, num_features=50, **where))
    assert torch.equal(part, whole[:, 37:87])


def test_bits_after_the_last_feature_are_zero() -> None:
    bits = dropout.dropout_bits(
        DropoutKey(
            token_index=torch.arange(4), feature_offset=3, num_features=13, probability=0.0, seed=1, site=1, step=1
        )
    )
    assert bits.tolist() == [[255, 31, 0, 0, 0, 0, 0, 0]] * 4


def test_no_rows() -> None:
    mask = _mask(
        DropoutKey(
            token_index=torch.arange(0), feature_offset=0, num_features=8, probability=0.1, seed=1, site=1, step=1
        )
    )
    assert mask.shape == (0, 8)


def test_any_number_of_threads() -> None:
    where = {"feature_offset": 3, "num_features": 777, "probability": 0.1, "seed": 1, "site": 2, "step": 3}
    assert_same_on_any_threads(lambda: (dropout.dropout_bits(DropoutKey(token_index=torch.arange(100), **where)),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "offset"), [(1, 7), (123, 0), (64, 8), (1000, 5)])
def test_drop(dtype: torch.dtype, features: int, offset: int) -> None:
    """Takes rows of a wider matrix, in a result of its own and added in place; dropped infinities are zeros."""
    where = {"feature_offset": offset, "num_features": features, "seed": 3, "site": 77, "step": torch.tensor(3)}
    key = DropoutKey(token_index=torch.randint(0, 2**40, (70,)), probability=0.3, **where)
    x = widened(torch.randn(70, features).masked_fill(~philox.dropout_mask(key), float("inf")).to(dtype))
    assert torch.equal(dropout.drop(x, key), philox.drop(x, key))
    into = torch.randn(70, features).to(dtype)
    expected, added = philox.drop(x, key, into.clone()), widened(into)
    assert dropout.drop(x, key, added) is added
    torch.testing.assert_close(added, expected, rtol=2**-23 if dtype is torch.float32 else 2**-8, atol=1e-6)
