"""Linears that compute with Q(W + s B A): losses and gradients against autograd of a straight-through module in plain
torch, whose numbers are rounded by a table of the format's codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from engine.batch import Batch
from engine.checkpoint.model_weights import open_source
from engine.choices import RECOMPUTE_LEVELS
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format
from engine.layers.context import TensorLayout
from engine.layers.encoded_storage import encoded_entries, fill_encoded, merged_names
from engine.layers.module import shard_entries
from engine.layers.recompute import MemoryPlan
from engine.models.decoder import Decoder, build_decoder
from engine.models.describe import meta_model
from engine.ops.encoded_weight import BaseEncoding
from engine.quantization.encoding import encoding
from engine.training.base_encoding import check_base, merge_sentence
from tests.distributed.cases import SCALE, Case, cut, make_batch, relative_error, small_config, whole_tensor
from tests.distributed.gradient_table import BLOCK, EVERY_LINEAR, FUSED
from tests.distributed.plain_decoder import PlainDecoder
from tests.support.few_bits import CONFIGS, in_few_bits
from tests.support.shared_scales import encoded_whole

CPU = torch.device("cpu")
CONFIG = small_config(num_layers=1, hidden=128, intermediate=256, head_dim=16)
"""A block of 128 columns, and of 128 rows, divides all linears but keys and values, which have 32 rows."""
CASE = Case(config=CONFIG, adapters=EVERY_LINEAR, dropout=0.0, merge_aware=True)
FORMAT_NAMES = ("nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4", "int8")
REACH = {
    "nvfp4": (-7.0, 7.0), "mxfp4": (-7.0, 7.0), "mxfp8": (-464.0, 464.0), "fp8_block": (-464.0, 464.0),
    "int4": (-8.5, 7.5), "int8": (-128.5, 127.5),
}  # fmt: skip
"""Numbers, in units of their block's scale, with which the block keeps its scale."""


def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """Weights whose every 16th column is their largest, and adapters that leave it alone: blocks keep their scales
    whatever becomes of their other numbers."""
    value = whole_tensor(name, shape)
    if name.startswith("layers.") and name.endswith(("_proj.weight", "lora_A")):
        value[:, ::16] = 0.0 if name.endswith("lora_A") else 0.6 * value[:, ::16].sign()
    return value


def _model(case: Case, base: str, **more: Any) -> Decoder:
    layout = TensorLayout(base=BaseEncoding.named(base))
    model = build_decoder(case.config, layout=layout, plan=case.plan(), device=CPU, dtype=torch.float32, **more)
    for entry in shard_entries(model):
        entry.parameter.data.copy_(cut(value_of(entry.name, entry.spec.global_shape), entry.spec))
    fill_encoded(encoded_entries(model), lambda entry: value_of(entry.name, entry.spec.global_shape))
    return model


def _scales(base: str, parts: dict[str, Tensor]) -> Tensor:
    """What a code of 1 is worth, fp32 [rows, groups]."""
    scales = parts["scales"]
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127)
    if base == "nvfp4":
        return scales.float() * parts["tensor_scale"][:, None]
    return scales.float().view(len(scales), -1)


def _sizes(base: str) -> Tensor:
    """The worth of the format's codes under a scale of 1, of codes with a sign without it."""
    if base.startswith("int"):
        half = 1 << (int(base[3:]) - 1)
        return torch.arange(-half, half).float()
    if base.endswith("fp4"):
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _points(stored: Tensor, scales: Tensor, group: int) -> Tensor:
    """The share of the way to its next code from which on a number takes it."""
    bits = (stored.abs() + scales).view(torch.int32).long()
    mixed = bits * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed // 2**16) * 0x85EBCA77 % 2**32
    columns = torch.arange(stored.shape[1]) % (group or stored.shape[1])
    return ((mixed // 2**20 + 2531 * columns) % 4096 + 0.5) / 4096


class Rounded:
    """Q of one weight, by a table of codes."""

    def __init__(self, base: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.base, codec, weight = base, encoding(base), value_of(name, shapes[name])
        parts = encoded_whole(codec, name, shapes, value_of)
        self.scales, self.stored = _scales(base, parts), torch.empty_like(weight)
        codec.decode(parts, self.stored)
        self.changed = 0.0

    def __call__(self, merged: Tensor) -> Tensor:
        of, sizes = FORMATS[self.base], _sizes(self.base)
        each = self.scales.repeat_interleave(of.rows, 0)[: len(merged)]
        each = each.repeat_interleave(of.group or merged.shape[1], 1)[:, : merged.shape[1]]
        (lowest, highest), quotient = REACH[self.base], merged / each
        assert lowest <= float(quotient.min()) and float(quotient.max()) <= highest, "a block does not keep its scale"
        points = _points(self.stored, each, of.group)
        if sizes[0] < 0:  # the sum is rounded to fp32
            value = (quotient + (0.5 - points).float()).round().clamp(sizes[0], sizes[-1])
        else:
            size = quotient.abs().clamp(max=sizes[-1])
            place = torch.searchsorted(sizes, size, right=True).sub(1).clamp(max=len(sizes) - 2)
            below, above = sizes[place], sizes[place + 1]
            value = torch.where((size - below) / (above - below) > points, above, below).copysign(quotient)
        rounded = torch.where(merged == self.stored, self.stored, value * each)
        self.changed = float((rounded != self.stored).float().mean())
        return rounded

    def straight_through(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Q(W + scale B A) with the derivative of W + scale B A."""
        product = torch.zeros_like(self.stored)
        for place in range(a.shape[0]):  # each sum rounded, in this order
            product = product + b[:, place, None] * a[place]
        merged = self.stored + scale * product
        with torch.no_grad():
            moved = self(merged) - merged
        return merged + moved


@dataclass(frozen=True, kw_only=True)
class _StraightThrough(PlainDecoder):
    """Every linear of the layers multiplies with Q(W + s B A), whose derivative is that of W + s B A."""

    rounded: dict[str, Rounded]

    def _merged(self, x: Tensor, name: str, a: Tensor | None, b: Tensor | None) -> Tensor:
        rounded = self.rounded[name]
        return x @ (rounded.stored if a is None or b is None else rounded.straight_through(a, b, self.scale)).T

    def _linears(
        self, x: Tensor, prefix: str, names: Sequence[str], fused: str, batch: Batch, step: int, site: int
    ) -> list[Tensor]:
        outputs, first = [], 0
        for name in names:
            rows = slice(first, first + len(self.rounded[f"{prefix}.{name}"].stored))
            a, b = (self.parameters.get(f"{prefix}.{name}.lora_{leaf}") for leaf in "AB")
            if f"{prefix}.{fused}.lora_A" in self.parameters:
                a, b = (self.parameters[f"{prefix}.{fused}.lora_{leaf}"] for leaf in "AB")
                b = b[rows]
            outputs.append(self._merged(x, f"{prefix}.{name}", a, b))
            first = rows.stop
        return outputs

    def _linear(self, x: Tensor, name: str, batch: Batch, step: int, site: int) -> Tensor:
        a, b = (self.parameters.get(f"{name}.lora_{leaf}") for leaf in "AB")
        return self._merged(x, name, a, b)


def _batch() -> Batch:
    return make_batch([(0, (20,)), (1, (12, 8))], row_length=20, seq_length=20, vocab_size=131, seed=1)


def _parameters(model: Decoder) -> dict[str, Tensor]:
    shapes = {entry.name: entry.spec.global_shape for entry in shard_entries(model)}
    return {name: value_of(name, shape).requires_grad_("lora" in name) for name, shape in shapes.items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("base", FORMAT_NAMES)
def test_losses_and_gradients_are_those_of_straight_through_rounding(base: str, fused: bool) -> None:
    case = replace(CASE, **FUSED) if fused else CASE
    model = _model(case, base)
    whole = _parameters(model)
    shapes = {entry.name: entry.spec.global_shape for entry in encoded_entries(model)}
    rounded = {name.removesuffix(".weight"): Rounded(base, name, shapes) for name in shapes}
    plain = _StraightThrough(config=CONFIG, parameters=whole, scale=SCALE, dropout=0.0, seed=11, rounded=rounded)
    expected = plain.token_losses(_batch(), 3)
    expected.sum().backward()
    losses = model(_batch(), torch.tensor(3))
    losses.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    trained = [entry for entry in shard_entries(model) if entry.sink is not None]
    assert len(trained) == (2 * (4 if fused else 9))
    for entry in trained:
        assert entry.sink is not None
        assert relative_error(entry.sink.buffer, whole[entry.name].grad) < 1e-5, entry.name
    assert min(one.changed for one in rounded.values()) > 0.2, "few numbers changed"


@pytest.mark.parametrize("base", FORMAT_NAMES)
def test_where_b_is_zero_the_bits_are_those_of_the_base(base: str) -> None:
    model, bare = _model(CASE, base), _model(Case(config=CONFIG), base)
    for entry in shard_entries(model):
        if (entry.name.endswith("lora_B") and "embed" not in entry.name) or entry.name == "embed_tokens.lora_A":
            entry.parameter.data.zero_()
    with torch.no_grad():
        assert torch.equal(model(_batch(), torch.tensor(3)), bare(_batch(), torch.tensor(3)))


def test_without_adapters_the_model_is_the_base() -> None:
    """As the reference of DPO and of GRPO."""
    model, bare = _model(CASE, "nvfp4"), _model(Case(config=CONFIG), "nvfp4")
    losses = []
    with torch.no_grad():
        for one, adapters in ((model, False), (bare, True), (model, True)):
            context = one.context(_batch(), torch.tensor(3), training=False, adapters=adapters)
            x = one.run_layers(one.embed(_batch(), adapters=adapters), context)
            losses.append(one.token_losses(x, _batch(), context))
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


def test_every_level_of_recomputation_has_the_same_bits() -> None:
    found = []
    for level in RECOMPUTE_LEVELS:
        model = _model(CASE, "int4", memory=MemoryPlan(recompute=level))
        losses = model(_batch(), torch.tensor(3))
        losses.sum().backward()
        sinks = {entry.name: entry.sink.buffer for entry in shard_entries(model) if entry.sink is not None}
        found.append({"losses": losses.detach(), **sinks})
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


def _refusal(call: Any) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_a_scale_whose_numbers_lie_on_several_ranks_is_refused() -> None:
    """Merged, a block may need a new scale, which no rank could know alone."""
    wide = replace(CONFIG, head_dim=32)

    def build(base: str | Format, adapters: str, *, merges: bool = True) -> list[str]:
        plan = replace(CASE, adapters=adapters, merge_aware=merges).plan()
        return merged_names(meta_model(wide, tensor_size=2, plan=plan, base=BaseEncoding(formats=lambda _: base)))

    message = _refusal(lambda: build("int8", EVERY_LINEAR))
    assert "layers.0.attention.o_proj is stored as int8, with one scale for a row of 256 input features" in message
    assert "set parallel.tensor to 1 " in message
    assert len(build("int8", r".*(q|k|v|gate|up)_proj")) == 5
    message = _refusal(lambda: build("fp8_block", EVERY_LINEAR))
    assert "layers.0.attention.k_proj is stored as fp8_block" in message
    assert "with one scale for 128 output features, but parallel.tensor 2 cuts its 64 into 32 a rank" in message
    assert len(build("fp8_block", r".*(q|o|gate|up|down)_proj")) == 5
    assert len(build("nvfp4", EVERY_LINEAR)) == 7
    one_scale = replace(FORMATS["fp8_channel"], keeps_scales=True)
    assert len(build(one_scale, EVERY_LINEAR)) == 7
    assert not build("int8", EVERY_LINEAR, merges=False) and not build("fp8_block", EVERY_LINEAR, merges=False)


@pytest.mark.parametrize("base", ["nf4", "fp8", "fp8_row"])
def test_what_is_no_format_of_a_merged_checkpoint_is_refused(base: str) -> None:
    message = _refusal(lambda: meta_model(CONFIG, plan=CASE.plan(), base=BaseEncoding.named(base)))
    assert f"layers.0.attention.q_proj is stored as {base}, a format that no merged checkpoint" in message


def test_a_run_none_of_whose_adapters_can_be_merged_is_refused() -> None:
    def check(targets: str) -> None:
        config = RunConfig(model=ModelOptions(path="x", base_dtype="int8"), lora=LoraOptions(merge_aware=True))
        check_base(config, CONFIG, replace(CASE, adapters=targets).plan())

    assert "no linear that is to have an adapter is stored encoded" in _refusal(lambda: check("lm_head|embed_tokens"))
    check("lm_head|.*up_proj")


def test_blocks_with_rows_of_two_linears_are_refused(tmp_path: Path) -> None:
    """A checkpoint in few bits has queries, keys and values in one matrix, 192 rows each."""
    config = Phi3Config(
        hidden_size=192, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=37, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "plain")
    in_few_bits(tmp_path / "plain", tmp_path, CONFIGS["fp8_block"])
    weights = open_source(tmp_path / "hf")
    options = RunConfig(model=ModelOptions(path="x", base_dtype="stored"), lora=LoraOptions(merge_aware=True))

    def check(targets: str) -> tuple[str, ...]:
        plan = replace(CASE, config=weights.model.decoder, adapters=targets).plan()
        return check_base(options, weights.model.decoder, plan, weights)

    message = _refusal(lambda: check(EVERY_LINEAR))
    assert "layers.0.attention.q_proj lies in model.layers.0.self_attn.qkv_proj.weight, which has one scale" in message
    assert check(r".*(o|gate|up|down)_proj") == ("fp8_block",)


def test_the_log_says_how_many_linears_and_which_adapters_are_left() -> None:
    config = RunConfig(model=ModelOptions(path="x", base_dtype="int8"), lora=LoraOptions(merge_aware=True))
    sentence = merge_sentence(config, [_model(CASE, "int8")])
    assert sentence.startswith("merge-aware training: 7 linears of this rank multiply with base and adapter merged")
    assert sentence.endswith("; adapters beside weights in float32: embed_tokens, lm_head")
    alone = merge_sentence(config, [_model(replace(CASE, adapters=BLOCK), "int8")])
    assert "adapters beside" not in alone
