"""Sections of tools/benchmark.py and what they share: options, timing, memory, the machine, the table."""
