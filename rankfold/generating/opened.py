"""A model that is open for text: its tokenizer, its reader of images, and generators with a cache for some prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.files.documents import read_json
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator, Speed, check_requests, context_limit
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Request
from engine.inference.speed_report import measure, report_lines
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.training.generation import OpenedModel, open_for_generation, storage_bytes
from engine.vision.data.reader import ImageReader
from rankfold.generating.options import limits, model_choice


class Opened:
    """A model on this rank. Making one is collective.

    Args:
        arguments: the command line.
        launch: this process.
        log: of this rank.
        image: the option or field that names an image of a prompt, for messages; None where prompts are text alone.
        chat: whether conversations are written with the chat template.
        adapters: as of `open_for_generation`.

    Raises:
        UserError: there is no such model, adapter or tokenizer, or they do not fit each other.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        launch: Launch,
        log: Log,
        *,
        image: str | None,
        chat: bool,
        adapters: bool = True,
    ) -> None:
        self._arguments, self._launch, self._log, self.chat = arguments, launch, log, chat
        self.model: OpenedModel = open_for_generation(
            model_choice(arguments), launch, log, image=image, adapters=adapters
        )
        self.tokenizer = self._open_tokenizer()
        for warning in self.tokenizer.chat_warnings():
            log.warning(warning)
        self.limits = limits(arguments)
        if not arguments.ignore_eos:
            ends = self.limits.stop_ids | self.model.end_tokens(self.tokenizer.eos_id)
            self.limits = replace(self.limits, stop_ids=ends)
        self.reader = self._image_reader(image)
        self._generator: Generator | None = None
        self._noted = False
        self.speed = Speed()

    def _image_reader(self, image: str | None) -> ImageReader | None:
        """Returns the reader of conversations for a model with a vision tower."""
        if not self.model.config.sees_images:
            return None
        folder = self.model.folder
        config = read_json(folder / "config.json", "copy it again") if (folder / "config.json").is_file() else None
        family = None if config is None else resolve(self.model.config.images)(config, folder, self.tokenizer)
        if family is None and image is not None:
            raise UserError(
                f"{image} names an image, but text about images is not generated with {self.model.config.family} "
                "models: leave images out."
            )
        return None if family is None else ImageReader(family, self._arguments.image_folder)

    def _open_tokenizer(self) -> Tokenizer:
        """Opens the tokenizer of the command line, else the trained one, else the model's; likewise the chat
        template.
        """
        arguments, trained = self._arguments, self.model.tokenizer
        path, own = arguments.tokenizer or trained.path or self.model.folder, arguments.chat_template is None
        if path == trained.path and not path.exists():
            raise UserError(
                f"--adapter {arguments.adapter} was trained with the tokenizer at {path}, which is gone: give it as "
                "--tokenizer."
            )
        if self.chat and own and trained.chat_template is not None:
            self._log.info("the chat template is the one that the adapter was trained with")
        chat = ChatOptions(
            template=arguments.chat_template,
            trained_template=trained.chat_template,
            arguments=arguments.chat_arguments,
        )
        return load_tokenizer(path, chat)

    @property
    def context(self) -> int:
        """The most tokens of a row."""
        return context_limit(self.model.config)

    def generator(
        self, requests: Sequence[Request], limits: Limits, sampling: Sampling, *, grows: bool = False
    ) -> Generator:
        """Returns a generator with a cache for these requests; the last one where its cache is large enough.

        Args:
            grows: prompts come one by one, and most of them continue the one before, whose row is kept.

        Raises:
            UserError: a prompt that the model cannot continue.
        """
        model = self.model
        check_requests(requests, model.config, limits.max_new_tokens)
        slots = min(limits.slots, len(requests))
        length = max(len(request.ids) for request in requests) + limits.max_new_tokens
        if self._generator is not None and self._generator.stage.cache.length >= length:
            self._generator.limits = replace(limits, slots=slots)
            return self._generator
        if grows:
            length = min(self.context, max(2 * length, 1024))
        self._generator = None  # its memory is free before more is taken
        stage = InferenceStage(
            model.decoder,
            tp=model.mesh.tp,
            pp=model.mesh.pp,
            sampling=sampling,
            slots=slots,
            length=length,
            device=self._launch.device,
            synchronise=self._arguments.report,
            capture=decode_capture(self._arguments.cuda_graph, self._launch.device),
        )
        for note in () if self._noted else stage.notes:
            self._log.info(note)
        self._noted = True
        self._generator = Generator(
            stage,
            replace(limits, slots=slots),
            self.tokenizer,
            family=None if self.reader is None else self.reader.family,
            speed=self.speed,
            keeps_row=grows,
        )
        return self._generator

    def forget(self) -> None:
        """Lets go of the generator: what it has in its cache, or how it samples, is of no use any more."""
        self._generator = None

    def report(self) -> None:
        """Prints memory, bandwidth and speed of every rank. Collective."""
        if self._generator is None:
            self._log.info("nothing was generated, so there is nothing to report")
            return
        figures = measure(
            self.model.mesh,
            self.speed,
            device=self._launch.device,
            weight_bytes=storage_bytes(self.model.decoder),
            pass_bytes=storage_bytes(self.model.decoder, each_token=True),
            cache_bytes=self._generator.stage.cache.num_bytes,
        )
        for line in report_lines(figures):
            self._log.info(line)
