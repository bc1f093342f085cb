"""The rows a rank trains and evaluates on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.tokenizer_files import TrainedTokenizer
from engine.config.data import split_mix
from engine.config.rules import check_warmup, data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.data.blend import blend
from engine.data.collate import GPU_LENGTH_MULTIPLE
from engine.data.data_report import context_warning
from engine.data.dataset import TokenDataset
from engine.data.hold_out import hold_out
from engine.data.loader import DataLoader, EvalLoader
from engine.data.preview import preview
from engine.data.processor_template import processor_template
from engine.data.row_means import RowMeanLoader
from engine.data.store import is_store, open_store
from engine.data.stored_rows import stored_dataset
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.distributed.mesh import Mesh
from engine.errors import UserError
from engine.inference.generate import context_limit
from engine.models.decoder_config import DecoderConfig
from engine.models.families import vision_left_out
from engine.preferences.data.judged import build_judged
from engine.preferences.data.preference_pairs import build_pairs
from engine.rollouts.data.prompts import PromptLoader, read_prompts
from engine.rollouts.scorer import check_rewards
from engine.rollouts.served import check_server
from engine.runtime.launch import Launch
from engine.telemetry.format import counted
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.node_data import NodeData
from engine.vision.data.families import vision_family
from engine.vision.data.reader import ImageReader
from engine.vision.tile_shares import ENCODES_ALL, EncoderRank


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Training and validation rows of this rank."""

    tokenizer: Tokenizer
    train: DataLoader | PromptLoader
    validation: EvalLoader | None


def build_data(config: RunConfig, launch: Launch, model: ModelFolder, log: Log) -> RunData:
    """Reads, tokenises and arranges the data. Needs no process group, so that bad input is refused early.

    Under torchrun the first rank of each machine reads and tokenises; see `engine.training.node_data`.

    Args:
        model: that is trained; its tower decides whether images are read.

    Raises:
        UserError: a record or tokenizer that cannot be used.
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
    assert config.data.train is not None
    if (left_out := vision_left_out(model.hf_config)) is not None:
        log.warning(left_out)
    images = _image_reader(config, model, tokenizer)
    if images is not None and images.family.remark is not None:
        log.info(images.family.remark)
    if "rollout" in config.objective.kind.sections:
        prompts = _prompt_loader(config, launch, model, tokenizer, log)
        return RunData(tokenizer=tokenizer, train=prompts, validation=None)
    source = _Source(config, tokenizer, images, decoder, log, NodeData.of_this_process(launch))
    train, held_out = source.training_set(config.data.train)
    show_samples(config, train, tokenizer, log)
    common = loader_options(config, launch.device, **data_position(config, launch))
    workers, pinned = config.data.num_workers, launch.device.type == "cuda"
    loader = DataLoader(
        train,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        last_batch=config.train.last_batch,
        num_workers=workers,
        pin_memory=pinned,
        **common,
    )
    if config.train.num_epochs is not None:
        check_warmup(config, loader.order.steps_left(0, config.train.num_epochs))
    if config.data.validation is not None:
        held_out = source.dataset(config.data.validation, "validation")
    validation = None
    if held_out is not None:
        kind = RowMeanLoader if config.train.eval_mean == "rows" else EvalLoader
        validation = kind(
            held_out, max_samples=config.train.eval_samples, num_workers=workers, pin_memory=pinned, **common
        )
    if (too_long := context_warning(config.data.seq_length, train.lengths, decoder.context_length)) is not None:
        log.warning(too_long)
    return RunData(tokenizer=tokenizer, train=loader, validation=validation)


def _prompt_loader(
    config: RunConfig, launch: Launch, model: ModelFolder, tokenizer: Tokenizer, log: Log
) -> PromptLoader:
    """Reads the prompts of a run that trains on its own completions.

    Raises:
        UserError: a record that cannot be used, or a model that is asked for more than text.
    """
    data, rollout, decoder = config.data, config.rollout, model.decoder
    assert data.train is not None
    if decoder.cross_attention is not None:
        raise UserError(
            f"every layer of this {decoder.family} model attends to an image, and rollouts have text alone: choose "
            "another model."
        )
    if data.seq_length > (limit := context_limit(decoder)):
        raise UserError(
            f"data.seq_length is {data.seq_length}, which prompts and completions may reach, but the model's context "
            f"is {limit}: set data.seq_length to {limit} or less."
        )
    room = data.seq_length - rollout.max_completion_length
    with Progress(log, "reading prompts", None, "records") as progress:
        done = 0

        def advance(count: int, total: int) -> None:
            nonlocal done
            progress.advance(count - done)
            done = count

        prompts = read_prompts(
            data.train, tokenizer=tokenizer, room=room, refuses_long=data.overlong == "error", progress=advance
        )
    if (largest := max(max(prompt.ids) for prompt in prompts.prompts)) >= decoder.vocab_size:
        raise UserError(
            f"{data.train} has token id {largest}, but the model's vocabulary has {decoder.vocab_size} entries: set "
            "data.tokenizer to the tokenizer this model was trained with."
        )
    log.info(f"training data: {prompts.summary(room)}")
    if config.objective.limits_ratios and rollout.steps_per_generation * config.objective.num_iterations == 1:
        log.info(
            "objective.epsilon, objective.epsilon_high and objective.delta have nothing to limit: with "
            "rollout.steps_per_generation 1 and objective.num_iterations 1 every importance ratio is 1"
        )
    check_rewards(config, launch, prompts.columns)
    if rollout.server is not None:
        check_server(config, launch, tokenizer, prompts, model=model, say=log.info)
    loader = PromptLoader(
        prompts,
        num_generations=rollout.num_generations,
        num_iterations=config.objective.num_iterations,
        steps_per_generation=rollout.steps_per_generation,
        global_batch_size=config.train.global_batch_size,
        num_micro_batches=gradient_accumulation_steps(config, launch.world_size),
        seed=config.train.seed,
    )
    if config.train.num_epochs is not None:
        check_warmup(config, loader.order.steps_left(0, config.train.num_epochs))
    return loader


def _image_reader(config: RunConfig, model: ModelFolder, tokenizer: Tokenizer) -> ImageReader | None:
    """Returns what reads conversations for a model with a vision tower."""
    if model.decoder.vision is None:
        return None
    family = vision_family(model.hf_config, model.path, tokenizer)
    return None if family is None else ImageReader(family, config.data.image_folder)


def show_samples(config: RunConfig, dataset: TokenDataset, tokenizer: Tokenizer, log: Log) -> None:
    """Prints the first rows of a data set, as many as data.show says."""
    if not log.enabled:
        return
    for row in range(min(config.data.show, len(dataset))):
        for document, (tokens, targets) in zip(dataset.rows.row(row).tolist(), dataset.documents(row), strict=True):
            spans = [] if dataset.vision is None else dataset.vision.spans_of(document)
            log.info(f"sample of row {row + 1}: {counted(len(tokens), 'token')}, {int(targets.sum()):,} trained on")
            log.info(preview(tokens, targets, tokenizer, colour=log.live, images=spans))


def chat_options(config: RunConfig) -> ChatOptions:
    """Returns how the run's conversations are rendered, and which tokens of them are trained on."""
    data, stored = config.data, _stored_templates(config)
    return ChatOptions(
        template=data.chat_template,
        trained_template=stored.pop() if len(stored) == 1 else None,
        arguments=data.chat_arguments or {},
        learn_after_end=data.learn_after_end,
    )


def _stored_templates(config: RunConfig) -> set[str]:
    """The chat templates that the token stores of the training data were rendered with, as far as they say it."""
    mixed = [split_mix(entry)[0] for entry in config.data.mix]
    stores = [open_store(path) for path in (config.data.train, *mixed) if path is not None and is_store(path)]
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
    """Returns what of the run's tokenizer is not its base's own, for exports."""
    options, path = chat_options(config), config.data.tokenizer
    beside = processor_template(Path(path or config.model.path).expanduser())  # adapters leave without its files
    chosen = any(one is not None for one in (options.template, options.trained_template, beside))
    return TrainedTokenizer(
        None if path is None else Path(path).expanduser().resolve(), tokenizer.chat_template if chosen else None
    )


class DataPosition(TypedDict):
    """Which part of each global batch, of each row, and of a micro-batch's images a rank reads."""

    data_rank: int
    data_size: int
    context_rank: int
    encoder: EncoderRank


def data_position(config: RunConfig, launch: Launch) -> DataPosition:
    """Returns which part of each global batch, and of each row, this rank reads: arguments of `loader_options`."""
    data_size = data_parallel_size(config, launch.world_size)
    # tensor-parallel neighbours are neighbouring ranks and share a data rank
    tensor, context = config.parallel.tensor, config.parallel.context
    data_rank = launch.rank // (tensor * context) % data_size
    context_rank = launch.rank // tensor % context
    encoder = EncoderRank.at(
        tensor=launch.rank % tensor,
        tensor_size=tensor,
        context=context_rank,
        context_size=context,
        pipeline=launch.rank // (tensor * context * data_size),
    )
    return {"data_rank": data_rank, "data_size": data_size, "context_rank": context_rank, "encoder": encoder}


def mesh_position(mesh: Mesh) -> DataPosition:
    """Returns the same of this rank, by its place in the mesh."""
    encoder = EncoderRank.at(
        tensor=mesh.tp.rank,
        tensor_size=mesh.tp.size,
        context=mesh.cp.rank,
        context_size=mesh.cp.size,
        pipeline=mesh.pp.rank,
    )
    return {
        "data_rank": mesh.dp.rank,
        "data_size": mesh.dp.size,
        "context_rank": mesh.cp.rank,
        "encoder": encoder,
    }


class LoaderOptions(TypedDict):
    """The options that all loaders of a run share; see `engine.data.loader.DataLoader`."""

    seq_length: int
    micro_batch_size: int
    data_rank: int
    data_size: int
    pad_multiple: int
    length_multiple: int
    context_rank: int
    context_size: int
    encoder: EncoderRank


def loader_options(
    config: RunConfig,
    device: torch.device,
    *,
    data_rank: int,
    data_size: int,
    context_rank: int,
    encoder: EncoderRank = ENCODES_ALL,
) -> LoaderOptions:
    """Returns the options that all loaders of a run on `device` share."""
    tensor, context = config.parallel.tensor, config.parallel.context
    return {
        "seq_length": config.row_length,
        "micro_batch_size": config.train.micro_batch_size,
        "data_rank": data_rank,
        "data_size": data_size,
        "pad_multiple": tensor * (2 * context if context > 1 else 1) if config.parallel.divides_tokens else 1,
        "length_multiple": GPU_LENGTH_MULTIPLE if device.type == "cuda" else 1,
        "context_rank": context_rank,
        "context_size": context,
        "encoder": encoder,
    }


@dataclass(frozen=True, slots=True)
class _Source:
    """What the data sets of a run are read with."""

    config: RunConfig
    tokenizer: Tokenizer
    images: ImageReader | None
    decoder: DecoderConfig
    log: Log
    node: NodeData

    def training_set(self, path: str) -> tuple[TokenDataset, TokenDataset | None]:
        """Returns data.train with what data.mix adds to it, and what data.validation_split holds out of data.train."""
        config = self.config
        whole, held_out = self.dataset(path, "training"), None
        share, seed = config.data.validation_split, config.train.seed
        if share is not None:
            whole, held_out = hold_out(whole, share, seed)
            self.log.info(
                f"validation data: {counted(len(held_out), 'row')} held out of data.train (data.validation_split "
                f"{share:g}, train.seed {seed}), {counted(held_out.report.target_tokens, 'token')} evaluated; "
                f"{counted(len(whole), 'row')} left to train on"
            )
        if not config.data.mix:
            return whole, held_out
        entries = [split_mix(entry) for entry in config.data.mix]
        more = [self.dataset(path, f"training ({path})") for path, _ in entries]
        parts = [whole, *more]
        mixed = blend(parts, [1.0, *(weight for _, weight in entries)])
        self.log.info(f"mixed training data: {counted(len(mixed), 'row')} per epoch")
        return mixed, held_out

    def dataset(self, path: str, what: str) -> TokenDataset:
        """Returns the rows of a file of records, or of a token store."""
        dataset = self._stored(path) if is_store(path) else self.node.get(lambda: self._read(path, what))
        dataset.read_with(None if self.images is None else self.images.family)
        if self.decoder.cross_attention is not None and (count := dataset.num_without_images):
            raise UserError(
                f"{path} has {counted(count, 'document')} without an image, but every layer of this "
                f"{self.decoder.family} model attends to one: give records with an image each (token stores and "
                "answers that are plain texts have none)."
            )
        if dataset.max_token >= self.decoder.vocab_size:
            raise UserError(
                f"{path} has token id {dataset.max_token}, but the model's vocabulary has {self.decoder.vocab_size} "
                "entries: set data.tokenizer to the tokenizer this model was trained with."
            )
        self.log.info(f"{what} data: {dataset.report.summary()}")
        for warning in dataset.report.warnings():
            self.log.warning(f"{what} data: {warning}")
        return dataset

    def _stored(self, path: str) -> TokenDataset:
        data, objective = self.config.data, self.config.objective
        if objective.kind.answers:
            raise UserError(
                f"{path} is a token store, but objective.name {objective.name} compares answers: give their records."
            )
        return stored_dataset(
            path,
            tokenizer=self.tokenizer,
            seq_length=data.seq_length,
            packing=data.packing,
            overlong=data.overlong,
        )

    def _read(self, path: str, what: str) -> TokenDataset:
        with Progress(self.log, f"reading {what} data", None, "records") as progress:
            done = 0

            def advance(count: int, total: int) -> None:
                nonlocal done
                progress.advance(count - done)
                done = count

            data, objective = self.config.data, self.config.objective
            if objective.kind.answers:
                assert data.packing != "concatenate", "which would tear answers apart"
                return (build_pairs if objective.kind.group > 1 else build_judged)(
                    path,
                    tokenizer=self.tokenizer,
                    seq_length=data.seq_length,
                    packing=data.packing,
                    overlong=data.overlong,
                    progress=advance,
                    images=self.images,
                )
            return TokenDataset.build(
                path,
                tokenizer=self.tokenizer,
                data_format=data.format,
                seq_length=data.seq_length,
                packing=data.packing,
                overlong=data.overlong,
                mask_prompt=data.mask_prompt,
                progress=advance,
                images=self.images,
            )
