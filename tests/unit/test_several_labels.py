"""Several labels of each token: losses and gradients against torch's own, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.batch import IGNORE_LABEL
from engine.distributed.mesh import Axis
from engine.ops.capped_loss import capped_loss
from engine.ops.cross_entropy import cross_entropy
from engine.ops.kernels import REFERENCE
from engine.ops.several_labels import several_label_losses

T, K, V, PADDING = 7, 3, 20, 4


@pytest.mark.parametrize(("cap", "temperature"), [(None, 1.0), (5.0, 1.0), (5.0, 0.7)])
def test_losses_and_gradients(cap: float | None, temperature: float) -> None:
    torch.manual_seed(0)
    logits_TV = torch.randn(T, V + PADDING, dtype=torch.float64) * 4
    labels_KT = torch.randint(0, V, (K, T))
    labels_KT[1, 2] = labels_KT[0, 4] = IGNORE_LABEL
    labels_KT[2] = labels_KT[0]  # a token's labels may be the same
    weights_TK = torch.randn(T, K, dtype=torch.float64)
    kernels = REFERENCE if cap is None else replace(REFERENCE, loss=capped_loss(cap, 1, temperature))
    leaf, own = logits_TV.clone().requires_grad_(), logits_TV.clone().requires_grad_()
    options: dict[str, Any] = {"first_id": 0, "num_ids": V, "axis": Axis("tp"), "kernels": kernels}
    found_TK = several_label_losses(leaf * 1.0, labels_KT, cap=cap, temperature=temperature, **options)
    (found_TK * weights_TK).sum().backward()
    capped = own[:, :V] if cap is None else cap * torch.tanh(own[:, :V] / cap) / temperature
    logps = capped.log_softmax(-1)
    expected_TK = torch.stack(
        [torch.nn.functional.nll_loss(logps, one, reduction="none", ignore_index=IGNORE_LABEL) for one in labels_KT], 1
    )
    (expected_TK * weights_TK).sum().backward()
    torch.testing.assert_close(found_TK, expected_TK)
    torch.testing.assert_close(leaf.grad, own.grad)
    alone = cross_entropy(logits_TV.clone(), labels_KT[1], **options)
    assert torch.equal(alone, found_TK[:, 1].detach())
