"""What each instruction does: a file for a group of families, each family a function that decodes one instruction.

`Steps` decodes those of a program. A family of a new instruction is entered by `table.family`, and has a test against
numpy in tests/ptx/test_instructions.py.
"""

from tests.ptx.instructions import arithmetic, conversions, memory, moves, products, warps
from tests.ptx.instructions.table import Steps

__all__ = ["Steps", "arithmetic", "conversions", "memory", "moves", "products", "warps"]
