"""Ranks that read parts of the same stored tensors share the work of checking them."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from engine.checkpoint import verification
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.safetensors_file import checksum
from engine.checkpoint.verification import checked_together
from engine.conversion.import_export import import_checkpoint
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.models.describe import parameter_specs
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed


Reading = tuple[str, int, dict[str, str] | None]


def _read_together(folders: list[Path], sums: dict[str, str] | None) -> list[Reading]:
    """Each base's error, the bytes summed, and the sums, of a rank of two that reads at tensor 2."""
    return [_read_one_together(folder, sums) for folder in folders]


def _read_one_together(folder: Path, sums: dict[str, str] | None) -> Reading:
    source, summed = open_source(folder), 0
    if sums is not None:
        source.expect(sums, "the run")

    def counting(tensor: Tensor) -> str:
        nonlocal summed
        summed += tensor.nbytes
        return checksum(tensor)

    verification.checksum = counting
    axis = Axis("world", dist.get_world_size(), dist.get_rank())
    specs = parameter_specs(source.model.decoder, tensor_rank=axis.rank, tensor_size=axis.size)
    try:
        with checked_together([source.checks], axis, learn=True):
            for name, spec in specs.items():
                source.read(name, spec)
    except UserError as error:
        return str(error), summed, None
    return "", summed, source.sums()


def flip_a_bit_of(folder: Path, key: str) -> Path:
    """Flips a bit in the middle of the second row of the matrix `key`."""
    for path in sorted(folder.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        start = 8 + struct.unpack("<Q", data[:8])[0]
        found = re.search(re.escape(key).encode() + rb'":\{[^}]*?"data_offsets":\[(\d+),(\d+)\]', bytes(data[:start]))
        if found:
            data[start + (int(found[1]) + int(found[2])) // 2] ^= 64
            path.write_bytes(data)
            return path
    raise AssertionError(key)


def own_sums(reader: TensorReader) -> dict[str, str]:
    return {name: checksum(reader.read_whole(name).contiguous()) for name in reader.tensor_names()}


def test_ranks_share_the_check(tmp_path: Path) -> None:
    """Each of two ranks sums half of what both read, knows all sums, and refuses what is damaged for the other."""
    # with transformers, which the ranks need not import
    from tests.unit.checkpoint_models import hf_name, tiny_llama, total_bytes

    folders = [tmp_path / "hf", tmp_path / "tp1"]
    tiny_llama(tmp_path / "hf")
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp1", tensor=1)
    total = total_bytes(open_source(tmp_path / "hf"))
    expected = own_sums(open_source(tmp_path / "hf"))
    for found in zip(*spawn(_read_together, world=2, args=(folders, None)), strict=True):
        assert [error for error, _, _ in found] == ["", ""] and [sums for _, _, sums in found] == [expected, expected]
        assert sum(summed for _, summed, _ in found) == total and max(summed for _, summed, _ in found) < 0.7 * total
    key = "layers.1.mlp.down_proj.weight"
    paths = [flip_a_bit_of(folder, name) for folder, name in zip(folders, (hf_name(key), key), strict=True)]
    for path, found in zip(
        paths, zip(*spawn(_read_together, world=2, args=(folders, expected)), strict=True), strict=True
    ):
        errors = [error for error, _, _ in found]
        assert errors[0] == errors[1] and str(path) in errors[0] and "mlp.down_proj.weight has checksum" in errors[0]
