"""One run of MLPerf Training's llama2_70b_lora, with the log its checkers read.

    torchrun --nproc-per-node 8 train.py --result result_0.txt --org ORG --platform SYSTEM --config llama2_70b_lora.yaml

What is not listed by --help is the engine's: --train.seed 1, --parallel.tensor 8 and so on (rankfold train
--help all). Whether the target was reached stands in the log.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlperf_log import Disclosed, MlperfLog, Submission, require_package
from rules import BENCHMARK, check_recipe, check_samples, check_size

from engine.config.load import load_config
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.runtime.launch import rank_from_environment, world_size_from_environment
from engine.telemetry.errors import EXIT_STOPPED, run_command
from engine.telemetry.listener import RunStatus

PRECISIONS = {"float32": "fp32", "bfloat16": "bfloat16", "float16": "fp16"}
BASE_PRECISIONS = {"int8": "int8", "fp8": "fp8", "fp8_row": "fp8"}


class BenchmarkLog(MlperfLog):
    """The log of a run; looks at the data's size as soon as that may be known.

    Args:
        path, submission, disclosed: see `MlperfLog`.
        small: the data is not the benchmark's.
    """

    reached = False

    def __init__(self, path: Path | None, submission: Submission, disclosed: Disclosed, *, small: bool) -> None:
        super().__init__(path, submission, disclosed)
        self._small = small

    def data_read(self, *, train_samples: int, eval_samples: int, total_steps: int, accumulation: int) -> None:
        if not self._small:
            check_samples(train_samples, eval_samples)
        super().data_read(
            train_samples=train_samples, eval_samples=eval_samples, total_steps=total_steps, accumulation=accumulation
        )

    def run_stopped(self, samples: int, status: RunStatus) -> None:
        self.reached = status == "target"
        super().run_stopped(samples, status)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Options of the submission, and those of the run."""
    parser = argparse.ArgumentParser(
        description="One run of llama2_70b_lora with its MLPerf log. Other options are the engine's.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's configuration, a YAML file")
    parser.add_argument("--result", type=Path, required=True, metavar="FILE", help="the log to write: result_0.txt")
    parser.add_argument("--org", required=True, help="who submits")
    parser.add_argument("--platform", required=True, help="name of the system, that of its systems/NAME.json")
    parser.add_argument("--division", choices=("closed", "open"), default="closed")
    parser.add_argument("--status", choices=("onprem", "cloud", "research"), default="onprem")
    parser.add_argument("--caches-cleared", action="store_true", help="the system's caches were cleared before this")
    parser.add_argument("--small", action="store_true", help="another model and data than the benchmark's, for tests")
    return parser.parse_known_args()


def disclosed(config: RunConfig, filename: str) -> Disclosed:
    """What of the configuration the rules want in the log.

    Raises:
        UserError: a precision that MLPerf has no name for.
    """
    compute, base = PRECISIONS[config.model.dtype], config.model.base_dtype
    if base is not None and base not in BASE_PRECISIONS:
        raise UserError(
            f"model.base_dtype is {base}, for which MLPerf's list of precisions has no name: set it to fp8, int8 or "
            "null."
        )
    optim, lora = config.optim, config.lora
    return Disclosed(
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        learning_rate=optim.lr,
        end_learning_rate=optim.min_lr,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_norm=optim.clip_grad_norm,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        seq_length=config.data.seq_length,
        tensor=config.parallel.tensor,
        pipeline=config.parallel.pipeline,
        context=config.parallel.context,
        linear_precision=compute if base is None else BASE_PRECISIONS[base],
        attention_precision=compute,
        communication_precision=compute,  # activations; gradients travel in fp32
        config_filename=Path(filename).name,
    )


def check_model_size(config: RunConfig) -> None:
    """Refuses another model than the benchmark's before its weights are read."""
    from engine.training.start_model import check_model, model_source

    source = model_source(config)
    plan = check_model(config, source.model, world_size_from_environment())
    check_size(config, source.model.decoder, plan.num_trained())


def main() -> None:
    options, rest = parse_arguments()
    require_package()
    config = load_config(["--config", options.config, *rest])
    check_recipe(config)
    if not options.small:
        check_model_size(config)
    submission = Submission(
        benchmark=BENCHMARK,
        organisation=options.org,
        platform=options.platform,
        division=options.division,
        status=options.status,
        caches_cleared=options.caches_cleared,
    )
    path = options.result if rank_from_environment() == 0 else None
    with BenchmarkLog(path, submission, disclosed(config, options.config), small=options.small) as log:
        from engine.training.trainer import train

        stopped = train(config, log).stopped
    if stopped is not None:
        sys.exit(EXIT_STOPPED)
    if not log.reached and path is not None:  # no failure to torchrun, which would end the other ranks for it
        print(f"the target was not reached: {path} says that the run was aborted", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
