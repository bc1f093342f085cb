"""A generation session: prompts on the command line, a file of them, or one after the other at a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from engine.errors import UserError
from engine.inference.generate import Generator
from engine.inference.rows import Answer, Request
from engine.runtime.launch import Launch
from engine.sentences import listed
from engine.telemetry.log import Log
from rankfold.chatting.talk import check_images, talk
from rankfold.generating.opened import Opened
from rankfold.generating.options import sampling
from rankfold.generating.prompts import PromptRecord, RecordsOut, Writer, read_records, requests_of


class Session:
    """An open model and its prompts.

    Args:
        arguments: the command line.
        launch: this process.
    """

    def __init__(self, arguments: argparse.Namespace, launch: Launch) -> None:
        self._arguments, self._launch, self._log = arguments, launch, Log(launch.rank)
        self._sampling = sampling(arguments)
        self._records = None if arguments.prompts is None else read_records(arguments.prompts)
        image = self._named_image(self._records)
        self._opened = Opened(
            arguments, launch, self._log, image=image, chat=arguments.chat, adapters=not arguments.compare_base
        )
        full = self._opened.model.full
        if arguments.compare_base and full:
            raise UserError(
                f"--adapter {arguments.adapter} has modules that were trained in full ({listed(full)}), "
                "so that the model without its adapters is not the base: leave --compare-base out, and generate with "
                "--model alone."
            )
        self._writer = Writer(
            tokenizer=self._opened.tokenizer,
            chat=arguments.chat,
            system=arguments.system,
            reader=self._opened.reader,
            images=tuple(arguments.image),
        )

    def _named_image(self, records: list[PromptRecord] | None) -> str | None:
        """Returns the name of the source of an image, for messages; None where the prompts are text alone."""
        check_images(self._arguments)
        if self._arguments.image:
            return "--image"
        return next((record.image for record in records or () if record.image is not None), None)

    def run(self) -> None:
        """Answers all prompts. Collective."""
        if self._records is not None:
            self._answer_file(self._records)
        elif self._arguments.prompt:
            self._answer_prompts(self._arguments.prompt)
        else:
            talk(self._arguments, self._launch, self._opened, self._sampling)
        if self._arguments.report:
            self._opened.report()

    def _answer_file(self, records: list[PromptRecord]) -> None:
        requests = requests_of([self._writer.record(record, number) for number, record in enumerate(records, 1)])
        generator = self._generator(requests)
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
        self._opened.model.use_adapters(False)
        answers = {answer.request.row: answer for answer in generator.run(requests)}
        self._opened.model.use_adapters(True)
        generator.stage.adapters = True
        return answers

    def _answer_prompts(self, texts: list[str]) -> None:
        requests = requests_of([self._writer.text(text, number) for number, text in enumerate(texts, 1)])
        generator = self._generator(requests)
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

    def _generator(self, requests: list[Request]) -> Generator:
        return self._opened.generator(requests, self._opened.limits, self._sampling)

    def _show(self) -> Callable[[Request, str], None] | None:
        """Returns the function that shows text as it comes, on the rank that shows it."""
        return (lambda _, text: self._say(text)) if self._log.enabled else None

    def _say(self, text: str) -> None:
        if self._log.enabled:
            sys.stdout.write(text)
            sys.stdout.flush()
