"""Routers of stock transformers models whose choice is another one than theirs: with noise, or given."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

Choose = Callable[[int, Tensor], Tensor]
"""The number of a router in the model, from 0, and its logits [T, E] -> experts [T, k]."""


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a Mixtral or Qwen3-MoE, in the order of layers."""
    return [one for one in model.modules() if type(one).__name__.endswith("TopKRouter")]


def choose_by(model: nn.Module, choose: Choose) -> None:
    """Has routers take these experts, with the weights that their own logits give them."""
    for number, router in enumerate(routers(model)):

        def forward(x: Tensor, router: nn.Module = router, number: int = number) -> tuple[Tensor, Tensor, Tensor]:
            logits = nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)  # type: ignore[arg-type]
            ids = choose(number, logits.detach())
            weights = logits.softmax(-1).gather(1, ids)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(logits.dtype), ids

        router.forward = forward  # type: ignore[method-assign]


class NoisyRoutes:
    """The choice of routers to whose logits noise is added, the same for a position in every pass.

    Args:
        model: whose routers choose so from now on.
        noise: standard deviation.
        longest: positions.
    """

    def __init__(self, model: nn.Module, noise: float, longest: int) -> None:
        found = routers(model)
        self._seen: list[Tensor] = [torch.empty(0)] * len(found)
        generator = torch.Generator().manual_seed(5)
        tables = [noise * torch.randn(longest, int(one.num_experts), generator=generator) for one in found]

        def choose(number: int, logits: Tensor) -> Tensor:
            noisy = logits + tables[number][: len(logits)]
            self._seen[number] = noisy.topk(int(found[number].top_k), dim=-1).indices
            return self._seen[number]

        choose_by(model, choose)

    def taken(self, count: int) -> np.ndarray:
        """[count, routers, k], the experts of the first tokens of the last pass."""
        return torch.stack(self._seen, dim=1)[:count].numpy()


def all_layers(routes: np.ndarray, layers: list[int], num_layers: int) -> np.ndarray:
    """The routes as servers return them: with zeros for layers without a router."""
    found = np.zeros((len(routes), num_layers, routes.shape[2]), dtype=routes.dtype)
    found[:, layers] = routes
    return found


def as_npy(routes: np.ndarray) -> str:
    """An array in vLLM's form."""
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def as_int32(routes: np.ndarray) -> str:
    """An array in SGLang's form."""
    return base64.b64encode(routes.astype(np.int32).tobytes()).decode()
