"""The sides of the step: the engine and its peers, by their names in tables and in `--peers`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from engine.errors import UserError
from engine.models.families import family_of
from rankfold.benchmarking.engine_side import EngineSide
from rankfold.benchmarking.machine import choose_device, set_up
from rankfold.benchmarking.model import Side, draw_batches, hf_config
from rankfold.benchmarking.options import (
    BITSANDBYTES,
    MERGE_AWARE,
    PADDED,
    WITHOUT_PEFT,
    ModelOptions,
    chosen_names,
    method_of,
)
from rankfold.benchmarking.peak_memory import peak_above_now
from rankfold.benchmarking.peers import Peers, find_peers
from rankfold.benchmarking.peft_side import (
    BitsandbytesSide,
    CheckpointingSide,
    ExpertLoopSide,
    ExpertsSide,
    FullSide,
    LigerSide,
    PaddedSide,
    PeftSide,
)
from rankfold.benchmarking.processes import caches_in, in_new_process_with
from rankfold.benchmarking.timing import wait_for

_MEMORY_STEPS = 3
ENGINE, PEER, BESIDE = "engine", "transformers + PEFT", "engine, adapters beside the base"


class SideKind(NamedTuple):
    """A side's name in tables, and its constructor."""

    name: str
    build: Callable[[ModelOptions, torch.device], Side]
    keeps_freed_memory: bool = False
    """Whether its process asks the C allocator to keep freed memory, as the engine's launcher does on a CPU."""


PEER_KINDS = {
    "peft": SideKind(PEER, PeftSide),
    "peft-kept-memory": SideKind(f"{PEER}, freed memory kept", PeftSide, keeps_freed_memory=True),
    PADDED: SideKind(f"{PEER}, padded", PaddedSide),
    BITSANDBYTES: SideKind(f"{PEER} + bitsandbytes", BitsandbytesSide),
    "transformers": SideKind("transformers", FullSide),
    "transformers-kept-memory": SideKind("transformers, freed memory kept", FullSide, keeps_freed_memory=True),
    "peft-checkpointing": SideKind(f"{PEER}, checkpointing", CheckpointingSide),
    "liger": SideKind(f"{PEER} + Liger", LigerSide),
    "peft-experts": SideKind(PEER, ExpertsSide),
    "peft-experts-kept-memory": SideKind(f"{PEER}, freed memory kept", ExpertsSide, keeps_freed_memory=True),
    "peft-experts-loop": SideKind(f"{PEER}, loop over experts", ExpertLoopSide, keeps_freed_memory=True),
}
"""Name that `--peers` knows -> the peer."""


def find_sides(options: ModelOptions, device: torch.device) -> tuple[dict[str, SideKind], Peers]:
    """Returns the engine and the peers of this section that can run here, by name in tables; and those that cannot.

    Raises:
        UserError: the sides would have other adapters.
    """
    family, _ = family_of(hf_config(options), options.implementation)
    if family.fused:
        raise UserError(
            f"--model-type {options.model_type} stores several linears as one, on which PEFT would put one adapter and "
            "the engine's side one on each: choose another type, or add --implementation adopted."
        )
    peers = find_peers(options.PEERS, chosen_names(options.peers, options.PEERS, "peers"), device)
    if options.model_type != "llama":
        peers = peers.without("liger", "here for a Llama alone")
    for name in options.PEERS:
        if (why := _unfit(name, options)) is not None:
            peers = peers.without(name, why)
    kinds = [SideKind(ENGINE, EngineSide, keeps_freed_memory=True)]
    if method_of(options) == MERGE_AWARE:
        kinds.append(SideKind(BESIDE, _beside, keeps_freed_memory=True))
    kinds += [*(PEER_KINDS[name] for name in options.PEERS if name in peers)]
    return {kind.name: kind for kind in kinds}, peers


def _beside(options: ModelOptions, device: torch.device) -> Side:
    """Returns the engine's side with adapters beside the base, for the cost of merging them into it."""
    return EngineSide(replace(options, method="lora"), device)


def _unfit(name: str, options: ModelOptions) -> str | None:
    """Returns why a peer would compute something else than the engine's side; None where it would not."""
    if (name == PADDED) != (options.documents > 1):
        return "for packed rows alone" if name == PADDED else "does not pack rows"
    if (name in WITHOUT_PEFT) != (method_of(options) == "full"):
        return "for --method full" if name in WITHOUT_PEFT else "trains adapters"
    if (name == BITSANDBYTES) != (options.base_dtype != "none"):
        return "for --base-dtype nf4" if name == BITSANDBYTES else "keeps weights as they are"
    return None


class Alone(NamedTuple):
    """The figures of a side's first steps in its own process.

    Args:
        peak: bytes above the loaded model: optimizer, gradients, activations, buffers; None where not measured.
        first_seconds: of the first step, with nothing compiled before.
        share: of the GPU's memory that is taken afterwards, the allocator's cache included; None on a CPU.
    """

    peak: int | None
    first_seconds: float
    share: float | None


def steps_alone(name: str, options: ModelOptions) -> Alone:
    """Takes a side's first steps in a new process, with empty caches of compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        return in_new_process_with(caches_in(Path(folder)), _first_steps, name, options)


def _first_steps(name: str, options: ModelOptions) -> Alone:
    device = choose_device(options.device)
    kind = find_sides(options, device)[0][name]
    set_up(options, keeps_freed_memory=kind.keeps_freed_memory)
    side = kind.build(options, device)
    batches = draw_batches(options, device, _MEMORY_STEPS)
    if device.type == "cuda":
        square = torch.randn(1024, 1024, device=device)
        square @ square  # the library's own start is not part of the step
    seconds = []

    def work() -> None:
        side.prepare()
        for ids in batches:
            wait_for(device)
            start = time.perf_counter()
            side.step(ids)
            wait_for(device)
            seconds.append(time.perf_counter() - start)

    peak = peak_above_now(work, device)
    return Alone(peak, seconds[0], _share_taken(device))


def _share_taken(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return 1 - free / total
