"""`rankfold distill`: reads records as a training does, asks a teacher for its most likely tokens at each target, and
writes records of token ids.

The teacher is a model in this layout, or a server that rank 0 asks.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.config.rollout import KEY_VARIABLE
from engine.data.dataset import TokenDataset
from engine.data.loader import EvalLoader
from engine.data.record_files import expand_paths
from engine.data.text_reader import build_texts
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.distillation.records import as_record
from engine.distillation.top_tokens import TopTokens
from engine.distributed.collectives import all_reduce, broadcast_object
from engine.errors import UserError
from engine.files.durable import open_new
from engine.files.refusals import writing
from engine.inference.token_scores import Question, token_scores
from engine.models.decoder import Decoder
from engine.ops.attention.token_context import TokenContext
from engine.rollouts.servers.client import TEACHER, ServerClient
from engine.rollouts.servers.http import CallRefused
from engine.rollouts.servers.likely_tokens import likely_call, likely_tokens
from engine.runtime.launch import Launch
from engine.runtime.secrets import secret
from engine.telemetry.format import counted
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.evaluate import group_size, groups
from engine.training.generation import OpenedModel, open_for_generation
from engine.training.opened_rows import row_stages, rows_of_opened
from rankfold.evaluating.options import model_choice

_COMPARED = 4
"""Texts that a server's tokenizer is compared with."""


def distill(arguments: argparse.Namespace, launch: Launch) -> None:
    """Writes the records. Collective; rank 0 writes.

    Raises:
        UserError: no such teacher or records, a server that cannot be used, or a file that cannot be written.
    """
    log = Log(launch.rank)
    for file in expand_paths(arguments.files):  # what is missing is refused before a model is read
        if arguments.out.exists() and arguments.out.samefile(file):
            raise UserError(f"--out is {arguments.out}, whose records are read: give the name of another file.")
    chat = ChatOptions(template=arguments.chat_template, arguments=arguments.chat_arguments)
    if arguments.server is not None:
        if launch.world_size > 1:
            raise UserError("--server is asked by one process: leave --nproc out.")
        dataset = _read(arguments, load_tokenizer(arguments.tokenizer, chat), log)
        taught = _by_server(arguments, dataset, load_tokenizer(arguments.tokenizer, chat))
    else:
        opened = open_for_generation(model_choice(arguments), launch, log)
        path = arguments.tokenizer or opened.tokenizer.path or opened.folder
        dataset = _read(arguments, load_tokenizer(path, chat), log)
        if max(dataset.max_token, arguments.top_k - 1) >= opened.config.vocab_size:
            raise UserError(
                f"the records have token ids up to {dataset.max_token} and --top-k is {arguments.top_k}, but the "
                f"teacher's vocabulary has {opened.config.vocab_size} entries: give the teacher's own tokenizer, or a "
                "lower --top-k."
            )
        taught = _by_model(arguments, dataset, opened, launch.device)
    with Progress(log, "asking the teacher", len(dataset), "records") as progress, closing(taught):
        _write(arguments.out, _records(dataset, taught, progress), launch.rank)
    targets = int(dataset.target_counts.sum())
    log.info(f"wrote {arguments.out}: {counted(len(dataset), 'record')}, {counted(targets, 'target')}")


def _read(arguments: argparse.Namespace, tokenizer: Tokenizer, log: Log) -> TokenDataset:
    """Returns the records, each in a row of its own."""
    with Progress(log, "reading records", None, "records") as progress:
        dataset = build_texts(
            arguments.files,
            tokenizer=tokenizer,
            data_format=arguments.format,
            mask_prompt=not arguments.no_mask_prompt,
            seq_length=arguments.seq_length,
            overlong=arguments.overlong,
            progress=progress.advance,
        )
    log.info(f"records: {dataset.report.summary()}")
    return dataset


def _by_model(
    arguments: argparse.Namespace, dataset: TokenDataset, opened: OpenedModel, device: torch.device
) -> Generator[NDArray[np.float64]]:
    """Yields float64 [targets, 2 K] of each row, ids and log-probabilities. Collective, equal on all ranks."""
    stages = row_stages(opened, device)
    shape = rows_of_opened(opened, device, micro_batch_size=arguments.batch)
    count, rows = arguments.top_k, len(dataset)
    read = partial(_likely, count=count)
    for group in groups(EvalLoader(dataset, shape), group_size(opened.mesh)):
        found = stages.read_head(group, read)
        for number, batch in enumerate(group):
            held = batch.labels_BS != IGNORE_LABEL
            size = int(held.sum()), 2 * count
            own = torch.zeros(size, dtype=torch.float64, device=device) if found is None else found[number]
            own = all_reduce(own.contiguous(), opened.mesh.pp).cpu()
            for part in own.split(held.sum(1).tolist())[:rows]:
                yield part.numpy()
            rows -= min(rows, batch.num_rows)


def _likely(model: Decoder, out: Tensor, batch: Batch, context: TokenContext, *, count: int) -> Tensor:
    """Returns fp64 [targets, 2 K]; see `engine.training.stage.ReadHead`."""
    found_TF = token_scores(model, out, batch, context, Question(best=count))
    return found_TF[(batch.labels_BS != IGNORE_LABEL).flatten()]


def _by_server(
    arguments: argparse.Namespace, dataset: TokenDataset, tokenizer: Tokenizer
) -> Generator[NDArray[np.float64]]:
    """Yields what `_by_model` does, of a server."""
    client = ServerClient(
        arguments.server, arguments.server_kind, TEACHER, timeout=arguments.server_timeout, key=secret(KEY_VARIABLE)
    )
    with closing(client), ThreadPoolExecutor(arguments.slots, thread_name_prefix="teacher") as pool:
        longest = int(dataset.lengths.max()) + 1
        model = client.require_model(None, longest, f"the longest text and one token more, which are {longest}")
        shown = [next(iter(dataset.documents(row)))[0].tolist() for row in range(min(_COMPARED, len(dataset)))]
        text = " ".join(tokenizer.decode(ids) for ids in shown)
        client.compare_tokens(model, text, list(tokenizer.encode(text)))

        def ask(row: int) -> NDArray[np.float64]:
            ((tokens, targets),) = dataset.documents(row)
            ids = tokens.tolist()
            try:
                answer = client.post(likely_call(client.dialect, model, ids, arguments.top_k))
            except CallRefused as refusal:
                raise UserError(f"{refusal}: see the log of the server.") from None
            try:
                likely = likely_tokens(client.dialect, answer, ids, arguments.top_k)
            except UserError as error:
                raise client.refused(error) from None
            return np.array(
                [[*zip(*likely[place - 1], strict=True)] for place in np.flatnonzero(targets)], dtype=np.float64
            ).reshape(-1, 2 * arguments.top_k)

        ahead = 4 * arguments.slots
        rest = iter(range(len(dataset)))
        asked = deque(pool.submit(ask, row) for row in islice(rest, ahead))
        try:
            while asked:
                yield asked.popleft().result()
                asked.extend(pool.submit(ask, row) for row in islice(rest, 1))
        finally:
            client.close()
            pool.shutdown(wait=False, cancel_futures=True)


def _records(
    dataset: TokenDataset, taught: Iterator[NDArray[np.float64]], progress: Progress
) -> Iterator[dict[str, Any]]:
    for row, found in zip(range(len(dataset)), taught, strict=True):
        ((tokens, targets),) = dataset.documents(row)
        ids, logps = np.hsplit(found, 2)
        places = np.flatnonzero(targets).astype(np.int64)
        top = TopTokens(places, ids.astype(np.int32), np.minimum(logps, 0.0).astype(np.float32))
        yield as_record(tokens, targets, top)
        progress.advance(1)


def _write(out: Path, records: Iterator[dict[str, Any]], rank: int) -> None:
    """Writes the records on rank 0, under another name until all are there; the other ranks compute along."""
    if rank != 0:
        problem = broadcast_object(None)
        if problem is not None:
            raise UserError(str(problem))
        for _ in records:
            pass
        return
    unfinished = Path(f"{out}.partial")
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            file = open(open_new(unfinished), "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except UserError as error:
        broadcast_object(str(error))
        raise
    broadcast_object(None)
    with file, writing(out):
        for record in records:
            file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())
    with writing(out):
        unfinished.replace(out)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
