"""Philox against the published known answers; masks and draws as functions of global coordinates alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.kernels.philox import dropout_mask, dropout_scale, dropout_threshold, philox4x32, uniform_rows
from engine.kernels.records import DropoutKey

# Random123's kat_vectors, philox 4x32 with 10 rounds: counter, key, answer
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _philox_by_integers(counter: list[int], key: list[int]) -> list[int]:
    """The rounds once more with Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str):
    words = philox4x32(tuple(torch.tensor([word]) for word in _words(counter)), tuple(_words(key)))
    assert [int(word) for word in words] == _words(answer)


def test_random_counters_equal_integer_arithmetic():
    generator = np.random.default_rng(5)
    counters, key = generator.integers(0, 2**32, (200, 4)), [int(word) for word in generator.integers(0, 2**32, 2)]
    words = philox4x32(tuple(torch.from_numpy(counters[:, place].astype(np.int64)) for place in range(4)), tuple(key))
    expected = [_philox_by_integers([int(word) for word in row], key) for row in counters]
    assert torch.stack(words, dim=1).tolist() == expected


def _mask(tokens: torch.Tensor, offset: int, count: int, **changes) -> torch.Tensor:
    options = {"probability": 0.3, "seed": 7, "site": 2, "step": 5, **changes}
    return dropout_mask(DropoutKey(token_index=tokens, feature_offset=offset, num_features=count, **options))


def test_mask_follows_its_definition():
    """Key (seed, site), counter (feature // 8, token low, token high, step), lane feature % 8 of sixteen bits each."""
    tokens = torch.tensor([0, 3, 2**32 - 1, 2**32, 5 * 2**32 + 17])
    mask = _mask(tokens, 0, 21)
    for row, token in enumerate(tokens.tolist()):
        for feature in range(21):
            words = _philox_by_integers([feature // 8, token % 2**32, token >> 32, 5], [7, 2])
            lane = feature % 8
            draw = (words[lane // 2] >> (16 * (lane % 2))) & 0xFFFF
            assert bool(mask[row, feature]) == (draw >= round(0.3 * 65536)), (token, feature)


@pytest.mark.parametrize(("offset", "count"), [(0, 123), (1, 5), (8, 8), (13, 50), (120, 3), (7, 1)])
def test_slices_of_features_are_slices_of_the_whole(offset: int, count: int):
    tokens = torch.arange(40)
    assert torch.equal(_mask(tokens, offset, count), _mask(tokens, 0, 123)[:, offset : offset + count])


def test_rows_depend_on_their_token_alone():
    tokens = torch.arange(64) * 2**29
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_mask(tokens[order], 0, 40), _mask(tokens, 0, 40)[order])


@pytest.mark.parametrize("change", [{"seed": 8}, {"site": 3}, {"step": 6}, {"step": torch.tensor(6)}])
def test_every_coordinate_changes_the_mask(change: dict):
    tokens = torch.arange(64)
    share = (_mask(tokens, 0, 64) != _mask(tokens, 0, 64, **change)).float().mean()
    # two independent masks differ where one keeps and the other drops: 2 * 0.3 * 0.7
    assert abs(share - 0.42) < 5 * math.sqrt(0.42 * 0.58 / 4096)


def test_tokens_beyond_32_bits_draw_anew():
    near, far = torch.arange(32), torch.arange(32) + 2**32
    assert not torch.equal(_mask(near, 0, 64), _mask(far, 0, 64))


def test_step_may_be_a_tensor():
    tokens = torch.arange(8)
    assert torch.equal(_mask(tokens, 0, 16), _mask(tokens, 0, 16, step=torch.tensor(5)))


@pytest.mark.parametrize("probability", [0.0, 0.05, 0.1, 0.5, 0.9])
def test_keep_rate_and_scale(probability: float):
    count = 500 * 400
    kept = _mask(torch.arange(500) + 2**33, 3, 400, probability=probability).float().mean().item()
    dropped = dropout_threshold(probability) / 65536
    assert abs(dropped - probability) <= 0.5 / 65536
    # five standard deviations of a mean of `count` coin flips
    assert abs(kept - (1 - dropped)) <= 5 * math.sqrt(dropped * (1 - dropped) / count)
    assert dropout_scale(probability) == pytest.approx(1 / (1 - dropped), rel=1e-12)


def test_lanes_and_neighbours_are_independent():
    kept = _mask(torch.arange(4000), 0, 32, probability=0.5).float() - 0.5
    correlation = (kept.T @ kept) / (0.25 * 4000)
    off_diagonal = correlation - torch.eye(32)
    # each entry is a mean of 4000 products of signs; 496 pairs, hence six standard deviations
    assert off_diagonal.abs().max() < 6 / math.sqrt(4000)


def test_uniform_rows_is_uniform_and_depends_on_coordinates_alone():
    rows = torch.tensor([5, 2**32 + 5, 0, 17])
    values = uniform_rows(rows, 1001, seed=3, site=9)
    assert values.dtype == torch.float32 and values.shape == (4, 1001)
    assert torch.equal(uniform_rows(rows[2:], 1001, seed=3, site=9), values[2:])
    assert torch.equal(uniform_rows(rows, 40, seed=3, site=9), values[:, :40])
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(uniform_rows(rows, 1001, seed=3, site=9, draw=1), values)
    flat = uniform_rows(torch.arange(200), 500, seed=3, site=9).flatten().double()
    assert flat.min() >= 0 and flat.max() < 1
    assert abs(flat.mean() - 0.5) < 5 / math.sqrt(12 * flat.numel())
    ordered = flat.sort().values
    steps = torch.arange(1, flat.numel() + 1) / flat.numel()
    # Kolmogorov and Smirnov: 1.95 / sqrt(n) is passed by chance once in a thousand, and the draw is fixed
    assert (ordered - steps).abs().max() < 1.95 / math.sqrt(flat.numel())
