"""The PEFT adapter that a run starts from, found to be what the run would train before any weight is read."""

from __future__ import annotations

from engine.checkpoint.reader import TensorReader
from engine.config.run import RunConfig
from engine.conversion.expert_factors import CommonFactors
from engine.conversion.merged_model import adapted_modules, fully_trained
from engine.conversion.peft_read import AdapterSource
from engine.errors import UserError
from engine.models.names import own_names
from engine.training.start_model import ModelPlan, ModelSource


def check_adapter(config: RunConfig, source: ModelSource, plan: ModelPlan) -> None:
    """Looks into the folder of `lora.init_from`, where there is one.

    Raises:
        UserError: as `adapter_source`.
    """
    if config.lora.rank > 0 and config.lora.init_from is not None:
        adapter_source(config, source, plan)


def adapter_source(config: RunConfig, source: ModelSource, plan: ModelPlan) -> TensorReader:
    """The adapter of `lora.init_from`.

    Raises:
        UserError: it is no adapter that can be read, belongs to another base, or differs from what the run would train
            in modules, ranks, scales, shapes or dtypes, or has numbers that are not finite.
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
    settings = {module: own for module in modules if (own := plan.modules.adapter(module)) is not None}
    found.require_matching({module: (own.rank, own.scale) for module, own in settings.items()})
    if found.settings.dora != lora.dora:
        raise UserError(
            f"lora.dora is {str(lora.dora).lower()}, but the adapter in {lora.init_from} has use_dora "
            f"{str(found.settings.dora).lower()}: set lora.dora to {str(found.settings.dora).lower()}."
        )
    if found.settings.bias != lora.bias:
        raise UserError(
            f"lora.bias is {str(lora.bias).lower()}, but the adapter in {lora.init_from} has lora_bias "
            f"{str(found.settings.bias).lower()}: set lora.bias to {str(found.settings.bias).lower()}."
        )
    for name in fully_trained(found.tensor_names()):
        if not plan.modules.trains(name.rpartition(".")[0]):
            raise UserError(
                f"the adapter in {lora.init_from} has {name} trained in full (modules_to_save), which this run does "
                f"not train: add {name.rpartition('.')[0]} to trainable."
            )
    start = CommonFactors(found, list(plan.shapes), model.decoder)
    for name in start.tensor_names():
        _check_tensor(start, name, plan.shapes.get(name))
    return start


def _check_tensor(source: TensorReader, name: str, shape: tuple[int, ...] | None) -> None:
    """Refuses a tensor as `load_parameters` would later, when everything else has been read."""
    if shape is not None and source.shape(name) != shape:
        raise UserError(
            f"the adapter in {source.label} has {name} with shape {list(source.shape(name))}, but this model takes "
            f"{list(shape)}: use an adapter that was trained on it."
        )
    if not (dtype := source.dtype(name)).is_floating_point:
        raise UserError(
            f"the adapter in {source.label} stores {name} as {str(dtype).removeprefix('torch.')}, but numbers with a "
            "point are expected: save it in float32 or bfloat16."
        )
    if not source.read_whole(name).isfinite().all():
        raise UserError(
            f"the adapter in {source.label} has numbers in {name} that are not finite: use one from before its "
            "training went wrong."
        )
