"""What of the compiled kernels was executed: the opcodes, and the instructions of each kernel that no test reached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.ptx.instructions.table import families

if TYPE_CHECKING:
    from tests.ptx.launching import Launches

_COLUMNS = 4


def report(launches: Launches) -> Iterator[str]:
    """Yields lines of text."""
    opcodes = launches.opcodes()
    yield (
        f"PTX of sm_{launches.arch}: {launches.count} launches of {len(launches.kernels)} compiled kernels, "
        f"{opcodes.total()} instructions of {len(opcodes)} kinds"
    )
    known = families()
    missed = sorted(known - {name.partition(".")[0] for name in opcodes})
    yield f"  of {len(known)} families of instructions all" + (
        f" but {len(missed)}: {', '.join(missed)}" if missed else ""
    )
    cells = [f"{name} {times}" for name, times in sorted(opcodes.items())]
    width = max(map(len, cells), default=0) + 2
    for start in range(0, len(cells), _COLUMNS):
        yield "  " + "".join(cell.ljust(width) for cell in cells[start : start + _COLUMNS]).rstrip()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for _, kernel in launches.kernels.values():
        for at, total in enumerate((1, len(kernel.executed), len(kernel.program.instructions))):
            counts[kernel.program.name][at] += total
    for name, (variants, reached, total) in sorted(counts.items()):
        yield f"  {name}: {variants} variants, {reached} of {total} instructions reached"
