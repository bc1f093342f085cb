"""The states of rows while text is generated: of each tensor that a layer keeps of a row, one for all rows.

A row's slot is its place in the pool, so that a pass of one token for each row updates the states where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class StatePools:
    """Tensors [slots, ...] of each layer, made when its first states are put.

    Args:
        slots: rows at a time.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pools: dict[str, tuple[Tensor, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all pools."""
        return sum(int(pool.nbytes) for pools in self._pools.values() for pool in pools)

    def bytes_by_layer(self) -> dict[str, int]:
        """Returns the bytes of each layer's pools."""
        return {layer: sum(int(pool.nbytes) for pool in pools) for layer, pools in self._pools.items()}

    def bytes_of(self, count: int) -> int:
        """Returns the bytes of the states of so many rows."""
        return sum(pool[:count].nbytes for pools in self._pools.values() for pool in pools)

    def put(self, layer: str, states: Sequence[Tensor], rows: Tensor, slots: Tensor) -> None:
        """Puts states into slots.

        Args:
            states: [P, ...] each; a layer's shapes and dtypes are always the same.
            rows, slots: int64; row rows[i] of them goes to slot slots[i].
        """
        if layer not in self._pools:
            self._pools[layer] = tuple(one.new_empty((self._slots, *one.shape[1:])) for one in states)
        for pool, state in zip(self._pools[layer], states, strict=True):
            pool.index_copy_(0, slots, state.index_select(0, rows))

    def of_slot(self, layer: str, slot: int) -> tuple[Tensor, ...] | None:
        """Returns the states of a slot, [1, ...] each; None where the layer has put none."""
        pools = self._pools.get(layer)
        return None if pools is None else tuple(pool[slot : slot + 1] for pool in pools)

    def first(self, layer: str, count: int) -> tuple[Tensor, ...] | None:
        """Returns the states of slots 0 to count - 1, to be updated in place; None where the layer has put none."""
        pools = self._pools.get(layer)
        return None if pools is None else tuple(pool[:count] for pool in pools)

    def copy(self, source: int, targets: Tensor) -> None:
        """Gives other slots, int64, what one has."""
        for pools in self._pools.values():
            for pool in pools:
                pool.index_put_((targets,), pool[source].clone())

    def move(self, source: int, target: int) -> None:
        """Gives a row another slot."""
        for pools in self._pools.values():
            for pool in pools:
                pool[target : target + 1].copy_(pool[source : source + 1])
