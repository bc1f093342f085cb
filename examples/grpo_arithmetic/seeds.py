"""Several seeds of the example together: a table as JSON, and a chart of the share of right answers by step.

python examples/grpo_arithmetic/seeds.py OUT_DIR

OUT_DIR has the folders seed_1, seed_2, ... of seeds.sh; seeds.json and seeds.svg are written beside them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from examples.grpo_arithmetic.summary import ends

FIGURE = "rewards/exact_match/mean"
SMOOTHED = 5
"""Steps of the moving mean that is drawn."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 260, 44, 14, 12, 34


def read(folder: Path) -> dict[int, list[dict[str, float]]]:
    """Returns seed -> the records of its training steps."""
    found = {}
    for run in sorted(folder.glob("seed_*"), key=lambda one: int(one.name.removeprefix("seed_"))):
        lines = (run / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [record for record in map(json.loads, lines) if "reward" in record]
        found[int(run.name.removeprefix("seed_"))] = steps
    return found


def table(runs: dict[int, list[dict[str, float]]]) -> dict[str, object]:
    """Returns the table, without the machine."""
    rows = []
    for seed, steps in runs.items():
        (reward_first, reward_last), (right_first, right_last) = ends(steps, "reward"), ends(steps, FIGURE)
        rows.append({
            "seed": seed, "reward, first steps": round(reward_first, 4), "reward, last steps": round(reward_last, 4),
            "right, first steps": round(right_first, 4), "right, last steps": round(right_last, 4),
        })  # fmt: skip
    last = [float(row["right, last steps"]) for row in rows]
    first = [float(row["right, first steps"]) for row in rows]
    return {
        "title": f"GRPO on sums, {len(rows)} seeds",
        "command": "bash examples/grpo_arithmetic/seeds.sh OUT_DIR",
        "columns": list(rows[0]),
        "rows": rows,
        "findings": [
            f"The share of right answers rose from {mean(first):.2f} ({min(first):.2f} to {max(first):.2f}) in the "
            f"first tenth of the steps to {mean(last):.2f} ({min(last):.2f} to {max(last):.2f}) in the last."
        ],
    }


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and those just before it."""
    return [mean(values[max(0, place - SMOOTHED + 1) : place + 1]) for place in range(len(values))]


def chart(runs: dict[int, list[dict[str, float]]]) -> str:
    """Returns an SVG: a thin line for each seed, and a thick one for their mean."""
    curves = [smoothed([step[FIGURE] for step in steps]) for steps in runs.values()]
    steps = min(map(len, curves))
    middle = [mean(curve[place] for curve in curves) for place in range(steps)]

    def line(values: Sequence[float], style: str) -> str:
        across, down = (WIDTH - LEFT - RIGHT) / (steps - 1), HEIGHT - TOP - BOTTOM
        points = " ".join(
            f"{LEFT + across * place:.1f},{TOP + down * (1 - value):.1f}" for place, value in enumerate(values[:steps])
        )
        return f'<polyline fill="none" {style} points="{points}"/>'

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in range(0, steps + 1, max(1, steps // 5)):
        x = LEFT + (WIDTH - LEFT - RIGHT) * max(tick - 1, 0) / (steps - 1)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{max(tick, 1)}</text>')
    parts += [line(curve, 'stroke="#2f6fb5" stroke-opacity="0.35"') for curve in curves]
    parts.append(line(middle, 'stroke="#1c3f6b" stroke-width="2.5"'))
    words = f"share of right answers by step, {len(curves)} seeds and their mean ({SMOOTHED} steps smoothed)"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">{words}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11" fill="#5f5f5a">\n{body}\n</svg>\n'
    )


def main(folder: Path) -> None:
    from rankfold.benchmarking.machine import choose_device, describe

    runs = read(folder)
    facts = describe(choose_device("cpu"), ())
    whole = table(runs) | {
        "date": facts["date"],
        "machine": {"CPU": facts["CPU"], "threads": 1},
        "versions": {name: facts[name] for name in ("Python", "torch")},
    }
    (folder / "seeds.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / "seeds.svg").write_text(chart(runs), encoding="utf-8")
    print(whole["findings"][0])  # type: ignore[index]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
