"""Section `experts`: the training step of a mixture of experts against transformers + PEFT and its products alone.

It is section `step` with other sides, which are built, compared and timed as there.
"""

from __future__ import annotations

from dataclasses import replace

from rankfold.benchmarking import step
from rankfold.benchmarking.options import ExpertsOptions
from rankfold.benchmarking.table import Table


def run(options: ExpertsOptions) -> Table:
    """Measures memory, checks that all sides agree, times them.

    Raises:
        UserError: a missing device.
        RuntimeError: two sides compute different things.
    """
    table = step.run(options)
    return replace(
        table,
        title=f"{table.title}; {options.experts} experts, {options.per_token} of them for a token",
        data={**table.data, "section": "experts"},
    )
