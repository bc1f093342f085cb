"""What GRPO did, from a run's metrics: the first and last tenth of its steps.

python examples/grpo_arithmetic/summary.py RUN_DIR/metrics.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean


def table(records: Sequence[dict[str, float]]) -> list[str]:
    """One line a figure: at the start and at the end."""
    steps = [record for record in records if "reward" in record]
    shown = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio", "uniform_groups")
    shown += ("turns/mean", "tools/call_frequency", "tools/failure_frequency")  # where the model calls tools
    names = [name for name in steps[0] if name in shown or (name.startswith("rewards/") and name.endswith("mean"))]
    lines = [f"{'':28}{'first steps':>12}{'last steps':>12}"]
    for name in names:
        first, last = ends(steps, name)
        lines.append(f"{name:28}{first:>12.4f}{last:>12.4f}")
    return lines


def ends(steps: Sequence[dict[str, float]], name: str) -> tuple[float, float]:
    """The mean of a figure over the first tenth of the steps, and over the last."""
    part = max(1, len(steps) // 10)
    first, last = (mean(float(step[name]) for step in chosen) for chosen in (steps[:part], steps[-part:]))
    return first, last


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    print("\n".join(table([json.loads(line) for line in text.splitlines()])))
