"""What the Triton kernels of layers with states cost: launches, bytes that each moves once, and FLOPs of products.

A launch reads each place of its inputs once and writes each place of its results once; what it reads again is taken
for cached. Tables of pieces, of a few bytes for each chunk, are left out, and of two numbers that overwrite each other
both are counted. The kernels are those of `engine.hybrids.triton_ops`, in their order; a triangular solve's products
run in three parts each.

Legend: T tokens, N value heads, G key heads, K, V features of a key and a value, L tokens of a chunk, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.hybrids.pieces import Pieces
from engine.ops.kernels.op import Cost

_CHUNK, _CONV_CHUNK, _CHANNEL_BLOCK = 64, 32, 16


def _bytes(*tensors: Tensor | None) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


def _num_chunks(pieces: Pieces, length: int) -> int:
    return sum(-(-one // length) for one in pieces.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """Bytes of the tensors of a recurrence, and FLOPs of its products.

    Args:
        keys: of q, or of k, [T, G, K]; head_keys, the same for each value head, [T, N, K]; and wide_keys in fp32.
        values: [T, N, V]; system: X, or P, [T, N, L]; single: one fp32 number for each token and head.
        states: of all chunks; given, sent: first states that pieces have, and last states that are asked for.
        pairs, outer: FLOPs of a product over tokens of a chunk by K or V, and of one with a state.
        solve: FLOPs of the products of a triangular solve.
    """

    keys: int
    head_keys: int
    wide_keys: int
    values: int
    system: int
    single: int
    states: int
    given: int
    sent: int
    pairs: int
    outer: int
    solve: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, pieces: Pieces, initial: Tensor | None, num_sent: int) -> _Rule:
        """Reads it off the inputs; K is taken for as large as V in products of tokens of a chunk."""
        (tokens, heads, values), keys, size = v.shape, k.shape[2], v.element_size()
        places = _num_chunks(pieces, _CHUNK) * heads
        return cls(
            keys=_bytes(k),
            head_keys=tokens * heads * keys * size,
            wide_keys=tokens * heads * keys * 4,
            values=_bytes(v),
            system=tokens * heads * _CHUNK * size,
            single=tokens * heads * 4,
            states=places * keys * values * size,
            given=_bytes(initial),
            sent=num_sent * heads * keys * values * 4,
            pairs=2 * places * _CHUNK * _CHUNK * (keys + values) // 2,
            outer=2 * places * _CHUNK * keys * values,
            solve=3 * 4 * 2 * places * _CHUNK**3,
        )

    def norms(self) -> Cost:
        return Cost(2, 4 * self.keys)

    def rows(self, keys: int, singles: int) -> Cost:
        moved = self.system + keys + 2 * self.values + singles * self.single + self.head_keys
        return Cost(1, moved, 2.0 * self.pairs)

    def walk(self, keys: int, decays: int, *, solved: bool, sent: int) -> Cost:
        moved = keys + self.values + decays + self.states + self.given + sent
        if solved:
            moved += self.head_keys + self.values
        return Cost(1, moved, (2.0 if solved else 1.0) * self.outer)

    def outputs(self, queries: int, decays: int) -> Cost:
        return Cost(1, queries + 2 * self.values + decays + self.states, 2.0 * self.pairs + self.outer)

    def walk_back(self, queries: int, decays: int, *, solved: bool) -> Cost:
        local = queries + decays + 2 * self.values
        back = queries + decays + 3 * self.values + self.states + self.given + self.sent
        if solved:
            back += self.head_keys
        return Cost(2, local + back, 2.0 * self.pairs + (3.0 if solved else 2.0) * self.outer)

    def through_norms(self, copies: int) -> Cost:
        return Cost(2, 2 * (copies + 2 * self.keys))


def _sum(*costs: Cost) -> Cost:
    launches, moved, flops = zip(*((one.launches, one.nbytes, one.flops) for one in costs), strict=True)
    return Cost(sum(launches), sum(moved), sum(flops))


_CUT = Cost(1, 0)


def delta_forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces, initial: Tensor | None, *,
    scale: float, keep: bool,
) -> Cost:  # fmt: skip
    """Returns the cost of `delta.delta_forward` or `delta_channels.channel_delta_forward`."""
    of = _Rule.of(k, v, pieces, initial, len(pieces.sent))
    if decay.dim() == 3:
        ends = _last_decays(decay, pieces)
        pairs = Cost(1, 2 * of.keys + of.wide_keys + of.single + 2 * of.system, 6.0 * of.pairs + of.solve)
        return _sum(
            _CUT, of.norms(), _decayed(of), pairs, of.rows(of.head_keys, 1),
            of.walk(of.head_keys, ends, solved=True, sent=of.sent),
            Cost(1, of.head_keys + of.system + 2 * of.values + of.states, of.pairs + of.outer),
        )  # fmt: skip
    solve = Cost(1, of.keys + 3 * of.single + of.system, of.pairs + of.solve)
    return _sum(
        _CUT, of.norms(), solve, of.rows(of.keys, 2), of.walk(of.keys, of.single, solved=True, sent=of.sent),
        of.outputs(2 * of.keys, of.single),
    )  # fmt: skip


def _decayed(of: _Rule) -> Cost:
    return Cost(1, 2 * of.keys + 2 * of.wide_keys + 3 * of.head_keys)


def _last_decays(decay: Tensor, pieces: Pieces) -> int:
    """Returns the bytes of the sums of decays at the ends of chunks, which the walks read."""
    return 4 * _num_chunks(pieces, _CHUNK) * int(decay[0].numel())


def delta_backward(
    d_out: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces,
    initial: Tensor | None, *, scale: float, kept: tuple[Tensor, ...],
) -> Cost:  # fmt: skip
    """Returns the cost of `delta_gradients.delta_backward` or `delta_channel_gradients.channel_delta_backward`."""
    of = _Rule.of(k, v, pieces, initial, 0 if d_final is None else d_final.shape[0])
    if decay.dim() == 3:
        ends, blocks = _last_decays(decay, pieces), -(-decay.shape[2] // _CHANNEL_BLOCK)
        back = of.walk_back(2 * of.head_keys, ends, solved=True)
        # of the first of its two launches, P in the place of queries, keys and decays
        back = Cost(2, back.nbytes - 2 * of.head_keys - ends + of.system, back.flops - of.pairs)
        kept_sums = _num_chunks(pieces, _CHUNK) * decay[0].numel() * 4
        sums = Cost(
            1, 3 * of.system + 4 * of.values + 2 * of.single + 2 * of.states + 3 * of.wide_keys + kept_sums,
            3.0 * of.pairs + 3.0 * of.outer,
        )  # fmt: skip
        tokens = Cost(
            2, 2 * of.keys + 7 * of.wide_keys + 2 * of.system + (2 + 2 * blocks + 1) * of.single + kept_sums,
            12.0 * of.pairs,
        )  # fmt: skip
        return _sum(
            _CUT, of.norms(), _decayed(of), of.rows(of.head_keys, 1),
            of.walk(of.head_keys, ends, solved=True, sent=0), back, sums, tokens, of.through_norms(of.wide_keys),
        )  # fmt: skip
    gradients = Cost(
        1, 2 * of.keys + of.system + 5 * of.values + 4 * of.single + 2 * of.states + 2 * of.wide_keys,
        7.0 * of.pairs + 3.0 * of.outer,
    )  # fmt: skip
    return _sum(
        _CUT, of.norms(), of.rows(of.keys, 2), of.walk(of.keys, of.single, solved=True, sent=0),
        of.walk_back(2 * of.keys, of.single, solved=True), gradients, of.through_norms(of.wide_keys),
    )  # fmt: skip


def ssd_forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, pieces: Pieces, initial: Tensor | None, *,
    keep: bool,
) -> Cost:  # fmt: skip
    """Returns the cost of `state_space.ssd_forward`."""
    of = _Rule.of(b, x, pieces, initial, len(pieces.sent))
    past = 0 if d is None else of.values
    turned = _copies(b, c, of.given, of.sent)
    outputs = of.outputs(2 * of.keys, of.single)
    return _sum(
        _CUT, turned, _weighed(of), of.walk(of.keys, of.single, solved=False, sent=of.sent),
        Cost(1, outputs.nbytes + past, outputs.flops),
    )  # fmt: skip


def ssd_backward(
    dy: Tensor, d_final: Tensor | None, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    pieces: Pieces, initial: Tensor | None, *, kept: tuple[Tensor, ...],
) -> Cost:  # fmt: skip
    """Returns the cost of `state_space.ssd_backward`."""
    of = _Rule.of(b, x, pieces, initial, 0 if d_final is None else d_final.shape[0])
    turned = _copies(b, c, of.given, of.given, of.sent)
    gradients = Cost(
        1, 2 * of.keys + 2 * of.values + 2 * of.single + 2 * of.states + 2 * of.wide_keys,
        3.0 * of.pairs + 2.0 * of.outer,
    )  # fmt: skip
    inputs = Cost(1, 4 * of.values + 3 * of.single)
    # the sums over chunks, and those over the heads of a group with their casts
    sums = Cost(5, 2 * of.wide_keys + 6 * of.keys)
    return _sum(
        _CUT, turned, _weighed(of), of.walk(of.keys, of.single, solved=False, sent=0),
        of.walk_back(2 * of.keys, of.single, solved=False), gradients, inputs, sums,
    )  # fmt: skip


def _weighed(of: _Rule) -> Cost:
    return Cost(1, 2 * of.values + 2 * of.single)


def _copies(b: Tensor, c: Tensor, *turned: int) -> Cost:
    """Returns the cost of dense copies of columns, and of states of so many bytes that are turned, 0 for none."""
    copied = [_bytes(one) for one in (b, c) if not one.is_contiguous()] + [one for one in turned if one]
    return Cost(len(copied), 2 * sum(copied))


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, tail: Tensor | None, *, activation: str | None
) -> Cost:
    """Returns the cost of `short_conv.conv_forward`."""
    return Cost(2, 2 * _bytes(x) + _bytes(weight, bias, tail))


def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, tail: Tensor | None, *,
    activation: str | None, weight_gradient: Tensor | None, bias_gradient: Tensor | None,
) -> Cost:  # fmt: skip
    """Returns the cost of `short_conv.conv_backward`."""
    cost = Cost(2, 3 * _bytes(x) + _bytes(weight, bias, tail))
    if tail is not None:
        cost = _sum(cost, Cost(1, 4 * _bytes(tail)))
    added = [one for one in (weight_gradient, bias_gradient) if one is not None]
    if added:
        channels, width = weight.shape
        chunks = x.shape[0] // _CONV_CHUNK + min(len(pieces.lengths), x.shape[0])  # those that are not there too
        partial = chunks * (width + 1) * channels * 4
        cost = _sum(cost, Cost(1 + len(added), 2 * partial + 3 * _bytes(*added)))
    return cost


def gated_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, weight_gradient: Tensor | None
) -> Cost:
    """Returns the cost of `gated_norm.gated_norm_backward`; the few partial sums of the weight's gradient are left
    out."""
    return Cost(1 if weight_gradient is None else 2, 5 * _bytes(x) + _bytes(weight, weight_gradient))
