"""Modules that several towers have, with the parameters' names of their checkpoints."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, linear


class PatchEmbedding(nn.Module):
    """Holds a convolution's weights; patches come flattened, [..., 3 * patch ** 2], so that it is a product."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, patches: Tensor) -> Tensor:
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class GeluMLP(nn.Module):
    """fc2(gelu(fc1(x))), with the exact GELU."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, mlp_width)
        self.fc2 = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))
