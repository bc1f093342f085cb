"""Masks drawn in kernels are those of the plain-torch generator, which has its own tests against published vectors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.kernels.comparing import places, random_rows
from triton_kernels import dropout, philox

TOKENS = [0, 1, 77, 2**32 - 1, 2**33 + 5, 2**40]


def _arguments(device: str, feature_offset: int, num_features: int, probability: float = 0.3) -> dict[str, object]:
    return {
        "feature_offset": feature_offset,
        "num_features": num_features,
        "probability": probability,
        "seed": 0xFFFFFFF1,
        "site": 0xF0000002,
        "step": torch.tensor(2**32 + 7, device=device),
    }


@places
@pytest.mark.parametrize(("offset", "features"), [(0, 123), (3, 1), (1021, 300), (8, 8)])
def test_mask_is_the_reference_mask(place, offset: int, features: int) -> None:
    tokens = torch.tensor(TOKENS, device=place[0])
    arguments = _arguments(place[0], offset, features)
    ours = dropout.dropout_mask(tokens, **arguments)
    assert torch.equal(ours, philox.dropout_mask(tokens, **arguments))


@places
def test_bits_are_the_reference_mask(place) -> None:
    tokens = torch.tensor(TOKENS, device=place[0])
    arguments = _arguments(place[0], 13, 61)
    bits = dropout.dropout_bits(tokens, **arguments)
    assert bits.shape == (len(TOKENS), 9)
    unpacked = (bits[:, :, None] >> torch.arange(8, device=place[0], dtype=torch.uint8)) & 1
    assert torch.equal(unpacked.flatten(1)[:, 5 : 5 + 61].bool(), philox.dropout_mask(tokens, **arguments))


@places
def test_small_key_and_extreme_probabilities(place) -> None:
    tokens = torch.arange(40, device=place[0])
    for probability in (0.0, 0.5, 1 / 65536):
        arguments = _arguments(place[0], 0, 24, probability) | {"seed": 1, "site": 0, "step": 0}
        ours = dropout.dropout_mask(tokens, **arguments)
        assert torch.equal(ours, philox.dropout_mask(tokens, **arguments)), probability
    assert dropout.dropout_mask(tokens, **_arguments(place[0], 0, 24, 0.0)).all()


@places
@pytest.mark.parametrize("as_bits", [False, True])
def test_apply_scales_what_is_kept(place, as_bits: bool) -> None:
    x = random_rows(place, len(TOKENS), 123, gap=5)
    arguments = _arguments(place[0], 5, 123)
    tokens = torch.tensor(TOKENS, device=place[0])
    kept = philox.dropout_mask(tokens, **arguments)
    fields = {name: value for name, value in arguments.items() if name != "num_features"}
    mask = dropout.DropoutMask(token_index_T=tokens, **fields)
    mask = mask.with_bits(123) if as_bits else mask
    expected = (x.float() * kept * philox.dropout_scale(0.3)).to(x.dtype)
    torch.testing.assert_close(dropout.dropout_apply(x, mask), expected, rtol=torch.finfo(x.dtype).eps, atol=0)
    in_place = x.clone()
    assert dropout.dropout_apply(in_place, mask, out=in_place) is in_place
    torch.testing.assert_close(in_place, expected, rtol=torch.finfo(x.dtype).eps, atol=0)


@places
def test_step_is_read_when_the_kernel_runs(place) -> None:
    """The step lies in memory: changing it changes the mask, as a replayed graph needs."""
    tokens = torch.arange(16, device=place[0])
    arguments = _arguments(place[0], 0, 64)
    step = arguments["step"]
    first = dropout.dropout_mask(tokens, **arguments)
    step.add_(1)
    second = dropout.dropout_mask(tokens, **arguments)
    assert not torch.equal(first, second)
    assert torch.equal(second, philox.dropout_mask(tokens, **arguments))


@places
def test_no_tokens(place) -> None:
    tokens = torch.empty(0, dtype=torch.int64, device=place[0])
    arguments = _arguments(place[0], 0, 24)
    assert dropout.dropout_mask(tokens, **arguments).shape == (0, 24)
    assert dropout.dropout_bits(tokens, **arguments).shape == (0, 3)
