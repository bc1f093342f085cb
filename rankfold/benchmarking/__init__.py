"""Sections of rankfold benchmark and what they share: options, timing, memory, the machine, the table."""
