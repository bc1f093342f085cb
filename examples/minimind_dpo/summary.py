"""What DPO did, from a run's metrics: the first and last tenth of its steps, and the held-out pairs before and after.

python examples/minimind_dpo/summary.py RUN_DIR/metrics.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

FIGURES = ("loss", "accuracy", "margin", "reward_chosen", "reward_rejected")


def table(records: Sequence[dict[str, float]]) -> list[str]:
    """One line a figure: trained pairs at the start and the end, held-out pairs before and after."""
    steps = [record for record in records if "loss" in record]
    held_out = [record for record in records if "eval_loss" in record]
    part = max(1, len(steps) // 10)
    lines = [f"{'':16}{'trained, first':>16}{'last':>10}{'held out, before':>18}{'after':>10}"]
    for name in FIGURES:
        first, last = (mean(step[name] for step in chosen) for chosen in (steps[:part], steps[-part:]))
        key = "eval_loss" if name == "loss" else name
        before, after = held_out[0][key], held_out[-1][key]
        lines.append(f"{name:16}{first:>16.4f}{last:>10.4f}{before:>18.4f}{after:>10.4f}")
    return lines


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    print("\n".join(table([json.loads(line) for line in text.splitlines()])))
