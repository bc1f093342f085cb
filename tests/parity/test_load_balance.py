"""The auxiliary loss of routers against transformers': the loss with labels, and every gradient, of a padded batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import IGNORE_LABEL, Padding
from tests.distributed.cases import make_batch
from tests.support.family_models import engine_model, gradient_errors, make_model, stock_gradient
from tests.support.sweeps import sampled

COEFFICIENT = 0.7
ROWS = (32, 20, 25, 30)
"""Tokens of each row; the rest is padding."""
NAMES = ("mixtral", "qwen2 moe", "qwen3 moe", "olmoe", "gpt oss")
TRAINED = {"all": ".*", "no router": r"(?!.*\.router).*"}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("name", "trained"),
    sampled(
        [(name, trained) for name in NAMES for trained in TRAINED],
        [("mixtral", "all"), ("qwen3 moe", "all"), ("olmoe", "no router")],
    ),
)
def test_loss_and_gradients(name: str, trained: str, parts: int, tmp_path: Path) -> None:
    """transformers has the batch at once, we in one or two micro-batches. With padding counted the auxiliary loss is
    off by 4e-3, with each micro-batch's own choices by 3e-2; without a frozen router's part gradients by 0.7."""
    stock = make_model(name, tmp_path / "hf", output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    common = {"row_length": 32, "seq_length": 32, "vocab_size": 67, "seed": 3}
    rows = [(slot, (length,)) for slot, length in enumerate(ROWS)]
    whole = make_batch(rows, **common)
    padding = whole.part(Padding)
    assert padding is not None and padding.padding_BS.sum() == 21
    built = engine_model(tmp_path / "hf", trained=TRAINED[trained], balance=COEFFICIENT)
    size = len(rows) // parts
    batches = [make_batch(rows[first : first + size], **common) for first in range(0, len(rows), size)]
    loss = built.step.gradients(batches, float(whole.loss_weights_BS.sum()))
    labels = torch.full_like(whole.labels_BS, IGNORE_LABEL)
    labels[:, 1:] = whole.labels_BS[:, :-1]
    expected = stock(input_ids=whole.tokens_BS, attention_mask=(~padding.padding_BS).long(), labels=labels)
    expected.loss.backward()
    assert built.balance is not None
    assert built.balance.loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    assert loss.item() + COEFFICIENT * built.balance.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    gradients = built.gradients()
    errors = gradient_errors(gradients, {key: stock_gradient(stock, tmp_path / "hf", key) for key in gradients})
    # fp32 sums of a few hundred terms in another order
    assert max(errors.values()) < 2e-5, {key: error for key, error in errors.items() if error >= 2e-5}
