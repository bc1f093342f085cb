"""Which products read the codes of a base in few bits: those of few rows, as sampling has them, and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.experts.ops.encoded_experts import EncodedExperts
from engine.experts.ops.merged_experts import MergedExperts
from engine.inference.options import Limits
from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import Format
from engine.kernels.native.loader import native_status
from engine.kernels.native.product import multiply
from engine.kernels.native.quantize import NATIVE_ARITHMETIC
from engine.layers.context import TensorLayout
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder
from engine.ops import quantized_backends
from engine.ops.adapters import Adapter, LowRank
from engine.ops.encoded_weight import BaseEncoding, EncodedWeight, Scratch
from engine.ops.quantized_backends import choose_quantized
from engine.ops.quantized_products import QuantizedWeight
from engine.ops.scaled_weight import ScaledWeight
from engine.quantization.encoding import encoding
from tests.distributed.cases import Case, cut, make_batch, small_config, whole_tensor
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.family_models import make_model
from tests.support.generation import engine_answers, random_prompts

MOST = 4


@dataclass
class Products:
    """A backend that multiplies few rows from codes, in plain torch, and counts them."""

    rows: list[int]

    def arithmetic(self, most: int = MOST) -> Arithmetic:
        def multiply(of: Format, parts: Mapping[str, Tensor], x: Tensor, out: Tensor) -> None:
            self.rows.append(len(x))
            numbers = x.new_empty(out.shape[1], x.shape[1])
            PLAIN.block_decode(of, parts, numbers)
            out.copy_(x.double() @ numbers.double().t())

        return replace(PLAIN, few_rows_product=multiply, most_few_rows=most)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _linear(arithmetic: Arithmetic, low_rank: LowRank | None) -> EncodedWeight:
    code = encoding("nvfp4", arithmetic)
    parts = code.encode(_random(48, 64))
    scratch = Scratch()
    scratch.announce((48, 64 + (0 if low_rank is None else 8)), torch.float32)
    weight = QuantizedWeight(encoding=code, parts=parts, in_features=64, sections=(32, 16))
    return EncodedWeight(weight=weight, dtype=torch.float32, scratch=scratch)


def _adapters() -> LowRank:
    """Over the first and the last rows, of ranks 2 and 3: three of eight columns beside the weight are padding."""
    places = ((0, 32, 0, 2), (32, 16, 2, 3))
    adapters = tuple(
        Adapter(
            first_column=first, num_columns=rows, first_row=row, num_ranks=rank, scale=1.0, b_OR=_random(rows, rank),
            sink_a=None, sink_b=None,
        )
        for first, rows, row, rank in places
    )  # fmt: skip
    return LowRank(a_RI=_random(5, 64), adapters=adapters, dropout=None)


@pytest.mark.parametrize("folded", [False, True])
def test_a_linear(folded: bool) -> None:
    """With folded adapters, whose H stands beside x, and without; backward decodes whatever the rows."""
    products, low_rank = Products([]), _adapters() if folded else None
    ours, decoded = _linear(products.arithmetic(), low_rank), _linear(PLAIN, low_rank)
    for count in (1, MOST, MOST + 1):
        x = _random(count, 72 if folded else 64)
        if folded:
            x[:, 69:] = 0
        torch.testing.assert_close(ours.product(x, low_rank), decoded.product(x, low_rank), rtol=1e-5, atol=1e-4)
        dy, width = _random(count, 48), x.shape[1]
        assert torch.equal(ours.input_gradient(dy, low_rank, width), decoded.input_gradient(dy, low_rank, width))
    assert products.rows == [1, MOST]


@pytest.mark.parametrize("name", ["nf4", "fp8", "fp8_row"])
def test_encodings_without_such_products(name: str) -> None:
    weight = replace(_linear(PLAIN, None).weight, encoding=encoding(name, Products([]).arithmetic()))
    assert not weight.multiplies_codes(1)


def test_rows_that_depend_on_no_number_of_rows() -> None:
    base = BaseEncoding.named("int8", Products([]).arithmetic())
    for one, few in ((base, True), (base.row_invariant(torch.mm), False)):
        found = one.common(["any"])
        assert found is not None
        weight = replace(_linear(PLAIN, None).weight, encoding=found)
        assert weight.multiplies_codes(1) is few


@pytest.mark.skipif(not native_status().available, reason=native_status().reason)
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4", "fp8_row"])
def test_products_of_codes_that_depend_on_no_number_of_rows(name: str) -> None:
    """torch's product may give one row other bits than many."""
    backend = choose_quantized("native", torch.device("cpu"))
    base = BaseEncoding.named(name, backend.arithmetic, backend.operands).row_invariant(multiply)
    code = base.common(["any"])
    assert code is not None
    weight = QuantizedWeight(
        encoding=code, parts=code.encode(_random(256, 512)), in_features=512, sections=(256,), operands=base.operands
    )
    kind = EncodedWeight if name == "fp8_row" else ScaledWeight
    rounding = kind(weight=weight, dtype=torch.float32, scratch=Scratch())
    x = _random(70, 512)
    y = rounding.product(x, None)
    for count in (1, 2, 33):
        assert torch.equal(rounding.product(x[:count], None), y[:count]), count


@pytest.mark.parametrize("beside", [0, 3])
def test_an_expert(beside: int) -> None:
    """The second of three, whose blocks of scales are its own."""
    products, found = Products([]), []
    for arithmetic in (products.arithmetic(), PLAIN):
        code = encoding("fp8_block", arithmetic).stacked([128])
        parts = code.encode(_random(384, 64))
        weight = QuantizedWeight(encoding=code, parts=parts, in_features=64, sections=(384,))
        experts = EncodedExperts(
            weight=weight, num_experts=3, b_EOR=_random(3, 128, beside) if beside else None, dtype=torch.float32,
            scratch=Scratch(),
        )  # fmt: skip
        experts.announce(together=False)
        found.append([experts.product(1, _random(count, 64 + beside), torch.mm) for count in (2, MOST + 1)])
    for ours, decoded in zip(*found, strict=True):
        torch.testing.assert_close(ours, decoded, rtol=1e-5, atol=1e-4)
    assert products.rows == [2]
    assert MergedExperts.product is not EncodedExperts.product, "weights with adapters in them are rounded first"


def test_a_step_of_training_decodes() -> None:
    """Its micro-batches have more rows than a pass of sampling."""
    case, products = Case(config=small_config(hidden=64, intermediate=128, head_dim=8), adapters=EVERY_LINEAR), []
    counted = Products(products)
    for most, used in ((MOST, False), (64, True)):
        base = BaseEncoding.named("nvfp4", counted.arithmetic(most))
        model = Decoder(
            case.config,
            layout=TensorLayout(base=base),
            plan=case.plan(),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        for entry in shard_entries(model):
            entry.parameter.data.copy_(cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
        fill_encoded(encoded_entries(model), lambda entry: whole_tensor(entry.name, entry.spec.global_shape))
        batch = make_batch([(0, (20,)), (1, (12, 8))], row_length=20, seq_length=20, vocab_size=131, seed=1)
        model(batch, torch.tensor(3)).sum().backward()
        assert bool(products) is used


@pytest.mark.skipif(not native_status().available, reason=native_status().reason)
@pytest.mark.parametrize("base", ["nvfp4", "int4", "int8"])
def test_sampling(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of decoded matrices, and log-probabilities within the rounding; passes read codes."""
    make_model("llama", tmp_path / "hf")
    prompts, rows, answers = random_prompts(67, (5, 40, 1)), [], []

    def counted(of: Format, parts: Mapping[str, Tensor], x: Tensor, out: Tensor) -> None:
        rows.append(len(x))
        multiply: Callable[..., None] | None = NATIVE_ARITHMETIC.few_rows_product
        assert multiply is not None
        multiply(of, parts, x, out)

    for product in (counted, None):
        arithmetic = replace(NATIVE_ARITHMETIC, few_rows_product=product)
        monkeypatch.setattr(quantized_backends, "NATIVE_ARITHMETIC", arithmetic)
        answers.append(
            engine_answers(tmp_path / "hf", prompts, Limits(max_new_tokens=12, slots=3), logps=True, base_dtype=base)
        )
    few, decoded = answers
    assert [one.ids for one in few] == [one.ids for one in decoded]
    for ours, theirs in zip(few, decoded, strict=True):
        assert ours.logps == pytest.approx(theirs.logps, abs=1e-5)
    assert rows and max(rows) <= NATIVE_ARITHMETIC.most_few_rows < 40
