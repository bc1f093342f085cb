"""Where sharded parameters lie: every element is one rank's, parts are equal and aligned; and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.config.data import DataOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis
from engine.distributed.sharding import ShardSpec, replicated_spec
from engine.errors import UserError
from engine.layers.module import ShardedModule, ShardEntry
from engine.layers.sharded_storage import ShardedStorage
from engine.layers.storage import StorageUser, WeightPlacement
from engine.ops.gradients import GradientSink
from engine.optim.flat_layout import ALIGNMENT, owned_ranges, plan_buckets, plan_regions
from engine.optim.state_sharding import Sharding

CPU = torch.device("cpu")
SHAPES = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple), st.booleans()), min_size=1, max_size=12
)


def _entries(shapes: list[tuple[tuple[int, ...], bool]]) -> list[ShardEntry]:
    """Parameters of these shapes; True where the gradient is a partial sum over tp."""
    entries = []
    for place, (shape, partial) in enumerate(shapes):
        spec = replicated_spec(shape, rank=0, size=2, grad_reduce=("tp",) if partial else ())
        sink = GradientSink(torch.Size(shape), CPU)
        entries.append(ShardEntry(f"p{place}", nn.Parameter(torch.zeros(shape)), spec, sink))
    return entries


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(2, 5), st.integers(1, 900))
def test_every_element_is_one_ranks(shapes: list[tuple[tuple[int, ...], bool]], size: int, limit: int) -> None:
    regions = plan_regions(_entries(shapes), num_parts={"dp_cp": size}, bucket_elements=limit)
    buckets = plan_buckets(regions, limit)
    assert regions[0].start == buckets[0].start == 0
    assert [region.stop for region in regions[:-1]] == [region.start for region in regions[1:]]
    assert [bucket.stop for bucket in buckets[:-1]] == [bucket.start for bucket in buckets[1:]]
    for region in regions:
        assert region.start % (size * ALIGNMENT) == region.stop % (size * ALIGNMENT) == 0
    for bucket in buckets:
        assert (bucket.stop - bucket.start) % (size * ALIGNMENT) == 0
        assert len({slot.entry.spec.grad_reduce for slot in bucket.slots}) == 1
        filled = sum(slot.size for slot in bucket.slots)
        assert bucket.stop - bucket.start < filled + ALIGNMENT * (len(bucket.slots) + size)
    held = {f"p{place}": torch.zeros(math.prod(shape), dtype=torch.int64) for place, (shape, _) in enumerate(shapes)}
    for rank in range(size):
        own = torch.zeros(regions[-1].stop // size, dtype=torch.int64)
        for run in owned_ranges(buckets, lambda data, rank=rank: rank):
            held[run.slot.entry.name][run.first : run.last] += 1
            own[run.place] += 1
            # the same place, counted from the beginning of the bucket's part
            bucket = next(one for one in buckets if run.slot in one.slots)
            length = (bucket.stop - bucket.start) // size
            there = run.slot.offset + run.first - bucket.start - rank * length
            assert bucket.own.start + there == run.start and 0 <= there < length
        assert own.max() <= 1
    assert all((count == 1).all() for count in held.values())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5), st.integers(0, 4), st.integers(2, 4))
def test_kept_runs_of_a_view_between_other_columns(rows: int, width: int, left: int, right: int, size: int) -> None:
    """[left | view | right]: each rank's run is what of the view lies in its part of the storage."""
    whole = torch.arange(rows * (left + width + right), dtype=torch.float32).view(rows, -1)
    expected = whole[:, left : left + width].clone()
    kept: list[float] = []
    for rank in range(size):
        storage = whole.clone()
        view = storage[:, left : left + width]
        spread = ShardedStorage(view, Axis("dp_cp", size, rank))
        assert storage.untyped_storage().nbytes() == 0
        spec = ShardSpec(global_shape=(rows, width), local_shape=(rows, width))
        for _, tensor, part in spread.shards("x", view, spec, *spread.run(view, rank)):
            row, column = part.runs(0)[0].global_offset, part.runs(1)[0].global_offset
            assert torch.equal(tensor, expected[row:, column:][: tensor.shape[0], : tensor.shape[1]])
            kept += tensor.flatten().tolist()
        low = rank * spread.length
        assert spread.part.numel() == spread.length and spread.length * size * 4 == spread.num_bytes
        assert torch.equal(spread.part[: max(0, whole.numel() - low)], whole.flatten()[low : low + spread.length])
    assert kept == expected.flatten().tolist()


class _Scale(ShardedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.own("w", torch.zeros(3), replicated_spec((3,), rank=0, size=1), trainable=True)


def test_without_other_ranks_nothing_is_spread() -> None:
    weights = WeightPlacement(Axis("dp_cp"))
    module = _Scale()
    (unit,) = weights.attach_storage([StorageUser(module=module)])
    x = torch.ones(3, requires_grad=True)
    assert unit.run(lambda given: given, x) is x
    assert weights.parts(module.weight)[0].tensor.data_ptr() == module.weight.parameter.data_ptr()
    sharding = Sharding(level="parameters", axis=Axis("dp_cp"), weights=weights)
    assert not sharding.is_sharded and not sharding.shards_gradients


def test_a_parameter_that_no_unit_reads_is_a_defect() -> None:
    weights, module = WeightPlacement(Axis("dp_cp")), _Scale()
    weights.attach_storage([StorageUser(module=module)])
    with pytest.raises(AssertionError, match="outside of all units"):
        weights.attach_arrival([torch.zeros(2)], None)  # type: ignore[arg-type]


def test_sentences() -> None:
    many = Axis("dp_cp", 4, 1)
    assert Sharding().sentence() is None
    assert Sharding(level="gradients", axis=many).sentence() == "sharding: gradients, over 4 ranks"
    alone = Sharding(level="gradients").sentence()
    assert alone is not None and "nothing" in alone and "parallel.shard is gradients" in alone


def _config(shard: str, graph: str = "none") -> RunConfig:
    return RunConfig(
        model=ModelOptions(path="x"),
        data=DataOptions(packing=True),
        parallel=ParallelOptions(shard=shard),  # type: ignore[arg-type]
        memory=MemoryOptions(cuda_graph=graph),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("graph", ["layer", "step"])
def test_graphs_do_not_go_with_sharding(shard: str, graph: str) -> None:
    check_config(_config(shard))
    check_config(_config("none", graph))
    with pytest.raises(
        UserError, match=f"memory.cuda_graph is {graph} and parallel.shard is {shard}, .*set parallel.shard"
    ):
        check_config(_config(shard, graph))


def test_unknown_level_is_refused() -> None:
    with pytest.raises(UserError, match="parallel.shard is 'all', but it must be one of none, optimizer"):
        ParallelOptions(shard="all")  # type: ignore[arg-type]
