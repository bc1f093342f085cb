"""`rankfold evaluate`: opens a model, evaluates it, and writes the results."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from lm_eval.loggers.utils import add_env_info, add_tokenizer_info
from lm_eval.utils import handle_non_serializable

from engine.errors import UserError
from engine.files.durable import write_durably
from engine.files.refusals import writing
from engine.runtime.launch import Launch
from engine.telemetry.format import format_columns
from engine.telemetry.log import Log
from engine.training.generation import OpenedModel, open_for_generation
from rankfold.evaluating.language_model import EngineLM, PassSizes
from rankfold.evaluating.model import EvaluatedModel
from rankfold.evaluating.options import model_choice, task_choice
from rankfold.evaluating.tasks import Results, Tasks, figures
from rankfold.evaluating.text_tokenizer import open_text_tokenizer
from rankfold.evaluating.watch import ShownProgress


def evaluate(arguments: argparse.Namespace, launch: Launch) -> None:
    """Evaluates as the command line says. Collective; rank 0 prints and writes.

    Raises:
        UserError: no such model or task, or results cannot be written.
    """
    log, began = Log(launch.rank), time.time()
    choice = task_choice(arguments)
    tasks = Tasks(choice)
    count = len(tasks.tasks)
    log.info(f"tasks: {', '.join(list(tasks.tasks)[:8])}{f' and {count - 8} more' if count > 8 else ''}")
    opened = open_for_generation(model_choice(arguments), launch, log)
    if opened.config.needs_images:
        raise UserError(
            f"every layer of this {opened.config.family} model attends to an image, but the tasks are texts: evaluate "
            "a model of text."
        )
    model = language_model(arguments, opened, launch, log)
    if choice.apply_chat_template and model.tokenizer.chat_template is None:
        raise UserError(
            "--apply-chat-template is given, but the tokenizer has no chat template: leave it out, or give a "
            "--tokenizer that has one."
        )
    results = tasks.evaluate(model, samples=arguments.samples is not None)
    if launch.rank != 0:
        return
    samples = results.pop("samples", {})
    print("\n".join(line.rstrip() for line in format_columns(table(results))))
    if arguments.samples is not None:
        _write_samples(arguments.samples, samples)
        log.info(f"wrote {len(samples)} files to {arguments.samples}")
    if arguments.out is not None:
        _complete(results, arguments, model, began)
        _write(arguments.out, _json(results, indent=2))
        log.info(f"wrote {arguments.out}")


def language_model(arguments: argparse.Namespace, opened: OpenedModel, launch: Launch, log: Log) -> EngineLM:
    """Returns an opened model as the harness takes it.

    Raises:
        UserError: its tokenizer cannot be opened.
    """
    trained = opened.tokenizer
    path = arguments.tokenizer or trained.path or opened.folder
    tokenizer = open_text_tokenizer(path, trained.chat_template if arguments.tokenizer is None else None)
    return EngineLM(
        EvaluatedModel.of_opened(opened, launch.device),
        tokenizer,
        folder=opened.folder,
        end_ids=opened.end_tokens(tokenizer.eos_token_id),
        max_length=arguments.max_length,
        template_arguments=arguments.chat_arguments,
        sizes=PassSizes(rows=arguments.batch, tokens=arguments.prefill_tokens),
        watch=ShownProgress(log),
        seed=arguments.seed,
    )


def table(results: Results) -> list[tuple[str, ...]]:
    """Returns the table of results for people: a row for each figure of a task or group, under headings."""
    rows: list[tuple[str, ...]] = [("task", "metric", "better", "value", "± error", "examples", "documents")]
    for task, metric, value, higher in figures(results):
        name = metric if "," in metric else f"{metric},none"
        error = results["results"][task].get("_stderr,".join(name.rsplit(",", 1)))
        rows.append(
            (
                task,
                metric,
                "" if higher is None else "higher" if higher else "lower",
                f"{value:.4f}",
                f"{error:.4f}" if isinstance(error, float) else "",
                str(results["n-shot"].get(task, "")),
                str(results["n-samples"].get(task, {}).get("effective", "")),
            )
        )
    return rows


def _complete(results: Results, arguments: argparse.Namespace, model: EngineLM, began: float) -> None:
    """Adds to the results what the harness's own command does."""
    name = str(arguments.model if arguments.model is not None else model.pretrained)
    given = {"pretrained": name} | ({} if arguments.adapter is None else {"peft": str(arguments.adapter)})
    results["config"] = {
        "model": "rankfold",
        "model_args": given,
        "batch_size": arguments.batch,
        "batch_sizes": [],
        "device": str(model.device),
        "use_cache": None,
        "limit": arguments.limit,
        "gen_kwargs": arguments.gen_kwargs or None,
        "fewshot_seed": arguments.seed,
    }
    results["date"] = began
    add_env_info(results)
    add_tokenizer_info(results, model)
    results |= {
        "model_source": "rankfold",
        "model_name": name,
        "model_name_sanitized": "".join(one if one.isalnum() or one in "-._" else "__" for one in name),
        "system_instruction": arguments.system,
        "fewshot_as_multiturn": arguments.apply_chat_template,
        "chat_template": model.chat_template(True) if arguments.apply_chat_template else None,
        "total_evaluation_time_seconds": str(time.time() - began),
    }


def _write_samples(folder: Path, samples: dict[str, list[dict[str, Any]]]) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for task, rows in samples.items():
        _write(folder / f"samples_{task.replace('/', '__')}.jsonl", "".join(f"{_json(row)}\n" for row in rows))


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text.encode(errors="replace"))


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, default=handle_non_serializable, ensure_ascii=False, **options)
