"""Predicts the memory of a rank, which layouts of the GPUs fit, and which of them is fastest.

Predicts the peak memory of a rank by part (weights, adapters, fp32 masters, gradients and optimizer state, activations
under each recompute policy, logits, buffers of collectives, temporary tensors) and the time of a step, for every layout
of the GPUs. Prints the fastest that fits with its table, the next ones, why the rest do not fit, and the sections of a
configuration for rankfold train; where nothing fits, the options to add to the command so that something does.
--offload and --activation-dtype let it use host memory and fewer bits as well. --config predicts for one configuration
as it is, and with --measure takes its steps on this device, with random weights. Nothing is measured unless --probe or
--measure is given; --examples answers for some well-known models and machines.
"""

from __future__ import annotations

import argparse
from typing import get_args

from engine.choices import BASE_DTYPES, BASE_PRODUCTS, RECOMPUTE_LEVELS, STORED
from engine.config.hub_flag import add_download
from engine.config.memory import CudaGraph
from engine.config.model import DTYPES
from engine.config.paths import path_text
from engine.config.units import read_count, read_gib, read_length
from engine.errors import UserError

STANDS_FOR = {
    "model.path": "--model", "model.dtype": "--dtype", "model.base_dtype": "--base-dtype",
    "model.base_products": "--base-products", "model.kernels": "--kernels", "data.seq_length": "--seq-length",
    "train.micro_batch_size": "--micro-batch", "train.global_batch_size": "--global-batch", "lora.rank": "--rank",
    "lora.dropout": "--dropout", "lora.targets": "--targets", "lora.merge_aware": "--merge-aware",
    "trainable": "--trainable", "objective.name": "--objective",
    "memory.recompute": "--recompute", "memory.activation_dtype": "--activation-dtype",
    "memory.cuda_graph": "--cuda-graph", "rollout.slots": "--slots", "rollout.num_generations": "--num-generations",
}  # fmt: skip
"""Option of a run -> the flag; see `engine.config.command_line`."""
BASES = f"{', '.join(BASE_DTYPES[:-1])} or {BASE_DTYPES[-1]}; {STORED} as a checkpoint in few bits has them"
RESERVE = 10.0
"""Percent of a GPU's memory. A run warns where it holds a tenth more than predicted, so that one that does not warn
fits. On a CPU no measured peak was more than 1% above its prediction; the additions of a GPU's allocator, context
and communicators have not been measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add_download(parser, model="config")
    parser.add_argument(
        "--model",
        type=path_text,
        metavar="PATH",
        help="folder of a model, its name on the hub, or its config.json under any name",
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs (default 1)")
    parser.add_argument(
        "--gpu-memory",
        type=read_gib,
        default=80.0,
        metavar="GIB",
        help="memory of each GPU, as 80 or 80GB (default 80)",
    )
    parser.add_argument(
        "--host-memory",
        type=read_gib,
        metavar="GIB",
        help="host memory of a machine, shared by up to 8 GPUs, that --offload may fill (default: this machine's)",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=RESERVE,
        metavar="PERCENT",
        help="share of GPU memory kept free for the device's context, communicators, fragmentation and the "
        f"prediction's own error (default {RESERVE:g})",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="speeds to assume: b200-180, h200-141, h100-80, a100-80, a100-40, l40s-48, rtx4090-24, or cpu, which is "
        "measured (default: by --gpu-memory)",
    )
    parser.add_argument(
        "--speeds",
        type=path_text,
        metavar="FILE",
        help="measured speeds of such a GPU, in place of assumed ones: the --json FILE of rankfold benchmark "
        "machine-speed",
    )
    _add_work(parser.add_argument_group("what is trained"))
    parser.add_argument(
        "--config",
        type=path_text,
        metavar="FILE",
        help="predict for this run file, on --gpus ranks, instead of searching",
    )
    parser.add_argument(
        "--routing",
        default="balanced",
        choices=("balanced", "worst"),
        help="of a mixture of experts divided over ranks, what must fit: tokens that spread evenly, or all of them on "
        "the experts of one rank (default balanced)",
    )
    parser.add_argument("--measure", action="store_true", help="with --config: also take real steps on this device")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="alternatives to show (default 5)")
    parser.add_argument("--probe", action="store_true", help="take real steps with 2 and with 4 layers on this device")
    parser.add_argument(
        "--by-kernel", action="store_true", help="also print what the step's time consists of, kernel by kernel"
    )
    parser.add_argument("--json", type=path_text, metavar="FILE", help="also write the answer to this file, as JSON")
    parser.add_argument(
        "--examples", action="store_true", help="print answers for well-known models and machines instead"
    )


def _add_work(work: argparse._ArgumentGroup) -> None:
    """Adds the options of the training."""
    _add_rows(work)
    _add_weights(work)
    _add_samples(work)
    _add_images(work)
    _add_measures(work)


def _add_rows(work: argparse._ArgumentGroup) -> None:
    work.add_argument(
        "--seq-length",
        type=read_length,
        default=2048,
        metavar="TOKENS",
        help="row length, as 8192 or 8k (default 2048)",
    )
    work.add_argument(
        "--document-length",
        type=read_length,
        metavar="TOKENS",
        help="length of the documents packed into a row (default: one document fills a row)",
    )
    work.add_argument("--micro-batch", type=int, default=1, metavar="ROWS", help="rows in a micro-batch (default 1)")
    work.add_argument("--global-batch", type=int, metavar="ROWS", help="rows in a step (default: 8, or one per GPU)")


def _add_weights(work: argparse._ArgumentGroup) -> None:
    """Adds the options of what trains, in which precision and by which loss."""
    work.add_argument("--rank", type=int, metavar="R", help="LoRA rank (default 16, or 0 with --trainable '*')")
    work.add_argument("--dropout", type=float, default=0.0, metavar="P", help="LoRA dropout (default 0)")
    work.add_argument(
        "--merge-aware",
        action="store_true",
        help="merge adapters before each product and round as the base's format does, as lora.merge_aware",
    )
    work.add_argument(
        "--base-products",
        default="decoded",
        choices=BASE_PRODUCTS,
        help="products with such a base, of decoded numbers or of codes, as model.base_products (default decoded)",
    )
    work.add_argument("--targets", metavar="NAME,..", help="modules with an adapter (default: all linears of a layer)")
    work.add_argument("--trainable", metavar="NAME,..", help="modules trained in full, '*' for all (default none)")
    work.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="precision of training (default bfloat16)")
    work.add_argument(
        "--base-dtype",
        metavar="NAME",
        help=f"how frozen weights are stored: {BASES} (default --dtype)",
    )
    work.add_argument(
        "--objective",
        default="language_modeling",
        metavar="NAME",
        help="loss, as objective.name (default language_modeling)",
    )


def _add_samples(work: argparse._ArgumentGroup) -> None:
    """Adds the options of prompts and completions."""
    work.add_argument(
        "--prompt-length",
        type=read_length,
        metavar="TOKENS",
        help="length of the prompts of grpo, or of the questions of pairs of answers, also with --config (default: "
        "what completions leave of a row; questions are not assumed to be alike)",
    )
    work.add_argument(
        "--completion-length",
        type=read_length,
        metavar="TOKENS",
        help="length of its completions, also with --config (default 512, or rollout.max_completion_length)",
    )
    work.add_argument(
        "--slots", type=int, default=32, metavar="N", help="completions that grpo samples at a time (default 32)"
    )
    work.add_argument(
        "--num-generations", type=int, default=8, metavar="N", help="completions of each of its prompts (default 8)"
    )


def _add_images(work: argparse._ArgumentGroup) -> None:
    """Adds the options of images and of what computes beside the decoder."""
    work.add_argument(
        "--beside",
        type=read_count,
        default=0,
        metavar="N",
        help="frozen parameters beside the model, such as 427M of a tower that is not known here, divided like the "
        "layers' (default 0)",
    )
    work.add_argument(
        "--tiles",
        type=int,
        default=1,
        metavar="N",
        help="tiles of images in a row, of the size that the model's family cuts most images into (default 1, also "
        "with --config, whose data is not read; a model of text alone has none)",
    )


def _add_measures(work: argparse._ArgumentGroup) -> None:
    """Adds the options of kernels, and of measures that make room."""
    work.add_argument("--kernels", default="auto", help="backend of the ops, as model.kernels (default auto)")
    work.add_argument(
        "--recompute", metavar="LEVEL,..", help=f"policies to try: {', '.join(RECOMPUTE_LEVELS)} (default: all of them)"
    )
    work.add_argument(
        "--offload",
        metavar="NAME,..",
        help="what may be offloaded to host memory: weights, optimizer, activations (default none)",
    )
    work.add_argument(
        "--cuda-graph",
        default="none",
        choices=get_args(CudaGraph),
        help="parts of a step that are replayed as CUDA graphs, as memory.cuda_graph (default none)",
    )
    work.add_argument(
        "--activation-dtype",
        metavar="NAME,..",
        help="dtypes to keep activations in, beside their own: bfloat16, float8 (default none)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan.

    Raises:
        UserError: options that do not go together, or a model that cannot be read.
    """
    from rankfold.planning import (
        answer_record,
        memory_config,
        memory_examples,
        memory_probe,
        memory_report,
        time_by_kernel,
    )
    from rankfold.planning.memory_question import ask, easier

    if arguments.examples:
        print(memory_examples.report(RESERVE))
        return
    if arguments.config is not None:
        print(memory_config.report(arguments))
        return
    if arguments.measure:
        raise UserError("--measure is given without --config: name the configuration to measure.")
    if arguments.model is None:
        raise UserError("--model is not given: name the folder of a model or its config.json, or ask for --examples.")
    answer = ask(arguments)
    if arguments.json is not None:
        answer_record.write(arguments.json, answer_record.of_answer(answer, top=arguments.top))
    print(memory_report.report(answer, top=arguments.top))
    if not answer.found.fitting:
        print("\n" + memory_report.alternatives(easier(arguments)))
    elif arguments.by_kernel:
        print("\n" + time_by_kernel.report(answer.found.fitting[0], answer.machine))
    if arguments.probe:
        print()
        print(memory_probe.report(answer))
