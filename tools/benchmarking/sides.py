"""Who takes the step: the engine and its peers, by the names that tables show and that `--peers` knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.distributed.launch import keep_freed_memory

from .engine_side import EngineSide
from .machine import choose_device
from .model import Side
from .options import ModelOptions, chosen_names
from .peers import Peers, find_peers
from .peft_side import CheckpointingSide, LigerSide, PeftSide

ENGINE, PEER = "engine", "transformers + PEFT"


class SideKind(NamedTuple):
    """A side's name in tables, and what builds it."""

    name: str
    build: Callable[[ModelOptions, torch.device], Side]


PEER_KINDS = {
    "peft": SideKind(PEER, PeftSide),
    "peft-checkpointing": SideKind(f"{PEER}, checkpointing", CheckpointingSide),
    "liger": SideKind(f"{PEER} + Liger", LigerSide),
}
"""Name that `--peers` knows -> the peer."""


def find_sides(options: ModelOptions, device: torch.device) -> tuple[dict[str, SideKind], Peers]:
    """The engine and the peers of this section that can run here, by name in tables; and who cannot."""
    peers = find_peers(options.PEERS, chosen_names(options.peers, options.PEERS, "peers"), device)
    kinds = [SideKind(ENGINE, EngineSide), *(PEER_KINDS[name] for name in options.PEERS if name in peers)]
    return {kind.name: kind for kind in kinds}, peers


def set_up(options: ModelOptions) -> torch.device:
    """Threads, allocator and device. The engine's launcher sets the allocator too; here every side profits by it."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    if device.type == "cpu":
        keep_freed_memory()
    return device
