"""Captures work on the device and replays it, behind a protocol of the operations that training and generation need.

Capturing runs a function once while its launches are recorded instead of carried out: device memory stays as it is, and
the function's work on the host happens once. Replaying carries the launches out again, on the same addresses.

Everything of a graphed run is launched on the stream it is captured on, the steps before the capture and those beside
the graph too. Autograd's nodes remember the stream they were made on, and a parameter's node lives as long as anything
refers to it: one that was made on another stream would make the capture wait for that stream, which is not part of it.
That holds also for gradients that autograd never sees, as those of this engine's sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]
Captured = Callable[[], tuple[Tensor, ...]]


class Replayable(Protocol):
    """A captured function.

    `outputs` are the tensors that the function returned while it was captured; a replay writes the same tensors again.
    """

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Launches it again on the current stream, which is that of `Capture.running`."""


class Capture(Protocol):
    """A way to capture."""

    def running(self) -> AbstractContextManager[None]:
        """Makes the stream of captures the current one; to be entered around all work of a capturing run."""

    def new_pool(self) -> Any:
        """Returns memory for captures to share that are replayed in the order in which they were captured."""

    def capture(self, function: Captured, pool: Any) -> Replayable:
        """Runs `function` once without effect on the device; inside `running`, between steps.

        Raises:
            UserError: it launches what no graph takes.
        """


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        self._graph.replay()


class CudaCapture:
    """CUDA graphs of torch.

    Other threads may go on meanwhile: the loader's pin memory, autograd's launch the backward pass that is captured.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Captured, pool: Any) -> Replayable:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = function()
        except RuntimeError as error:
            if (sentence := _refusal(error)) is None:
                raise
            raise UserError(sentence) from error
        return _CudaGraph(graph, outputs)


def _refusal(error: BaseException) -> str | None:
    """Returns the sentence where CUDA refuses to capture; None for any other error.

    The end of a capture that is broken raises too, so the error that broke it is the first of the chain. Work of the
    host has been done halfway, so that going on without a graph would need the state before.
    """
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    if not any("captur" in str(one) for one in chain):
        return None
    frames = [frame for frame in extract_tb(chain[-1].__traceback__) if _ROOT in Path(frame.filename).parents]
    place = f", at {Path(frames[-1].filename).relative_to(_ROOT)}:{frames[-1].lineno}" if frames else ""
    return (
        f"a CUDA graph cannot be captured here ({str(chain[-1]).splitlines()[0]}{place}): set memory.cuda_graph, or "
        "where completions are sampled rollout.cuda_graph, to none, or give rankfold generate --cuda-graph none."
    )
