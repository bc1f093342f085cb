"""Begins a system description for a submission with what this machine tells of itself.

    python system.py --org ORG --name SYSTEM --out SYSTEM.json

What it cannot know (interconnects, storage, cooling) is left as "" to be filled in by hand.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

FIELDS = [
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
    "cooling",
    "hw_notes",
    "sw_notes",
]
STATUSES = ("Available on-premise", "Available cloud", "Research, Development, or Internal (RDI)", "Preview")


def processors() -> dict[str, str]:
    """Model, sockets, cores of a socket and threads of this machine, where the system tells."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    blocks = [dict(_pair(line) for line in block.splitlines() if ":" in line) for block in text.split("\n\n") if block]
    first = blocks[0] if blocks else {}
    return {
        "host_processors_per_node": str(len({block.get("physical id", "0") for block in blocks}) or ""),
        "host_processor_model_name": first.get("model name", platform.processor()),
        "host_processor_core_count": first.get("cpu cores", ""),
        "host_processor_vcpu_count": str(len(blocks) or ""),
    }


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def memory() -> str:
    """Memory of this machine."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return ""
    kilobytes = int(path.read_text(encoding="utf-8").split()[1])
    return f"{round(kilobytes / 2**20)} GiB"


def accelerators() -> dict[str, str]:
    """This machine's GPUs, which are taken to be alike."""
    count = torch.cuda.device_count()
    if not count:
        return {"accelerators_per_node": "0", "accelerator_model_name": "N/A", "accelerator_memory_capacity": "N/A"}
    first = torch.cuda.get_device_properties(0)
    return {
        "accelerators_per_node": str(count),
        "accelerator_model_name": first.name,
        "accelerator_memory_capacity": f"{round(first.total_memory / 2**30)} GiB",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Begin a system description for an MLPerf submission.")
    parser.add_argument("--org", required=True)
    parser.add_argument("--name", required=True, help="of the system, as --platform of the runs")
    parser.add_argument("--division", choices=("closed", "open"), default="closed")
    parser.add_argument("--status", choices=STATUSES, default=STATUSES[0])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    described = {
        "submitter": options.org,
        "division": options.division,
        "status": options.status,
        "system_name": options.name,
        "number_of_nodes": str(options.nodes),
        **processors(),
        "host_memory_capacity": memory(),
        **accelerators(),
        "framework": f"PyTorch {torch.__version__}",
        "other_software_stack": f"CUDA {torch.version.cuda}" if torch.version.cuda else "",
        "operating_system": f"{platform.system()} {platform.release()}",
        **dict.fromkeys(FIELDS, ""),
    }
    options.out.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    print(f"{options.out}: complete the fields that are empty")


if __name__ == "__main__":
    main()
