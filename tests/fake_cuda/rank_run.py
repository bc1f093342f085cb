"""Runs a case: a rank is built, takes steps with their reports and guards, evaluates, and copies what a save writes."""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses import fake_tensor

from engine.batch import Batch
from engine.checkpoint.run.commit import owned
from engine.checkpoint.run.snapshot import Snapshot
from engine.checkpoint.tokenizer_files import BASES_OWN
from engine.config.load import parse_config
from engine.config.rules import check_config, check_world
from engine.config.run import RunConfig
from engine.data.collate import pin
from engine.data.columns import contiguous
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader, EvalLoader
from engine.data.prefixes import with_shared_prefixes
from engine.distributed.transfer_meter import METER
from engine.experts.router_load import RouterLoad
from engine.runtime.launch import Launch
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.progress import TrainProgress
from engine.training.build import Training, build_training
from engine.training.evaluate import evaluate
from engine.training.evaluations import BestLoss
from engine.training.guards.run_guards import build_guards
from engine.training.observer import LaunchedStep
from engine.training.reports.notes import RoundingNote
from engine.training.reports.observation import Observation
from engine.training.reports.step_reporter import RunClock, StepReporter
from engine.training.row_shape import shape_of_launch
from engine.training.start_model import check_model, model_source
from engine.training.state import state_contents, state_tensors
from engine.training.step import StepFigures
from engine.training.step_source import RowSource
from engine.training.warm_up import warm_up
from rankfold.planning.memory_measure import draw_batches
from tests.fake_cuda import arithmetic, cuda, exchanges, mistakes, nccl, recorder, triton_launches
from tests.fake_cuda.images import prompts_with_images, with_images
from tests.fake_cuda.layouts import CASES, Case
from tests.fake_cuda.models import LLAMA
from tests.fake_cuda.recorder import Recorder
from tests.fake_cuda.rollouts import rollout_source
from tests.fake_cuda.waits import MAY_WAIT

SILENT = Log(rank=1)


@contextmanager
def watched(device: Recorder) -> Iterator[None]:
    """Everything inside is on the device that does not exist, and watched."""
    recorder.install_reads(device)
    cuda.install(device)
    nccl.install(device)
    triton_launches.install(device)
    arithmetic.install(device)
    for switch in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, switch)(False)  # a build with CUDA asks the device whether it has them
    # real tensors of the host are what a loader's threads build
    module: Any = fake_tensor
    module.init_gpu_context = lambda device: None
    module.FakeTensorMode.avoid_device_init = True
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.autograd.set_multithreading_enabled(False), mode, device:
        yield


def run_case(name: str) -> dict[str, Any]:
    """Returns what was found in a case."""
    case, device = CASES[name], Recorder(MAY_WAIT)
    exchanges.install(device, rows_arrive=case.rows_arrive)
    with tempfile.TemporaryDirectory() as folder:
        decoding = (_generate if case.generates else _train)(case, Path(folder), device)
    gc.collect()
    return {
        "mistakes": dict(device.mistakes),
        "operations": dict(device.operations),
        "reads": dict(device.reads),
        "decoding": decoding,
        "pool bytes": device.machine.most_pooled,
        "waited": sorted(map(list, device.used)),
        "error": None,
    }


def make_mistakes() -> dict[str, Any]:
    """Returns, for each of `mistakes.py`, what is to be said of it and what was found."""
    device, found = Recorder({}), {}
    device.is_running = True
    with watched(device):
        for name, mistake in mistakes.MISTAKES.items():
            device.mistakes.clear()
            with nccl.nccl_world(1, 4):
                mistake.make(device)
            gc.collect()
            found[name] = [mistake.said, list(device.mistakes)]
    return {"made": found, "error": None}


def _config(case: Case, folder: Path) -> RunConfig:
    (folder / "config.json").write_text(
        json.dumps({**LLAMA, "num_hidden_layers": case.layers, **case.model}), encoding="utf-8"
    )
    what = ["--lora.rank", "16", "--lora.dropout", "0.1", "--guards.liveness_steps", "3"]
    if case.trains_all:
        what = ["--lora.rank", "0", "--trainable", '["*"]']
    config = parse_config(
        [
            "--model.path", str(folder), "--model.init", "random", *what, "--data.seq_length", "64",
            "--train.global_batch_size", str(case.global_batch_size), "--model.dtype", "bfloat16",
            "--guards.replicas_every", "2", "--log.peak_tflops", "100", *case.options.split(),
        ]
    )  # fmt: skip
    check_config(config)
    check_world(config, case.world)
    return config


def _train(case: Case, folder: Path, device: Recorder) -> list[dict[str, int]]:
    """The life of a run, from the build to a save."""
    config = _config(case, folder)
    launch = Launch(rank=case.rank, world_size=case.world, device=cuda.DEVICE)
    dataset, source = _dataset(config), model_source(config)
    plan = check_model(config, source.model, case.world)
    with ExitStack() as opened:
        opened.enter_context(watched(device))
        opened.enter_context(nccl.nccl_world(case.rank, case.world) if case.world > 1 else nullcontext())
        training = build_training(config, launch, source, plan, SILENT, documents_per_row=4)
        warm_up(config, launch, training, SILENT)
        reporter, guards, loader = _reporter(config, launch, training, dataset, folder)
        opened.callback(METER.stop)
        reporter.begin(0, 0)
        device.is_running = True
        take_step = training.step if training.graphs is None else training.graphs
        consumed = 0
        sampled = None
        if config.objective.name == "grpo":
            sampled = rollout_source(config, launch, training).stream(0, 0, case.steps)
        for step in range(1, case.steps + 1):
            if sampled is None:
                batches, targets = _batches(config, training, loader, consumed)
            else:
                rows = next(sampled)
                batches, targets = rows.batches, rows.targets
            reporter.before(step)
            result = take_step(batches, targets, 1e-3)
            consumed += config.train.global_batch_size
            launched = LaunchedStep(step, batches, targets, 1e-3, consumed, result, StepFigures(result))
            reporter.after(launched, rows=16, tokens=1024, figures={} if sampled is None else rows.figures)
        reporter.save(case.steps, last=True)
        reporter.finish(case.steps, consumed)
        guards._locator.locate(batches, targets, case.steps)
        _evaluate(config, launch, training, dataset, batches)
        if tensors := state_tensors(training):
            Snapshot(tensors).take(owned(tensors))
        if training.mesh.is_writer:
            state_contents(
                config,
                training,
                step=case.steps,
                consumed=consumed,
                fingerprint=None,
                data="",
                tokenizer=BASES_OWN,
                best=BestLoss(),
            )
    return []


def _dataset(config: RunConfig) -> TokenDataset:
    """Documents of 8 to 64 tokens; where beginnings are to be shared, four at a time begin alike."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(8, config.data.seq_length + 1, size=256)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    targets = np.ones(offsets[-1], dtype=bool)
    targets[offsets[:-1]] = False
    tokens = generator.integers(0, LLAMA["vocab_size"], size=offsets[-1], dtype=np.int32)
    shares = config.data.share_prefixes is True
    for first in range(0, len(lengths), 4) if shares else ():
        for other in range(first + 1, first + 4):
            count = min(lengths[first], lengths[other], 24)
            tokens[offsets[other] : offsets[other] + count] = tokens[offsets[first] : offsets[first] + count]
    dataset = TokenDataset(
        contiguous(tokens, targets, offsets), seq_length=config.row_length, packing=config.data.fills_rows
    )
    return with_shared_prefixes(dataset) if shares else dataset


def _reporter(
    config: RunConfig, launch: Launch, training: Training, dataset: TokenDataset, folder: Path
) -> tuple[StepReporter, Any, DataLoader]:
    """What reports and watches the steps, and the loader."""
    loader = DataLoader(
        dataset,
        shape_of_launch(config, launch),
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        num_workers=0,
        pin_memory=True,
    )
    stages, decoder = training.stages, training.source.model.decoder
    guards = build_guards(config, training, launch, say=lambda line: None)
    observers = [
        Observation(config, launch, training, folder, steps=1, say=lambda line: None),
        RoundingNote(training.parts, lambda line: None),
        guards,
    ]
    if decoder.num_experts:
        observers.insert(0, RouterLoad(decoder, stages.models(), training.mesh, launch.device, stages.balance))
    reporter = StepReporter(
        config.log,
        training,
        RowSource(loader),
        RunClock(),
        metrics=MetricsWriter(None),
        progress=TrainProgress(SILENT, None),
        listener=RunListener(),
        observers=observers,
    )
    return reporter, guards, loader


def _batches(config: RunConfig, training: Training, loader: DataLoader, consumed: int) -> tuple[list[Batch], float]:
    """A step's micro-batches in pinned memory of the host, and the number of its targets."""
    if not config.objective.kind.answers:
        batches, decoder = loader.batches(consumed), training.source.model.decoder
        if decoder.fronts:
            batches = [with_images(batch, decoder) for batch in batches]
        return batches, loader.target_count(consumed)
    host = Launch(rank=0, world_size=training.mesh.grid.world_size, device=torch.device("cpu"))
    return [pin(batch) for batch in draw_batches(config, training, host)], float(config.train.global_batch_size)


def _evaluate(
    config: RunConfig, launch: Launch, training: Training, dataset: TokenDataset, batches: list[Batch]
) -> None:
    if config.objective.kind.answers:
        training.stages.figures(batches)
    if config.objective.name != "language_modeling":
        return
    shape = shape_of_launch(config, launch)
    loader = EvalLoader(dataset, shape, max_samples=2 * training.mesh.dp.size, pin_memory=True)
    evaluate(training.stages, loader, training.mesh)


def _continue(stage: Any, rows: list[int], lengths: list[int]) -> None:
    """Lets the last row wait apart from the slots, continues it by some tokens, and takes one more of each row."""
    slot, place = len(rows) - 1, stage.cache.waiting_rows[0]
    if not stage.cache.can_continue(slot, lengths[slot], lengths[slot]):
        return
    stage.cache.move(slot, place)
    stage.cache.move(place, slot)
    length = lengths[slot] + 5
    stage.continue_row(slot, [1] * length, lengths[slot], range(lengths[slot], length), rows[slot]).read()
    places = [*lengths[:slot], length]
    stage.decode(places, places, rows).read()


def _generate(case: Case, folder: Path, device: Recorder) -> list[dict[str, int]]:
    """Prompts and a few tokens of each; returns what was launched for the prompts and for each pass of one token.

    Two rows have a penalty and top-p; more are sampled as they are, as rollouts have it.
    """
    from engine.distributed.mesh import build_mesh
    from engine.distributed.ranks import RankGrid
    from engine.inference.decode_graphs import WARMUP_PASSES, decode_capture
    from engine.inference.model_part import InferenceStage
    from engine.inference.prompt_coordinates import text_coordinates
    from engine.inference.sampling import Sampling
    from engine.models.decoder import Decoder
    from engine.training import generation

    config = _config(case, folder)
    launch = Launch(rank=case.rank, world_size=case.world, device=cuda.DEVICE)
    source = model_source(config)
    plan, decoder = check_model(config, source.model, case.world), source.model.decoder
    prompts, coordinates = prompts_with_images(decoder)
    many = case.slots > 4
    if many:
        prompts = [[1] * (60 + number) for number in range(case.slots)]
        coordinates = text_coordinates(list(map(len, prompts)))
    lengths = [len(prompt) for prompt in prompts]
    with ExitStack() as opened:
        opened.enter_context(watched(device))
        opened.enter_context(nccl.nccl_world(case.rank, case.world) if case.world > 1 else nullcontext())
        grid = RankGrid(tp=config.parallel.tensor, pp=case.pipeline)
        mesh = build_mesh(grid, device_type="cuda", num_kv_heads=decoder.num_kv_heads)
        model = Decoder(
            decoder,
            layout=generation.TensorLayout.over(
                mesh,
                joint_reduce=True,
                kernels=generation.choose_model_kernels(config, launch.device, decoder, packed=True)[0].kernels,
                attention_blocks=generation.attention_blocks(config, launch.device, decoder),
                base=generation.base_encoding(config, launch.device),
            ),
            plan=plan.modules,
            device=launch.device,
            dtype=torch.bfloat16,
            part=generation._parts(decoder, case.pipeline)[mesh.pp.rank],
        )
        sampling = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=1)
        stage = InferenceStage(
            model,
            tp=mesh.tp,
            pp=mesh.pp,
            sampling=Sampling(temperature=1.0) if many else sampling,
            slots=case.slots,
            length=1024 if many else 64,
            with_logps=many,
            conversations=case.slots,
            device=launch.device,
            capture=decode_capture(case.cuda_graph, launch.device),
        )
        for slot, length in enumerate(lengths):
            stage.cache.begin([slot], length, length + 8, waits=False)
        device.is_running = True
        rows = list(range(len(prompts)))
        stage.prefill(prompts, coordinates, 0, [[row] for row in rows])
        found, launches = [{"attentions of prompts": device.operations["_flash_attention_forward"]}], device.launches
        for number in range(WARMUP_PASSES + 3):
            if number == WARMUP_PASSES + 2:  # a row ends before the last one
                stage.free(0)
                stage.move(rows.pop(), 0)
                lengths = [lengths[-1], *lengths[1:-1]]
            places, before = [length + number for length in lengths], Counter(launches)
            stage.decode(places, places, rows).read()
            found.append(dict(launches - before))
        _continue(stage, rows, [place + 1 for place in places])
        stage.finish()
    return found
