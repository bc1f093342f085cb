"""Turns the options of `rankfold plan memory` into a search, and searches."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.model_folder import open_model
from engine.choices import MERGED_DTYPES, RECOMPUTE_LEVELS, SCALED_DTYPES
from engine.config.data import DataOptions
from engine.config.hub import instead_of
from engine.config.lora import LoraOptions
from engine.config.matching import BLOCK_LINEARS
from engine.config.memory import CudaGraph, MemoryOptions
from engine.config.model import ModelOptions
from engine.config.objective import ObjectiveOptions
from engine.config.rollout import RolloutOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.errors import UserError
from engine.files.documents import read_json
from engine.files.refusals import shown
from engine.layers.recompute import Level
from engine.models.dtypes import STORED_DTYPES
from engine.models.families import family_of
from engine.planning.machine import MEASURED_SPEEDS, Machine, machine_for
from engine.planning.predict import usual_tiles, workload_of
from engine.planning.rank_layout import Layout, Routing, Workload
from engine.planning.search import SearchRequest, SearchResult, search
from engine.planning.stored_formats import stored_formats
from engine.sentences import listed
from engine.telemetry.log import Log
from engine.telemetry.process_memory import total_memory_bytes
from engine.telemetry.progress import Progress
from engine.training.module_plan import block_linears, decoder_in_training, training_plan
from engine.training.prefixes import choose_sharing

GIB = 2**30
PLACES = ("weights", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The question and the layouts found.

    Args:
        hf_config: the model's config.json.
        folder: of the model, where a folder was given.
    """

    hf_config: dict[str, Any]
    folder: str | None
    config: RunConfig
    workload: Workload
    machine: Machine
    devices: int
    gpu_memory: float
    capacity: float
    host_memory: float | None
    found: SearchResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """The means that a search may use to make room.

    Args:
        recompute: levels.
        offload: of PLACES.
        stored: of STORED_DTYPES.
        routing: under which it must fit.
    """

    recompute: tuple[Level, ...] = RECOMPUTE_LEVELS
    offload: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    routing: Routing = "balanced"


def ask(arguments: argparse.Namespace) -> Answer:
    """Reads the model and searches.

    Args:
        arguments: see rankfold.planning.memory.

    Raises:
        UserError: options that do not go together, or a model that cannot be read.
    """
    for name in ("gpus", "seq_length", "micro_batch", "top"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: give at least 1.")
    for name in ("tiles", "beside"):
        if getattr(arguments, name) < 0:
            raise UserError(f"--{name} is {getattr(arguments, name)}: give 0 or more.")
    if arguments.host_memory is not None and arguments.host_memory <= 0:
        raise UserError(f"--host-memory is {arguments.host_memory:g}: give a memory above 0 GiB, or leave it out.")
    if not 0 < arguments.gpu_memory < float("inf") or not 0 <= arguments.reserve < 100:
        raise UserError(
            f"--gpu-memory is {arguments.gpu_memory:g} and --reserve is {arguments.reserve:g}: give a memory above 0 "
            "GiB and a reserve from 0 to below 100 percent."
        )
    if arguments.merge_aware and arguments.base_dtype not in MERGED_DTYPES:
        raise UserError(
            f"--merge-aware is given and --base-dtype is {arguments.base_dtype or 'not'}, but only weights in few bits "
            f"are merged while they train: give --base-dtype as one of {listed(MERGED_DTYPES)}."
        )
    if arguments.base_products == "codes" and (arguments.base_dtype not in SCALED_DTYPES or arguments.merge_aware):
        raise UserError(
            f"--base-products is codes, which needs --base-dtype as one of {listed(SCALED_DTYPES)}, without "
            "--merge-aware: give such a base, or leave --base-products out."
        )
    document, row = arguments.document_length, arguments.seq_length
    if document is not None and not 1 <= document <= row:
        raise UserError(
            f"--document-length is {document}, but rows have {row} tokens: give 1 to {row}, or a larger --seq-length."
        )
    hf_config, folder = read_config(arguments.model)
    family, text = family_of(hf_config)
    return answer_for(
        hf_config,
        config_of(arguments, folder or arguments.model, block_linears(family.config_from_hf(text))),
        folder=folder,
        devices=arguments.gpus,
        gpu_memory=arguments.gpu_memory,
        reserve=arguments.reserve,
        host_memory=arguments.host_memory or total_memory_bytes() / GIB,
        machine=arguments.machine,
        speeds=arguments.speeds,
        allowed=Allowed(
            recompute=_levels(arguments.recompute),
            offload=_chosen("--offload", arguments.offload, PLACES),
            stored=_chosen("--activation-dtype", arguments.activation_dtype, tuple(STORED_DTYPES)),
            routing=arguments.routing,
        ),
        beside=int(arguments.beside),
        tiles_per_row=arguments.tiles,
        document_length=arguments.document_length,
        prompt_length=arguments.prompt_length,
    )


EASIER = (
    {"base_dtype": "stored"},
    {"base_dtype": "fp8"},
    {"base_dtype": "int8"},
    {"base_dtype": "nf4"},
    {"base_dtype": "int4"},
    {"offload": "weights"},
    {"offload": "weights,optimizer"},
    {"offload": "weights,optimizer,activations", "activation_dtype": "float8"},
    {"base_dtype": "nf4", "offload": "weights,optimizer,activations", "activation_dtype": "float8"},
)
"""Options to add to a question without a fitting layout, in order of their effect: fewer bits first, then host
memory."""
_ENOUGH = 3


def easier(arguments: argparse.Namespace) -> list[tuple[dict[str, str], Answer]]:
    """Returns options that make something fit, with the answers under them: the first few."""
    found: list[tuple[dict[str, str], Answer]] = []
    for added in EASIER:
        if any(getattr(arguments, name) for name in added):
            continue
        try:
            answer = ask(argparse.Namespace(**{**vars(arguments), **added}))
        except UserError:  # the machine, the checkpoint or the trained parameters do not allow it
            continue
        if answer.found.fitting:
            found.append((added, answer))
        if len(found) == _ENOUGH:
            break
    return found


def answer_for(
    hf_config: dict[str, Any],
    config: RunConfig,
    *,
    devices: int,
    gpu_memory: float,
    reserve: float,
    host_memory: float | None = None,
    folder: str | None = None,
    machine: str | None = None,
    speeds: str | None = None,
    allowed: Allowed | None = None,
    beside: int = 0,
    tiles_per_row: int = 1,
    document_length: int | None = None,
    prompt_length: int | None = None,
    node_size: int | None = None,
    tries: Callable[[Layout], bool] | None = None,
) -> Answer:
    """Searches all layouts of `devices`.

    Args:
        hf_config: the model's config.json.
        config: the run; its layout is not read.
        gpu_memory: GiB of a device.
        reserve: percent of it that stays free.
        host_memory: GiB of a machine, shared by the devices in it; None for no limit.
        machine: name of the speeds to assume; None for those of a GPU with that memory.
        speeds: file of measured ones; None for none.
        allowed: the measures that may be tried to make room.
        beside: frozen parameters of other parts than the decoder.
        tiles_per_row: tiles of images in a row, for a model with vision.
        document_length: tokens of the documents of a row; None for the objective's own.
        prompt_length: tokens of a prompt, of an objective that samples, None for what completions leave of a row; of
            answers that are compared, tokens of their question, None for none that both have in common.
        node_size: devices of a machine; None for those that the speeds are of.
        tries: whether a layout is tried; None for all.

    Raises:
        UserError: the model or a name in the configuration is not known, or weights that are to stay as they are
            stored are in no format that is read.
    """
    chosen = machine_of(machine, gpu_memory, speeds)
    if node_size is not None:
        chosen = replace(chosen, node_size=node_size)
    workload = _workload(hf_config, config, "cpu" if machine == "cpu" else "cuda", prompt_length)
    longest = workload.longest_document if document_length is None else document_length
    tiles = usual_tiles(workload.decoder, config.train.micro_batch_size * tiles_per_row)
    workload = replace(workload, beside=beside, longest_document=longest, tiles=tiles)
    usable = GIB * (1 - reserve / 100)
    capacity = gpu_memory * usable
    allowed = allowed or Allowed()
    wanted = SearchRequest(
        config=config,
        devices=devices,
        capacity=capacity,
        host_capacity=inf if host_memory is None else host_memory * usable / min(devices, chosen.node_size),
        recompute=allowed.recompute,
        offload=allowed.offload,
        stored=(None, *(STORED_DTYPES[name] for name in allowed.stored)),
        routing=allowed.routing,
    )
    return Answer(
        hf_config=hf_config,
        folder=folder,
        config=config,
        workload=workload,
        machine=chosen,
        devices=devices,
        gpu_memory=gpu_memory,
        capacity=capacity,
        host_memory=host_memory,
        found=search(
            wanted,
            workload,
            chosen,
            lambda places: _shown_on_a_terminal([one for one in places if tries is None or tries(one)]),
        ),
    )


def _workload(hf_config: dict[str, Any], config: RunConfig, device_type: str, prompt_length: int | None) -> Workload:
    """Returns what a run of a model trains; arguments are those of `answer_for` and of `workload_of`."""
    family, text = family_of(hf_config, config.model.implementation)
    decoder = decoder_in_training(config, family.config_from_hf(text), family.names)
    return workload_of(
        config,
        decoder,
        training_plan(config, decoder, family.names),
        device_type=device_type,
        prompt=prompt_length,
        sharing=choose_sharing(config, decoder),
        stored=stored_formats(config.model.base_dtype, hf_config, family.names),
    )


def _shown_on_a_terminal(layouts: Sequence[Layout]) -> Iterator[Layout]:
    """Passes layouts on and shows their number on a terminal; elsewhere nothing waits for the answer."""
    log = Log()
    if not log.live:
        yield from layouts
        return
    with Progress(log, "trying layouts", len(layouts), "layouts") as progress:
        for layout in layouts:
            yield layout
            progress.advance()


def read_config(path: str, option: str = "--model") -> tuple[dict[str, Any], str | None]:
    """Returns a model's config.json, and its folder where one was given.

    Args:
        path: of the folder or the file.
        option: that gave it, for a message.

    Raises:
        UserError: there is none.
    """
    place = Path(path)
    if place.is_dir():
        return open_model(place).hf_config, path
    if not place.is_file():
        advice = instead_of(path, "give a model or its config.json")
        raise UserError(f"{option} is {path}, which is neither a folder nor a file{advice}.")
    return read_json(place, "give a model's config.json as --model"), None


def config_of(arguments: argparse.Namespace, path: str, linears: tuple[str, ...] = BLOCK_LINEARS) -> RunConfig:
    """Returns the configuration that the options describe, on one rank.

    Args:
        arguments: see rankfold.planning.memory.
        path: of the model.
        linears: the targets of adapters where none are given.

    Raises:
        UserError: a value out of its range.
    """
    rows = arguments.global_batch
    if rows is None:
        rows = max(8, arguments.gpus) * arguments.micro_batch
    graph: CudaGraph = arguments.cuda_graph
    objective, rollout = ObjectiveOptions(name=arguments.objective), RolloutOptions()
    if objective.kind.samples:
        longest = arguments.completion_length or rollout.max_completion_length
        rollout = RolloutOptions(
            rewards=("exact_match",),
            slots=arguments.slots,
            num_generations=arguments.num_generations,
            max_completion_length=longest,
        )
    trainable, rank = _names(arguments.trainable), arguments.rank
    if rank is None:
        rank = 0 if "*" in trainable else 16  # where everything trains, nothing is left for adapters
    return RunConfig(
        model=ModelOptions(
            path=path,
            dtype=arguments.dtype,
            base_dtype=arguments.base_dtype,
            base_products=arguments.base_products,
            kernels=arguments.kernels,
        ),
        objective=objective,
        rollout=rollout,
        trainable=trainable,
        lora=LoraOptions(
            rank=rank,
            dropout=arguments.dropout,
            merge_aware=arguments.merge_aware,
            targets=_names(arguments.targets) or linears,
        ),
        data=DataOptions(seq_length=arguments.seq_length, packing=graph != "none"),  # which graphs need
        memory=MemoryOptions(cuda_graph=graph),
        train=TrainOptions(micro_batch_size=arguments.micro_batch, global_batch_size=rows),
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _chosen(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        if name not in known:
            raise UserError(f"{option} has {name!r}, which is not known: choose from {', '.join(known)}.")
    return tuple(name for name in known if name in names)


def _levels(text: str | None) -> tuple[Level, ...]:
    names = _names(text)
    for name in names:
        if name not in RECOMPUTE_LEVELS:
            raise UserError(
                f"--recompute has {name!r}, which is not a policy: choose from {', '.join(RECOMPUTE_LEVELS)}."
            )
    return tuple(level for level in RECOMPUTE_LEVELS if level in names) if names else RECOMPUTE_LEVELS


def machine_of(name: str | None, memory: float, speeds: str | None) -> Machine:
    """Returns the machine whose speeds are assumed.

    Args:
        name: of a preset, or "cpu", which is measured; None for a GPU with that memory.
        memory: GiB of a device.
        speeds: file of measured speeds; None for none.

    Raises:
        UserError: there is no such preset, or the file has no speeds.
    """
    if name == "cpu":
        if speeds is not None:
            raise UserError(
                f"--speeds is {speeds} and --machine is cpu, which is measured here: leave one of them out."
            )
        return measured_cpu(memory)
    machine = machine_for(name, memory)
    return machine if speeds is None else machine.with_measured(read_speeds(speeds))


def read_speeds(path: str) -> dict[str, float]:
    """Returns the speeds in the JSON file of `rankfold benchmark machine-speed`, by the names of `Machine`.

    Raises:
        UserError: it has none, or one that is no positive number.
    """
    advice = "give the --json FILE of rankfold benchmark machine-speed, run on such a GPU"
    found = read_json(Path(path), advice)
    speeds = found.get("speeds")
    if found.get("device") == "cpu":
        raise UserError(f"{shown(path)} has the speeds of a CPU: {advice}.")
    if not isinstance(speeds, dict) or not speeds:
        raise UserError(f"{shown(path)} has no measured speeds: {advice}.")
    for name, value in speeds.items():
        known = name in MEASURED_SPEEDS
        if not known or isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise UserError(f"{shown(path)} has no speed {listed([name])} that can be used: {advice}.")
    return {name: float(value) for name, value in speeds.items()}


def measured_cpu(memory: float) -> Machine:
    """Measures this machine's CPU by a product of 1024 x 1024 matrices and a copy of 64 MiB, the best of three each."""
    a, source = torch.ones(1024, 1024), torch.ones(2**24)
    target = torch.empty_like(source)
    product = min(_seconds(lambda: a @ a) for _ in range(3))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(3))
    copies = 2 * source.nbytes / copy / 1e9
    products = 2 * 1024**3 / product / 1e12
    return Machine(
        name="cpu",
        memory=memory,
        products=products,
        copies=copies,
        link=copies / 2,
        network=copies / 2,
        products_fp8=products,
        host=copies / 2,
    )


def _seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
