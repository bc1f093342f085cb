"""Rules for Megatron-LM's flags."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating.conversion import Conversion, sets
from rankfold.migrating.given import PROGRAM, Given
from rankfold.migrating.trainers import experts_of_megatron, shared


@sets("data.train", "data.mix", "data.validation")
def data_path(conversion: Conversion, given: Given) -> None:
    """Converts a data path: one prefix, several, or weights and prefixes in turn; a prefix's data is the .bin file."""
    words = given.value if isinstance(given.value, list) else str(given.value).split()
    which = "data.validation" if given.key.startswith(("valid", "test")) else "data.train"
    weighted = len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2])
    files = [_bin(str(word)) for word in (words[1::2] if weighted else words)]
    if not files:
        conversion.drop(given, "empty")
        return
    conversion.take(given, which, files[0])
    if len(files) > 1 and which == "data.train":
        weights = [float(word) for word in words[::2]] if weighted else [1.0] * len(files)
        # data.train has weight 1
        mix = [f"{name}={weight / weights[0]:.6g}" for name, weight in zip(files[1:], weights[1:], strict=True)]
        note = "relative to data.train's 1" if weighted else "Megatron weighs prefixes without weights by their sizes"
        conversion.take(given, "data.mix", mix, note)
    elif len(files) > 1:
        conversion.notes.append(f"{given.key}: only the first of {len(files)} is evaluated, {files[0]}")


def _is_number(word: object) -> bool:
    try:
        float(str(word))
    except ValueError:
        return False
    return True


def _bin(prefix: str) -> str:
    return prefix if prefix.endswith(shared.FILES) else f"{prefix}.bin"


@sets("data.validation_split")
def split(conversion: Conversion, given: Given) -> None:
    """Converts the shares of documents for training, validation and test."""
    shares = [float(part) for part in str(given.value).split(",") if _is_number(part)]
    if len(shares) < 2 or not shares[1] > 0 or not sum(shares) < float("inf"):
        conversion.drop(given, "all of the data is trained on")
        return
    conversion.take(given, "data.validation_split", float(f"{shares[1] / sum(shares):.6g}"), "rows, not documents")
    if len(shares) > 2 and shares[2] > 0:
        conversion.notes.append(
            f"split leaves {shares[2] / sum(shares):.2%} of the documents for a test; here they are trained on"
        )


@sets("optim.schedule")
def decay_style(conversion: Conversion, given: Given) -> None:
    shared.schedule.apply(conversion, given)
    conversion.facts["no_warmup"] = False  # here a constant rate has its warm-up, too


@sets("lora.rank", "trainable")
def peft(conversion: Conversion, given: Given) -> None:
    conversion.add_fact(given, "lora", str(given.value).lower() == "lora", f"adapters: {given.value}")


def init(conversion: Conversion) -> str:
    facts, save = conversion.facts, conversion.options.get("checkpoint.dir")
    starts = facts.get("load")
    if starts is None and conversion.given("load", "pretrained_checkpoint"):  # only the script knows which
        return "checkpoint" if facts.get("finetune") else "random"
    return "random" if starts is None or (starts == save and not facts.get("finetune")) else "checkpoint"


def validation_split(conversion: Conversion) -> float | None:
    """Returns Megatron's default share of validation data, where data_path is given and split is not."""
    return 0.03 if conversion.given("data_path") and not conversion.given("split", "valid_data_path") else None


def expert_tensor(conversion: Conversion) -> int | None:
    """Returns the tensor ranks of experts, by default those of the other layers."""
    return conversion.options.get("parallel.tensor") if conversion.given("expert_model_parallel_size") else None


def sequence(conversion: Conversion) -> bool | None:
    return False if conversion.options.get("parallel.tensor", 1) > 1 else None


@sets("parallel.context_method")
def context_method(conversion: Conversion, given: Given) -> None:
    conversion.take(given, "parallel.context_method", "ulysses" if "a2a" in str(given.value) else "ring")


def finish(conversion: Conversion) -> None:
    facts, options = conversion.facts, conversion.options
    batch = options.get("train.global_batch_size")
    for name, became in (("steps_samples", "train.steps"), ("warmup_samples", "optim.warmup_steps")):
        if name in facts and batch:
            conversion.set_default(
                "derived", name.replace("_", " "), became, max(0, facts[name] // batch), "over the batch"
            )
        elif name in facts:
            conversion.to_fill.append(f"{became}: {facts[name]} samples over a global batch that was not given")
    row = options.get("data.seq_length")
    if batch and row:  # the fork of DeepSpeed counts tokens, and ends at the earlier limit
        if "steps_tokens" in facts:
            steps = facts["steps_tokens"] // (batch * row)
            options["train.steps"] = min(steps, options.get("train.steps", steps))
        if "warmup_tokens" in facts:
            conversion.set_default("derived", "tokens", "optim.warmup_steps", facts["warmup_tokens"] // (batch * row))
        if "decay_tokens" in facts:
            facts["decay_steps"] = facts["decay_tokens"] // (batch * row)
    steps = options.get("train.steps")
    decay = facts.get("decay_steps") or (
        facts["decay_samples"] // batch if batch and "decay_samples" in facts else None
    )
    if decay and steps and decay != steps and options.get("optim.schedule") != "constant":
        conversion.notes.append(
            f"the schedule is over {decay} steps and the run takes {steps}: here it ends with the run, so the "
            "learning rate differs on the way"
        )
    fraction = options.get("optim.warmup_ratio")
    if fraction is not None and decay and steps and decay != steps:
        conversion.remove("optim.warmup_ratio", "a share of lr_decay_iters")
        conversion.set_default(
            "derived", "lr_warmup_fraction", "optim.warmup_steps", int(fraction * decay), "of its schedule"
        )
    if facts.get("documents_apart"):
        conversion.set_default(
            "derived", "reset_attention_mask", "data.packing", True, "attention stays inside a document"
        )
        conversion.set_default("derived", "reset_attention_mask", "data.overlong", "cut", "long documents in pieces")
    if options.get("memory.recompute") == "full" and facts.get("recompute_method") == "block":
        conversion.set_default(
            "derived", "recompute_num_layers", "memory.recompute_layers", facts.get("recompute_layers")
        )
    if "virtual_layers" in facts and "shape_num_hidden_layers" in facts:
        stages = (
            int(facts["shape_num_hidden_layers"]) // int(options.get("parallel.pipeline", 1)) // facts["virtual_layers"]
        )
        conversion.set_default("derived", "num_layers_per_virtual_pipeline_stage", "parallel.virtual", stages)
    experts_of_megatron.finish(conversion)
    silent = [key for key in ("hidden_dropout", "attention_dropout") if not conversion.given(key)]
    if silent:
        conversion.notes.append(
            f"{' and '.join(silent)} {'was' if len(silent) == 1 else 'were'} not given, and Megatron drops 0.1 "
            "(TransformerConfig); the base has no dropout here, and the run will differ"
        )
    _model(conversion)


def _model(conversion: Conversion) -> None:
    """Reports the folder that model.path must name, since Megatron's own checkpoints are not read."""
    facts = conversion.facts
    if init(conversion) == "random":
        shape = {key.removeprefix("shape_"): value for key, value in facts.items() if key.startswith("shape_")}
        said = ", ".join(f"{key} {value}" for key, value in shape.items())
        conversion.to_fill.append(
            f"model.path: weights are drawn, so a folder with a config.json is enough{f': {said}' if said else ''}"
        )
    else:
        conversion.to_fill.append(
            f"model.path: {facts.get('load')} is Megatron's checkpoint, which is not read; name the model's Hugging "
            "Face folder"
        )
    programs = [str(row.given.value) for row in conversion.rows if row.given.key == PROGRAM]
    if any(name.startswith(_OTHER_MODELS) for name in programs):
        raise UserError(
            f"{programs[-1]} trains another kind of model, and only decoders are trained from Megatron's flags: give "
            "the flags of pretrain_gpt.py."
        )


_OTHER_MODELS = (
    "pretrain_bert", "pretrain_t5", "pretrain_mamba", "pretrain_hybrid", "pretrain_vlm", "pretrain_ict",
    "pretrain_retro", "pretrain_vision",
)  # fmt: skip
