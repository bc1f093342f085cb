"""The PEFT adapter that a run starts from, checked against the run's own adapters before any weight is read."""

from __future__ import annotations

from engine.checkpoint.leftover import refuse_leftover
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.weight_source import SHARED, TIED_HEAD
from engine.config.run import RunConfig
from engine.conversion.merged_model import adapted_modules, fully_trained
from engine.conversion.peft_read import AdapterSource
from engine.conversion.shared_factors import CommonFactors
from engine.errors import UserError
from engine.models.names import own_names
from engine.training.start_model import ModelPlan, ModelSource


def adapter_source(config: RunConfig, source: ModelSource, plan: ModelPlan) -> TensorReader:
    """Returns the adapter of `lora.init_from`.

    Raises:
        UserError: it is no adapter that can be read, belongs to another base, differs from the adapters that the run
            would train in modules, ranks, scales, shapes or dtypes, or has numbers that are not finite.
    """
    lora, model = config.lora, source.model
    assert lora.init_from is not None
    modules = adapted_modules([own for name in plan.shapes for own in own_names(name, model.decoder)])
    found = AdapterSource(
        lora.init_from,
        names=model.names,
        decoder=model.decoder,
        fused=[module for module in modules if plan.modules.fused(module)],
        with_saved_modules=True,
    )
    if source.weights is not None:
        found.require_base(source.weights)
    _check_tying(found, config, source)
    settings = {module: adapter for module in modules if (adapter := plan.modules.adapter(module)) is not None}
    found.require_matching({module: (own.rank, own.scale) for module, own in settings.items()})
    for option, key, stored, asked in (
        ("dora", "use_dora", found.settings.dora, lora.dora),
        ("bias", "lora_bias", found.settings.bias, lora.bias),
    ):
        if stored != asked:
            raise UserError(
                f"lora.{option} is {str(asked).lower()}, but the adapter in {lora.init_from} has {key} "
                f"{str(stored).lower()}: set lora.{option} to {str(stored).lower()}."
            )
    for name in fully_trained(found.tensor_names()):
        if name not in plan.trained and name in (*plan.shapes, TIED_HEAD):
            raise UserError(
                f"the adapter in {lora.init_from} has {name} trained in full (modules_to_save), which this run does "
                f"not train: add {name.rpartition('.')[0]} to trainable."
            )
    start = CommonFactors(found, list(plan.shapes), model.decoder)
    refuse_leftover(
        f"the adapter in {lora.init_from}",
        start.tensor_names(),
        plan.trained,
        because=f"the model in {model.path} does not have: start from an adapter that was trained on it.",
    )
    for name in start.tensor_names():
        _check_tensor(start, name, plan.shapes[name])
    return start


def _check_tying(found: AdapterSource, config: RunConfig, source: ModelSource) -> None:
    """Refuses an adapter whose embedding and head train together where the run's would train apart, and the reverse."""
    base_is_tied = source.head_is_copy or source.model.decoder.tied_embeddings
    saved = [name for name in fully_trained(found.tensor_names()) if name in (SHARED, TIED_HEAD)]
    ensures, folder = found.settings.ensures_tying, config.lora.init_from
    if not base_is_tied:
        return
    if ensures and (adapted := [end for end in ("embed_tokens", "lm_head") if end in found.modules()]):
        raise UserError(
            f"the adapter in {folder} has {adapted[0]} with ensure_weight_tying, where embedding and head share their "
            "adapter, which is not supported in training: start from one without it, or merge it into the base first."
        )
    if saved and ensures != config.lora.ensure_weight_tying:
        now, then = (str(value).lower() for value in (config.lora.ensure_weight_tying, ensures))
        raise UserError(
            f"lora.ensure_weight_tying is {now}, but the adapter in {folder} has {saved[0]} trained in full with "
            f"ensure_weight_tying {then}: set lora.ensure_weight_tying to {then}."
        )


def _check_tensor(source: TensorReader, name: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor as `load_parameters` would later, when everything else has been read."""
    if source.shape(name) != shape:
        raise UserError(
            f"the adapter in {source.label} has {name} with shape {list(source.shape(name))}, but this model takes "
            f"{list(shape)}: use an adapter that was trained on it."
        )
    source.require_numbers(name)
    if not source.read_whole(name).isfinite().all():
        raise UserError(
            f"the adapter in {source.label} has numbers in {name} that are not finite: use one from before its "
            "training went wrong."
        )
