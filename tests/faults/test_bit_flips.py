"""One bit of a stored model or checkpoint is flipped: every reader at every layout refuses it, or did not use it."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.checkpoint import model_weights as source_module
from engine.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import TrainingCheckpoint, open_run
from engine.conversion.decoded_base import DecodedSource
from engine.conversion.import_export import Work, export_hf, import_checkpoint
from engine.conversion.live_logits import live_logits, proof_tokens
from engine.conversion.merged_model import MergedSource
from engine.distributed.sharding import NamedShard, Piece, ShardSpec, replicated_spec
from engine.errors import UserError
from engine.models.describe import parameter_specs
from tests.distributed.test_shared_checks import flip_a_bit_of, own_sums
from tests.support.saved_training import save_training
from tests.support.sweeps import sampled
from tests.unit.checkpoint_models import tiny_llama
from tests.unit.test_checkpoint_peft import BLOCK, RANK, factors, trained_run
from tests.unit.test_checkpoint_training import save_together, shards

Values = dict[str, Tensor | str]
FLIPS = 10
"""Flips in each folder, in the quick suite."""


def _rank(folder: Path, size: int, rank: int) -> Values:
    source = open_source(folder)
    specs = parameter_specs(source.model.decoder, tensor_rank=rank, tensor_size=size)
    return {name: source.read(name, spec).clone() for name, spec in specs.items()}


def _stage(folder: Path, layer: int) -> Values:
    """A pipeline stage of one layer."""
    source = open_source(folder)
    names = [name for name in source.tensor_names() if name.startswith(f"layers.{layer}.")]
    return {name: source.read_whole(name).clone() for name in names}


def _data_shard(folder: Path) -> Values:
    """The second half of each matrix's rows and the middle of its columns: parameters spread over data ranks."""
    source, values = open_source(folder), {}
    for name in source.tensor_names():
        shape = source.shape(name)
        if len(shape) == 2:
            half, quarter = shape[0] // 2, shape[1] // 4
            spec = ShardSpec(
                global_shape=shape, local_shape=(shape[0] - half, shape[1] - quarter), dim=0,
                pieces=(Piece(half, 0, shape[0] - half),), offsets=(0, quarter),
            )  # fmt: skip
            values[name] = source.read(name, spec).clone()
    return values


def _written(write: Callable[[Path], object], folder: Path) -> Values:
    out = folder.parent / "written"
    write(out)
    return {
        f"{path.name} {name}": value for path in out.glob("*.safetensors") for name, value in load_file(path).items()
    }


def _reshard(folder: Path) -> Values:
    return _written(
        lambda out: import_checkpoint(open_source(folder), out, tensor=4, work=Work(overwrite=True)), folder
    )


def _export(folder: Path) -> Values:
    return _written(lambda out: export_hf(open_source(folder), out, work=Work(overwrite=True)), folder)


def _merge(folder: Path, *, decoded: bool) -> Values:
    base, run = open_source(folder), open_run(folder.parent / "run")
    seen = DecodedSource(base, "nf4") if decoded else base
    merged = MergedSource(base.model, seen, run.trained(), scale=5.0 / RANK)
    return _written(lambda out: export_hf(merged, out, work=Work(overwrite=True)), folder)


def _logits(folder: Path) -> Values:
    source = open_source(folder)
    return {"logits": live_logits(source.model.decoder, source, proof_tokens(37))}


READERS: dict[str, Callable[[Path], Values]] = {
    **{f"tensor {rank} of {size}": partial(_rank, size=size, rank=rank) for size in (1, 2, 4) for rank in range(size)},
    "stage 0": partial(_stage, layer=0),
    "stage 1": partial(_stage, layer=1),
    "data shard": _data_shard,
    "import": _reshard,
    "export": _export,
    "merge": partial(_merge, decoded=False),
    "merge into nf4": partial(_merge, decoded=True),
    "logits": _logits,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base at three layouts; "old" is as it was before whole tensors had checksums."""
    folder = tmp_path_factory.mktemp("bases")
    tiny_llama(folder / "hf", kv_heads=2)
    trained_run(folder / "run", factors(BLOCK), folder / "hf")
    for size in (1, 2, 4):
        import_checkpoint(open_source(folder / "hf"), folder / f"tp{size}", tensor=size)
    import_checkpoint(open_source(folder / "hf"), folder / "old", tensor=2)
    manifest = read_manifest(folder / "old")
    for record in manifest.tensors.values():
        object.__setattr__(record, "checksum", None)
    write_manifest(folder / "old", manifest)
    assert '"checksum"' in (folder / "old" / MANIFEST).read_text()
    return {name: folder / name for name in ("tp1", "tp2", "tp4", "old")}


def _places(folder: Path, chance: random.Random, count: int) -> list[tuple[Path, int]]:
    """Bytes of the weight files, and some of the manifest."""
    files = sorted(folder.glob("*.safetensors"))
    places = [(folder / MANIFEST, chance.randrange((folder / MANIFEST).stat().st_size)) for _ in range(count // 10)]
    for _ in range(count - len(places)):
        path = chance.choice(files)
        places.append((path, chance.randrange(path.stat().st_size)))
    return places


def _key_at(path: Path, place: int) -> str | None:
    """The tensor whose bytes the place lies in."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = re.findall(
        rb'"([^"]+)":\{"dtype":"[^"]+","shape":[^}]*?"data_offsets":\[(\d+),(\d+)\]', data[8 : 8 + length]
    )
    start = 8 + length
    return next((key.decode() for key, a, b in header if start + int(a) <= place < start + int(b)), None)


def _same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _sweep(folder: Path, readers: dict[str, Callable[[Path], Values]], *, seed: int, flips: int) -> None:
    chance = random.Random(seed)
    sound = {name: read(folder) for name, read in readers.items()}
    refused = 0
    for path, place in _places(folder, chance, flips):
        whole = path.read_bytes()
        key = _key_at(path, place) if path.suffix == ".safetensors" else None
        data = bytearray(whole)
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        for name, read in readers.items():
            where = f"{name} of {path.name} byte {place} ({key})"
            try:
                values = read(folder)
            except UserError as error:
                refused += 1
                assert str(path) in str(error) and (key is None or key in str(error)), (where, str(error))
            else:
                unread = path.name != MANIFEST  # the manifest is for everyone
                assert unread and _same(values, sound[name]), f"{where}: read and used without a word"
        path.write_bytes(whole)
    assert refused > flips, "hardly anything was refused: the readers did not read what was damaged"


@pytest.mark.parametrize("layout", sampled(["tp1", "tp2", "tp4", "old"], ["tp2", "old"]))
def test_bases(bases: dict[str, Path], layout: str) -> None:
    _sweep(bases[layout], READERS, seed=1, flips=FLIPS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp4", "old"])
def test_many_flips_in_bases(bases: dict[str, Path], layout: str) -> None:
    _sweep(bases[layout], READERS, seed=2, flips=500)


def _resumed(folder: Path, size: int, rank: int) -> Values:
    checkpoint = TrainingCheckpoint(folder)
    return {name: checkpoint.read(name, spec).clone() for name, _, spec in shards(rank, size)}


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_training_checkpoints(tmp_path: Path, saved: int) -> None:
    save_together(tmp_path, saved, 50)
    readers = {
        f"rank {rank} of {size}": partial(_resumed, size=size, rank=rank) for size in (1, 2, 4) for rank in range(size)
    }
    _sweep(tmp_path / "checkpoints" / "step_00000050", readers, seed=saved, flips=6 * FLIPS)


def test_sums_of_whole_tensors_do_not_depend_on_the_layout(bases: dict[str, Path]) -> None:
    expected = own_sums(open_source(bases["tp1"].parent / "hf"))
    assert [open_source(bases[name]).sums() for name in ("tp1", "tp2", "tp4", "old")] == [expected] * 3 + [None]
    again = bases["tp1"].parent / "again"
    import_checkpoint(open_source(bases["old"]), again, tensor=4, work=Work(overwrite=True))
    assert open_source(again).sums() == expected


def test_a_base_that_changed_in_the_middle_is_not_trained_on(tmp_path: Path) -> None:
    """Whatever reads it: conversions, generation's loader, a base that was imported after the change."""
    tiny_llama(tmp_path / "hf")
    base = open_source(tmp_path / "hf")
    sums = own_sums(base)
    run = trained_run(tmp_path / "run", factors(BLOCK), tmp_path / "hf")
    tensors = [NamedShard("master/x.lora_A", torch.ones(2, 2), replicated_spec((2, 2), rank=0, size=1))]
    recorded = {"path": str(tmp_path / "hf"), "fingerprint": base.fingerprint(), "sums": sums}
    save_training(run, step=2, tensors=tensors, state={}, run_config="", base=recorded, lora={}, layout={})
    path = flip_a_bit_of(tmp_path / "hf", "model.layers.0.mlp.up_proj.weight")
    assert open_source(tmp_path / "hf").fingerprint() == base.fingerprint(), "the fingerprint reads the ends of tensors"
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    with pytest.raises(
        UserError, match=r"tp2 is not the model that .* was trained on: layers\.0\.mlp\.up_proj\.weight"
    ):
        open_source(tmp_path / "tp2").expect(sums, str(run))
    sentence = f"{re.escape(str(path))} has changed: model.layers.0.mlp.up_proj.weight has checksum"
    for read in (_export, _reshard, _logits, partial(_rank, size=2, rank=1), partial(_stage, layer=0)):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=sentence):
            patch.setattr("tests.faults.test_bit_flips.open_source", partial(_expecting, sums=sums))
            read(tmp_path / "hf")


def _expecting(folder: Path, sums: dict[str, str]) -> object:
    source = source_module.open_source(folder)
    source.expect(sums, "the run")
    return source
