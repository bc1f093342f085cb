"""A pass of further tokens of one row, whose earlier tokens are in the cache: the next turn of a conversation.

Each new token attends to the cached ones and to the new ones before it. What is read of the cache is gathered before
the new tokens are written: layers with a window write over the oldest ones, which the first new tokens still see.
Layers with states begin with those that the row has, and leave it the new ones.

Legend: T new tokens, L tokens that they see, H query heads, K key/value heads, G query heads of one of them, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.inference.layer_cache import LayerCache
from engine.inference.pages import PageTable
from engine.inference.state_pools import StatePools
from engine.kernels.records import Documents
from engine.layers.host_copies import sent
from engine.ops.kernels import Attention

_QUERIES = 512
"""New tokens whose scores are in memory at a time."""


class _Columns(NamedTuple):
    """What layers of one capacity read and write.

    Args:
        read: int64 [C], where in a pool the earlier tokens are.
        positions_L: int64 [C + T], positions of the earlier tokens and of the new ones, in their order.
        chosen: int64, the new tokens that are kept; None for all.
        places: int64, where in a pool those go.
    """

    read: Tensor
    positions_L: Tensor
    chosen: Tensor | None
    places: Tensor


class ContinuedPass:
    """See `engine.ops.attention.cache_protocol.KeyValueCache`.

    Args:
        layers: by the names of their attentions.
        tables: capacity -> pages of layers that keep so many tokens of a row; `continue_row` gave this row its pages.
        states: of layers that carry some; the row's are those after `kept` tokens.
        slot: of the row.
        kept: tokens of it that are in the cache.
        count: new tokens.
        fill: tokens that follow them and are not read.
        length: the most tokens that a row may reach.
        device: of the layers' pools.
    """

    starts: Mapping[int, int] | None = None
    continues = True

    def __init__(
        self,
        layers: Mapping[str, LayerCache],
        tables: Mapping[int, PageTable],
        states: StatePools,
        slot: int,
        kept: int,
        count: int,
        *,
        fill: int,
        length: int,
        device: torch.device,
    ) -> None:
        self._layers, self.length, self._device = layers, length, device
        self._kept, self._count, self._fill = kept, count, fill
        self._states, self._slot = states, slot
        self._place: tuple[Tensor, Tensor] | None = None
        """The row among those that the pass leaves states of, and its slot, both int64 [1]."""
        self._columns = {capacity: self._columns_of(table, slot) for capacity, table in tables.items()}
        self._earlier: dict[str, tuple[Tensor, Tensor]] = {}
        """The earlier keys and values of a layer whose window they leave: layers that share a cache read them again."""

    def keep(self, layer: str, slot: int, beside: tuple[Tensor, ...] | None) -> None:
        """Is not called: rows of such layers are not continued."""
        raise AssertionError(f"{layer} keeps more of a row than keys and values")

    def kept(self, layer: str, slot: int) -> tuple[Tensor, ...] | None:
        """Returns None: rows of layers that keep something are not continued."""
        return None

    def keep_states(self, layer: str, states: tuple[Tensor, ...]) -> None:
        """See `KeyValueCache`; states of tokens that only fill up the pass may follow."""
        if self._place is None:
            row, slot = sent(torch.tensor([[0], [self._slot]], dtype=torch.int64), self._device)
            self._place = row, slot
        self._states.put(layer, states, *self._place)

    def states(self, layer: str) -> tuple[Tensor, ...] | None:
        """See `KeyValueCache`."""
        return self._states.of_slot(layer, self._slot)

    def _columns_of(self, table: PageTable, slot: int) -> _Columns:
        earlier = np.arange(max(0, self._kept - table.capacity), self._kept)
        end = self._kept + self._count
        written = np.arange(max(self._kept, end - table.capacity), end)
        positions = np.concatenate((earlier, np.arange(self._kept, end)))
        every = len(written) == self._count + self._fill
        read, places, positions_L, chosen = (
            sent(torch.from_numpy(one.astype(np.int64)), self._device)
            for one in (table.places(slot, earlier), table.places(slot, written), positions, written - self._kept)
        )
        return _Columns(read, positions_L, None if every else chosen, places)

    def attend(
        self,
        layer: str,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        whole: Attention,
        documents: Documents,
        *,
        scale: float,
    ) -> Tensor:
        """See `KeyValueCache`."""
        of_layer = self._layers[layer]
        columns = self._columns[of_layer.table.capacity]
        if layer not in self._earlier:
            self._earlier[layer] = of_layer.keys[columns.read], of_layer.values[columns.read]
        new = k_TKD[: self._count], v_TKD[: self._count]
        k_LKD, v_LKD = (torch.cat(pair) for pair in zip(self._earlier[layer], new, strict=True))
        for pool, tokens in zip((of_layer.keys, of_layer.values), (k_TKD, v_TKD), strict=True):
            kept = tokens if columns.chosen is None else tokens[columns.chosen]
            pool.index_copy_(0, columns.places, kept)
        out = torch.zeros_like(q_THD)  # tokens that only fill up the pass
        for start in range(0, self._count, _QUERIES):
            q = q_THD[start : min(start + _QUERIES, self._count)]
            at_T1 = torch.arange(self._kept + start, self._kept + start + len(q), device=q.device)[:, None]
            behind = at_T1 - columns.positions_L
            mask_TL = (behind >= 0) & (behind < of_layer.table.capacity)
            if of_layer.softcap is None and of_layer.sinks_H is None:
                found = _plain(q, k_LKD, v_LKD, mask_TL, scale)
            else:
                found = _exact(q, k_LKD, v_LKD, mask_TL, scale, of_layer.softcap, of_layer.sinks_H)
            out[start : start + len(q)] = found
        return out


def _plain(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, mask_TL: Tensor, scale: float) -> Tensor:
    q, k, v = (one.transpose(0, 1)[None] for one in (q_THD, k_LKD, v_LKD))
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask_TL, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def _exact(
    q_THD: Tensor,
    k_LKD: Tensor,
    v_LKD: Tensor,
    mask_TL: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Computes attention in fp32; scores become softcap * tanh(score / softcap), and a head's sink takes its share of
    each softmax."""
    q_TKGD = q_THD.float().view(len(q_THD), k_LKD.shape[1], -1, q_THD.shape[-1])
    scores = torch.einsum("tkgd,lkd->tkgl", q_TKGD, k_LKD.float()).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.masked_fill_(~mask_TL[:, None, None], -torch.inf)
    total = torch.logsumexp(scores, -1, keepdim=True)
    if sinks_H is not None:
        total = torch.logaddexp(total, sinks_H.float().view(1, k_LKD.shape[1], -1, 1))
    out = torch.einsum("tkgl,lkd->tkgd", (scores - total).exp_(), v_LKD.float())
    return out.to(q_THD.dtype).reshape(q_THD.shape)
