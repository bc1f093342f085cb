"""The data of a run: its readers, and the part that each rank takes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.tokenizer_files import TrainedTokenizer
from engine.config.data import DataOptions, split_mix
from engine.config.hub import DATA_PREFIX
from engine.config.run import RunConfig
from engine.data.processor_template import processor_template
from engine.data.store_paths import is_store
from engine.data.tokenize import ConversationReader
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.models.families import vision_left_out
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.training.run_data import DataReader, RunData, Supplied

_IMAGE_READER = "engine.vision.data.reader:ImageReader"


def build_data(
    config: RunConfig, launch: Launch, model: ModelFolder, log: Log, supplied: Supplied | None = None
) -> RunData:
    """Reads, tokenises and arranges the data. Needs no process group, so that bad input is refused early.

    Under torchrun the first rank of each machine reads and tokenises; see `engine.training.node_data`.

    Args:
        model: the trained one; its tower decides whether images are read.
        supplied: records and functions that do not come from files.

    Raises:
        UserError: a record or tokenizer cannot be used.
    """
    decoder = model.decoder
    tokenizer = load_tokenizer(config.data.tokenizer or config.model.path, chat_options(config))
    for warning in (*tokenizer.chat_warnings(training=True), *_template_warnings(config, tokenizer)):
        log.warning(warning)
    if tokenizer.vocab_size > decoder.vocab_size:
        log.warning(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {decoder.vocab_size}: tokens beyond the "
            "model's vocabulary will be refused."
        )
    if (left_out := vision_left_out(model.hf_config, model.implementation)) is not None:
        log.warning(left_out)
    images = _image_reader(config, model, tokenizer, log)
    if images is not None and images.family.remark is not None:
        log.info(images.family.remark)
    read: DataReader = resolve(config.objective.kind.data)
    return read(config, launch, model, tokenizer, log, images=images, supplied=supplied or Supplied())


def with_hub_data(data: DataOptions, supplied: Supplied | None, opened: ExitStack) -> Supplied:
    """Adds the sources of data sets on the Hugging Face hub to what a run is supplied with.

    Args:
        data: names them, with the commits that `engine.config.snapshots.with_snapshots` has found.
        opened: closes them when the run has ended.
    """
    supplied = supplied or Supplied()
    texts = (data.train, data.validation, *(split_mix(entry)[0] for entry in data.mix))
    named = {text for text in texts if text is not None and text.startswith(DATA_PREFIX)}
    if not named:
        return supplied
    source = resolve("engine.hub.data_sets:HubRecords")
    found = {text: opened.enter_context(source(text)) for text in sorted(named)}
    return replace(supplied, sources={**found, **supplied.sources})


def _image_reader(config: RunConfig, model: ModelFolder, tokenizer: Tokenizer, log: Log) -> ConversationReader | None:
    """Returns the reader of conversations for a model that sees images."""
    if not model.decoder.sees_images:
        return None
    try:
        family = resolve(model.decoder.images)(model.hf_config, model.path, tokenizer)
    except UserError as refusal:
        if model.implementation != "adopted":
            raise
        log.warning(f"records with images are refused: {refusal}")  # others can be trained on
        return None
    if family is None:
        return None
    reader: ConversationReader = resolve(_IMAGE_READER)(family, config.data.image_folder, log.info)
    return reader


def chat_options(config: RunConfig) -> ChatOptions:
    """Returns the options that say how the run's conversations are rendered, and which of their tokens are trained
    on."""
    data, stored = config.data, _stored_templates(config)
    return ChatOptions(
        template=data.chat_template,
        trained_template=stored.pop() if len(stored) == 1 else None,
        arguments=data.chat_arguments or {},
        learn_after_end=data.learn_after_end,
    )


def _stored_templates(config: RunConfig) -> set[str]:
    """Returns the chat templates that the token stores of the training data were rendered with, where they record
    it."""
    mixed = [split_mix(entry)[0] for entry in config.data.mix]
    paths = [path for path in (config.data.train, *mixed) if path is not None and is_store(path)]
    if not paths:
        return set()
    from engine.data.store import open_store

    stores = [open_store(path) for path in paths]
    return {store.chat_template for store in stores if store.chat_template is not None}


def _template_warnings(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Says where samples and exports have another chat template than a store."""
    if _stored_templates(config) <= {tokenizer.chat_template}:
        return []
    taken = "the tokenizer's own" if config.data.chat_template is None else "that of data.chat_template"
    return [
        "the conversations of a token store in data.train or data.mix were rendered with another chat template than "
        f"{taken}, which samples and exports take: tokenise it again, or set data.chat_template to its own."
    ]


def trained_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> TrainedTokenizer:
    """Returns the parts of the run's tokenizer that differ from its base's own, for exports."""
    options, path = chat_options(config), config.data.tokenizer
    beside = processor_template(Path(path or config.model.path).expanduser())  # adapters leave without its files
    chosen = any(one is not None for one in (options.template, options.trained_template, beside))
    return TrainedTokenizer(
        None if path is None else Path(path).expanduser().resolve(),
        tokenizer.chat_template if chosen else None,
        None if config.objective.kind.head is None else tokenizer.padding_id,
    )
