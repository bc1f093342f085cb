"""Small vision-language checkpoints, and what the models' original code made of them; see shared_data.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.shared_data import shared


class VisionFixture:
    """One folder of vision/: weights in fp32, inputs, and expected outputs."""

    def __init__(self, name: str) -> None:
        self.folder = shared(f"vision/{name}")
        self.hf: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    def _load(self, name: str) -> dict[str, Tensor]:
        tensors = load_file(self.folder / f"{name}.safetensors")
        return {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return self._load("model")

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return self._load("inputs")

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        return self._load("expected")

    @property
    def cases(self) -> list[str]:
        return sorted({key.partition(".")[0] for key in self.inputs})

    def images(self, case: str, kind: str = "images") -> list[Tensor]:
        """The normalised images [3, H, W] of all samples of a case, in order."""
        found = [key for key in self.inputs if key.startswith(f"{case}.{kind}.")]
        return [self.inputs[key] for key in sorted(found, key=lambda key: [int(part) for part in key.split(".")[2:]])]

    def patches(self, case: str, patch: int, kind: str = "images") -> tuple[Tensor, tuple[tuple[int, int], ...]]:
        """The same as patches [P, 3 * patch ** 2], features in the order (c, y, x), and the tiles' grids."""
        images = self.images(case, kind)
        flat = [flatten_image(image, patch) for image in images]
        return torch.cat(flat), tuple((x.shape[1] // patch, x.shape[2] // patch) for x in images)

    def load(self, module: nn.Module, prefix: str, *roots: str) -> None:
        """Gives a module the weights whose names begin, behind the prefix, with one of its roots: no more, no fewer."""
        names = [name for name in self.weights if name.startswith(tuple(prefix + root for root in roots))]
        module.load_state_dict({name.removeprefix(prefix): self.weights[name] for name in names})

    def series(self, name: str) -> list[Tensor]:
        """The inputs `name`.0, `name`.1 ... or `name`.0.0, `name`.0.1, ...; samples without any are left out."""
        found = [key for key in self.inputs if key.startswith(f"{name}.")]
        found.sort(key=lambda key: [int(part) for part in key.removeprefix(f"{name}.").split(".")])
        return [self.inputs[key] for key in found]

    def gradients(self, case: str) -> Iterator[tuple[str, int, Tensor]]:
        """The parameter, stride of rows, and value of each whole or thinned gradient of a case."""
        for key, value in self.expected.items():
            kind, _, name = key.removeprefix(f"{case}.").partition(".")
            if key.startswith(f"{case}.") and kind == "grad":
                yield name, 1, value
            elif key.startswith(f"{case}.") and kind.startswith("grad_stride"):
                yield name, int(kind.removeprefix("grad_stride")), value


def flatten_image(image: Tensor, patch: int = 14) -> Tensor:
    """Patches of [3, height, width], row by row, each flattened as a convolution's weight is."""
    return rearrange(image, "c (h p) (w q) -> (h w) (c p q)", p=patch, q=patch)
