"""The conversion commands: each recognises a folder, converts it, and reports the result. The output of
`inspect` is in `engine.conversion.inspection`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from engine.checkpoint.heads import SCORE, score_head
from engine.checkpoint.manifest import MANIFEST, read_manifest
from engine.checkpoint.model_folder import ModelFolder, open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import TrainingCheckpoint, expect_base, open_run
from engine.checkpoint.tokenizer_files import BASES_OWN, TrainedTokenizer, adapter_template, trained_tokenizer
from engine.checkpoint.untied import trained_apart, untied
from engine.checkpoint.weight_source import WeightSource
from engine.choices import STORED, AdapterForm, AdapterReader, Implementation
from engine.config.hub import instead_of, local_folder, looks_like_hub_name, name_of_snapshot
from engine.config.resume_rules import flat_options
from engine.config.run_files import CHECKPOINTS
from engine.conversion.add_adapter import kept_summary, summary
from engine.conversion.decoded_base import DecodedSource
from engine.conversion.import_export import (
    DEFAULT_SHARD_BYTES,
    ConversionReport,
    Fusing,
    Proof,
    Work,
    export_hf,
    import_checkpoint,
)
from engine.conversion.lora_scales import Scale
from engine.conversion.low_precision.export import LowOptions, low_export
from engine.conversion.merged_model import MergedSource, adapted_modules, fully_trained, recorded_scale, require_known
from engine.conversion.model_card import model_card
from engine.conversion.peft_config import scores_texts
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft, unread_by_peft
from engine.conversion.proof import prove_adapter, prove_model
from engine.conversion.run_facts import training_facts
from engine.conversion.shared_factors import EachExpert
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.kernels.checksum import slow_checksums
from engine.models.dtypes import TORCH_DTYPES
from engine.printable import printable
from engine.sentences import listed
from engine.telemetry.format import counted, format_bytes, short_path
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A training checkpoint with the base it belongs to, which has a head of its own where that was trained;
    `weights` is None where it started from random values."""

    checkpoint: TrainingCheckpoint
    model: ModelFolder
    weights: WeightSource | None

    @property
    def values(self) -> EachExpert:
        """The trained values, with those that experts share under the name of each."""
        return EachExpert(self.checkpoint.trained(), self.model.decoder)

    @property
    def scale(self) -> Scale:
        """The factor on B A; 0 without adapters."""
        return recorded_scale(self.checkpoint.lora, self.values, self.model.names)

    @property
    def is_merge_aware(self) -> bool:
        """Whether linears computed with adapters merged and rounded into them."""
        return bool(self.checkpoint.lora.get("merge_aware"))

    @property
    def merged_factors(self) -> torch.dtype | None:
        """The dtype of the factors that a merge-aware run merged; None for others."""
        if not self.is_merge_aware:
            return None
        return TORCH_DTYPES[str(flat_options(self.checkpoint.run_config)["model.dtype"])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(Work):
    """Options that all conversions share.

    Args:
        max_shard_bytes: of a Hugging Face weight file.
        fusing: see `export_hf`.
        proof: compare the logits of the export with the engine's.
        stored_base: merge into the base as it is stored, also where the adapter was trained beside an encoded one.
        low: of a whole model: how to store its linears in few bits; None for numbers, like the base's.
    """

    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    fusing: Fusing = "keep"
    proof: bool = True
    stored_base: bool = False
    low: LowOptions | None = None

    def __post_init__(self) -> None:
        if self.max_shard_bytes <= 0:
            raise UserError(f"--max-shard-gb gives {self.max_shard_bytes} bytes: expected more than 0, use e.g. 5.")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"--threads is {self.threads}: expected at least 1.")

    @contextmanager
    def work(self, log: Log, title: str) -> Iterator[Work]:
        """Shows a progress line of bytes written and, if asked for, read back; it does not cover the proof."""
        total = done = 0
        if (slow := slow_checksums()) is not None:
            log.info(f"note: {slow}")
        with Progress(log, title, None, "bytes") as progress:

            def expect(amount: int) -> None:
                nonlocal total
                total = amount * (2 if self.verify else 1)
                progress.expect(total)

            def advance(amount: int) -> None:
                nonlocal done
                done += amount
                progress.advance(amount)
                if done >= total:
                    progress.finish()

            yield replace(self, planned=expect, progress=advance)


def run_import(
    source: Path,
    out: Path,
    *,
    tensor: int,
    options: Options,
    implementation: Implementation = "auto",
    doing: str = "importing",
) -> None:
    """Partitions a model. See `import_checkpoint`; `doing` is for the progress line."""
    log = Log()
    weights = open_source(source, implementation)
    with options.work(log, f"{doing} {source}") as work:
        report = import_checkpoint(weights, out, tensor=tensor, work=work)
    if outside := weights.outside_names():
        log.info(f"kept as they are: {counted(len(outside), 'tensor')} outside the language model: {listed(outside)}")
    _say(log, report)


def run_reshard(source: Path, out: Path, *, tensor: int, options: Options) -> None:
    """Reshards a partitioned base for another number of ranks."""
    if is_training(source) or open_model(source).manifest is None:
        raise UserError(
            f"{source} is not a partitioned base, and reshard is for one: use import for a Hugging Face model; "
            "a run's checkpoint opens at any layout as it is."
        )
    run_import(source, out, tensor=tensor, options=options, doing="resharding")


def run_export(
    source: Path,
    out: Path,
    *,
    form: Literal["peft", "hf"],
    merge: bool,
    base: Path | None,
    step: int | Literal["best"] | None,
    options: Options,
    base_name: str | None = None,
    adapter_form: AdapterForm | None = None,
    reader: AdapterReader | None = None,
    download: bool = False,
    for_hub: bool = False,
) -> None:
    """Writes a PEFT adapter or a Hugging Face model from a run, a checkpoint or a base.

    Args:
        base_name: an adapter's name of its base, such as its name on the Hugging Face hub.
        adapter_form: of the adapters of a mixture's experts; None for "per_expert".
        reader: the program that is to read an adapter of experts.
        download: whether the base that a run records may be downloaded from the Hugging Face hub.
        for_hub: an adapter has to name a base that others have.

    Raises:
        UserError: the options do not fit the kind of `source`.
    """
    log = Log()
    if options.low is not None and form == "peft":
        raise UserError(
            f"--dtype {options.low.dtype} is for a whole model, and --format peft writes an adapter: leave it out."
        )
    if base_name is not None and form == "hf":
        raise UserError("--base-name is written into an adapter, and --format hf writes a whole model: leave it out.")
    if form == "hf" and (adapter_form is not None or reader is not None):
        raise UserError(
            "--adapter-form and --reader are about an adapter, and --format hf writes a whole model: leave them out."
        )
    if not is_training(source):
        _export_base(source, out, form, merge or base is not None or step is not None, options, log)
        return
    trained = open_trained(open_run(source, step=step), base, log, download=download)
    values = trained.values
    tokenizer = trained_tokenizer(trained.checkpoint.state, trained.checkpoint.folder / MANIFEST)
    if form == "peft":
        if merge:
            raise UserError("--format peft writes the adapter by itself, and --merge asks for a whole model: use one.")
        if for_hub and base_name is None and name_of_snapshot(trained.model.hf_path.resolve()) is None:
            raise UserError(
                f"the base of {source} is in {trained.model.hf_path}, a folder that only this machine has, and an "
                "adapter on the hub names its base: give the base's name there with --base-name."
            )
        _export_adapter(trained, out, base_name, adapter_form or "per_expert", reader, options, log, tokenizer)
        return
    if adapted_modules(values.tensor_names()) and not merge:
        raise UserError(
            f"{source} has adapters, and --format hf writes a whole model: add --merge to put them into its "
            "weights, or use --format peft."
        )
    base_dtype = trained.checkpoint.base.get("dtype")
    if trained.is_merge_aware and options.low is None:
        log.info(f"note: written in {base_dtype}, in which this merge-aware run computed; --dtype takes another format")
        options = replace(options, low=LowOptions(dtype=base_dtype))
    weights = _as_trained(trained.weights, base_dtype, values.tensor_names(), options, log)
    merged = MergedSource(trained.model, weights, values, scale=trained.scale)
    card = model_card(trained.model, training_facts(trained.checkpoint))
    _export_weights(merged, trained.checkpoint.folder, out, options, log, tokenizer, card, trained)


def _export_adapter(
    trained: TrainedModel,
    out: Path,
    base_name: str | None,
    form: AdapterForm,
    reader: AdapterReader | None,
    options: Options,
    log: Log,
    tokenizer: TrainedTokenizer,
) -> None:
    """Writes a run's adapter as PEFT reads it; arguments are those of `run_export`."""
    if trained.is_merge_aware:
        log.info(
            "note: this merge-aware run computed with the adapter rounded into its base, and readers of an adapter "
            "add it unrounded: a merged model is what was trained"
        )
    values, weights = trained.values, trained.weights
    unread = unread_by_peft(values, trained.checkpoint.lora, trained.model, form)
    proof = partial(prove_adapter, base=weights, trained=values, scale=trained.scale, unread=unread)
    report = export_peft(
        values,
        trained.checkpoint.lora,
        trained.model,
        out,
        overwrite=options.overwrite,
        inputs=[trained.checkpoint.folder],
        proof=proof if options.proof and weights is not None else None,
        tokenizer=tokenizer,
        base_name=base_name,
        facts=training_facts(trained.checkpoint),
        form=form,
        reader=reader,
    )
    _say(log, report)


def run_merge(base: Path, adapter: Path, out: Path, *, base_dtype: str | None, options: Options) -> None:
    """Writes a base model with a PEFT adapter added into its weights.

    Args:
        base_dtype: the encoding of the base that the adapter was trained beside, which its folder does not say.

    Raises:
        UserError: the adapter does not belong to the base.
    """
    log = Log()
    if options.low is not None:
        options.low.require_no_rows(adapter)
    weights: WeightSource = open_source(base)
    if scores_texts(adapter):
        weights = score_head().weights(weights, seed=0, padding_id=_padding_id(adapter, base))
    factors = AdapterSource(adapter, names=weights.model.names, decoder=weights.model.decoder, with_saved_modules=True)
    weights = factors.on(weights)
    seen = _as_trained(weights, base_dtype, factors.tensor_names(), options, log)
    merged = MergedSource(weights.model, seen, factors, scale=factors.scale)
    card = model_card(weights.model, adapter=adapter)
    _export_weights(merged, adapter, out, options, log, adapter_template(adapter), card)


def _padding_id(*folders: Path) -> int | None:
    """Returns the padding token of the first of the folders that has a tokenizer; None where none has."""
    found = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
    return None if found is None else load_tokenizer(found).padding_id


def _as_trained(
    weights: WeightSource | None, base_dtype: str | None, trained: list[str], options: Options, log: Log
) -> WeightSource | None:
    """Returns the base that an adapter was trained beside: decoded from its encoding, unless the stored one is
    asked for.
    """
    if weights is None or base_dtype is None or base_dtype == STORED:  # which is read with the numbers of training
        return weights
    if options.stored_base:
        log.info(f"note: trained beside a base in {base_dtype}, merged into the stored weights as asked for")
        return weights
    log.info(
        f"note: merged into the base as {base_dtype} kept it, because that is the model that was trained; "
        "--stored-base takes the stored weights"
    )
    return DecodedSource(weights, base_dtype, fully_trained(trained))


def _export_weights(
    weights: WeightSource,
    read: Path,
    out: Path,
    options: Options,
    log: Log,
    tokenizer: TrainedTokenizer = BASES_OWN,
    card: str | None = None,
    run: TrainedModel | None = None,
) -> None:
    proof: Proof | None = partial(prove_model, source=weights) if options.proof else None
    low = None
    if options.low is not None:
        run_config, factors = (None, None) if run is None else (run.checkpoint.run_config, run.merged_factors)
        export = low_export(weights, options.low, run_config, log, proof=options.proof, factors=factors)
        low, proof = export.low, export.check if export.has_checks else None
    with options.work(log, f"exporting {short_path(read)}") as work:
        report = export_hf(
            weights,
            out,
            max_shard_bytes=options.max_shard_bytes,
            inputs=() if read == weights.model.path else (read,),
            fusing=options.fusing,
            work=work,
            proof=proof,
            tokenizer=tokenizer,
            card=card,
            low=low,
        )
    _say(log, report, "merged" if low is None else "rounded")


def _export_base(source: Path, out: Path, form: str, has_run_options: bool, options: Options, log: Log) -> None:
    if form == "peft":
        raise UserError(f"{source} is a base model without adapters: give a run, or use --format hf.")
    if has_run_options:
        raise UserError(f"{source} is a base model, and --merge, --base and --step are for runs: leave them out.")
    if options.low is not None:
        options.low.require_no_rows(source)
    _export_weights(open_source(source), source, out, options, log)


def is_training(folder: Path) -> bool:
    """Returns whether a folder is a run or one of its checkpoints, rather than a model."""
    if not folder.is_dir():
        advice = instead_of(folder, "expected a run, a checkpoint or a model, correct the path")
        raise UserError(f"{folder} is not a folder{advice}.")
    if (folder / MANIFEST).is_file():
        return read_manifest(folder).kind == "training"
    return (folder / CHECKPOINTS).is_dir()


def open_trained(
    checkpoint: TrainingCheckpoint, base: Path | None, log: Log, *, download: bool = False
) -> TrainedModel:
    """Finds the base of a training checkpoint, at its recorded path or at `base`.

    Args:
        download: whether a recorded name on the Hugging Face hub may be downloaded.

    Raises:
        UserError: it is not there, or is another model.
    """
    checkpoint.refuse_leftover()
    recorded, fingerprint = str(checkpoint.base.get("path")), checkpoint.base.get("fingerprint")
    folder = base if base is not None else local_folder(Path(recorded), download=download)
    if base is None and not folder.is_dir():
        gone = ", which is gone: give"
        if looks_like_hub_name(recorded):
            gone = f"{instead_of(recorded, '')}, or give"
        raise UserError(f"the base of {checkpoint.folder} was at {recorded}{gone} its folder with --base.")
    implementation = checkpoint.base.get("implementation", "auto")
    scores = checkpoint.base.get("head") == SCORE
    padding_id = trained_tokenizer(checkpoint.state, checkpoint.folder / MANIFEST).padding_id
    if fingerprint is None:
        model = open_model(folder, implementation)
        if scores:
            model = score_head().folder(model, padding_id=padding_id)
        trained = TrainedModel(checkpoint, model, None)
    else:
        weights = open_source(folder, implementation)
        if (found := weights.fingerprint()) != fingerprint:
            raise UserError(
                f"{folder} has fingerprint {found}, but {checkpoint.folder} was trained on {fingerprint} ({recorded}): "
                "give that model with --base."
            )
        expect_base(checkpoint, weights, log.info)
        if trained_apart(checkpoint.lora, checkpoint.trained().tensor_names()):
            weights = untied(weights)
        if scores:
            weights = score_head().weights(weights, seed=0, padding_id=padding_id)  # the head was trained
        trained = TrainedModel(checkpoint, weights.model, weights)
    require_known(trained.values, trained.model)
    return trained


def _say(log: Log, report: ConversionReport, done: str = "merged") -> None:
    for note in report.notes:
        log.info(f"note: {note}")
    if report.rounding:
        log.info(kept_summary(report.rounding) or summary(report.rounding, done))
    text = f"wrote {report.out}: {counted(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)} in "
    text += counted(len(report.files), "file")
    if report.kept_bytes:
        text += f", {format_bytes(report.kept_bytes)} of them by an earlier call and compared"
    if report.seconds:
        text += f", {format_bytes(report.num_bytes / report.seconds)}/s"
    print(printable(text) + (", read back and compared" if report.verified else ""))
