"""Exports whose linears are stored in few bits: what is rounded, how, in whose spelling, and what proves it."""
