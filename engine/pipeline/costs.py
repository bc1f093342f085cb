"""The costs of each stage's actions, for the simulator: times in any one unit, and kept activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import UserError
from engine.pipeline.schedule import Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The costs per stage of the whole model. Times have one unit, whichever.

    Args:
        forward: time of F.
        input_grad: time of I.
        weight_grad: time of W; B takes input_grad + weight_grad.
        activation: bytes that the forward of one micro-batch keeps for backward.
        transfer: time for one message from rank to rank.

    Raises:
        UserError: a negative value, or lists of different lengths.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    activation: tuple[float, ...]
    transfer: float = 0.0

    def __post_init__(self) -> None:
        columns = (self.forward, self.input_grad, self.weight_grad, self.activation)
        if len({len(column) for column in columns}) != 1:
            raise UserError("forward, input_grad, weight_grad and activation must have one value for each stage.")
        smallest = min(*(value for column in columns for value in column), self.transfer)
        if smallest < 0:
            raise UserError(f"a cost of {smallest} is given: times and sizes may not be negative.")

    def time(self, action: Action) -> float:
        """Returns the time of `action`."""
        stage = action.stage
        if action.op == "F":
            return self.forward[stage]
        input_grad = self.input_grad[stage] if action.op in ("B", "I") else 0
        weight_grad = self.weight_grad[stage] if action.op in ("B", "W") else 0
        return input_grad + weight_grad


def even_costs(
    num_stages: int,
    *,
    forward: float = 1,
    input_grad: float = 1,
    weight_grad: float = 0,
    activation: float = 1,
    transfer: float = 0,
) -> Costs:
    """Returns the costs of equal stages. The defaults are those of a frozen base: backward as long as forward, no
    dW."""
    return Costs(
        forward=(forward,) * num_stages,
        input_grad=(input_grad,) * num_stages,
        weight_grad=(weight_grad,) * num_stages,
        activation=(activation,) * num_stages,
        transfer=transfer,
    )


def layer_costs(
    layers: Sequence[int],
    *,
    forward: float = 1,
    input_grad: float = 1,
    weight_grad: float = 0,
    activation: float = 1,
    transfer: float = 0,
    embedding: float = 0,
    head: float = 0,
    frozen_head: bool = True,
    first_trainable_layer: int = 0,
) -> Costs:
    """Returns the costs of stages of `layers[stage]` layers each, the first with the embedding, the last with the head.

    Args:
        layers: number of layers of each stage.
        forward, input_grad, weight_grad: times of one layer.
        activation: bytes that one layer keeps for backward.
        transfer: time for one message from rank to rank.
        embedding: time of the embedding, in layers (a layer's whole time is 1); all of it is in forward.
        head: time of the head and the loss, in layers.
        frozen_head: the head's time is all in forward, because the loss under a frozen head computes its gradient
            there. Otherwise it is divided over forward and backward as a layer's.
        first_trainable_layer: layers below it have no backward and keep nothing, wherever the stages are cut.
    """
    whole = forward + input_grad + weight_grad
    times: dict[str, list[float]] = {"forward": [], "input_grad": [], "weight_grad": []}
    kept = []
    end = 0
    for stage, count in enumerate(layers):
        start, end = end, end + count
        with_backward = end - max(start, min(first_trainable_layer, end))
        ends = whole * embedding if stage == 0 else 0
        divided = 0.0
        if stage == len(layers) - 1:
            ends, divided = (ends + whole * head, 0) if frozen_head else (ends, head)
        times["forward"].append(forward * (count + divided) + ends)
        times["input_grad"].append(input_grad * (with_backward + divided))
        times["weight_grad"].append(weight_grad * (with_backward + divided))
        kept.append(activation * with_backward)
    return Costs(
        forward=tuple(times["forward"]),
        input_grad=tuple(times["input_grad"]),
        weight_grad=tuple(times["weight_grad"]),
        activation=tuple(kept),
        transfer=transfer,
    )
