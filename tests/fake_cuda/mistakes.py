"""Mistakes made on purpose, each with what is to be said of it; and the same done right, of which nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import all_reduce_async, exchange_async
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.document_levels import device_levels
from engine.kernels.records import Documents
from engine.kernels.triton import swiglu
from engine.layers.host_copies import CudaTransfer, sent
from engine.ops.attention.flash_calls import flash_varlen_backward, flash_varlen_forward
from engine.ops.attention.varlen import VarlenAttention
from tests.fake_cuda.cuda import DEVICE
from tests.fake_cuda.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake.

    Args:
        make: makes it.
        said: part of what is reported; None where nothing may be.
    """

    make: Callable[[Recorder], None]
    said: str | None


def _there(*shape: int) -> Tensor:
    return torch.ones(shape or (8,), device=DEVICE)


def _axis(name: str = "cp") -> Axis:
    return Axis(name, 4, 1, dist.group.WORLD)


def _connected() -> Axis:
    axis = _axis()
    all_reduce_async(_there(), axis)[1].wait()
    return axis


def item(device: Recorder) -> None:
    float(_there().sum())


def tolist(device: Recorder) -> None:
    _there().tolist()


def nonzero(device: Recorder) -> None:
    _there().nonzero()


def boolean_index(device: Recorder) -> None:
    x = _there()
    x[x > 0]


def pageable_copy(device: Recorder) -> None:
    torch.empty(8).copy_(_there(), non_blocking=True)


def pageable_source(device: Recorder) -> None:
    torch.ones(8).to(DEVICE, non_blocking=True)


def pinned_source(device: Recorder) -> None:
    sent(torch.ones(8), DEVICE)


def blocking_copy(device: Recorder) -> None:
    torch.empty(8, pin_memory=True).copy_(_there())


def number_to_device(device: Recorder) -> None:
    torch.tensor([1.0, 2.0], device=DEVICE)


def pinned_copy(device: Recorder) -> None:
    host = torch.empty(8, pin_memory=True)
    host.copy_(_there(), non_blocking=True)


def reading_before_arrival(device: Recorder) -> None:
    host = torch.empty(8, pin_memory=True)
    host.copy_(_there(), non_blocking=True)
    host.add(1)


def synchronise(device: Recorder) -> None:
    torch.cuda.current_stream().synchronize()


def mixed_devices(device: Recorder) -> None:
    try:
        _there() + torch.ones(8)
    except RuntimeError as error:
        device.report(str(error))


def _beside(x: Tensor, *, waits: bool = True, records: bool = True) -> torch.cuda.Stream:
    side = torch.cuda.Stream(DEVICE)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    if records:
        x.record_stream(side)
    return side


def unrecorded(device: Recorder) -> None:
    _beside(_there(), records=False)


def recorded(device: Recorder) -> None:
    _beside(_there())


def kept_until_waited(device: Recorder) -> None:
    x = _there()
    torch.cuda.current_stream().wait_stream(_beside(x, records=False))


def fetched_and_not_read(device: Recorder) -> None:
    transfer = CudaTransfer(DEVICE)
    transfer.fetch(transfer.send(_there()))


def over_as_the_host_knows(device: Recorder) -> None:
    x = _there()
    assert _beside(x, records=False).record_event().query()
    x.add(1)


def resized_too_early(device: Recorder) -> None:
    x = _there()
    side = _beside(x, records=False)
    x.untyped_storage().resize_(0)
    torch.cuda.current_stream().wait_stream(side)


def used_without_memory(device: Recorder) -> None:
    x = _there()
    x.untyped_storage().resize_(0)
    x.add(1)


def read_too_early(device: Recorder) -> None:
    x = _there()
    side = _beside(x)
    x.add(1)
    torch.cuda.current_stream().wait_stream(side)


def not_waited_for(device: Recorder) -> None:
    _beside(_there(), waits=False)


def on_the_host(device: Recorder) -> None:
    axis = _connected()
    all_reduce_async(torch.ones(8), axis)[1].wait()


def not_contiguous(device: Recorder) -> None:
    axis = _connected()
    all_reduce_async(_there(4, 4).t()[1:], axis)[1].wait()


def used_before_the_wait(device: Recorder) -> None:
    axis = _connected()
    x, handle = all_reduce_async(_there(), axis)
    x.add(1)
    handle.wait()


def nobody_waits(device: Recorder) -> None:
    axis = _connected()
    all_reduce_async(_there(), axis)


def side_stream_waits_first(device: Recorder) -> None:
    axis = _connected()
    work = dist.all_reduce(_there(), group=axis.group, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        work.wait()
    work.wait()


def transfer_first(device: Recorder) -> None:
    exchange_async(_there(), _axis(), to=2, source=0, received=(8,))[1].wait()


def mesh_first(device: Recorder) -> None:
    mesh = build_mesh(RankGrid(cp=4), device_type="cuda", num_kv_heads=4)
    exchange_async(_there(), mesh.cp, to=2, source=0, received=(8,))[1].wait()


def _captured(inside: Callable[[], object], after: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(DEVICE), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            inside()
        after()
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def captured_well(device: Recorder) -> None:
    axis, x, host = _connected(), _there(), torch.empty(8, pin_memory=True)
    _captured(lambda: (all_reduce_async(x, axis)[1].wait(), host.copy_(x + 1, non_blocking=True)))


def captured_read(device: Recorder) -> None:
    x = _there()
    _captured(lambda: x.sum().item())


def captured_pinned(device: Recorder) -> None:
    """Memory of the host that is given back after the capture, which each replay reads."""
    target = _there()
    _captured(lambda: target.add_(sent(torch.ones(8), DEVICE)))


def captured_pageable(device: Recorder) -> None:
    x, host = _there(), torch.ones(8)
    _captured(lambda: x.copy_(host, non_blocking=True))


def captured_connection(device: Recorder) -> None:
    x = _there()
    _captured(lambda: all_reduce_async(x, _axis())[1].wait())


def captured_question(device: Recorder) -> None:
    axis, x = _connected(), _there()

    def inside() -> None:
        handle = all_reduce_async(x, axis)[1]
        handle.done()
        handle.wait()

    _captured(inside)


def captured_side_stream(device: Recorder) -> None:
    x = _there()
    _captured(lambda: _beside(x))


def captured_wait_for_before(device: Recorder) -> None:
    axis, x = _connected(), _there()
    handle = all_reduce_async(x, axis)[1]
    _captured(handle.wait)


def replayed_on_freed_memory(device: Recorder) -> None:
    inputs = [_there()]
    _captured(lambda: inputs[0].mul_(2), inputs.clear)


def captured_globally(device: Recorder) -> None:
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        pass


def captured_on_the_default_stream(device: Recorder) -> None:
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        pass


def captured_question_to_a_stream(device: Recorder) -> None:
    _captured(lambda: torch.cuda.current_stream().query())


def made_beside_the_pool(device: Recorder) -> None:
    """Memory of a stream that joins the capture only afterwards is not the graph's."""
    x, side, made = _there(), torch.cuda.Stream(DEVICE), []

    def inside() -> None:
        with torch.cuda.stream(side):
            made.append(torch.empty(8, device=DEVICE))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made[0].copy_(x)
        torch.cuda.current_stream().wait_stream(side)

    _captured(inside, made.clear)


def made_in_the_pool(device: Recorder) -> None:
    x, side, made = _there(), torch.cuda.Stream(DEVICE), []

    def inside() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made.append(x + 1)
        torch.cuda.current_stream().wait_stream(side)

    _captured(inside, made.clear)


def pinned_in_a_capture(device: Recorder) -> None:
    x = _there()
    _captured(lambda: torch.empty(8, pin_memory=True).copy_(x, non_blocking=True))


def _attended(features: int = 16, *, heads: int = 4, made_of: str = "bfloat16", **given: Any) -> None:
    """Attention over documents of 40 and 24 tokens, and its gradients."""
    dtype = getattr(torch, made_of)
    q = torch.ones(64, heads, features, device=DEVICE, dtype=dtype)
    k, v = (torch.ones(64, 2, features, device=DEVICE, dtype=dtype) for _ in range(2))
    offsets = given.get("offsets", torch.ones(3, device=DEVICE, dtype=torch.int32))
    longest = given.get("longest", 128)
    k = given.get("k", k)
    out, lse = flash_varlen_forward(q, k, v, offsets, longest, 1.0)
    flash_varlen_backward(torch.ones_like(out), (q, k, v, out, lse), offsets, longest, 1.0)


def attended(device: Recorder) -> None:
    _attended()


def attended_by_branches(device: Recorder) -> None:
    """Five documents of 8 tokens, which two more continue each: levels that are gathered, and a step later in place."""
    for groups in (5, 2):
        tokens, count = 24 * groups, 3 * groups
        parents = tuple(-1 if number % 3 == 0 else number - number % 3 for number in range(count))
        levels = device_levels((8,) * count, parents, DEVICE)
        offsets = torch.ones(count + 1, device=DEVICE, dtype=torch.int32)
        documents = Documents(lengths=(8,) * count, offsets=offsets, max_length=8, parents=parents, levels=levels)
        assert len(levels) == (1 if groups == 5 else groups)
        inputs = [
            torch.ones(tokens, heads, 16, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)
        ]
        VarlenAttention()(*inputs, documents, scale=1.0).sum().backward()


def offsets_of_64_bits(device: Recorder) -> None:
    _attended(offsets=torch.ones(3, device=DEVICE, dtype=torch.int64))


def offsets_on_the_host(device: Recorder) -> None:
    try:
        _attended(offsets=torch.ones(3, dtype=torch.int32))
    except RuntimeError as error:
        device.report(f"refuses: {error}")


def offsets_apart(device: Recorder) -> None:
    _attended(offsets=torch.ones(6, device=DEVICE, dtype=torch.int32)[::2])


def features_apart(device: Recorder) -> None:
    _attended(k=torch.ones(64, 16, 2, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2))


def keys_misaligned(device: Recorder) -> None:
    _attended(k=torch.ones(64 * 32 + 4, device=DEVICE, dtype=torch.bfloat16)[4:].view(64, 2, 16))


def heads_of_12(device: Recorder) -> None:
    _attended(12)


def heads_of_264(device: Recorder) -> None:
    _attended(264)


def heads_without_keys(device: Recorder) -> None:
    _attended(heads=3)


def attended_in_float32(device: Recorder) -> None:
    _attended(made_of="float32")


def longest_of_1(device: Recorder) -> None:
    _attended(longest=1)


def _grouped(device: Recorder, *, inner: int = 16, columns: int = 16, **given: Any) -> None:
    """A product of 64 rows with 4 matrices. Without numbers too, torch itself refuses some."""
    dtype = given.get("dtype", torch.bfloat16)
    x = given.get("x", torch.ones(64, inner, device=DEVICE, dtype=dtype))
    weights = given.get("weights", torch.ones(4, inner, columns, device=DEVICE, dtype=dtype))
    ends = given.get("ends", torch.ones(4, device=DEVICE, dtype=torch.int32))
    try:
        torch.ops.aten._grouped_mm(x, weights, ends)
    except RuntimeError as error:
        device.report(f"torch refuses: {error}")


def grouped(device: Recorder) -> None:
    _grouped(device)
    x = torch.ones(64, 16, device=DEVICE, dtype=torch.bfloat16)
    _grouped(device, x=x.t(), weights=x)


def grouped_rows_of_12(device: Recorder) -> None:
    _grouped(device, inner=12)


def grouped_columns_of_12(device: Recorder) -> None:
    _grouped(device, columns=12)


def grouped_misaligned(device: Recorder) -> None:
    _grouped(device, x=torch.ones(64 * 16 + 4, device=DEVICE, dtype=torch.bfloat16)[4:].view(64, 16))


def grouped_ends_of_64_bits(device: Recorder) -> None:
    _grouped(device, ends=torch.ones(4, device=DEVICE, dtype=torch.int64))


def grouped_ends_on_the_host(device: Recorder) -> None:
    _grouped(device, ends=torch.ones(4, dtype=torch.int32))


def grouped_in_float16(device: Recorder) -> None:
    _grouped(device, dtype=torch.float16)


def launch_of_nothing(device: Recorder) -> None:
    x = _there()
    swiglu._forward_kernel[(0, 1)](x, 8, x, 4, 1, 4, TOKENS=16, FEATURES=16)


def launch_along_the_second_side(device: Recorder) -> None:
    x = _there()
    swiglu._forward_kernel[(1, 65536)](x, 8, x, 4, 1, 4, TOKENS=16, FEATURES=16)


def launch_on_the_host(device: Recorder) -> None:
    swiglu.swiglu_forward(_there(4, 8), out=torch.empty(4, 4))


def launch_without_an_argument(device: Recorder) -> None:
    x = _there()
    swiglu._forward_kernel[(1,)](x, 8, x, 4, TOKENS=16, FEATURES=16)


def launch_with_a_hole(device: Recorder) -> None:
    x = _there()
    swiglu._forward_kernel[(1,)](x, 8, (x, None), 4, 1, 4, TOKENS=16, FEATURES=16)


def launch_with_a_hole_further_inside(device: Recorder) -> None:
    x = _there()
    swiglu._forward_kernel[(1,)](x, 8, (x, (1, None)), 4, 1, 4, TOKENS=16, FEATURES=16)


MISTAKES = {
    "item": Mistake(make=item, said="the host waits for the device: item"),
    "tolist": Mistake(make=tolist, said="the host waits for the device: tolist"),
    "nonzero": Mistake(make=nonzero, said="the host waits for the device: nonzero"),
    "index by a mask": Mistake(make=boolean_index, said="the host waits for the device: index by a mask"),
    "copy to pageable memory": Mistake(make=pageable_copy, said="cuda -> cpu, pageable memory"),
    "copy from pageable memory": Mistake(make=pageable_source, said="a copy cpu -> cuda of pageable memory at a test"),
    "copy from pinned memory": Mistake(make=pinned_source, said=None),
    "blocking copy": Mistake(make=blocking_copy, said="a blocking copy cuda -> cpu, pinned memory"),
    "numbers to the device": Mistake(make=number_to_device, said="a blocking copy cpu -> cuda, pageable memory"),
    "copy to pinned memory": Mistake(make=pinned_copy, said=None),
    "reading what has not arrived": Mistake(make=reading_before_arrival, said="the host reads at"),
    "synchronize": Mistake(make=synchronise, said="the host waits for the device: stream.synchronize"),
    "mixed devices": Mistake(make=mixed_devices, said=" devices"),
    "unrecorded": Mistake(make=unrecorded, said="record_stream was not called"),
    "recorded": Mistake(make=recorded, said=None),
    "kept until waited for": Mistake(make=kept_until_waited, said=None),
    "fetched, and given up unread": Mistake(make=fetched_and_not_read, said=None),
    "over, as the host knows": Mistake(make=over_as_the_host_knows, said=None),
    "resized too early": Mistake(make=resized_too_early, said="is given back"),
    "used without memory": Mistake(make=used_without_memory, said="uses memory that has been given back"),
    "read too early": Mistake(make=read_too_early, said="without having waited for it"),
    "not waited for": Mistake(make=not_waited_for, said="without having waited for it"),
    "collective on the host": Mistake(make=on_the_host, said="on cpu: NCCL takes tensors of a GPU"),
    "collective not contiguous": Mistake(make=not_contiguous, said="NCCL takes contiguous tensors"),
    "collective's result used early": Mistake(make=used_before_the_wait, said="without having waited for it"),
    "collective nobody waits for": Mistake(make=nobody_waits, said="nobody waits for the all_reduce"),
    "side stream waits first": Mistake(make=side_stream_waits_first, said="record_stream was not called"),
    "transfer first": Mistake(make=transfer_first, said="is a transfer"),
    "connected by the mesh": Mistake(make=mesh_first, said=None),
    "captured well": Mistake(make=captured_well, said=None),
    "read in a capture": Mistake(make=captured_read, said="item inside a graph's capture"),
    "pageable copy in a capture": Mistake(make=captured_pageable, said="pageable memory inside a graph's capture"),
    "pinned copy in a capture": Mistake(make=captured_pinned, said="a graph uses memory that was made"),
    "communicator made in a capture": Mistake(make=captured_connection, said="is made inside a graph's capture"),
    "question in a capture": Mistake(make=captured_question, said="asked whether it is done inside a graph's capture"),
    "side stream in a capture": Mistake(make=captured_side_stream, said="a capture ends before it has waited for"),
    "wait for what was before a capture": Mistake(make=captured_wait_for_before, said="from before the capture"),
    "capture that other threads disturb": Mistake(make=captured_globally, said="a capture in the mode global"),
    "capture on the default stream": Mistake(make=captured_on_the_default_stream, said="on the default stream"),
    "stream queried in a capture": Mistake(make=captured_question_to_a_stream, said="a stream is queried inside"),
    "made beside a graph's pool": Mistake(make=made_beside_the_pool, said="has been given back"),
    "made in a graph's pool": Mistake(make=made_in_the_pool, said=None),
    "pinned memory that a graph does not keep": Mistake(make=pinned_in_a_capture, said="has been given back"),
    "attention": Mistake(make=attended, said=None),
    "attention of branches": Mistake(make=attended_by_branches, said=None),
    "offsets of 64 bits": Mistake(make=offsets_of_64_bits, said="refuses cum_seq_q in torch.int64"),
    "offsets on the host": Mistake(make=offsets_on_the_host, said="refuses cum_seq_q on cpu"),
    "offsets apart": Mistake(make=offsets_apart, said="refuses cum_seq_q of shape (3,) and strides (2,)"),
    "features apart": Mistake(make=features_apart, said="features lie apart"),
    "keys misaligned": Mistake(make=keys_misaligned, said="refuses key, which begins 4 numbers"),
    "heads of 12 features": Mistake(make=heads_of_12, said="refuses query with heads of 12 features"),
    "heads of 264 features": Mistake(make=heads_of_264, said="refuses query with heads of 264 features"),
    "heads that share no keys": Mistake(make=heads_without_keys, said="refuses 3 heads of queries and 2 of keys"),
    "attention in float32": Mistake(make=attended_in_float32, said="refuses query in torch.float32"),
    "attention taken for decoding": Mistake(make=longest_of_1, said="refuses max_q of 1 for 64 rows"),
    "grouped products": Mistake(make=grouped, said=None),
    "grouped rows of 12": Mistake(make=grouped_rows_of_12, said="multiple of 16 bytes"),
    "grouped columns of 12": Mistake(make=grouped_columns_of_12, said="multiple of 16 bytes"),
    "grouped rows misaligned": Mistake(make=grouped_misaligned, said="refuses self, which begins 4 numbers"),
    "grouped by ends of 64 bits": Mistake(make=grouped_ends_of_64_bits, said="int32"),
    "grouped by ends on the host": Mistake(make=grouped_ends_on_the_host, said="refuses offs on cpu"),
    "grouped in float16": Mistake(make=grouped_in_float16, said="the host waits for the device: _grouped_mm of torch"),
    "launch of no block": Mistake(make=launch_of_nothing, said="with the grid (0, 1)"),
    "launch along the second side": Mistake(make=launch_along_the_second_side, said="with the grid (1, 65536)"),
    "launch on the host": Mistake(make=launch_on_the_host, said="_forward_kernel is launched at"),
    "launch without an argument": Mistake(make=launch_without_an_argument, said="missing a required argument"),
    "launch with a hole": Mistake(make=launch_with_a_hole, said="with a None inside y_ptr"),
    "launch with a hole further inside": Mistake(
        make=launch_with_a_hole_further_inside, said="with a None inside y_ptr"
    ),
    "replay on freed memory": Mistake(make=replayed_on_freed_memory, said="has been given back"),
}
