"""Rules between sections: each refuses what clashes with both values and the fix, and lets the neighbour pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.optim import OptimOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config, check_warmup, check_world, data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.errors import UserError


def run(**sections: Any) -> RunConfig:
    return RunConfig(model=ModelOptions(path="x"), **sections)


def refused(config: RunConfig, *words: str, world_size: int = 1) -> None:
    with pytest.raises(UserError) as caught:
        check_config(config)
        check_world(config, world_size)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    assert all(word in message for word in words), message


def test_defaults_pass() -> None:
    check_config(run())
    check_world(run(), 1)


def test_nothing_trains() -> None:
    refused(run(lora=LoraOptions(rank=0)), "lora.rank is 0", "trainable is []", "set lora.rank to")
    check_config(run(lora=LoraOptions(rank=0), trainable=("*",)))


def test_native_kernels_know_two_dtypes() -> None:
    refused(
        RunConfig(model=ModelOptions(path="x", kernels="native", dtype="float16")),
        "model.kernels is native",
        "model.dtype is float16",
    )
    for dtype in ("float32", "bfloat16"):
        check_config(RunConfig(model=ModelOptions(path="x", kernels="native", dtype=dtype)))


def test_adapters_without_targets() -> None:
    refused(run(lora=LoraOptions(rank=8, targets=())), "lora.rank is 8", "lora.targets is []")
    check_config(run(lora=LoraOptions(rank=0, targets=()), trainable=("lm_head",)))


def test_adapter_to_start_from_without_rank() -> None:
    config = run(lora=LoraOptions(rank=0, init_from="adapter"), trainable=("*",))
    refused(config, "lora.init_from is adapter", "lora.rank is 0")
    check_config(run(lora=LoraOptions(rank=4, init_from="adapter")))


def test_one_adapter_for_several_modules_needs_all_of_them() -> None:
    for fused in ("qkv", "all"):
        refused(run(lora=LoraOptions(fused=fused, targets=("q_proj", "down_proj"))), "lacks k_proj, v_proj")
    for fused in ("gate_up", "all"):
        refused(run(lora=LoraOptions(fused=fused, targets=("up_proj", "down_proj"))), "lacks gate_proj")
    for fused in ("auto", "none", "gate_up"):
        check_config(run(lora=LoraOptions(fused=fused, targets=("q_proj", "down_proj"))))
    check_config(run(lora=LoraOptions(fused="all", targets=("[qkv]_proj", "o_proj"))))
    check_config(run(lora=LoraOptions(fused="all")))


def test_joint_reduction_and_sequence_parallelism() -> None:
    refused(
        run(parallel=ParallelOptions(tensor=2, lora_reduce="joint")),
        "parallel.lora_reduce is joint",
        "parallel.tensor 2",
        "set parallel.sequence to false",
    )
    check_config(run(parallel=ParallelOptions(tensor=2, sequence=False, lora_reduce="joint")))
    check_config(run(parallel=ParallelOptions(tensor=1, lora_reduce="joint")))


def test_warmup_longer_than_the_run() -> None:
    refused(
        run(optim=OptimOptions(warmup_steps=11), train=TrainOptions(steps=10)),
        "optim.warmup_steps is 11",
        "train.steps is 10",
    )
    check_config(run(optim=OptimOptions(warmup_steps=10), train=TrainOptions(steps=10)))
    check_config(run(optim=OptimOptions(warmup_steps=10)))
    epochs = run(optim=OptimOptions(warmup_steps=10), train=TrainOptions(epochs=2))
    check_warmup(epochs, 10)
    with pytest.raises(UserError, match="warmup_steps is 10 and train.epochs is 2, which is 9 steps, .* to 9 or less"):
        check_warmup(epochs, 9)


def test_evaluation_without_samples() -> None:
    refused(run(train=TrainOptions(eval_every=5)), "train.eval_every is 5", "data.validation is not set")
    check_config(run(train=TrainOptions(eval_every=5), data=DataOptions(validation="v.jsonl")))


def test_tokens_that_do_not_divide() -> None:
    data, train = DataOptions(seq_length=510), TrainOptions(micro_batch_size=1)
    refused(
        run(data=data, train=train, parallel=ParallelOptions(tensor=4)),
        "data.seq_length 510",
        "train.micro_batch_size 1",
        "parallel.tensor 4",
        world_size=4,
    )
    check_world(run(data=data, train=TrainOptions(micro_batch_size=2), parallel=ParallelOptions(tensor=4)), 4)
    check_world(run(data=data, train=train, parallel=ParallelOptions(tensor=4, sequence=False)), 4)


def test_rows_that_do_not_divide_over_context_ranks() -> None:
    parallel = ParallelOptions(context=4)
    refused(
        run(data=DataOptions(seq_length=6), parallel=parallel), "make data.seq_length a multiple of 8", world_size=4
    )
    check_world(run(data=DataOptions(seq_length=8), parallel=parallel, train=TrainOptions(global_batch_size=1)), 4)


def test_ranks_come_before_tokens() -> None:
    """A mistyped parallel.tensor is not answered with advice on data.seq_length."""
    refused(run(parallel=ParallelOptions(tensor=3)), "2 ranks", "change parallel.tensor.", world_size=2)


@pytest.mark.parametrize(("tensor", "world", "expected"), [(1, 1, 1), (1, 6, 6), (2, 2, 1), (2, 8, 4), (4, 8, 2)])
def test_data_parallel_size(tensor: int, world: int, expected: int) -> None:
    assert data_parallel_size(run(parallel=ParallelOptions(tensor=tensor)), world) == expected


@pytest.mark.parametrize(("tensor", "world"), [(2, 1), (2, 3), (4, 6)])
def test_ranks_that_do_not_divide(tensor: int, world: int) -> None:
    with pytest.raises(UserError, match=f"has {world} ranks? .*parallel.tensor {tensor} .*--nproc {tensor}"):
        check_world(run(parallel=ParallelOptions(tensor=tensor)), world)


def test_batches_that_do_not_divide() -> None:
    train = TrainOptions(micro_batch_size=2, global_batch_size=10)
    with pytest.raises(UserError, match=r"is 10, .*micro_batch_size 2 x 2 data-parallel ranks: .*global_batch_size 8"):
        check_world(run(train=train), 2)
    with pytest.raises(UserError, match=r"is 10, .* 2 x 8 data-parallel ranks: .*global_batch_size 16"):
        check_world(run(train=train), 8)
    check_world(run(train=train), 5)


def test_accumulation() -> None:
    train = TrainOptions(micro_batch_size=2, global_batch_size=16)
    assert gradient_accumulation_steps(run(train=train), 1) == 8
    assert gradient_accumulation_steps(run(train=train, parallel=ParallelOptions(tensor=2)), 8) == 2


MERGED: dict[str, Any] = {"merge_aware": True}


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"dropout": 0.05}, ("lora.dropout is 0.05", "set lora.dropout to 0,")),
        ({"dora": True}, ("lora.dora is true", "set lora.dora to false")),
        ({"bias": True}, ("lora.bias is true", "set lora.bias to false")),
    ],
)
def test_what_cannot_be_merged_before_rounding(lora: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        LoraOptions(**MERGED, **lora)
    assert all(word in str(caught.value) for word in ("lora.merge_aware is true", *words)), caught.value


def test_products_of_codes_need_a_format_that_has_them() -> None:
    def with_base(base: Any, **lora: Any) -> RunConfig:
        model = ModelOptions(path="x", base_dtype=base, base_products="codes")
        return RunConfig(model=model, lora=LoraOptions(**lora))

    for base in (None, "nf4", "int8", "fp8", "mxfp4"):
        refused(with_base(base), f"model.base_dtype is {base or 'null'}", "one of stored, nvfp4, mxfp8, fp8_block")
    refused(with_base("mxfp8", merge_aware=True), "model.base_products is codes and lora.merge_aware is true")
    for base in ("stored", "nvfp4", "mxfp8", "fp8_block"):
        check_config(with_base(base))
    with pytest.raises(UserError, match="must be one of decoded, codes"):
        ModelOptions(path="x", base_products="numbers")  # type: ignore[arg-type]


def test_merging_needs_adapters_and_a_format_that_is_written() -> None:
    def with_base(base: Any, **lora: Any) -> RunConfig:
        return RunConfig(model=ModelOptions(path="x", base_dtype=base), lora=LoraOptions(**MERGED, **lora))

    config = with_base("int8", rank=0)
    refused(replace(config, trainable=("lm_head",)), "lora.merge_aware is true and lora.rank is 0")
    for base in (None, "nf4", "fp8", "fp8_row"):
        refused(with_base(base), f"model.base_dtype is {base or 'null'}", "one of stored, nvfp4, ", ", int4, int8")
    check_config(with_base("int8"))
