"""The small checkpoints of vision-language models that the originals' code has run, and what it gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class VisionFixture:
    """A folder of them; weights are upcast, as the original computed in fp32."""

    config: dict[str, Any]
    weights: Tensors
    inputs: Tensors
    expected: Tensors

    @classmethod
    def read(cls, folder: Path) -> VisionFixture:
        weights, inputs, expected = (
            load_file(folder / f"{name}.safetensors") for name in ("model", "inputs", "expected")
        )
        return cls(
            config=json.loads((folder / "config.json").read_text(encoding="utf-8")),
            weights={name: tensor.float() for name, tensor in weights.items()},
            inputs=inputs,
            expected=expected,
        )

    def load(self, module: nn.Module, prefix: str, *roots: str) -> None:
        """Gives a module the weights whose names begin with one of its roots, neither more nor fewer."""
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


def flatten_picture(picture: Tensor, patch: int = 14) -> Tensor:
    """Patches of [3, height, width], row by row, each flattened as a convolution's weight is."""
    return rearrange(picture, "c (h p) (w q) -> (h w) (c p q)", p=patch, q=patch)
