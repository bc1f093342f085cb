"""Bytes of the two ends of a model: the embedding, and the head with the loss.

A frozen head without adapter computes its loss in blocks of tokens and its input's gradient in forward
(`engine.ops.head_loss`); a head that trains or carries an adapter has all of its logits (`engine.ops.cross_entropy`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.ops.head_loss import BLOCK_BYTES
from engine.planning.ledger import ACTIVATIONS, COMMUNICATION, LOGITS, TEMPORARY, Block, Ledger
from engine.planning.linears import LinearKept, LinearWalk
from engine.planning.shapes import EndShape
from engine.planning.sizes import WIDE, Sizes

_INDEX = 8
"""Bytes of a token id."""


@dataclass(slots=True)
class HeadKept:
    """What head and loss leave for backward."""

    linear: LinearKept = field(default_factory=LinearKept)
    gradient: Block | None = None
    """Of the head's input, made in forward."""
    logits: Block | None = None
    vectors: Block | None = None
    """Targets, scales and losses: a few numbers a token."""
    answers: Block | None = None
    """Whose token it is, for each answer."""


class EndWalk:
    """Goes through the ends with a ledger."""

    def __init__(self, ledger: Ledger, sizes: Sizes, hidden: int, *, defers: bool = False) -> None:
        self.ledger, self.sizes, self.hidden = ledger, sizes, hidden
        self._linear = LinearWalk(ledger, sizes, defers=defers)

    def _rows(self, rows: int, part: str = TEMPORARY) -> Block:
        """[rows, hidden]."""
        return self.ledger.take(part, self.sizes.numbers(rows, self.hidden))

    # The embedding.

    def embed(self, end: EndShape, *, scales: bool) -> tuple[Block, Block | None]:
        """The residual stream, and the indices that an embedding that trains keeps.

        Args:
            scales: embeddings are multiplied into another tensor.
        """
        ledger, sizes = self.ledger, self.sizes
        indices = ledger.take(ACTIVATIONS, (2 * _INDEX + 1) * sizes.tokens)
        y = self._rows(sizes.tokens, ACTIVATIONS)
        h = ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, end.rank))
        if sizes.splits:
            scattered = self._rows(sizes.local, ACTIVATIONS)
            ledger.drop(y)
            y = scattered
        ledger.drop(indices, h)
        if scales:
            scaled = self._rows(sizes.local, ACTIVATIONS)
            ledger.drop(y)
            y = scaled
        kept = (_INDEX + 1) * sizes.tokens + h.nbytes if end.trains or end.rank else 0
        return y, ledger.take(ACTIVATIONS, kept)

    def embedding_backward(self, end: EndShape, kept: Block | None, dy: Block | None) -> None:
        """Rows are added to the gradient where they belong, in fp32, after those of other ranks are made zero."""
        ledger, sizes = self.ledger, self.sizes
        if dy is not None:
            whole = self._rows(sizes.tokens, COMMUNICATION) if sizes.splits else None
            if end.trains:
                masked = self._rows(sizes.tokens)
                if not sizes.is_wide:
                    ledger.touch(TEMPORARY, sizes.tokens * self.hidden * WIDE)
                ledger.drop(masked)
            ledger.drop(whole)
        ledger.drop(dy, kept)

    # The head.

    def head(self, end: EndShape, *, saved: bool) -> HeadKept:
        """Norm, head and loss."""
        assert end.linear is not None
        if end.linear.rank or end.linear.trained_rows:
            kept = self._whole_logits(end, saved=saved)
        else:
            kept = self._blocks_of_logits(end, saved=saved)
        kept.answers = self._compare(saved=saved)
        return kept

    def _compare(self, *, saved: bool) -> Block | None:
        """Where answers are compared, each token's loss in the row of its answer, and whose it is; see
        engine.objectives.preference."""
        numbers = self.sizes.answers * self.sizes.tokens
        whose = self.ledger.take(LOGITS, numbers)
        self.ledger.touch(LOGITS, WIDE * numbers)
        if numbers and saved:
            return whose
        self.ledger.drop(whose)
        return None

    def _blocks_of_logits(self, end: EndShape, *, saved: bool) -> HeadKept:
        """The head's input, its gradient, and the logits of one block of tokens, which plain torch repeats in fp32
        where the model computes in a narrower dtype."""
        ledger, sizes, kept = self.ledger, self.sizes, HeadKept()
        x = self._rows(sizes.local)
        statistics = self._linear.make("norm", sizes.local, self.hidden)
        kept.linear = LinearKept(statistics=statistics)
        full = self._rows(sizes.tokens, COMMUNICATION) if sizes.splits else None
        kept.vectors = ledger.take(ACTIVATIONS, (2 * _INDEX + 3 * WIDE + 1) * sizes.tokens)
        if saved:
            kept.gradient = self._rows(sizes.tokens, ACTIVATIONS)
        # the block is as long as the padded vocabulary allows, and holds the rows that stand for tokens
        block = min(max(1, BLOCK_BYTES // (sizes.itemsize * end.rows)), sizes.tokens)
        logits = ledger.take(LOGITS, sizes.numbers(block, end.ids))
        self._wide_logits(end, block)
        ledger.drop(logits, x, full)
        if not saved:
            ledger.drop(statistics, kept.vectors)
            return HeadKept()
        return kept

    def _whole_logits(self, end: EndShape, *, saved: bool) -> HeadKept:
        """The logits of all tokens, written over by their exponentials and then by their gradient; plain torch
        repeats them in fp32 where the model computes in a narrower dtype."""
        assert end.linear is not None
        ledger, sizes, kept = self.ledger, self.sizes, HeadKept()
        kept.logits, kept.linear = self._linear.forward(end.linear, "norm", column=True, saved=saved, output=LOGITS)
        kept.vectors = ledger.take(ACTIVATIONS, (_INDEX + 4 * WIDE + 1) * sizes.tokens)
        self._wide_logits(end, sizes.tokens)
        if not saved:
            ledger.drop(kept.logits, kept.vectors)
            return HeadKept()
        return kept

    def _wide_logits(self, end: EndShape, rows: int) -> None:
        """What plain torch writes beside the logits in fp32. Capped logits are plain torch in any backend: in fp32
        themselves, their slope and their probabilities."""
        copies = 0 if self.sizes.is_wide else 1
        if end.caps_logits:
            self.ledger.touch(LOGITS, (copies + 2) * rows * end.ids * WIDE)
        elif self.sizes.kernels.writes_intermediates:
            self.ledger.touch(LOGITS, copies * rows * end.ids * WIDE)

    def head_backward(self, end: EndShape, kept: HeadKept, x: Block, *, needs_gradient: bool) -> Block | None:
        """The gradient of the residual stream. Frees `x` and what was kept."""
        assert end.linear is not None
        ledger, sizes = self.ledger, self.sizes
        ledger.touch(LOGITS, 2 * WIDE * sizes.answers * sizes.tokens)
        ledger.drop(kept.answers)
        if kept.logits is not None:
            self._wide_logits(end, sizes.tokens)
            du = self._linear.backward(
                end.linear, "norm", kept.linear, column=True, needs_gradient=needs_gradient,
                trains_norm=end.trains_norm,
            )  # fmt: skip
            ledger.drop(kept.logits, kept.vectors, x)
            return du
        dx = self._rows(sizes.tokens)
        if sizes.splits:
            scattered = self._rows(sizes.local, COMMUNICATION)
            ledger.drop(dx)
            dx = scattered
        du = self._linear.source_gradient("norm", dx, sizes.local, self.hidden, trains_norm=end.trains_norm)
        ledger.drop(dx, kept.gradient, kept.vectors, *kept.linear.blocks(), x)
        if not needs_gradient:
            ledger.drop(du)
            return None
        return du
