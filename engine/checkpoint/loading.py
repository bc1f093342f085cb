"""Filling a model's parameters from any source of tensors, each rank reading only its own slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.checkpoint.reader import TensorReader
from engine.distributed.sharding import NamedShard


def load_parameters(
    shards: Iterable[NamedShard], source: TensorReader, *, progress: Callable[[int], None] | None = None
) -> int:
    """Copies stored values into the given tensors, casting to each tensor's own dtype.

    Args:
        shards: this rank's parameters by logical name; padding is zeroed.
        source: where they are stored, at any layout.
        progress: called with the bytes of each tensor once it is loaded.

    Returns:
        The number of tensors loaded.

    Raises:
        UserError: a tensor is absent from the source, has another shape, or is damaged.
    """
    count = 0
    for name, tensor, spec in shards:
        source.read(name, spec, out=tensor)
        count += 1
        if progress is not None:
            progress(tensor.nbytes)
    return count
