"""A generation session: prompts on the command line, a file of them, or one after the other at a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.files.documents import read_json
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Answer, Generator, Request, Speed, check_requests, context_limit
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits
from engine.inference.speed_report import measure, report_lines
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.sentences import listed
from engine.telemetry.log import Log
from engine.training.generation import OpenedModel, open_for_generation, storage_bytes
from engine.vision.data.files import image_size
from engine.vision.data.reader import ImageReader
from rankfold.generating.options import limits, model_choice, sampling
from rankfold.generating.prompts import PromptRecord, RecordsOut, Writer, read_records, requests_of

_HELP = "a line is a prompt; /reset forgets the conversation, /exit or the end of input ends"


class Session:
    """An open model and its prompts.

    Args:
        arguments: the command line.
        launch: this process.
    """

    def __init__(self, arguments: argparse.Namespace, launch: Launch) -> None:
        self._arguments, self._launch, self._log = arguments, launch, Log(launch.rank)
        self._sampling, self._limits = sampling(arguments), limits(arguments)
        records = None if arguments.prompts is None else read_records(arguments.prompts)
        image = self._named_image(records)
        choice = model_choice(arguments)
        self._model: OpenedModel = open_for_generation(choice, launch, self._log, image=image)
        if arguments.compare_base and self._model.full:
            raise UserError(
                f"--adapter {arguments.adapter} has modules that were trained in full ({listed(self._model.full)}), "
                "so that the model without its adapters is not the base: leave --compare-base out, and generate with "
                "--model alone."
            )
        tokenizer = self._open_tokenizer()
        for warning in tokenizer.chat_warnings():
            self._log.warning(warning)
        if not arguments.ignore_eos:
            ends = self._limits.stop_ids | self._model.end_tokens(tokenizer.eos_id)
            self._limits = replace(self._limits, stop_ids=ends)
        self._writer = Writer(
            tokenizer=tokenizer,
            chat=arguments.chat,
            system=arguments.system,
            reader=self._image_reader(tokenizer, image),
            images=tuple(arguments.image),
        )
        self._records: list[PromptRecord] | None = records
        self._generator: Generator | None = None

    def _named_image(self, records: list[PromptRecord] | None) -> str | None:
        """Returns the name of the source of an image, for messages; None where the prompts are text alone."""
        for path in self._arguments.image:
            image_size(Path(self._arguments.image_folder or ".") / path, "--image")
        if self._arguments.image:
            return "--image"
        return next((record.image for record in records or () if record.image is not None), None)

    def _image_reader(self, tokenizer: Tokenizer, image: str | None) -> ImageReader | None:
        """Returns the reader of conversations for a model with a vision tower."""
        if not self._model.config.sees_images:
            return None
        folder = self._model.folder
        config = read_json(folder / "config.json", "copy it again") if (folder / "config.json").is_file() else None
        family = None if config is None else resolve(self._model.config.images)(config, folder, tokenizer)
        if family is None and image is not None:
            raise UserError(
                f"{image} names an image, but text about images is not generated with {self._model.config.family} "
                "models: leave images out."
            )
        return None if family is None else ImageReader(family, self._arguments.image_folder)

    def _open_tokenizer(self) -> Tokenizer:
        """Opens the tokenizer of the command line, else the trained one, else the model's; likewise the chat
        template.
        """
        arguments, trained = self._arguments, self._model.tokenizer
        path, own = arguments.tokenizer or trained.path or self._model.folder, arguments.chat_template is None
        if path == trained.path and not path.exists():
            raise UserError(
                f"--adapter {arguments.adapter} was trained with the tokenizer at {path}, which is gone: give it as "
                "--tokenizer."
            )
        if arguments.chat and own and trained.chat_template is not None:
            self._log.info("the chat template is the one that the adapter was trained with")
        chat = ChatOptions(
            template=arguments.chat_template,
            trained_template=trained.chat_template,
            arguments=arguments.chat_arguments,
        )
        return load_tokenizer(path, chat)

    def run(self) -> None:
        """Answers all prompts. Collective."""
        if self._records is not None:
            self._answer_file(self._records)
        elif self._arguments.prompt:
            self._answer_prompts(self._arguments.prompt)
        else:
            self._talk()
        if self._arguments.report:
            self._report()

    def _answer_file(self, records: list[PromptRecord]) -> None:
        requests = requests_of([self._writer.record(record, number) for number, record in enumerate(records, 1)])
        generator = self._make_generator(requests, self._limits)
        base = self._base_answers(generator, requests)
        out = None
        if self._log.enabled:
            out = RecordsOut(records, self._arguments.out, with_ids=self._arguments.ids, base=base)
        generator.run(requests, on_answer=None if out is None else out.add)
        if out is not None:
            out.close()

    def _base_answers(self, generator: Generator, requests: list[Request]) -> dict[int, Answer] | None:
        """Returns the answers of the model without its adapter, by the numbers of the prompts; None where they were
        not asked for. Collective."""
        if not self._arguments.compare_base:
            return None
        generator.stage.adapters = False
        answers = {answer.request.row: answer for answer in generator.run(requests)}
        generator.stage.adapters = True
        return answers

    def _answer_prompts(self, texts: list[str]) -> None:
        requests = requests_of([self._writer.text(text, number) for number, text in enumerate(texts, 1)])
        generator = self._make_generator(requests, self._limits)
        base = self._base_answers(generator, requests)
        if base is None and len(requests) == 1:
            generator.run(requests, on_text=self._show())
            self._say("\n")
            return

        def show(answer: Answer, whose: str = "") -> None:
            text = f"{'' if answer.text[:1].isspace() else ' '}{answer.text}"
            self._say(f"[{answer.request.row + 1}{whose}]{text}\n")

        for answer in generator.run(requests):
            if base is not None:
                show(base[answer.request.row], " base")
            show(answer, "" if base is None else " adapter")

    def _talk(self) -> None:
        """Answers lines at the terminal of rank 0, until its end."""
        self._log.info(_HELP)
        messages: list[dict[str, Any]] = []
        row = 0
        while (line := self._ask()) is not None:
            if line == "/reset":
                messages = []
                continue
            asked = [*messages, {"role": "user", "content": line}]
            row += 1
            try:
                write = self._writer
                prompt = write.conversation(asked, row) if write.chat else write.text(line, row)
                request = Request(row=row - 1, ids=prompt.ids, images=prompt.images)
                generator = self._make_generator([request], replace(self._limits, slots=1))
            except UserError as error:  # reported, and the next line may fit; the same on all ranks
                self._log.info(f"error: {error}")
                continue
            (answer,) = generator.run([request], on_text=self._show())
            self._say("\n")
            messages = [*asked, {"role": "assistant", "content": answer.text}]

    def _ask(self) -> str | None:
        """Returns the next line that is not empty, the same on all ranks; None at the end."""
        line: str | None = ""
        while line == "":
            if self._launch.rank == 0:
                if sys.stdin.isatty():
                    self._say("> ")
                raw = sys.stdin.readline()
                line = raw.strip() if raw else None
            line = broadcast_object(line)  # type: ignore[assignment]
        return None if line == "/exit" else line

    def _make_generator(self, requests: list[Request], limits: Limits) -> Generator:
        """Makes a generator with a cache for these requests; a cache that is large enough is reused."""
        model = self._model
        check_requests(requests, model.config, limits.max_new_tokens)
        slots = min(limits.slots, len(requests))
        length = max(len(request.ids) for request in requests) + limits.max_new_tokens
        if self._generator is not None and self._generator.stage.cache.length >= length:
            return self._generator
        if self._records is None and not self._arguments.prompt:  # more lines follow, and most are longer
            length = min(context_limit(model.config), max(2 * length, 1024))
        speed = Speed() if self._generator is None else self._generator.speed
        stage = InferenceStage(
            model.decoder,
            tp=model.mesh.tp,
            pp=model.mesh.pp,
            sampling=self._sampling,
            slots=slots,
            length=length,
            device=self._launch.device,
            synchronise=self._arguments.report,
            capture=decode_capture(self._arguments.cuda_graph, self._launch.device),
        )
        if self._generator is None:
            for note in stage.notes:
                self._log.info(note)
        reader = self._writer.reader
        self._generator = Generator(
            stage,
            replace(limits, slots=slots),
            self._writer.tokenizer,
            family=None if reader is None else reader.family,
            speed=speed,
        )
        return self._generator

    def _show(self) -> Callable[[Request, str], None] | None:
        """Returns the function that shows text as it comes, on the rank that shows it."""
        return (lambda _, text: self._say(text)) if self._log.enabled else None

    def _say(self, text: str) -> None:
        if self._log.enabled:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _report(self) -> None:
        if self._generator is None:
            self._log.info("nothing was generated, so there is nothing to report")
            return
        figures = measure(
            self._model.mesh,
            self._generator.speed,
            device=self._launch.device,
            weight_bytes=storage_bytes(self._model.decoder),
            pass_bytes=storage_bytes(self._model.decoder, each_token=True),
            cache_bytes=self._generator.stage.cache.num_bytes,
        )
        for line in report_lines(figures):
            self._log.info(line)
