"""The key/value cache of the active rows, for the layers of one rank.

A layer has a pool of pages, [places, K, D] of keys and of values, and a row's tokens lie where the block tables of
`engine.inference.pages` say. Its capacity is the length that rows may reach, or the layer's window where that is
shorter: then keys that have left the window are overwritten, and every kept key is visible. Keys are rotated before
they are kept, so their order does not matter to attention. Rows that continue one prompt share its pages, so that it
is run once. The states of layers that carry some have pools of their own (`engine.inference.state_pools`). What else a
layer needs of a row, such as keys and values of encoded images, is kept beside the pools until the row ends; rows that
continue one prompt begin with the same.

Active rows are always in slots 0 to n - 1. Rows of different lengths share a pass. Where the backend has a kernel for
it (`Kernels.paged_attention`), attention reads the pages where they are; else they are gathered, as long as the longest
row is, and a mask hides the positions beyond a shorter row. `KeyValues.gathered` says why.

Legend: T tokens, H query heads, K key/value heads, D head size, N rows of a pass, L longest row, S places of a pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.inference.continued_pass import ContinuedPass
from engine.inference.layer_cache import LayerCache
from engine.inference.pages import PAGE, SPARE_PAGE, PageTable
from engine.inference.state_pools import StatePools
from engine.kernels.records import Documents
from engine.layers.attention import CachedAttention
from engine.layers.host_copies import sent
from engine.ops.kernels import Attention, Kernels

WRITTEN = 5
_PLACES, _COUNTS, _ENTRIES, _SOURCES, _TARGETS = range(WRITTEN)
"""What `KeyValues.write` returns of each row of a pass: where in a pool the new token goes; the row's tokens with it;
the entry of its page in the table, of all rows one after the other; and a page to copy before, with the one to copy it
to, both `SPARE_PAGE` where none is copied."""


def copies_pages(written: np.ndarray) -> bool:
    """Returns whether pages are copied before a pass, given what `KeyValues.write` returned."""
    return bool((written[:, _SOURCES] != written[:, _TARGETS]).any())


class KeyValues:
    """Keys and values of up to `slots` rows, of a prompt that waits for more rows to continue it, and of conversations
    that wait for their next turn.

    Args:
        attentions: of the model's layers on this rank.
        kernels: of the backend that reads pages.
        slots, length: maximum rows at a time, and their maximum length.
        new: the most tokens that follow a prompt; None for any.
        group: rows that continue one prompt, which is kept once for so many; 1 where none is shared.
        conversations: that may be under way, in slots or waiting, at least `slots`; 0 where a row ends with its
            answer.
        device, dtype: of keys and values.
    """

    def __init__(
        self,
        attentions: Iterable[CachedAttention],
        kernels: Kernels,
        *,
        slots: int,
        length: int,
        new: int | None = None,
        group: int = 1,
        conversations: int = 0,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        assert conversations == 0 or conversations >= slots, (conversations, slots)
        self.slots, self.length, self.conversations = slots, length, conversations
        self._new = length if new is None else new
        self._waiting = slots
        """The slot of the prompt that waits."""
        self.waiting_rows = range(slots + 1, slots + 1 + conversations)
        """The slots of rows that wait for their next turn."""
        self.layers: dict[str, LayerCache] = {}
        self._tables: dict[int, PageTable] = {}
        self.gathered: str | None = None
        """Why pages are gathered in some layers, in one sentence; None where all are read where they are."""
        for attention in attentions:
            capacity = length if attention.window is None else min(length, attention.window)
            if capacity not in self._tables:
                self._tables[capacity] = PageTable(
                    rows=slots,
                    capacity=capacity,
                    prompt=length - (0 if new is None else new),
                    new=self._new,
                    group=group,
                    conversations=conversations,
                )
            table = self._tables[capacity]
            shape = (table.num_pages * PAGE, attention.num_kv_heads, attention.head_dim)
            softcap, sinks = attention.softcap, attention.sinks_H
            lack = _lack(kernels, attention.head_dim, capped=softcap is not None, sinks=sinks is not None)
            attend = None
            if lack is None and kernels.paged_attention is not None:
                attend = kernels.paged_attention.attend
            elif self.gathered is None:
                self.gathered = f"each token that is decoded gathers the keys of all rows: {lack}"
            # masked values must be finite
            make = torch.zeros if attend is None else torch.empty
            keys, values = (make(shape, dtype=dtype, device=device) for _ in range(2))
            self.layers[attention.name] = LayerCache(keys, values, table, softcap, sinks, attend)
        self._device = device
        self._beside: dict[str, dict[int, tuple[Tensor, ...]]] = {}
        self._states = StatePools(slots + 1 + conversations)
        """Of layers that carry states; the waiting prompt's come behind those of the rows."""
        self._sharing: dict[int, list[int]] = {}
        """The slot that runs a prompt -> the others that continue it."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all pools, and of the state kept beside them."""
        pools = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())
        beside = sum(_num_bytes(kept) for layer in self._beside.values() for kept in layer.values())
        return int(pools) + beside + self._states.num_bytes

    def bytes_by_layer(self) -> dict[str, int]:
        """Returns the bytes of each layer's pools, and of the state kept beside them; layers by their names."""
        found = self._states.bytes_by_layer()
        for name, layer in self.layers.items():
            found[name] = found.get(name, 0) + int(layer.keys.nbytes + layer.values.nbytes)
        for name, kept in self._beside.items():
            found[name] = found.get(name, 0) + sum(map(_num_bytes, kept.values()))
        return found

    def bytes_read(self, lengths: Sequence[int]) -> int:
        """Returns the bytes that are read of all this to continue rows of these lengths by one token each."""
        total = self._states.bytes_of(len(lengths))
        for layer in self.layers.values():
            total += 2 * layer.keys[0].nbytes * sum(min(length, layer.table.capacity) for length in lengths)
        for beside in self._beside.values():
            total += sum(_num_bytes(kept) for slot, kept in beside.items() if slot < len(lengths))
        return total

    def room(self, prompt: int, new: int, *, waits: bool) -> int:
        """Returns the number of rows of a prompt that fit in memory.

        Args:
            prompt, new: tokens of the prompt, and the most that follow it.
            waits: it is the prompt that waits, and so has its pages.
        """
        return min((table.room(prompt, new, cached=waits) for table in self._tables.values()), default=self.slots)

    def begin(self, slots: Sequence[int], prompt: int, new: int, *, waits: bool) -> None:
        """Takes pages for a prompt, which rows in these slots continue; it may wait for further ones."""
        first, *others = [*slots, self._waiting] if waits else slots
        self._sharing[first] = others
        for table in self._tables.values():
            table.begin(first, prompt)
            for other in others:
                table.share(first, other)
            for slot in slots:
                table.reserve(slot, prompt, new)

    def begin_more(self, slots: Sequence[int], prompt: int, new: int) -> None:
        """Lets further rows continue the prompt that waits."""
        for table in self._tables.values():
            for slot in slots:
                table.share(self._waiting, slot)
                table.reserve(slot, prompt, new)
        for beside in self._beside.values():
            if self._waiting in beside:
                beside.update(dict.fromkeys(slots, beside[self._waiting]))
        self._states.copy(self._waiting, self._on_device(np.array(slots, dtype=np.int64)))

    def end_waiting(self) -> None:
        """Lets go of the prompt that waits."""
        self.free(self._waiting)

    def can_continue(self, slot: int, length: int, kept: int) -> bool:
        """Returns whether new tokens may follow the first `kept` ones of a row of `length` tokens: of layers with a
        window the last tokens alone are here. Where layers have states, which are those of the whole row, `kept` is
        `length`."""
        if any(slot in beside for beside in self._beside.values()):
            return False
        return kept == length or all(length <= table.capacity for table in self._tables.values())

    def continue_row(self, slot: int, kept: int, count: int, *, fill: int = 0) -> ContinuedPass:
        """Returns the pass of `count` new tokens that follow the first `kept` ones of a row; `fill` tokens follow that
        are not read."""
        for table in self._tables.values():
            if pairs := table.continue_row(slot, kept, kept + count):
                sources, targets = self._on_device(np.array(pairs, dtype=np.int64).T.copy())
                self._copy(table, sources, targets)
        return ContinuedPass(
            self.layers,
            self._tables,
            self._states,
            slot,
            kept,
            count,
            fill=fill,
            length=self.length,
            device=self._device,
        )

    def free(self, slot: int) -> None:
        """Ends a row."""
        for table in self._tables.values():
            table.free(slot)
        for beside in self._beside.values():
            beside.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        """Gives a row another slot, which is free."""
        for table in self._tables.values():
            table.move(source, target)
        for beside in self._beside.values():
            if source in beside:
                beside[target] = beside.pop(source)
        self._states.move(source, target)

    def keep(self, layer: str, slot: int, beside: tuple[Tensor, ...] | None) -> None:
        """See `KeyValueCache`."""
        kept = self._beside.setdefault(layer, {})
        kept.pop(slot, None)
        if beside is not None:
            kept[slot] = beside

    def keep_of_prompt(self, layer: str, slot: int, beside: tuple[Tensor, ...] | None) -> None:
        """Keeps what all rows that continue the prompt of this slot begin with."""
        for each in (slot, *self._sharing.get(slot, ())):
            self.keep(layer, each, beside)

    def kept(self, layer: str, slot: int) -> tuple[Tensor, ...] | None:
        """See `KeyValueCache`."""
        return self._beside.get(layer, {}).get(slot)

    def first_pass(self, slots: Sequence[int], lengths: Sequence[int], *, fill: int = 0) -> FirstPass:
        """Returns the pass of whole prompts, one after the other along T, which `begin` gave the pages of these slots;
        `fill` tokens follow that are not kept."""
        return FirstPass(self, slots, lengths, fill)

    @property
    def tables(self) -> Mapping[int, PageTable]:
        """Capacity -> the pages of layers that keep so many tokens of a row."""
        return self._tables

    def write(self, positions: Sequence[int], *, fill: int = 0) -> np.ndarray:
        """Gives slots 0 to len(positions) - 1 the pages of one more token each, at these positions.

        Args:
            fill: rows that follow and are not read; their tokens go to a page of no row.

        Returns:
            int64 [tables, 5, N], see `_PLACES`.
        """
        rows, at = len(positions), np.array(positions, dtype=np.int64)
        found = np.full((len(self._tables), 5, rows + fill), SPARE_PAGE, dtype=np.int64)
        for table, (places, counts, entries, sources, targets) in zip(self._tables.values(), found, strict=True):
            for slot, position in enumerate(positions):
                if (pair := table.write(slot, position)) is not None:
                    sources[slot], targets[slot] = pair
            kept, slots = at % table.capacity, np.arange(rows + fill)
            places[:] = SPARE_PAGE * PAGE
            places[:rows] = table.table[slots[:rows], kept // PAGE].astype(np.int64) * PAGE + kept % PAGE
            counts[:] = 1
            counts[:rows] = np.minimum(at + 1, table.capacity)
            entries[:] = slots * table.table.shape[1]
            entries[:rows] += kept // PAGE
        return found

    def copy_pages(self, written: Tensor) -> None:
        """Copies the pages that a pass needs copied, and those of no row onto themselves.

        Args:
            written: int64 [tables, 5, N], what `write` returned, on the device.
        """
        for table, of_table in zip(self._tables.values(), written, strict=True):
            self._copy(table, of_table[_SOURCES], of_table[_TARGETS])

    def _copy(self, table: PageTable, sources: Tensor, targets: Tensor) -> None:
        """Copies pages, int64, of all layers whose pages are those of a table."""
        for layer in self.layers.values():
            for pool in (layer.keys, layer.values) if layer.table is table else ():
                by_page = pool.view(table.num_pages, -1)
                by_page.index_copy_(0, targets, by_page.index_select(0, sources))

    def next_pass(self, written: np.ndarray, on_device: Tensor, num_rows: int) -> NextPass:
        """Returns the pass of one token each of slots 0 to num_rows - 1.

        Args:
            written: what `write` returned for it.
            on_device: the same, on the device.
        """
        if copies_pages(written):
            self.copy_pages(on_device)
        found = {
            capacity: self._rows(table, host[_COUNTS], device)
            for (capacity, table), host, device in zip(self._tables.items(), written, on_device, strict=True)
        }
        return NextPass(self, num_rows, found)

    def static_pass(self, tables: Mapping[int, Tensor], on_device: Tensor, num_rows: int, *, longest: int) -> NextPass:
        """Returns a pass of one token each of slots 0 to num_rows - 1 that may be run again, on other numbers in the
        same tensors: nothing about it is known on the host.

        Args:
            tables: capacity -> int32 [N, P], contiguous, pages of each row; the pass enters those of the new tokens.
            on_device: int64 [tables, 5, N], as `write` returns it; its pages were copied already.
            longest: the most tokens of a row, which attention has room for.
        """
        assert self.gathered is None, self.gathered
        found = {}
        for (capacity, table_NP), (places, counts, entries, *_) in zip(tables.items(), on_device, strict=True):
            table_NP.view(-1).index_copy_(0, entries, (places // PAGE).int())
            found[capacity] = _Rows(places, table_NP[:, : -(-longest // PAGE)], counts, None, None)
        return NextPass(self, num_rows, found)

    def _rows(self, table: PageTable, counts: np.ndarray, written: Tensor) -> _Rows:
        """Returns the rows of a pass, with as many pages as the longest one has."""
        longest = int(counts.max())
        num_rows = min(len(counts), self.slots)
        pages_NP = np.full((len(counts), -(-longest // PAGE)), SPARE_PAGE, dtype=np.int32)
        pages_NP[:num_rows] = table.table[:num_rows, : pages_NP.shape[1]]
        table_NP, counts_N = self._on_device(pages_NP), written[_COUNTS]
        index = mask = None
        if any(layer.attend is None for layer in self.layers.values() if layer.table is table):
            columns = torch.arange(longest, device=self._device)
            index = table_NP.long()[:, columns // PAGE] * PAGE + columns % PAGE
            if int(counts.min()) < longest:
                mask = (columns < counts_N[:, None])[:, None, None]
        return _Rows(written[_PLACES], table_NP, counts_N, index, mask)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return sent(torch.from_numpy(values), self._device)


class _Pass:
    """A pass through the layers.

    Args:
        cache: of all rows.
    """

    continues = False

    def __init__(self, cache: KeyValues) -> None:
        self._cache, self.length = cache, cache.length
        self.keep, self.kept = cache.keep, cache.kept

    def states(self, layer: str) -> tuple[Tensor, ...] | None:
        """See `KeyValueCache`."""
        return None


class FirstPass(_Pass):
    """A prefill pass: attention within each prompt, as in training; keys and values are kept. See `KeyValueCache`."""

    def __init__(self, cache: KeyValues, slots: Sequence[int], lengths: Sequence[int], fill: int) -> None:
        super().__init__(cache)
        self.keep = cache.keep_of_prompt
        self._prompts, self._fill = [*zip(slots, lengths, strict=True)], fill
        ends = np.cumsum(lengths).tolist()
        self.starts = {end - length: slot for end, (slot, length) in zip(ends, self._prompts, strict=True)}
        self._places = {capacity: self._place(table) for capacity, table in cache._tables.items()}
        self._continued: tuple[Tensor, Tensor] | None = None
        """Which prompt each slot continues, and the slots."""

    def keep_states(self, layer: str, states: tuple[Tensor, ...]) -> None:
        """See `KeyValueCache`."""
        cache = self._cache
        if self._continued is None:
            pairs = [
                (row, each)
                for row, (slot, _) in enumerate(self._prompts)
                for each in (slot, *cache._sharing.get(slot, ()))
            ]
            rows, slots = cache._on_device(np.array(pairs, dtype=np.int64).T.copy())
            self._continued = rows, slots
        cache._states.put(layer, states, *self._continued)

    def _place(self, table: PageTable) -> tuple[Tensor | None, Tensor]:
        """Returns which tokens stay (None for all), and their places in the pool."""
        chosen, places, start = [], [], 0
        for slot, length in self._prompts:
            kept = np.arange(max(0, length - table.capacity), length)
            chosen.append(start + kept)
            places.append(table.places(slot, kept))
            start += length
        index = np.concatenate(chosen)
        every = len(index) == start + self._fill
        on_device = self._cache._on_device
        return None if every else on_device(index), on_device(np.concatenate(places))

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
        chosen, places = self._places[kept.table.capacity]
        for pool, new in ((kept.keys, k_TKD), (kept.values, v_TKD)):
            pool.index_copy_(0, places, new if chosen is None else new[chosen])
        return whole(q_THD, k_TKD, v_TKD, documents, scale=scale)


class _Rows(NamedTuple):
    """A decode pass's rows, for layers of one capacity.

    Args:
        places_N: int64, where in a pool the new tokens go.
        table_NP: int32, the pages of each row.
        counts_N: int64 [N], the tokens that each row has, with the new one.
        index_NL: int64, where the rows' tokens lie; only where they are gathered.
        mask: bool [N, 1, 1, L], True where a row has a token; None where all rows have L, or nothing is gathered.
    """

    places_N: Tensor
    table_NP: Tensor
    counts_N: Tensor
    index_NL: Tensor | None
    mask: Tensor | None


class NextPass(_Pass):
    """A decode pass: one token per row attends to all that was kept of the row.

    See `engine.ops.attention.cache_protocol.KeyValueCache`.
    """

    starts = None

    def __init__(self, cache: KeyValues, num_rows: int, rows: Mapping[int, _Rows]) -> None:
        super().__init__(cache)
        self._num_rows, self._rows = num_rows, rows

    def keep_states(self, layer: str, states: tuple[Tensor, ...]) -> None:
        """Is not called: a pass of one token for each row updates states where they are."""
        raise AssertionError(f"{layer} keeps states of prompts in a pass without them")

    def states(self, layer: str) -> tuple[Tensor, ...] | None:
        """See `KeyValueCache`."""
        return self._cache._states.first(layer, self._num_rows)

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
        rows = self._rows[kept.table.capacity]
        kept.keys.index_copy_(0, rows.places_N, k_TKD)
        kept.values.index_copy_(0, rows.places_N, v_TKD)
        if kept.attend is not None:
            return kept.attend(
                q_THD,
                kept.keys,
                kept.values,
                rows.table_NP,
                rows.counts_N,
                page=PAGE,
                scale=scale,
                softcap=kept.softcap,
                sinks_H=kept.sinks_H,
            )
        assert rows.index_NL is not None
        # a token's heads lie together in a pool
        keys, values = (pool[rows.index_NL].transpose(1, 2) for pool in (kept.keys, kept.values))
        # the query heads of one key/value head take the query dimension, so that keys are not repeated
        q_NKGD = q_THD.view(len(q_THD), keys.shape[1], -1, q_THD.shape[-1])
        if kept.sinks_H is not None:
            out = _sink_attention(q_NKGD, keys, values, rows.mask, scale, kept.sinks_H)
        elif kept.softcap is None:
            out = scaled_dot_product_attention(q_NKGD, keys, values, attn_mask=rows.mask, scale=scale)
        else:
            out = _capped_attention(q_NKGD, keys, values, rows.mask, scale, kept.softcap)
        return out.reshape(q_THD.shape)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _lack(kernels: Kernels, head_dim: int, *, capped: bool, sinks: bool) -> str | None:
    """Returns why a layer's pages cannot be read where they are, in words; None where they can."""
    if kernels.paged_attention is None:
        return f"the {kernels.name} kernels do not read pages"
    lack = kernels.paged_attention.lacks(head_dim, capped, sinks)
    return None if lack is None else f"the {kernels.name} kernels do not read pages for {lack}"


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
