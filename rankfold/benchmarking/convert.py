"""Section `convert`: the conversion commands on a synthetic checkpoint, beside `cp` of the same bytes.

Every command is a separate process, as a user starts it, timed from its start to its end, with the model's files
evicted from the page cache beforehand; so is `cp -r` followed by `sync` of the copy, right before it. Its peak of
anonymous memory is the largest RssAnon that /proc showed. The stock library compares the output with
the input.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import UserError
from engine.files import platforms
from rankfold.benchmarking.machine import describe
from rankfold.benchmarking.sections import ConvertOptions
from rankfold.benchmarking.table import Table, progress

_SHARD_BYTES = 1 << 30
_POLL_SECONDS = 0.02
_LINEARS = {
    "self_attn.q_proj": ("hidden", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "hidden"),
    "mlp.gate_proj": ("mlp", "hidden"),
    "mlp.up_proj": ("mlp", "hidden"),
    "mlp.down_proj": ("hidden", "mlp"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One command: seconds from start to end, peak RssAnon in bytes, and its output."""

    seconds: float
    peak: int
    output: str


def run(options: ConvertOptions) -> Table:
    """Measures import, reshard, export, merge and a kill.

    Raises:
        UserError: the folder cannot be used, or there is no /proc.
    """
    if not Path("/proc/self/status").is_file():
        raise UserError("the convert section reads /proc, which this system does not have: run it on Linux.")
    with _work_folder(options.folder) as folder:
        progress("convert", f"a checkpoint of {options.gb:g} GB in {folder}")
        base = _make_model(folder / "hf", options)
        adapter = _make_adapter(folder / "adapter", base, options)
        rows, data = _measure_all(folder, base, adapter)
    size = data["bytes"] / 1e9
    return Table(
        title=f"Conversions of a {size:.1f} GB bfloat16 checkpoint beside cp and sync of the same folder",
        columns=("", "s", "MB/s", "cp MB/s", "over cp", "CPU s", "cp CPU s", "peak RssAnon MiB"),
        rows=tuple(rows),
        findings=(
            "From the start of the process to its end; files read were not in the system's memory. CPU seconds are "
            "user and system time.",
            f"Load of the machine (processes that want a processor, a minute's mean): {data['load'][0]:.1f} before the "
            f"first command, {data['load'][1]:.1f} after the last.",
            f"Killed by SIGKILL with {data['killed_at'] / 1e9:.1f} GB written; the second call kept "
            f"{data['kept_text']}, took {data['resumed_seconds']:.1f} s, and gave the same bytes.",
            "The export gave back the tensors of the first folder, bit for bit, read by the stock library.",
        ),
        machine=describe(torch.device("cpu"), ("safetensors",)),
        data={"section": "convert", "options": asdict(options), **data},
    )


@contextmanager
def _work_folder(where: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=where or None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_all(folder: Path, base: Path, adapter: Path) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
    rows: list[tuple[str, ...]] = []
    samples: dict[str, dict[str, float]] = {}
    total = _weight_bytes(base)

    def measure(title: str, source: Path, out: Path, *command: object) -> None:
        before = _cpu_seconds()
        copied = _copy(source, folder / "copy")
        between = _cpu_seconds()
        progress("convert", f"{title}: cp took {copied:.1f} s")
        _forget(source)
        done = _convert(*command, "--out", out)
        cpu = (_cpu_seconds() - between, between - before)
        progress("convert", f"{title}: {done.seconds:.1f} s; {done.output.strip()}")
        speed, limit = total / 1e6 / done.seconds, total / 1e6 / copied
        cpu_used, cp_used = cpu
        samples[title] = {
            "seconds": done.seconds,
            "cp_seconds": copied,
            "peak": done.peak,
            "cpu": cpu_used,
            "cp_cpu": cp_used,
        }
        ratio = f"{speed / limit:.2f}"
        cells = (f"{done.seconds:.1f}", f"{speed:.0f}", f"{limit:.0f}", ratio, f"{cpu_used:.1f}", f"{cp_used:.1f}")
        rows.append((title, *cells, f"{done.peak / 2**20:.0f}"))

    load = [os.getloadavg()[0]]
    one, four, two, back = (folder / name for name in ("tp1", "tp4", "tp2", "back"))
    measure("import to TP1", base, one, "import", "--source", base)
    data = _kill_and_go_on(folder, base, one)
    measure("reshard TP1 to TP4", one, four, "reshard", "--source", one, "--tensor", 4)
    shutil.rmtree(one)
    measure("reshard TP4 to TP2", four, two, "reshard", "--source", four, "--tensor", 2)
    shutil.rmtree(four)
    measure("export TP2", two, back, "export", "--source", two, "--format", "hf", "--no-proof")
    _assert_same(base, back)
    shutil.rmtree(two)
    shutil.rmtree(back)
    merged = folder / "merged"
    measure("merge", base, merged, "merge", "--base", base, "--adapter", adapter, "--no-proof")
    load.append(os.getloadavg()[0])
    return rows, {"bytes": total, "samples": samples, "load": load, **data}


def _cpu_seconds() -> float:
    """Returns user and system time of the processes that were started here and have ended."""
    used = platforms.resource.getrusage(platforms.resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _copy(source: Path, target: Path) -> float:
    """Copies a folder by `cp -r` and `sync`, and returns the seconds."""
    _forget(source)
    begin = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    seconds = time.monotonic() - begin
    shutil.rmtree(target)
    return seconds


def _forget(folder: Path) -> None:
    """Drops the files of a folder from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _start(*command: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [sys.executable, "-m", "rankfold", "convert", *map(str, command)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


def _convert(*command: object, stop: Callable[[], bool] | None = None) -> Measured:
    """Runs the tool and samples its memory; kills it once `stop` says so."""
    begin, peak = time.monotonic(), 0
    process = _start(*command)
    while process.poll() is None:
        peak = max(peak, _anonymous(process.pid))
        if stop is not None and stop():
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(_POLL_SECONDS)
    output = process.communicate()[0]
    seconds = time.monotonic() - begin
    if process.returncode not in (0, -signal.SIGKILL):
        raise UserError(
            f"rankfold convert {command[0]} ended with status {process.returncode}: run it alone to see why."
        )
    return Measured(seconds=seconds, peak=peak, output=output)


def _anonymous(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"RssAnon:\s+(\d+)", text)
    return int(found[1]) * 1024 if found else 0


def _kill_and_go_on(folder: Path, base: Path, whole: Path) -> dict[str, Any]:
    """Kills an import when half of it is written, and lets a second call finish it."""
    out, partial = folder / "again", folder / ".again.partial"
    half = _weight_bytes(base) // 2

    def written() -> int:
        return sum(path.stat().st_blocks * 512 for path in partial.iterdir()) if partial.is_dir() else 0

    _convert("import", "--source", base, "--out", out, stop=lambda: written() >= half)
    killed_at = written()
    assert not out.exists() and killed_at >= half
    done = _convert("import", "--source", base, "--out", out)
    kept = re.search(r"([\d.]+ \w+) of them by an earlier call", done.output)
    if kept is None:
        raise UserError("the second import kept nothing of the killed one: it should have resumed from it.")
    for path in whole.glob("*.safetensors"):
        subprocess.run(["cmp", str(path), str(out / path.name)], check=True)
    shutil.rmtree(out)
    return {"killed_at": killed_at, "kept_text": kept[1], "resumed_seconds": done.seconds}


def _assert_same(one: Path, other: Path) -> None:
    places = [_places(folder) for folder in (one, other)]
    assert places[0].keys() == places[1].keys()
    for name, path in places[0].items():
        with safe_open(path, "pt") as first, safe_open(places[1][name], "pt") as second:
            assert torch.equal(first.get_tensor(name), second.get_tensor(name)), name


def _places(folder: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _make_model(folder: Path, options: ConvertOptions) -> Path:
    """Writes a Llama of about `gb` with random weights, in shards, by the stock library."""
    folder.mkdir()
    sizes = {"hidden": options.hidden, "kv": options.hidden // 4, "mlp": options.intermediate}
    shapes = {name: (sizes[rows], sizes[columns]) for name, (rows, columns) in _LINEARS.items()}
    ends = {
        "model.embed_tokens.weight": (options.vocab, options.hidden),
        "lm_head.weight": (options.vocab, options.hidden),
    }
    of_layer = 2 * sum(rows * columns for rows, columns in shapes.values())
    layers = max(1, round((options.gb * 1e9 - 4 * options.vocab * options.hidden) / of_layer))
    declared: dict[str, tuple[int, ...]] = {**ends, "model.norm.weight": (options.hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        declared |= {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
        declared |= {
            f"{prefix}.{name}.weight": (options.hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": options.hidden,
        "intermediate_size": options.intermediate, "num_hidden_layers": layers, "vocab_size": options.vocab,
        "num_attention_heads": options.hidden // 128, "num_key_value_heads": options.hidden // 512, "head_dim": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in declared.items():
        if 2 * sum(torch.Size(each).numel() for each in shards[-1].values()) > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _filled(noise, shape, number + place) for place, (name, shape) in enumerate(shard.items())}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _filled(noise: Tensor, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns random values, drawn once and shifted, because drawing gigabytes takes minutes."""
    count = torch.Size(shape).numel()
    repeated = noise.roll(seed * 9973).repeat(-(-count // noise.numel()))
    return repeated[:count].reshape(shape).contiguous()


def _make_adapter(folder: Path, base: Path, options: ConvertOptions) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, path in _places(base).items():
        module = name.removesuffix(".weight")
        if module.partition("layers.")[2].partition(".")[2] not in _LINEARS:
            continue
        with safe_open(path, "pt") as file:
            rows, columns = file.get_slice(name).get_shape()
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(options.rank, columns, generator=generator) / columns**0.5
        tensors[f"{key}.lora_B.weight"] = torch.randn(rows, options.rank, generator=generator) * 1e-3
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": options.rank, "lora_alpha": 2 * options.rank,
        "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(name.split(".")[1] for name in _LINEARS),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
