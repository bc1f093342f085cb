"""The files of Triton kernels, in an order in which none is imported before what it is made of."""

from __future__ import annotations

KERNELS = (
    "dropout",
    "rows",
    "grouped",
    "grouped_factors",
    "partial_sums",
    "lora",
    "output_gradients",
    "rmsnorm",
    "swiglu",
    "rope",
    "head_norm",
    "cross_entropy",
    "quantize",
    "formats",
    "merged_formats",
    "coded_rows",
    "inputs",
    "paged_attention",
    "sampling",
    "chunks",
    "gated_norm",
    "short_conv",
    "delta",
    "delta_gradients",
    "delta_channels",
    "delta_channel_gradients",
    "state_space",
    "state_steps",
)
