"""Stand-ins for torch.cuda: streams, events and graphs as timelines, and an H100 that answers what is asked of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda.recorder import Recorder
from tests.fake_cuda.timelines import Capture, Moment, Timeline

DEVICE = torch.device("cuda", 0)


class _Properties:
    name, major, minor, multi_processor_count, total_memory = "a GPU that does not exist", 9, 0, 132, 80 << 30


def install(recorder: Recorder) -> None:
    """Puts the stand-ins into torch.cuda, for as long as the process lives."""
    machine = recorder.machine
    streams = _streams(recorder)
    cuda: Any = torch.cuda
    for name, stand_in in streams.items():
        setattr(cuda, name, stand_in)
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: _Properties()
    cuda.get_device_name = lambda device=None: _Properties.name
    cuda.mem_get_info = lambda device=None: (_Properties.total_memory, _Properties.total_memory)
    cuda.get_rng_state_all, cuda.set_rng_state_all = list, lambda states: None
    cuda.max_memory_allocated = cuda.memory_allocated = lambda device=None: 1 << 30

    def record_stream(tensor: Tensor, stream: Any) -> None:
        machine.memory(tensor).recorded.add(stream.timeline)

    torch.Tensor.record_stream = record_stream


def _streams(recorder: Recorder) -> dict[str, Any]:
    """Makes the classes and functions of torch.cuda that concern order."""
    machine = recorder.machine

    class Event:
        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self.moment: Moment | None = None
            self.capture: Capture | None = None

        def record(self, stream: Stream | None = None) -> None:
            timeline = machine.current[-1] if stream is None else stream.timeline
            self.moment = timeline.moment()
            capturing = machine.capturing
            self.capture = capturing if capturing is not None and timeline in capturing.joined else None

        def wait(self, stream: Stream | None = None) -> None:
            recorder.stream_waits(machine.current[-1] if stream is None else stream.timeline, self)

        def query(self) -> bool:
            recorder.forbid_in_capture("an event is queried")
            machine.host.wait(self.moment or {})
            return True

        def synchronize(self) -> None:
            recorder.synchronised("event.synchronize")
            machine.host.wait(self.moment or {})

        def elapsed_time(self, other: Event) -> float:
            return 1.0

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, timeline: Timeline | None = None) -> None:
            self.device = DEVICE
            self.timeline = machine.timeline(f"a stream of {recorder.place()}") if timeline is None else timeline
            self.cuda_stream = id(self.timeline)

        def wait_stream(self, other: Stream) -> None:
            self.wait_event(other.record_event())

        def wait_event(self, event: Event) -> None:
            recorder.stream_waits(self.timeline, event)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            recorder.synchronised("stream.synchronize")
            machine.host.wait(self.timeline.moment())

        def query(self) -> bool:
            recorder.forbid_in_capture("a stream is queried")
            machine.host.wait(self.timeline.moment())
            return True

    @contextmanager
    def stream(used: Stream) -> Iterator[None]:
        machine.current.append(used.timeline)
        try:
            yield
        finally:
            machine.current.pop()

    def synchronize(device: Any = None) -> None:
        recorder.synchronised("cuda.synchronize")
        for timeline in machine.timelines:
            machine.host.wait(timeline.moment())

    main = Stream(timeline=machine.main)

    def current_stream(device: Any = None) -> Stream:
        return main if machine.current[-1] is machine.main else Stream(timeline=machine.current[-1])

    return {
        **_graphs(recorder),
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "synchronize": synchronize,
        "current_stream": current_stream,
        "default_stream": lambda device=None: main,
    }


def _graphs(recorder: Recorder) -> dict[str, Any]:
    """Makes the classes and functions of torch.cuda that concern captures."""
    machine = recorder.machine

    class CUDAGraph:
        def __init__(self) -> None:
            self.capture: Capture | None = None

        def replay(self) -> None:
            assert self.capture is not None, "a graph is replayed that was never captured"
            recorder.operations["graph replays"] += 1
            recorder.launched()
            machine.replay(self.capture)

    @contextmanager
    def graph(
        graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert machine.capturing is None, "a capture within a capture"
        if capture_error_mode not in ("thread_local", "relaxed"):
            recorder.report(
                f"a capture in the mode {capture_error_mode} at {recorder.place()}: what other threads ask of CUDA "
                "meanwhile, as the loader's that pin memory, fails, and so does the capture"
            )
        gc.collect()  # as torch does
        origin = machine.timeline("a capture's stream") if stream is None else stream.timeline
        if origin is machine.main:
            recorder.report(f"a capture on the default stream at {recorder.place()}, which CUDA refuses")
        graph.capture = machine.capturing = Capture(origin)
        machine.current.append(origin)
        try:
            yield
        finally:
            machine.current.pop()
            machine.capturing = None
        recorder.end_of_capture(graph.capture)

    return {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: machine.capturing is not None,
    }
