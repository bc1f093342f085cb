"""Kernels and their plain-torch specification. Level 0: imports torch and triton only, never the engine."""
