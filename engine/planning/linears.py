"""Bytes of a parallel linear's forward and backward, in the order of `engine.ops.parallel_linear`.

A linear keeps for backward H, the dropout mask and its input's statistics; what its input is made from belongs to
whoever made that. Legend: I input and O output features, E columns of folded adapters, R stacked rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kernels.reference_quantize import CHUNK
from engine.planning.ledger import ACTIVATIONS, COMMUNICATION, DECODED, TEMPORARY, Block, Ledger
from engine.planning.shapes import LinearShape
from engine.planning.sizes import WIDE, Sizes

Source = Literal["norm", "swiglu", "given"]
"""What a linear's input is made by; see engine.ops.inputs."""


@dataclass(slots=True)
class LinearKept:
    """What backward needs of one call; blocks that are None are not there."""

    mask: Block | None = None
    h: Block | None = None
    statistics: Block | None = None
    made: Block | None = None
    """The input, where it is kept instead of made again."""

    def blocks(self) -> tuple[Block | None, ...]:
        return self.mask, self.h, self.statistics, self.made


class LinearWalk:
    """Goes through linears with a ledger.

    Args:
        ledger: to write into.
        sizes: of the rank.
        defers: backward leaves dY and x of weights that train for later, as a split backward does.
    """

    def __init__(self, ledger: Ledger, sizes: Sizes, *, defers: bool = False) -> None:
        self.ledger, self.sizes, self._defers = ledger, sizes, defers

    # The pieces.

    def draw_mask(self, linear: LinearShape, rows: int) -> Block | None:
        """Plain torch holds four words, eight halves and their stack at once: 20 bytes an element (one Philox call of
        four 8-byte words decides eight elements); a kernel writes the mask alone."""
        if not linear.drops:
            return None
        if self.sizes.kernels.writes_intermediates:
            self.ledger.touch(TEMPORARY, 20 * rows * -(-linear.inputs // 8) * 8)
        return self.ledger.take(ACTIVATIONS, rows * self.sizes.kernels.mask_bytes(linear.inputs))

    def make(self, source: Source, rows: int, features: int) -> Block | None:
        """Makes an input into a buffer that is there; returns its statistics: 1 / rms, one number a row.

        Plain torch squares and scales all of x, in fp32; silu(gate) is written before it is multiplied by up.
        """
        plain, wide, n = self.sizes.kernels.writes_intermediates, self.sizes.is_wide, rows * features
        if source == "given":
            return None
        if source == "swiglu":
            if plain:
                self.ledger.touch(TEMPORARY, n * self.sizes.itemsize)
            return None
        if plain:
            self.ledger.touch(TEMPORARY, n * WIDE if wide else n * (2 * WIDE + self.sizes.itemsize))
        return self.ledger.take(ACTIVATIONS, rows * WIDE)

    def dropped(self, linear: LinearShape, rows: int) -> None:
        """Plain torch multiplies x by the mask into a tensor of its own."""
        if linear.drops and self.sizes.kernels.writes_intermediates:
            self.ledger.touch(TEMPORARY, self.sizes.numbers(rows, linear.inputs))

    def update(self, linear: LinearShape, rows: int) -> None:
        """dX += drop'(dH A): in place, but plain torch writes dH A and the mask as numbers where something drops."""
        if linear.drops and self.sizes.kernels.writes_intermediates:
            self.ledger.touch(TEMPORARY, 2 * self.sizes.numbers(rows, linear.inputs))

    def weight_products(self, linear: LinearShape) -> None:
        """Products are added to fp32 gradients in place; in a narrower dtype torch writes the product first."""
        if not self.sizes.is_wide:
            largest = max((rows * linear.inputs for rows in linear.trained_rows), default=0)
            self.ledger.touch(TEMPORARY, largest * self.sizes.itemsize)

    def adapter_products(self, linear: LinearShape) -> None:
        """The same of dA and dB, by plain torch; kernels stack the dA of one input in fp32."""
        plain = self.sizes.kernels.writes_intermediates
        if plain and not self.sizes.is_wide:
            self.ledger.touch(TEMPORARY, linear.adapter_products * self.sizes.itemsize)
        elif not plain:
            self.ledger.touch(TEMPORARY, linear.rank * linear.inputs * WIDE)

    def source_gradient(self, source: Source, dx: Block, rows: int, features: int, *, trains_norm: bool) -> Block:
        """The gradient of what an input [rows, features] was made from: dX itself, or what the norm or SwiGLU makes
        of it."""
        ledger, sizes, n = self.ledger, self.sizes, rows * features
        if source == "given":
            return dx
        plain = sizes.kernels.writes_intermediates
        if source == "swiglu":
            # silu'(gate) and dX up; in a narrower dtype gate, dX and their product in fp32 as well
            du = ledger.take(TEMPORARY, sizes.numbers(rows, 2 * features))
            if plain:
                ledger.touch(TEMPORARY, n * WIDE if sizes.is_wide else 3 * n * WIDE)
            return du
        if plain and trains_norm:
            ledger.touch(TEMPORARY, (2 if sizes.is_wide else 3) * n * WIDE)
        if plain and not sizes.is_wide:
            ledger.touch(TEMPORARY, 3 * n * WIDE)  # x, dX and dX weight in fp32
        du = ledger.take(TEMPORARY, n * sizes.itemsize)
        if plain:  # beside the result: (dX weight) x; in a narrower dtype x and dX weight in fp32
            ledger.touch(TEMPORARY, n * WIDE if sizes.is_wide else 2 * n * WIDE)
        return du

    # Products.

    def product(self, linear: LinearShape, part: str) -> Block:
        """y of all tokens, beside what an encoded weight needs for it."""
        ledger, sizes = self.ledger, self.sizes
        operand = None
        if linear.is_decoded:
            self._decode(linear)
        elif linear.encoding == "fp8":
            operand = self._operand(sizes.tokens, linear.inputs, scaled=False)
        y = ledger.take(part, sizes.numbers(sizes.tokens, linear.outputs))
        if linear.encoding == "fp8":  # a product for each stacked matrix
            ledger.touch(TEMPORARY, sizes.numbers(sizes.tokens, linear.stacked))
        ledger.drop(operand)
        return y

    def input_gradient(self, linear: LinearShape, needs: bool) -> Block:
        """dX of all tokens, with dH beside it where folded.

        Args:
            needs: whether dX is wanted, or dH alone.
        """
        ledger, sizes = self.ledger, self.sizes
        width = linear.inputs + (linear.extra if linear.folded else 0)
        held: list[Block | None] = []
        if needs and linear.is_decoded:
            self._decode(linear)
        elif needs and linear.encoding is not None:
            held = [
                self._operand(sizes.tokens, linear.outputs, scaled=True),
                ledger.take(DECODED, linear.inputs * linear.outputs),
            ]
        dx = ledger.take(TEMPORARY, sizes.numbers(sizes.tokens, width))
        ledger.drop(*held)
        return dx

    def _decode(self, linear: LinearShape) -> None:
        """Into the scratch, which is always there; plain torch takes some rows at a time. NF4: 8 bytes an index, one a
        code and 4 a number, and, from the second rows on, the numbers of those before."""
        if self.sizes.kernels.decodes_plainly:
            height = max(1, CHUNK // max(linear.inputs, 1))
            n = min(height, linear.outputs) * linear.inputs
            nf4 = 13 + (WIDE if linear.outputs > height else 0)
            self.ledger.touch(TEMPORARY, n * (nf4 if linear.encoding == "nf4" else WIDE))

    def _operand(self, rows: int, features: int, *, scaled: bool) -> Block:
        """[rows, features] in one byte each and a scale a row; plain torch has them in fp32 first, and scaled again."""
        n = rows * features
        if self.sizes.kernels.quantizes_plainly:
            wide = WIDE * n if scaled or not self.sizes.is_wide else 0
            self.ledger.touch(TEMPORARY, wide + WIDE * n + n)
        return self.ledger.take(TEMPORARY, n + WIDE * rows)

    # Forward.

    def forward(
        self,
        linear: LinearShape,
        source: Source,
        *,
        column: bool,
        saved: bool,
        keeps_input: bool = False,
        output: str = ACTIVATIONS,
        without_rows: bool = False,
    ) -> tuple[Block, LinearKept]:
        """Makes the input beside H, the product, and what crosses the tensor ranks.

        Args:
            column: output rows are split over the ranks; else input columns.
            saved: whether autograd keeps H, mask and statistics.
            keeps_input: recompute level "none".
            output: the part that the output counts as.
            without_rows: the second run of a region's last linear, which has no output.

        Returns:
            The output, and what is kept.
        """
        ledger, sizes = self.ledger, self.sizes
        rows = sizes.local if column else sizes.tokens
        kept = LinearKept(mask=self.draw_mask(linear, rows))
        x = self._made_input(linear, source, kept, rows)
        full, codes = None, None
        if linear.encoding == "fp8_row" and not without_rows:
            # x is in codes from here on, and travels so
            codes = self._operand(rows, linear.inputs, scaled=False)
            if not keeps_input:
                ledger.drop(x)
                x = None
        if column and sizes.splits:
            full = self._gathered(linear, kept, in_codes=codes is not None)
            ledger.drop(codes)
            codes = None
            if not keeps_input:
                ledger.drop(x)
                x = None
        y = ledger.take(output, 0) if without_rows else self.product(linear, output)
        if linear.folded:
            kept.h = ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, linear.rank))
        if not column and sizes.splits and not without_rows:
            scattered = ledger.take(output, sizes.numbers(sizes.local, linear.outputs))
            ledger.drop(y)
            y = scattered
        ledger.drop(full, codes, x)
        if keeps_input and saved and x is not None:
            kept.made = ledger.take(ACTIVATIONS, x.nbytes)
        if not saved:
            ledger.drop(*kept.blocks())
            kept = LinearKept()
        return y, kept

    def _made_input(self, linear: LinearShape, source: Source, kept: LinearKept, rows: int) -> Block | None:
        """x with room for H where folded, and H where it is not; None where x is the caller's."""
        ledger, sizes = self.ledger, self.sizes
        x = None
        if linear.folded or source != "given":
            x = ledger.take(TEMPORARY, sizes.numbers(rows, linear.inputs + linear.extra))
        kept.statistics = self.make(source, rows, linear.inputs)
        if linear.rank and not linear.folded:
            kept.h = ledger.take(ACTIVATIONS, sizes.numbers(rows, linear.rank))
        self.dropped(linear, rows)
        return x

    def _gathered(self, linear: LinearShape, kept: LinearKept, *, in_codes: bool) -> Block:
        """All tokens' x, or its codes with a scale a row; H that is not beside it takes the place of the local one."""
        ledger, sizes = self.ledger, self.sizes
        width = linear.inputs + WIDE if in_codes else (linear.inputs + linear.extra) * sizes.itemsize
        full = ledger.take(COMMUNICATION, sizes.tokens * width)
        if linear.rank and not linear.folded:
            whole = ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, linear.rank))
            ledger.drop(kept.h)
            kept.h = whole
        return full

    # Backward.

    def backward(
        self,
        linear: LinearShape,
        source: Source,
        kept: LinearKept,
        *,
        column: bool,
        needs_gradient: bool,
        trains_norm: bool = False,
    ) -> Block | None:
        """The input's gradient, and additions to the gradients of what trains; what was kept is freed.

        Returns:
            The gradient by what the input was made from; None where nobody needs it. dY is the caller's.
        """
        needs = needs_gradient or trains_norm
        dx, held = (self._column if column else self._row)(linear, source, kept, needs)
        rows = self.sizes.local if column else self.sizes.tokens
        du = None
        if dx is not None and needs:
            if not (column and self._updates_before_collective(linear)):
                self.update(linear, rows)
            du = self.source_gradient(source, dx, rows, linear.inputs, trains_norm=trains_norm)
        if dx is not None and dx is not du:
            self.ledger.drop(dx)
        self.ledger.drop(*held, *kept.blocks())
        if self._defers and linear.trained_rows:
            self.ledger.take(ACTIVATIONS, self.sizes.numbers(self.sizes.tokens, linear.inputs + linear.outputs))
        if du is not None and not needs_gradient:
            self.ledger.drop(du)
            return None
        return du

    def _updates_before_collective(self, linear: LinearShape) -> bool:
        """A column linear that sees all tokens and keeps dH local: dX is complete before it is summed."""
        return not (linear.folded or linear.joint or self.sizes.splits or self.sizes.ranks == 1)

    def _make_again(self, linear: LinearShape, source: Source, kept: LinearKept, rows: int) -> Block | None:
        """x, unless it was kept or is what it is made from; frozen linears do not read it."""
        if not (linear.rank or linear.trained_rows) or kept.made is not None or source == "given":
            return None
        made = self.ledger.take(TEMPORARY, self.sizes.numbers(rows, linear.inputs))
        self.ledger.drop(self.make(source, rows, linear.inputs))
        return made

    def _column(
        self, linear: LinearShape, source: Source, kept: LinearKept, needs: bool
    ) -> tuple[Block | None, list[Block | None]]:
        """dX (with dH beside it where folded), and what else lives until the linear's backward returns."""
        ledger, sizes = self.ledger, self.sizes
        columns = linear.inputs + linear.extra
        dx = dh = full = None
        arriving: list[Block] = []  # until the collective is waited for, its input lives too

        def reduced(block: Block, width: int) -> Block:
            if not sizes.splits:
                return block
            arriving.append(block)
            return ledger.take(COMMUNICATION, sizes.numbers(sizes.local, width))

        if linear.folded:
            dx = reduced(self.input_gradient(linear, needs), columns)
        else:
            if linear.rank:
                dh = ledger.take(TEMPORARY, sizes.numbers(sizes.tokens, linear.rank))
            if needs:
                dx = self.input_gradient(linear, True)
                if linear.rank and self._updates_before_collective(linear):
                    self.update(linear, sizes.tokens)
            dh = reduced(dh, linear.rank) if dh is not None else None
            dx = reduced(dx, linear.inputs) if dx is not None else None
        if linear.rank:
            self.adapter_products(linear)
        made = self._make_again(linear, source, kept, sizes.local)
        if linear.trained_rows and sizes.splits:
            full = ledger.take(COMMUNICATION, sizes.numbers(sizes.tokens, linear.inputs))
        ledger.drop(*arriving)
        if linear.rank:
            self.dropped(linear, sizes.local)
        self.weight_products(linear)
        return dx, [made, full, dh]

    def _row(
        self, linear: LinearShape, source: Source, kept: LinearKept, needs: bool
    ) -> tuple[Block | None, list[Block | None]]:
        """As `_column`. With sequence parallelism dY is gathered while x is made."""
        ledger, sizes = self.ledger, self.sizes
        gathered = dx = dh = None
        if sizes.splits:
            gathered = ledger.take(COMMUNICATION, sizes.numbers(sizes.tokens, linear.outputs))
        made = self._make_again(linear, source, kept, sizes.tokens)
        if linear.folded and needs:
            dx = self.input_gradient(linear, True)
        else:
            if linear.rank:
                dh = ledger.take(TEMPORARY, sizes.numbers(sizes.tokens, linear.rank))
            if needs:
                dx = self.input_gradient(linear, True)
        if linear.rank:
            self.dropped(linear, sizes.tokens)
            self.adapter_products(linear)
        self.weight_products(linear)
        return dx, [gathered, made, dh]
