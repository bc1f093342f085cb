"""The sections of `rankfold benchmark` and their common parts: options, timing, memory, the machine, the table."""
