"""The log that MLPerf Training's checkers read: which line is written when.

The only place that names MLPerf's keys. It hears of a run as any listener does, and writes from rank 0 alone, through
MLCommons' own package (`pip install mlperf-logging`). Whether a run keeps to a benchmark's rules is decided elsewhere.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.errors import UserError
from engine.telemetry.listener import EvaluationEvent, RunListener, RunStatus, StepEvent

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Who submits what.

    Args:
        benchmark: MLPerf's name of it.
        organisation, platform: submitter and system, as in the submitted folders.
        division: closed or open.
        status: onprem, cloud or research.
        caches_cleared: whether the system's caches were cleared before this process began.
    """

    benchmark: str
    organisation: str
    platform: str
    division: str = "closed"
    status: str = "onprem"
    caches_cleared: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Disclosed:
    """What the rules want to be told of a run, as it is configured.

    Args:
        seed: of the run.
        global_batch_size, micro_batch_size: rows.
        learning_rate, end_learning_rate: highest and last.
        schedule: course from the one to the other.
        warmup_steps: steps up to the highest.
        betas, eps, weight_decay: of AdamW.
        clip_norm: largest norm of the gradient.
        lora_rank, lora_alpha, lora_dropout: of the adapters.
        seq_length: tokens of a row.
        tensor, pipeline, context: ranks along each axis.
        linear_precision, attention_precision, communication_precision: lowest in use, as MLPerf spells them.
        config_filename: where all this is configured.
    """

    seed: int
    global_batch_size: int
    micro_batch_size: int
    learning_rate: float
    end_learning_rate: float
    schedule: str
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    seq_length: int
    tensor: int
    pipeline: int
    context: int
    linear_precision: str
    attention_precision: str
    communication_precision: str
    config_filename: str


class MlperfLog(RunListener):
    """Writes a result file. Used as a context around a run: a run that breaks off is logged as aborted.

    Args:
        path: of the file, which must not exist; None on ranks that do not write.
        submission: who submits.
        disclosed: how the run is configured.

    Raises:
        UserError: mlperf-logging is not installed, or the file is there already or cannot be written.
    """

    def __init__(self, path: Path | None, submission: Submission, disclosed: Disclosed) -> None:
        self._submission, self._disclosed = submission, disclosed
        self._runs = self._in_block = False
        self._samples = 0
        self._handler = None if path is None else _open(path)
        self._log: Any = None
        if self._handler is not None:
            logger = logging.Logger("mlperf")
            logger.addHandler(self._handler)
            self._log = _mllog().MLLogger(logger=logger, default_stack_offset=2, root_dir=str(_ROOT))

    def __enter__(self) -> MlperfLog:
        """The beginning of what is measured as initialisation: enter before the model is built."""
        submission = self._submission
        self._event("cache_clear", submission.caches_cleared)
        self._start("init_start")
        self._event("submission_benchmark", submission.benchmark)
        self._event("submission_division", submission.division)
        self._event("submission_org", submission.organisation)
        self._event("submission_platform", submission.platform)
        self._event("submission_status", submission.status)
        for key, value in self._settings().items():
            self._event(key, value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runs:
            self.run_stopped(self._samples, "stopped")
        if self._handler is not None:
            self._handler.close()

    def _settings(self) -> dict[str, str | int | float]:
        run = self._disclosed
        return {
            "seed": run.seed,
            "global_batch_size": run.global_batch_size,
            "micro_batch_size": run.micro_batch_size,
            "max_sequence_length": run.seq_length,
            "opt_name": "adamw",
            "opt_base_learning_rate": run.learning_rate,
            "opt_end_learning_rate": run.end_learning_rate,
            "opt_learning_rate_decay_schedule": run.schedule,
            "opt_learning_rate_warmup_steps": run.warmup_steps,
            "opt_adamw_beta_1": run.betas[0],
            "opt_adamw_beta_2": run.betas[1],
            "opt_adamw_epsilon": run.eps,
            "opt_adamw_weight_decay": run.weight_decay,
            "opt_gradient_clip_norm": run.clip_norm,
            "lora_rank": run.lora_rank,
            "lora_alpha": run.lora_alpha,
            "lora_dropout": run.lora_dropout,
            "tensor_parallelism": run.tensor,
            "pipeline_parallelism": run.pipeline,
            "context_parallelism": run.context,
            "expert_parallelism": 1,
            "lowest_numerical_precision_in_linear": run.linear_precision,
            "lowest_numerical_precision_in_attn": run.attention_precision,
            "lowest_numerical_precision_in_comm": run.communication_precision,
            "config_filename": run.config_filename,
        }

    def run_started(self) -> None:
        self._end("init_stop")
        self._start("run_start")
        self._runs = True

    def data_read(self, *, train_samples: int, eval_samples: int, total_steps: int, accumulation: int) -> None:
        self._event("train_samples", train_samples)
        self._event("eval_samples", eval_samples)
        self._event("opt_learning_rate_training_steps", total_steps)
        self._event("gradient_accumulation_steps", accumulation)

    def block_started(self, samples: int) -> None:
        self._samples, self._in_block = samples, True
        self._start("block_start", samples=samples)

    def block_stopped(self, samples: int) -> None:
        self._samples, self._in_block = samples, False
        self._end("block_stop", samples=samples)

    def reported(self, event: StepEvent) -> None:
        self._samples = event.samples
        self._event("train_loss", event.loss, samples=event.samples, lr=event.lr)

    def evaluated(self, event: EvaluationEvent) -> None:
        self._event("eval_accuracy", event.loss, samples=event.samples)

    def run_stopped(self, samples: int, status: RunStatus) -> None:
        if self._in_block:
            self.block_stopped(samples)
        self._end("run_stop", samples=samples, status="success" if status == "target" else "aborted")
        self._runs = False

    def _event(self, key: str, value: str | float | None = None, **metadata: str | float) -> None:
        if self._log is not None:
            self._log.event(key, value, metadata=_named(metadata))

    def _start(self, key: str, **metadata: str | float) -> None:
        if self._log is not None:
            self._log.start(key, metadata=_named(metadata))

    def _end(self, key: str, **metadata: str | float) -> None:
        if self._log is not None:
            self._log.end(key, metadata=_named(metadata))


def _named(metadata: dict[str, str | float]) -> dict[str, str | float]:
    return {"samples_count" if key == "samples" else key: value for key, value in metadata.items()}


def require_package() -> None:
    """Checks for the package mlperf-logging; called before anything that takes time.

    Raises:
        UserError: mlperf-logging is not installed.
    """
    _mllog()


def _mllog() -> Any:
    try:
        return importlib.import_module("mlperf_logging.mllog.mllog")
    except ImportError:
        raise UserError(
            "An MLPerf log is written by the package mlperf-logging, which is not installed: run "
            "`bash tools/setup_venv.sh mlperf`."
        ) from None


def _open(path: Path) -> logging.FileHandler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(path, mode="x", encoding="utf-8")
    except FileExistsError:
        raise UserError(
            f"The MLPerf log {path} is there already, and a log holds one run: give another name, or move it away."
        ) from None
    except OSError as error:
        raise UserError(
            f"The MLPerf log {path} cannot be written ({error.strerror}): give a file in a folder that can be written."
        ) from None
