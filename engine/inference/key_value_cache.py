"""The key/value cache of the active rows, for the layers of one rank.

A layer holds [slots, K, C, D] of each. C is the length rows may reach, or the layer's window where that is shorter: a
key is kept at its position modulo C, so that keys which have left the window are overwritten and every kept key is
visible. Keys are rotated before they are kept, so their order does not matter to attention. Keys and values of encoded
pictures, which layers with cross attention attend to, are kept beside it as long as each prompt has them.

Active rows are always in slots 0 to n - 1: a pass of one token each reads the front of the storage in place, without
gathering rows. Rows of different lengths share a pass; a mask hides what a shorter row does not have.

Legend: T tokens, H query heads, K key/value heads, D head size, N rows of a pass, C capacity, L longest row. In cross
attention N are heads and K encoded rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.records import Documents
from engine.models.decoder import DecoderLayer
from engine.ops.attention.cross import EncodedRows, EncodedSpan, cross_attention
from engine.ops.kernels import Attention


@dataclass(frozen=True, slots=True)
class _LayerCache:
    keys: Tensor
    values: Tensor
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class _EncodedPictures:
    """What the tokens of a row attend to in a layer with cross attention: [encoded rows, H, D] of each."""

    keys: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class KeyValues:
    """Storage for `slots` rows of up to `length` tokens.

    Args:
        layers: of the model on this rank; they have their number of heads here and their window.
        slots, length: maximum rows at a time, and their maximum length.
        device, dtype: of keys and values.
    """

    def __init__(
        self, layers: Iterable[DecoderLayer], *, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.slots, self.length = slots, length
        self.layers: dict[str, _LayerCache] = {}
        for layer in layers:
            attention = layer.attention
            window = attention.kind.window
            capacity = length if window is None else min(length, window)
            shape = (slots, attention.num_kv_heads, capacity, attention.head_dim)
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            sinks = None if attention.sinks is None else attention.sinks.scores.parameter
            self.layers[attention.prefix] = _LayerCache(keys, values, attention.kind.softcap, sinks)
        self._device = device
        self._encoded: dict[str, dict[int, _EncodedPictures]] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        slots = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())
        return slots + sum(kept.num_bytes for layer in self._encoded.values() for kept in layer.values())

    def bytes_read(self, lengths: Sequence[int]) -> int:
        """Returns the bytes that attention reads to continue rows of these lengths by one token each."""
        total = 0
        for layer in self.layers.values():
            a_token = 2 * layer.keys.shape[1] * layer.keys.shape[3] * layer.keys.element_size()
            total += a_token * sum(min(length, layer.capacity) for length in lengths)
        for encoded in self._encoded.values():
            total += sum(kept.num_bytes for slot, kept in encoded.items() if slot < len(lengths))
        return total

    def move(self, source: int, target: int) -> None:
        """Copies a row to another slot."""
        for layer in self.layers.values():
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]
        for encoded in self._encoded.values():
            encoded.pop(target, None)
            if source in encoded:
                encoded[target] = encoded.pop(source)

    def keep_encoded(self, layer: str, slot: int, pictures: _EncodedPictures | None) -> None:
        """Takes what a row attends to beside its tokens; None for nothing."""
        kept = self._encoded.setdefault(layer, {})
        kept.pop(slot, None)
        if pictures is not None:
            kept[slot] = pictures

    def encoded(self, layer: str, slot: int) -> _EncodedPictures | None:
        """Returns what `keep_encoded` took."""
        return self._encoded.get(layer, {}).get(slot)

    def first_pass(self, slots: Sequence[int], lengths: Sequence[int]) -> FirstPass:
        """Returns the pass of whole prompts, one after the other along T, into `slots`."""
        return FirstPass(self, slots, lengths)

    def next_pass(self, positions: Sequence[int]) -> NextPass:
        """Returns the pass of one token each of slots 0 to len(positions) - 1, at these positions."""
        return NextPass(self, positions)


class _Pass:
    """The tokens of a pass that are kept, and their places; the same for all layers of one capacity."""

    def __init__(self, cache: KeyValues, slots: Sequence[int], positions: Sequence[int], lasts: Sequence[int]) -> None:
        """Takes each token's slot and position, and the last position of its row after this pass."""
        self._cache = cache
        self._tokens = (slots, positions, lasts)
        self._places: dict[int, tuple[Tensor | None, Tensor, Tensor]] = {}
        for layer in cache.layers.values():  # before the first layer runs: the host waits for copies to the device
            self._place(layer.capacity)

    def _place(self, capacity: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Returns which tokens stay (None for all), their slots and their places in them."""
        if capacity not in self._places:
            device = self._cache._device
            slots, positions, lasts = (torch.tensor(values, dtype=torch.int64) for values in self._tokens)
            kept = positions > lasts - capacity
            chosen = None if bool(kept.all()) else kept.nonzero().flatten()
            if chosen is not None:
                slots, positions = slots[chosen], positions[chosen]
                chosen = chosen.to(device)
            self._places[capacity] = chosen, slots.to(device), (positions % capacity).to(device)
        return self._places[capacity]

    def _keep(self, layer: _LayerCache, k_TKD: Tensor, v_TKD: Tensor) -> None:
        chosen, slots, places = self._place(layer.capacity)
        if chosen is not None:
            k_TKD, v_TKD = k_TKD[chosen], v_TKD[chosen]
        layer.keys[slots, :, places] = k_TKD
        layer.values[slots, :, places] = v_TKD


class FirstPass(_Pass):
    """A prefill pass: attention within each prompt, as in training; keys and values are kept. See `KeyValueCache`."""

    def __init__(self, cache: KeyValues, slots: Sequence[int], lengths: Sequence[int]) -> None:
        pairs = list(zip(slots, lengths, strict=True))
        super().__init__(
            cache,
            [slot for slot, length in pairs for _ in range(length)],
            [position for length in lengths for position in range(length)],
            [length - 1 for length in lengths for _ in range(length)],
        )
        ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        self._slot_of = {end - length: slot for end, (slot, length) in zip(ends, pairs, strict=True)}

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
        self._keep(self._cache.layers[layer], k_TKD, v_TKD)
        return whole(q_THD, k_TKD, v_TKD, documents, scale=scale)

    def attend_encoded(self, layer: str, q_TND: Tensor, rows: EncodedRows | None) -> Tensor:
        for slot in self._slot_of.values():
            self._cache.keep_encoded(layer, slot, None)
        if rows is None:
            return torch.zeros_like(q_TND)
        for span in rows.spans:  # of whole prompts; what is kept must not keep the other prompts' with it
            own = _EncodedPictures(rows.k_KND[span.rows].clone(), rows.v_KND[span.rows].clone())
            self._cache.keep_encoded(layer, self._slot_of[span.tokens.start], own)
        return cross_attention(q_TND, rows)


class NextPass(_Pass):
    """A decode pass: one token per row attends to all that was kept of the row.

    See `engine.ops.attention.cache_protocol.KeyValueCache`.
    """

    def __init__(self, cache: KeyValues, positions: Sequence[int]) -> None:
        super().__init__(cache, range(len(positions)), positions, positions)
        self._counts = [position + 1 for position in positions]
        self._seen: dict[int, Tensor | None] = {}
        for layer in cache.layers.values():
            self._mask(layer.capacity)

    def _mask(self, capacity: int) -> Tensor | None:
        """Returns bool [N, 1, 1, L], True where a row has a key; None where all rows have all L."""
        if capacity not in self._seen:
            counts = [min(count, capacity) for count in self._counts]
            mask = None
            if min(counts) < max(counts):
                device = self._cache._device
                columns = torch.arange(max(counts), device=device)
                mask = (columns < torch.tensor(counts, device=device)[:, None])[:, None, None]
            self._seen[capacity] = mask
        return self._seen[capacity]

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
        kept = self._cache.layers[layer]
        self._keep(kept, k_TKD, v_TKD)
        rows, length = len(self._counts), min(max(self._counts), kept.capacity)
        keys, values = kept.keys[:rows, :, :length], kept.values[:rows, :, :length]
        mask = self._mask(kept.capacity)
        # the query heads of one key/value head take the query dimension, so that keys are not repeated
        q_NKGD = q_THD.view(rows, keys.shape[1], -1, q_THD.shape[-1])
        if kept.sinks_H is not None:
            out = _sink_attention(q_NKGD, keys, values, mask, scale, kept.sinks_H)
        elif kept.softcap is None:
            out = scaled_dot_product_attention(q_NKGD, keys, values, attn_mask=mask, scale=scale)
        else:
            out = _capped_attention(q_NKGD, keys, values, mask, scale, kept.softcap)
        return out.reshape(q_THD.shape)

    def attend_encoded(self, layer: str, q_TND: Tensor, rows: EncodedRows | None) -> Tensor:
        assert rows is None, "pictures belong to prompts"
        parts = []
        for slot, q_1ND in enumerate(q_TND.split(1)):
            kept = self._cache.encoded(layer, slot)
            if kept is None:
                parts.append(torch.zeros_like(q_1ND))
            else:
                whole = (EncodedSpan(slice(0, 1), slice(0, kept.keys.shape[0])),)
                parts.append(cross_attention(q_1ND, EncodedRows(kept.keys, kept.values, whole)))
        return torch.cat(parts)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Computes attention in fp32; scores become softcap * tanh(score / softcap)."""
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _sink_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks_H: Tensor) -> Tensor:
    """Computes attention in fp32; a head's sink takes its share of each softmax."""
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    sinks = sinks_H.float().view(1, k.shape[1], -1, 1)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)
    return ((scores - total).exp_() @ v.float()).to(q.dtype)
