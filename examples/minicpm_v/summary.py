"""The table at the end: what trained, what it learnt, and what the exports hold.

Usage: python summary.py OUT_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors import safe_open


def changed(before: Path, after: Path) -> list[str]:
    """Modules of the model, each once, whose weights a merge has changed."""
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        assert set(old.keys()) == set(new.keys())
        names = [name for name in old.keys() if not old.get_tensor(name).equal(new.get_tensor(name))]  # noqa: SIM118
    kinds = [name.removeprefix("llm.model.") for name in names]
    return sorted({kind.split(".")[3] if kind.startswith("layers") else kind.split(".")[0] for kind in kinds})


def table(out: Path) -> list[tuple[str, str]]:
    """The rows."""
    records = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    settings = json.loads((out / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    merged = next((out / "merged").glob("*.safetensors"))
    first, last = min(losses), max(losses)
    return [
        ("training loss", f"{losses[first]:.3f} (step {first}) -> {losses[last]:.3f} (step {last})"),
        ("loss on held-out images", " -> ".join(f"{loss:.3f}" for loss in (held_out[0], held_out[-1]))),
        ("adapter for PEFT", f"rank {settings['r']}, with {', '.join(settings['modules_to_save'])} in full"),
        ("changed in the merged model", ", ".join(changed(out / "model/model.safetensors", merged))),
    ]


def main() -> None:
    out = Path(sys.argv[1])
    print()
    for name, value in table(out):
        print(f"  {name:<34}{value}")


if __name__ == "__main__":
    main()
