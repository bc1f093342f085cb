"""The groups of cases, and the setting that they run in."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.models.dtypes import TORCH_DTYPES
from rankfold.benchmarking.case import Case
from rankfold.benchmarking.kernels import (
    attention,
    dropout,
    formats,
    frozen,
    head_norm,
    loss,
    low_rank,
    norm,
    optimizer,
    product,
    quantize,
    rope,
    rounded,
    states,
    swiglu,
)
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.options import KernelOptions, chosen_names
from rankfold.benchmarking.peers import find_backends, find_peers

Build = Callable[[Setting], Case]
GROUPS: dict[str, tuple[str, dict[str, Build]]] = {
    "norm": ("RMSNorm", norm.CASES),
    "swiglu": ("SwiGLU", swiglu.CASES),
    "rope": ("Rotary embedding", {**rope.CASES, **head_norm.CASES}),
    "dropout": ("Dropout", dropout.CASES),
    "low-rank": ("Low-rank products", low_rank.CASES),
    "loss": ("Cross-entropy", loss.LOSS_CASES),
    "head": ("Frozen head and loss", loss.HEAD_CASES),
    "optimizer": ("AdamW", optimizer.CASES),
    "attention": ("Causal attention", attention.CASES),
    "quantize": ("Quantised weights and operands", {**quantize.CASES, **formats.CASES, **rounded.CASES}),
    "frozen": ("Frozen products on a CPU", frozen.CASES),
    "states": ("Layers with states", states.CASES),
    "product": ("Frozen product and adapters: which way is faster", product.CASES),
}
"""Name that `--only` knows -> title and cases."""


def make_setting(options: KernelOptions, device: torch.device) -> tuple[Setting, tuple[str, ...]]:
    """Returns the setting with the contestants, and sentences about those that are absent."""
    dtype = TORCH_DTYPES[options.dtype]
    backends, absent = find_backends(device, dtype, timed=options.repeats > 0)
    wanted = chosen_names(options.peers, options.PEERS, "peers")
    peers = find_peers(options.PEERS, wanted, device, compiled=options.compile)
    setting = Setting(options=options, device=device, dtype=dtype, backends=backends, peers=peers)
    return setting, (*absent, *peers.sentences())
