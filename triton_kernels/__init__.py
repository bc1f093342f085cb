"""Triton kernels for GPUs, imported as `engine.kernels.triton`. Each has its plain-torch specification in
`engine.kernels`; nothing here communicates."""
