"""Splits of layers against all splits there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from engine.pipeline.costs import layer_costs
from engine.pipeline.partition import LayerWeights, first_trainable_stage, parse_layers, split_layers


def all_splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(end - start for start, end in pairwise((0, *cut, num_layers))) for cut in cuts]


def by_hand(weights: LayerWeights, layers: tuple[int, ...]) -> list[int]:
    """Time of each stage in millionths of a layer, layer by layer."""
    numbered = iter(range(sum(layers)))
    costs = []
    for count in layers:
        own = [next(numbered) for _ in range(count)]
        frozen = round(weights.frozen_layer * 10**6)
        costs.append(sum(frozen if layer < weights.first_trainable_layer else 10**6 for layer in own))
    costs[0] += round(weights.embedding * 10**6)
    costs[-1] += round(weights.head * 10**6)
    return costs


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 11), st.data())
def test_no_split_is_better(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, min(num_layers, 6)))
    weights = LayerWeights(
        embedding=data.draw(st.sampled_from([0, 0.3, 1, 2.5])),
        head=data.draw(st.sampled_from([0, 0.5, 1, 2.4, 4])),
        first_trainable_layer=data.draw(st.integers(0, num_layers)),
        frozen_layer=data.draw(st.sampled_from([0.5, 1 / 3])),
    )
    found = split_layers(num_layers, num_stages, weights)

    def order(layers: tuple[int, ...]) -> tuple:
        costs = by_hand(weights, layers)
        return max(costs), sum(cost**2 for cost in costs), layers

    assert order(found) == min(map(order, all_splits(num_layers, num_stages)))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "weights", "layers"),
    [
        (32, 8, {}, (4, 4, 4, 4, 4, 4, 4, 4)),
        (34, 8, {}, (4, 4, 4, 4, 4, 4, 5, 5)),
        (30, 4, {"head": 2}, (8, 8, 8, 6)),
        (30, 4, {"embedding": 1, "head": 1}, (7, 8, 8, 7)),
        (32, 4, {"first_trainable_layer": 16}, (12, 8, 6, 6)),
        (126, 16, {"embedding": 1, "head": 1}, (7, *(8,) * 14, 7)),
    ],
)
def test_splits_known_beforehand(num_layers: int, num_stages: int, weights: dict, layers: tuple[int, ...]) -> None:
    """Even ones; a head of two layers; Llama-3.1-405B's 126 layers, whose ends count as one layer each."""
    assert split_layers(num_layers, num_stages, LayerWeights(**weights)) == layers


def test_the_weights_are_the_times_that_are_simulated() -> None:
    """A stage's weight is the sum of its times, in layers."""
    layers = (3, 4, 2)
    costs = layer_costs(layers, forward=1, input_grad=1, embedding=0.5, head=1.5, first_trainable_layer=4)
    weights = LayerWeights(embedding=0.5, head=1.5, first_trainable_layer=4)
    times = [sum(parts) / 2 for parts in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)]
    assert [cost / 10**6 for cost in by_hand(weights, layers)] == times == [2, 3.5, 3.5]


def test_first_trainable_stage() -> None:
    assert [first_trainable_stage((3, 1, 2), layer) for layer in range(7)] == [0, 0, 0, 1, 2, 2, 2]


def test_splits_that_users_write() -> None:
    assert parse_layers("8, 8,8,6", 30, 4) == (8, 8, 8, 6)
    for text, words in (
        ("8,8,8", ["3 stages", "are 4"]),
        ("8,8,8,8", ["32 layers", "has 30"]),
        ("8,8,8,x", ["8,8,8,x", "as 8,8,8,6"]),
        ("15,15,0,0", ["at least 1"]),
        ("", ["not a split"]),
    ):
        with pytest.raises(UserError) as caught:
            parse_layers(text, 30, 4)
        assert all(word in str(caught.value) for word in words), text


def test_impossible_splits() -> None:
    with pytest.raises(UserError, match="6 layers cannot be split into 8 stages"):
        split_layers(6, 8)
    with pytest.raises(UserError, match="head is -1"):
        LayerWeights(head=-1)
