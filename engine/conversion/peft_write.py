"""Writes a PEFT LoRA adapter folder that stock PEFT opens with no missing or unexpected key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.folder import ADAPTER_CONFIG, check_output
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.safetensors_file import SafetensorsReader, SafetensorsWriter
from engine.checkpoint.tokenizer_files import BASES_OWN, TrainedTokenizer, complete_settings
from engine.checkpoint.weight_source import SHARED
from engine.choices import VISION, AdapterForm, AdapterReader
from engine.config.hub import name_of_snapshot
from engine.conversion.expert_stacks import in_turns, live_name
from engine.conversion.import_export import ConversionReport, Proof
from engine.conversion.lora_scales import recorded_alpha
from engine.conversion.merged_model import LORA_A, adapted_modules, fully_trained, recorded_scales
from engine.conversion.model_card import CARD, adapter_card
from engine.conversion.peft_config import SCORING, patterns
from engine.conversion.peft_experts import TrainedAdapters, advice, fitting_form, is_expert, obstacle, readers_line
from engine.conversion.peft_read import ADAPTER_WEIGHTS, KEY_PREFIX
from engine.conversion.peft_tensors import adapter_tensors, fused_with, is_stored_fused, outer_tensors, stacked_tensors
from engine.conversion.run_facts import NO_FACTS, TrainingFacts
from engine.conversion.shared_factors import EachExpert
from engine.conversion.vllm_adapters import unread_by_vllm
from engine.errors import UserError
from engine.files.durable import write_durably
from engine.files.staging import staged_folder
from engine.models.families import language_family
from engine.models.names import fused_parts
from engine.sentences import listed


def export_peft(
    trained: TensorReader,
    lora: Mapping[str, Any],
    model: ModelFolder,
    out: Path,
    *,
    overwrite: bool = False,
    inputs: Sequence[Path] = (),
    proof: Proof | None = None,
    tokenizer: TrainedTokenizer = BASES_OWN,
    base_name: str | None = None,
    facts: TrainingFacts = NO_FACTS,
    form: AdapterForm = "per_expert",
    reader: AdapterReader | None = None,
) -> ConversionReport:
    """Writes adapter_model.safetensors and adapter_config.json, with the tokenizer and a model card beside them.

    One adapter over several modules becomes one for each, which share A; where the base itself stores them as one
    matrix, it stays one, and adapters of its parts become one with a block for each. All of that is exact. Modules
    trained in full beside the adapters go into `modules_to_save`.

    Args:
        trained: trained values by logical name; shared factors of experts, under the name of each.
        lora: "rank", "alpha", "alpha_pattern", "dropout", "rslora" and "dora" of the run.
        model: the base that they belong to.
        out: folder to make.
        overwrite: replace an existing adapter at `out`.
        inputs: folders that are read at the same time.
        proof: tries the folder before it takes its name.
        tokenizer: of the training.
        base_name: the adapter's name of its base; None for the folder it is in here.
        facts: about the training, for the model card.
        form: of the factors of a mixture's experts.
        reader: the program that is to read the folder; None for those that `form` is made for.

    Raises:
        UserError: there are no adapters, PEFT cannot express the training, a value is not finite, or a factor that
            does not start from zeros is all zero.
    """
    described, model = model, replace(model, names=model.names.live)
    modules = _modules_with_adapters(trained)
    parts = [part for module in modules for part in fused_parts(module)]
    saved = _modules_to_save(fully_trained(trained.tensor_names()), parts, model)
    adapters = _trained_adapters(trained, described, lora)
    if (reason := obstacle(adapters, model.decoder, form, reader)) is not None:
        raise UserError(f"{reason}: {advice(adapters, model.decoder, reader)}.")
    tensors, config = _contents(trained, adapters, described, model, lora, form)
    alone = form == "per_expert" and obstacle(adapters, model.decoder, form) is not None
    config["modules_to_save"] = saved or None
    config["ensure_weight_tying"] = _tied_head_key(model) in tensors
    if base_name is not None:
        config["base_model_name_or_path"] = base_name
        config.pop("revision", None)
    companions = tokenizer.companions(model.companions(), with_model=False)
    notes = [*_notes(modules, parts, saved, model, config, base_name, float(lora["dropout"])), *companions.left_out]
    if config.get("target_parameters"):
        form = "stacked"
    if adapters.experts or alone:
        notes.append(readers_line(form, model.decoder, alone=alone))
    notes += _refuse_zeros(trained, modules)
    check = partial(check_output, out.absolute(), overwrite, [model.path, *inputs])
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with staged_folder(out, check=check, num_bytes=num_bytes + companions.num_bytes) as staging:
        _write(staging, tensors, config)
        companions.copy_to(staging)
        tokenizer.write_template(staging)
        complete_settings(staging)
        write_durably(staging / CARD, adapter_card(config, model, facts))
        _verify(staging, tensors)
        if proof is not None:
            notes.append(proof(staging))
    files, count = (ADAPTER_WEIGHTS,), len(tensors)
    return ConversionReport(
        out=out, files=files, num_tensors=count, num_bytes=num_bytes, verified=True, notes=tuple(notes)
    )


def _modules_with_adapters(trained: TensorReader) -> list[str]:
    modules = adapted_modules(trained.tensor_names())
    if not modules:
        raise UserError(
            f"{trained.label} has no adapters, only fully trained parameters, which a PEFT folder cannot hold: "
            "export with --format hf --merge."
        )
    return modules


def form_for(
    trained: TensorReader, lora: Mapping[str, Any], model: ModelFolder, reader: AdapterReader
) -> tuple[AdapterForm, str | None]:
    """Returns the form in which a reader computes with the adapters as they were trained, and None. Where there is
    none, the usual form, and the reason why the reader does not compute with that.

    Args:
        trained, lora, model: as for `export_peft`.
    """
    found = _trained_adapters(trained, model, lora)
    form = fitting_form(found, model.decoder, reader) or "per_expert"
    return form, obstacle(found, model.decoder, form, reader)


def unread_by_peft(trained: TensorReader, lora: Mapping[str, Any], model: ModelFolder, form: AdapterForm) -> str | None:
    """Returns the reason why PEFT would not compute with adapters of this form as they were trained, if it would not.

    Args:
        trained, lora, model: as for `export_peft`.
    """
    found = _trained_adapters(trained, model, lora)
    return obstacle(found, model.decoder, form, "peft")


def _trained_adapters(trained: TensorReader, model: ModelFolder, lora: Mapping[str, Any]) -> TrainedAdapters:
    """Returns the properties on which the forms of experts' adapters depend."""
    scales = recorded_scales(lora, trained, model.names)
    return TrainedAdapters(
        adapters={module: (trained.shape(f"{module}.{LORA_A}")[0], scale) for module, scale in scales.items()},
        in_full=[name.rpartition(".")[0] for name in fully_trained(trained.tensor_names())],
        shared=set(trained.stored.values()) if isinstance(trained, EachExpert) else (),
        rslora=bool(lora["rslora"]),
    )


def _contents(
    trained: TensorReader,
    found: TrainedAdapters,
    described: ModelFolder,
    model: ModelFolder,
    lora: Mapping[str, Any],
    form: AdapterForm,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of a folder by PEFT's keys, and its adapter_config.json.

    Args:
        described: the base as it is stored, by whose names patterns are.
        model: the same with the names of transformers' modules.
    """
    rslora, modules = bool(lora["rslora"]), list(found.adapters)
    alphas = {module: recorded_alpha(lora, module, described.names) for module in modules}
    apart = modules if form == "per_expert" else [module for module in modules if not is_expert(module)]
    tensors, adapters = adapter_tensors(trained, apart, model, alphas, rslora=rslora)
    for name in fully_trained(trained.tensor_names()):
        tensors[KEY_PREFIX + model.names.to_hf(name).name] = trained.read_whole(name)
    if (head := _tied_head_key(model)) is not None and SHARED in trained:
        tensors[head] = trained.read_whole(SHARED)
    parts = [part for one in apart for part in fused_parts(one)]
    parameters = [part for part in parts if model.names.is_parameter(part)]
    linears = [part for part in parts if part not in parameters]
    targets = _target_modules(linears, model)
    if model.decoder.num_experts and found.beside_experts:  # whose short names mean the experts to PEFT
        targets = sorted({live_name(model.names.module_to_hf(part)) for part in parts})
    config = _adapter_config(lora, targets, model)
    as_parameters = [name for part in linears if model.names.means_experts(name := model.names.module_to_hf(part))]
    if as_parameters:
        adapters |= _as_parameters(config, as_parameters, linears, adapters, model)
    if found.experts or parameters:
        config["lora_dropout"] = 0.0  # PEFT opens no adapter of experts with another
    if parameters:
        stacked = (model.names.module_to_hf(part) for part in parameters)
        config["target_parameters"] = sorted([*config.get("target_parameters", ()), *stacked])
    if form == "stacked":
        scales = {module: scale for module, (_, scale) in found.adapters.items()}
        stacks, more = stacked_tensors(trained, model, scales, rslora=rslora, turns=in_turns(described.names))
        tensors, adapters, config["target_parameters"] = tensors | stacks, adapters | more, sorted(more)
    elif form == "shared_outer":
        assert isinstance(trained, EachExpert)
        tensors |= outer_tensors(trained, model)
        config["target_modules"] = sorted({*config["target_modules"], *found.expert_linears})
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{key} is not finite, so nothing was exported: use an earlier step (--step).")
    return tensors, config | patterns(adapters, rank=config["r"], alpha=config["lora_alpha"])


def _tied_head_key(model: ModelFolder) -> str | None:
    """Returns PEFT's key of a head that is the embedding; None where it is not."""
    return f"{KEY_PREFIX}{model.names.head}.weight" if model.decoder.tied_embeddings else None


def _modules_to_save(full: list[str], adapted: list[str], model: ModelFolder) -> list[str]:
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in full))
    if both := sorted(set(modules) & set(adapted)):
        raise UserError(
            f"{both[0]} has an adapter and is trained in full too, which a PEFT folder cannot hold: "
            "export with --format hf --merge."
        )
    if parts := [module for module in modules if fused_with(module, model) is not None]:
        raise UserError(
            f"{parts[0]} was trained in full beside adapters, and the base stores it as rows of a larger matrix, which "
            "a PEFT folder cannot express: export with --format hf --merge."
        )
    if alone := [module for module in modules if model.names.is_parameter(module)]:
        raise UserError(
            f"{alone[0].removeprefix(VISION)} was trained in full beside adapters, and is no module but a parameter, "
            "which a PEFT folder cannot hold: export with --format hf --merge."
        )
    return [model.names.module_to_hf(module) for module in _outermost(modules, full, model)]


def _outermost(modules: list[str], full: list[str], model: ModelFolder) -> list[str]:
    """Returns the modules that are in no other of them; PEFT takes a module with all that is below it.

    Raises:
        UserError: a part of a module was not trained.
    """
    found = [module for module in modules if not any(module.startswith(f"{outer}.") for outer in modules)]
    for module in found:
        if frozen := [name for name in model.expected_shapes() if name.startswith(f"{module}.") and name not in full]:
            raise UserError(
                f"{module} was trained in full without {frozen[0]}, and a PEFT folder can only save a module with all "
                "that is below it: export with --format hf --merge."
            )
    return found


def _target_modules(parts: list[str], model: ModelFolder) -> list[str]:
    """Returns short names such as q_proj where they match exactly the adapted modules, full names otherwise."""
    full = list(dict.fromkeys(model.names.module_to_hf(part) for part in parts))
    leaves = {name.rpartition(".")[2] for name in full}
    if model.names.body != language_family(model.decoder.family, model.hf_config, model.implementation).names.body:
        return sorted(full)  # beside a nested language model the short names may match other modules too
    everywhere = {name.rpartition(".")[0] for name in model.expected_shapes()} | {"lm_head"}
    modules = {model.names.module_to_hf(name) for name in everywhere}
    modules |= {outer for name in modules for outer in accumulate(name.split("."), "{}.{}".format)}  # a layer's is 0
    meant = {module for module in modules if module.rpartition(".")[2] in leaves}
    return sorted(leaves) if meant == set(full) else sorted(full)


def _as_parameters(
    config: dict[str, Any],
    chosen: list[str],
    parts: list[str],
    adapters: Mapping[str, tuple[int, float]],
    model: ModelFolder,
) -> dict[str, tuple[int, float]]:
    """Has linears whose names mean experts to PEFT targeted as parameters, which PEFT computes the same with.

    Args:
        config: adapter_config.json, which is changed.
        chosen: names of these linears in transformers' model.
        parts: all modules with adapters.
        adapters: names in transformers' model -> rank and alpha.

    Returns:
        Rank and alpha by the parameters' names, where they are not the default.
    """
    if config["use_dora"] or config["lora_bias"]:
        what = "lora.dora" if config["use_dora"] else "lora.bias"
        raise UserError(
            f"{chosen[0]} has an adapter, whose name means the experts to PEFT unless it is targeted as a parameter, "
            f"for which PEFT lacks {what}: export with --format hf --merge."
        )
    others = {model.names.module_to_hf(part) for part in parts}.difference(chosen)
    config["target_modules"] = sorted(others) or None
    config["target_parameters"] = sorted({f"{name}.weight" for name in chosen})
    config["lora_dropout"] = 0.0  # PEFT has none for parameters
    default = (config["r"], config["lora_alpha"])
    return {f"{name}.weight": adapters[name] for name in chosen if adapters[name] != default}


def _adapter_config(lora: Mapping[str, Any], targets: list[str], model: ModelFolder) -> dict[str, Any]:
    alpha = float(lora["alpha"])
    return {
        "peft_type": "LORA",
        "task_type": SCORING if model.decoder.scores else "CAUSAL_LM",
        **_base_name(model),
        "r": int(lora["rank"]),
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": float(lora["dropout"]),
        "use_rslora": bool(lora["rslora"]),
        "use_dora": bool(lora.get("dora", False)),
        "lora_bias": bool(lora.get("bias", False)),
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _base_name(model: ModelFolder) -> dict[str, Any]:
    """Returns the base's name and commit where it is a snapshot of the hub, else its folder here."""
    folder = model.hf_path.resolve()
    name = name_of_snapshot(folder)
    if name is None:
        return {"base_model_name_or_path": str(folder)}
    return {"base_model_name_or_path": name.repo, "revision": name.revision}


def _refuse_zeros(trained: TensorReader, modules: list[str]) -> list[str]:
    """Refuses a factor of zeros that does not start as zeros; where it does, the adapter is reported as untrained.

    B starts from zeros, of an embedding's adapter A, as PEFT has it.
    """
    untrained = []
    for module in modules:
        starts, drawn = ("lora_A", "lora_B") if module == "embed_tokens" else ("lora_B", "lora_A")
        if not trained.read_whole(f"{module}.{drawn}").any():
            raise UserError(
                f"{module}.{drawn} is all zero, so nothing was exported: that adapter was never trained, use an "
                "earlier step (--step)."
            )
        if not trained.read_whole(f"{module}.{starts}").any():
            untrained.append(module)
    if not untrained:
        return []
    if len(untrained) == len(modules):
        return ["the adapter is untrained: every B is zero, so it changes nothing"]
    return [f"{len(untrained)} of {len(modules)} adapters are untrained (B is zero): {listed(untrained, most=3)}"]


def _notes(
    modules: list[str],
    parts: list[str],
    saved: list[str],
    model: ModelFolder,
    config: Mapping[str, Any],
    base_name: str | None,
    dropout: float,
) -> list[str]:
    notes = []
    if config.keys() & {"rank_pattern", "alpha_pattern"}:
        notes.append(
            "the adapters differ in rank or alpha, which adapter_config.json says in rank_pattern and alpha_pattern: "
            "PEFT reads these, and vLLM from 0.33 on; older ones and SGLang use r and lora_alpha for all, so for them "
            "merge with --format hf --merge"
        )
    stacked = "target_parameters" in config
    if any(
        fused_parts(module) != [module] and not is_stored_fused(module, model) and not (stacked and is_expert(module))
        for module in modules
    ):
        notes.append(
            "an adapter over several modules is written as one for each that share A, which is exact; PEFT would "
            "continue to train them separately"
        )
    if config["lora_dropout"] != dropout:
        notes.append(
            f"lora_dropout is 0 in adapter_config.json and was {dropout:g} in training: PEFT has none for experts or "
            "parameters, and would continue to train without it"
        )
    if model.decoder.tied_embeddings and {"embed_tokens", "lm_head"} & set(parts):
        notes.append(
            "the base ties its head to its embedding, and the adapter changes one of them: "
            "merge with --format hf --merge, PEFT's own merge would change both"
        )
    if config["lora_bias"]:
        notes.append("the adapters have biases, which PEFT reads and may only merge where the base has biases too")
    if any(module.endswith(".kv_b_proj") for module in modules):
        notes.append(
            "kv_b_proj has adapters, which PEFT reads; vLLM generates without them, since it multiplies that matrix "
            "into others beforehand: there merge with --format hf --merge"
        )
    elif (reason := unread_by_vllm(parts, model.decoder)) is not None:
        notes.append(f"PEFT reads the adapters, but {reason}: for it merge with --format hf --merge")
    if config["use_dora"]:
        notes.append(
            "the adapters are DoRA's, which PEFT reads and vLLM does not: there merge with --format hf --merge"
        )
    if config["ensure_weight_tying"]:
        notes.append(
            "embedding and head were trained as one matrix, which is saved for both, with ensure_weight_tying in "
            "adapter_config.json: older releases of PEFT do not know it and would continue to train them apart"
        )
    if saved:
        notes.append(
            "modules trained in full are in modules_to_save, which PEFT reads and vLLM and SGLang do not: "
            "for them merge with --format hf --merge"
        )
    if base_name is None and model.manifest is not None and model.hf_path == model.path:
        notes.append(
            "base_model_name_or_path is a partitioned checkpoint, which other tools cannot open: "
            "give them the Hugging Face folder, or the base's name with --base-name"
        )
    return notes


def _write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    declared = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    with SafetensorsWriter(folder / ADAPTER_WEIGHTS, declared, {"format": "pt"}) as writer:
        for key, tensor in tensors.items():
            writer.write(key, tensor)
    text = json.dumps(config, indent=2, sort_keys=True)
    write_durably(folder / ADAPTER_CONFIG, text + "\n")


def _verify(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Opens the result and compares every tensor with the intended one."""
    written = SafetensorsReader(folder / ADAPTER_WEIGHTS)
    assert set(written.names()) == set(tensors), set(written.names()) ^ set(tensors)
    for key, tensor in tensors.items():
        if not torch.equal(written.view(key), tensor):
            raise UserError(
                f"{key} reads back from {folder.parent} with other values than were written: the disk is faulty, "
                "give a folder on another one."
            )
