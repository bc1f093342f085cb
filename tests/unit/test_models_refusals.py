"""Models that do not fit a layout are refused with a sentence that names both values and what to change."""

from __future__ import annotations

import pytest
import torch

from engine.distributed.mesh import shape_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.context import TensorLayout
from engine.models.decoder import Decoder
from engine.models.describe import meta_model, module_names, num_parameters
from engine.models.families import FAMILIES, WRAPPINGS, family_of
from engine.models.families.family import Family
from engine.seams import resolve
from engine.vision.families.wrapping import Wrapping
from tests.distributed.cases import Case, make_batch, small_config
from tests.distributed.gradient_table import FUSED
from tests.distributed.stock_models import STOCK_MODELS, decoder_config, stock_model


@pytest.mark.parametrize(
    ("changes", "tensor_size", "sentence"),
    [
        ({"num_heads": 6}, 4, "6 attention heads, which do not divide over parallel.tensor 4"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "6 key/value heads, which neither divide over nor are divided by"),
        ({"intermediate": 49}, 2, "intermediate_size is 49, which does not divide over parallel.tensor 2"),
    ],
)
def test_sizes_that_do_not_divide(changes: dict[str, int], tensor_size: int, sentence: str):
    with pytest.raises(UserError, match=sentence):
        meta_model(small_config(**changes), tensor_size=tensor_size)


def test_fused_adapter_with_too_few_key_value_heads():
    plan = Case(config=small_config(), **FUSED).plan()
    with pytest.raises(
        UserError,
        match=r"one adapter for query, key .* 2 and parallel.tensor is 4: set parallel.tensor to 2, or lora.fused",
    ):
        meta_model(small_config(), tensor_size=4, plan=plan)


def test_tokens_that_do_not_divide_over_sequence_parallel_ranks():
    mesh = shape_mesh(RankGrid(tp=2), 0, 2)
    layout = TensorLayout(tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=True)
    model = Decoder(
        small_config(), layout=layout, plan=Case(config=small_config()).plan(), device=torch.device("cpu"),
        dtype=torch.float32,
    )  # fmt: skip
    batch = make_batch([(0, (9,))], row_length=9, seq_length=9, vocab_size=131, seed=0)
    with pytest.raises(UserError, match="1 rows x 9 tokens does not divide over the ranks of parallel.tensor 2"):
        model.context(batch, torch.tensor(0), training=True)


def test_unknown_family_and_activation():
    with pytest.raises(UserError, match="model_type 'unheard_of' in config.json is not supported: expected one of"):
        family_of({"model_type": "unheard_of"})
    family, _ = family_of({"model_type": "llama"})
    with pytest.raises(UserError, match="lacks hidden_size, intermediate_size"):
        family.config_from_hf({"model_type": "llama"})


@pytest.mark.parametrize("name", STOCK_MODELS)
def test_counts_and_names_equal_transformers(name: str):
    config = decoder_config(name)
    model = stock_model(name, Case(config=config))
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    names = module_names(config)
    assert len(names) == len(set(names)) and "lm_head" in names


@pytest.mark.parametrize("table", [FAMILIES, WRAPPINGS])
def test_each_row_of_the_tables_names_a_family(table: dict[str, str]) -> None:
    assert list(table) == sorted(table)
    for name in table.values():
        assert isinstance(resolve(name), Family | Wrapping), name
