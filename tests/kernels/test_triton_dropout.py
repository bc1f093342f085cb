"""Masks drawn on the device are those of plain torch, which has its own tests against published vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import philox
from engine.kernels.records import DropoutKey
from engine.kernels.triton.dropout import drop, dropout_bits
from tests.kernels.comparing import places

TOKENS = [0, 1, 77, 2**32 - 1, 2**33 + 5, 2**40]


def _key(place, feature_offset: int, num_features: int, tokens: list[int] = TOKENS) -> DropoutKey:
    step = torch.tensor(2**32 + 7, device=place[0])
    return DropoutKey(
        token_index=torch.tensor(tokens, dtype=torch.int64, device=place[0]), step=step, seed=0xFFFFFFF1,
        site=0xF0000002, probability=0.3, num_features=num_features, feature_offset=feature_offset,
    )  # fmt: skip


def _mask(key: DropoutKey) -> Tensor:
    bits = dropout_bits(key)
    assert bits.shape == (key.token_index.shape[0], -(-key.num_features // 8)) and bits.dtype == torch.uint8
    unpacked = (bits[:, :, None] >> torch.arange(8, device=bits.device, dtype=torch.uint8)) & 1
    return unpacked.flatten(1)[:, : key.num_features].bool()


@places
@pytest.mark.parametrize("offset", [0, 3, 8, 13, 16, 29, 1021])
@pytest.mark.parametrize("features", [1, 5, 6, 61, 64, 300])
def test_bits_are_the_reference_mask(place, offset: int, features: int) -> None:
    """In shards that start at a block of eight features, and in those that do not."""
    key = _key(place, offset, features)
    assert torch.equal(_mask(key), philox.dropout_mask(key))


@places
def test_small_key_and_extreme_probabilities(place) -> None:
    for probability in (0.0, 0.5, 1 / 65536):
        key = replace(_key(place, 0, 24, list(range(40))), probability=probability, seed=1, site=0, step=0)
        assert torch.equal(_mask(key), philox.dropout_mask(key)), probability
    assert _mask(replace(key, probability=0.0)).all()


@places
def test_a_number_equal_to_the_threshold_is_kept(place) -> None:
    """One number of 65536 is, of each half of a word."""
    key = _key(place, 0, 1024, list(range(300)))
    next_key = replace(key, probability=(philox.dropout_threshold(key.probability) + 1) / 65536)
    expected = philox.dropout_mask(key)
    at_threshold = (expected & ~philox.dropout_mask(next_key)).nonzero()[:, 1]
    assert set((at_threshold % 2).tolist()) == {0, 1}
    assert torch.equal(_mask(key), expected)


@places
def test_step_is_read_when_the_kernel_runs(place) -> None:
    """The step lies in memory: changing it changes the mask, as a replayed graph needs."""
    key = _key(place, 0, 64, list(range(16)))
    first = _mask(key)
    key.step.add_(1)
    second = _mask(key)
    assert not torch.equal(first, second)
    assert torch.equal(second, philox.dropout_mask(key))


@places
def test_no_tokens(place) -> None:
    assert _mask(_key(place, 0, 24, [])).shape == (0, 24)


@places
@pytest.mark.parametrize("offset", [0, 16, 29])
@pytest.mark.parametrize("features", [1, 61, 1200])
def test_drop(place, offset: int, features: int) -> None:
    """Takes rows of a wider matrix, in a result of its own and added in place; dropped infinities are zeros."""
    key = _key(place, offset, features, [*TOKENS, *range(20)])
    kept = philox.dropout_mask(key)
    wide = torch.randn(26, features + 3, device=place[0])
    wide[:, :features].masked_fill_(~kept, float("inf"))
    x = wide.to(place[1])[:, :features]
    assert torch.equal(drop(x, key), philox.drop(x, key))
    into = torch.randn(26, features + 5, device=place[0]).to(place[1])
    expected = philox.drop(x, key, into[:, :features].clone())
    assert drop(x, key, into[:, :features]).data_ptr() == into.data_ptr()
    exact = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}[place[1]]
    torch.testing.assert_close(into[:, :features], expected, rtol=exact, atol=1e-6)


@places
def test_drop_of_no_tokens(place) -> None:
    assert drop(torch.empty(0, 24, device=place[0]), _key(place, 0, 24, [])).shape == (0, 24)
