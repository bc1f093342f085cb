"""The identity of a model: equal for a Hugging Face folder and every partitioned import of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor

from engine.checkpoint.reader import TensorReader
from engine.checkpoint.safetensors_file import dtype_name, raw_bytes

_FINGERPRINT_ROW_BYTES = 4096
# Keys of a config about its author or its use, not about the model.
_COSMETIC_KEYS = ("transformers_version", "_name_or_path", "use_cache", "architectures", "torch_dtype", "dtype")


def fingerprint_of(tensors: TensorReader, hf_config: dict[str, Any]) -> str:
    """Returns 32 hexadecimal digits: a hash of the config (without keys about its author) and of each tensor's
    name, shape, dtype and the first 4 KiB of its first and last row."""
    digest = hashlib.blake2b(digest_size=16)
    config = {key: value for key, value in hf_config.items() if key not in _COSMETIC_KEYS}
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name in tensors.tensor_names():
        shape = tensors.shape(name)
        tensors.expect_rows(name, (0, shape[0] - 1) if shape else ())
    for name in sorted(tensors.tensor_names()):
        shape = tensors.shape(name)
        digest.update(f"{name} {list(shape)} {dtype_name(tensors.dtype(name))}".encode())
        for row in [tensors.read_whole(name)] if len(shape) < 2 else _end_rows(tensors, name, shape[0]):
            digest.update(raw_bytes(row)[:_FINGERPRINT_ROW_BYTES])
    return digest.hexdigest()


def _end_rows(tensors: TensorReader, name: str, num_rows: int) -> list[Tensor]:
    return [tensors.read_rows(name, row, row + 1) for row in (0, num_rows - 1)]
