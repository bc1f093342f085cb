"""What families have beside Llama, under other backends, recomputation and context parallelism."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.kernels.native.loader import native_status
from engine.kernels.records import Documents
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.recompute import Level, MemoryPlan
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.families import family_of
from engine.models.plain_torch import plain_torch_parts
from engine.ops.attention.masked import BLOCK, MaskedAttention
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE
from tests.distributed.cases import Case, make_batch, relative_error
from tests.support.family_models import make_model
from tests.support.memory_models import build_with, packed_batches, same_bits, two_alive

NAMES = ["qwen3", "mistral", "granite", "smollm3", "olmo2", "phi3 longrope", "gemma2", "gemma3"]
KINDS = {
    "adapters": {"adapters": r"layers\..*_proj", "dropout": 0.1},
    "adapters and norms": {"adapters": r"layers\..*_proj|lm_head", "trained": ".*norm", "dropout": 0.1},
    "everything": {"trained": ".*"},
}
Results = tuple[Tensor, dict[str, Tensor]]

every_name = pytest.mark.parametrize("name", NAMES)
every_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def _config(name: str) -> DecoderConfig:
    family, text = family_of(make_model(name).config.to_dict())
    return replace(family.config_from_hf(text), num_layers=2, layer_kinds=family.config_from_hf(text).layer_kinds[:2])


def _case(name: str, kind: str) -> Case:
    options = dict(KINDS[kind])
    if _config(name).tied_embeddings and "adapters" in options:
        # a tied matrix with an adapter on one side is a matter of its own
        options["adapters"] = options["adapters"].removesuffix("|lm_head")
    return Case(config=_config(name), **options)


@functools.cache
def _results(name: str, kind: str, level: Level = "selective", backend: str = "reference") -> Results:
    kernels = NATIVE if backend == "native" else REFERENCE
    built = build_with(_case(name, kind), MemoryPlan(recompute=level), kernels=kernels)
    return two_alive(built, packed_batches(_config(name).vocab_size))


@pytest.mark.skipif(not native_status().available, reason=native_status().reason)
@every_name
@every_kind
def test_native_kernels_follow_the_reference(name: str, kind: str) -> None:
    loss, gradients = _results(name, kind, backend="native")
    expected_loss, expected = _results(name, kind)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    errors = {key: relative_error(value, expected[key]) for key, value in gradients.items()}
    assert max(errors.values()) < 2e-5, {key: error for key, error in errors.items() if error >= 2e-5}


@every_name
@every_kind
@pytest.mark.parametrize("level", ["none", "attention", "full"])
def test_levels_of_recomputation_give_the_same_bits(name: str, kind: str, level: Level) -> None:
    same_bits(_results(name, kind, level), _results(name, kind))


def _layout(size: int, method: str) -> TensorLayout:
    return TensorLayout(cp=Axis("cp", size), context_method=method)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "what"), [("mistral", "a window of 7"), ("gemma2", "a soft cap of 1.5 on scores")])
def test_ring_attention_is_refused(name: str, what: str) -> None:
    common = {"plan": TrainingPlan(), "device": torch.device("meta"), "dtype": torch.float32}
    with pytest.raises(UserError, match=rf"{what}, which ring attention .* set parallel.context_method to ulysses"):
        Decoder(_config(name), layout=_layout(2, "ring"), **common)
    Decoder(_config(name), layout=_layout(2, "ulysses"), **common)
    Decoder(replace(_config(name), layer_kinds=(), attention_softcap=None), layout=_layout(2, "ring"), **common)


def test_rows_beyond_the_short_factors_are_refused() -> None:
    built = build_with(Case(config=_config("phi3 longrope")), MemoryPlan())
    batch = make_batch([(0, (41,))], row_length=41, seq_length=41, vocab_size=67, seed=0)
    with pytest.raises(UserError, match="rows have 41 tokens, but .* more than 40, .* use a data.seq_length of 40 or"):
        built.model.context(batch, built.stage.step, training=False)


def test_apex_norms_are_refused_where_weights_are_wider_than_activations() -> None:
    layout = TensorLayout(kernels=replace(REFERENCE, name="apex"))
    common = {"layout": layout, "plan": TrainingPlan(), "device": torch.device("meta")}
    with pytest.raises(UserError, match="model.kernels is apex, .* this model adds 1 to .* set model.kernels to auto"):
        Decoder(_config("gemma2"), dtype=torch.bfloat16, **common)
    Decoder(_config("gemma2"), dtype=torch.float32, **common)
    Decoder(_config("granite"), dtype=torch.bfloat16, **common)


def test_what_runs_in_plain_torch_is_said() -> None:
    said = {name: plain_torch_parts(_config(name)) or "" for name in NAMES}
    assert said["granite"] == said["smollm3"] == said["qwen3"] == ""
    assert said["mistral"].endswith("attention of documents longer than a window of 7")
    assert said["olmo2"].endswith("the norm of queries and keys over all heads, where these lie on several ranks")
    assert said["phi3 longrope"].endswith("which turns a part of each head")
    for words in ("scores have a soft cap of 1.5", "the MLP's GELU", "logits have a soft cap of 2"):
        assert words in said["gemma2"]


def _masked(window: int | None, softcap: float | None) -> MaskedAttention:
    return MaskedAttention(plain=NATIVE.attention, window=window, softcap=softcap)


@pytest.mark.parametrize(("window", "softcap"), [(5, None), (300, None), (None, 0.8), (300, 0.8)])
def test_masked_attention_equals_torch(window: int | None, softcap: float | None) -> None:
    """In fp64, with the whole mask written out; documents of several blocks, of one token, and short ones."""
    lengths = (2 * BLOCK + 37, 1, 4, BLOCK)
    total = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    shapes = ((total, 6, 4), (total, 2, 4), (total, 2, 4), (total, 6, 4))
    q, k, v, dout = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    seen = (document[:, None] == document[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = _masked(window, softcap)(*ours, Documents(lengths=lengths, offsets=None, max_length=total), scale=0.7)
    q4, k4, v4 = (x.transpose(0, 1).repeat_interleave(6 // x.shape[1], 0) for x in theirs)
    scores = q4 @ k4.transpose(1, 2) * 0.7
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    expected = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v4).transpose(0, 1)
    out.backward(dout)
    expected.backward(dout)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-11)


def test_a_window_that_hides_nothing_leaves_the_backends_own_attention() -> None:
    calls = []

    def plain(*tensors: Tensor, scale: float) -> Tensor:
        calls.append(scale)
        return tensors[0]

    q = torch.zeros(9, 2, 4)
    attention = MaskedAttention(plain=plain, window=5, softcap=None)  # type: ignore[arg-type]
    attention(q, q, q, Documents(lengths=(5, 4), offsets=None, max_length=9), scale=1.0)
    assert calls == [1.0]
    attention(q, q, q, Documents(lengths=(6, 3), offsets=None, max_length=9), scale=1.0)
    assert calls == [1.0]
    with pytest.raises(UserError, match="turn the capture of graphs off"):
        attention(q, q, q, Documents(lengths=(), offsets=None, max_length=9), scale=1.0)


def test_norms_round_as_in_transformers() -> None:
    """In bfloat16, where 1 + w would lose most of w: the sum and the product are made in fp32 and rounded once."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    case = Case(config=_config("gemma2"))
    layer = build_with(case, MemoryPlan(), dtype=torch.bfloat16).model.layers[0]
    torch.manual_seed(0)
    stock = Gemma2RMSNorm(40, eps=1e-6).bfloat16()
    torch.nn.init.normal_(stock.weight, std=0.01)
    x = torch.randn(64, 40).bfloat16()
    expected = stock(x)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    rounded_early = (x.float() * rstd * (1 + stock.weight).float()).bfloat16()
    assert not torch.equal(rounded_early, expected), "nothing to tell apart"
    for norm in (layer.input_norm, layer.mlp_output_norm):
        norm.weight.parameter.data.copy_(stock.weight)
    assert torch.equal(layer.input_norm.as_input().make(x, None, REFERENCE)[0], expected)
    assert torch.equal(layer.mlp_output_norm.of_output(x), expected)
