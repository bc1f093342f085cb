"""A model whose frozen weights are stored encoded: its arithmetic, its bytes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.checkpoint.loading import load_encoded
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.weight_source import WeightSource
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec, split_spec
from engine.errors import UserError
from engine.kernels.formats import Format
from engine.layers import encoded_storage
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import EncodedStorage, encoded_entries, fill_encoded
from engine.layers.linear import RowParallelLinear
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder
from engine.models.describe import meta_model
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.inputs import GivenInput
from engine.quantization.encoding import ENCODING_NAMES, encoding
from engine.training.base_encoding import base_encoding, check_base
from rankfold.planning.memory_measure import LiveStorages
from tests.distributed.cases import Case, cut, make_batch, relative_error, small_config, whole_parameters, whole_tensor
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.distributed.plain_decoder import PlainDecoder
from tests.support.format_parts import drawn_parts
from tests.support.shared_scales import encoded_whole
from tests.support.spawning import spawn

CPU = torch.device("cpu")
CONFIG = small_config(hidden=64, intermediate=172, head_dim=8)
"""172 columns are two blocks of 64 and a short one."""
CASE = Case(config=CONFIG, adapters=EVERY_LINEAR)
NAMES = ENCODING_NAMES
DECODED = tuple(name for name in NAMES if name not in ("fp8", "fp8_row"))


def _model(case: Case, base: str | None, *, fold: bool = True) -> Decoder:
    """With the values that `whole_tensor` gives each name."""
    layout = TensorLayout(fold=fold, base=None if base is None else BaseEncoding.named(base))
    model = Decoder(case.config, layout=layout, plan=case.plan(), device=CPU, dtype=torch.float32)
    for entry in shard_entries(model):
        entry.parameter.data.copy_(cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
    fill_encoded(encoded_entries(model), lambda entry: whole_tensor(entry.name, entry.spec.global_shape))
    return model


def _rounded(name: str, weights: Mapping[str, Tensor], base: str) -> Tensor:
    """What the encoding makes of a whole weight: by hand for int8, else by its decoder."""
    weight = weights[name]
    if base == "int8":
        largest = weight.abs().amax(1, keepdim=True)
        return (127 * weight.double() / largest).round().float() * (largest / 127)
    decoded, shapes = torch.empty_like(weight), {one: tuple(weights[one].shape) for one in weights}
    codec = encoding(base)
    codec.decode(encoded_whole(codec, name, shapes, lambda one, shape: weights[one].detach()), decoded)
    return decoded


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("base", DECODED)
def test_losses_and_gradients_are_those_of_rounded_weights_in_plain_torch(base: str, fold: bool) -> None:
    model = _model(CASE, base, fold=fold)
    unchanged = whole_parameters(CASE)
    whole = {
        name: _rounded(name, unchanged, base) if name.endswith("_proj.weight") else weight
        for name, weight in whole_parameters(CASE).items()
    }
    for name in whole:
        if "lora" in name:
            whole[name].requires_grad_()
    batch = make_batch([(0, (20,)), (1, (12, 8))], row_length=20, seq_length=20, vocab_size=131, seed=1)
    plain = PlainDecoder(config=CONFIG, parameters=whole, scale=1.7, dropout=CASE.dropout, seed=11)
    expected = plain.token_losses(batch, 3)
    expected.sum().backward()
    losses = model(batch, torch.tensor(3))
    losses.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for entry in shard_entries(model):
        if entry.sink is not None:
            assert relative_error(entry.sink.buffer, whole[entry.name].grad) < 1e-5, entry.name
    unrounded = PlainDecoder(
        config=CONFIG, parameters=whole_parameters(CASE), scale=1.7, dropout=CASE.dropout, seed=11
    ).token_losses(batch, 3)
    assert (unrounded - expected).abs().max() > 1e-2, "the encoding rounds nothing"


@pytest.mark.parametrize("fused", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_linears_that_servers_put_into_one_matrix_are_encoded_as_it_is(fused: tuple[str, ...]) -> None:
    """With the one scale that compressed-tensors gives the whole."""
    from compressed_tensors.quantization.utils import generate_gparam

    entries = {entry.name: entry for entry in encoded_entries(_model(CASE, "nvfp4"))}
    module = "mlp" if "up_proj" in fused else "attention"
    found = [entries[f"layers.1.{module}.{leaf}.weight"] for leaf in fused]
    matrix = torch.cat([whole_tensor(entry.name, entry.spec.global_shape) for entry in found])
    expected = encoding("nvfp4").encode(matrix)
    for name, part in expected.items():
        ours = torch.cat([entry.parts[name] for entry in found])
        assert torch.equal(ours.view(torch.uint8), part.view(torch.uint8)), name
    theirs = 1 / generate_gparam(matrix.min()[None], matrix.max()[None])
    torch.testing.assert_close(found[0].parts["tensor_scale"][:1], theirs, rtol=1e-6, atol=0)


def _linear(base: str, weight: Tensor) -> RowParallelLinear:
    settings = AdapterSettings(rank=4, scale=1.5, dropout=0.0)
    layout, plan = TensorLayout(base=BaseEncoding.named(base)), TrainingPlan(adapter=lambda _: settings)
    build = LayerContext(layout=layout, plan=plan, device=CPU, dtype=torch.float32)
    linear = RowParallelLinear("down_proj", weight.shape[1], weight.shape[0], bias=False, site=0, build=build)
    fill_encoded(encoded_entries(linear), lambda entry: weight)
    for entry in linear.entries:
        entry.parameter.data.copy_(whole_tensor(entry.name, entry.spec.global_shape))
    return linear


def _e4m3(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("base", ["fp8", "fp8_row"])
def test_fp8_products_are_those_of_what_the_codes_stand_for(base: str) -> None:
    """y = q(x) q(W)^T + H B^T and dX = q(dY s_W) q(W): the adapters see neither rounding."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, 64, generator=generator).requires_grad_()
    weight, dy = torch.randn(48, 64, generator=generator) / 8, torch.randn(32, 48, generator=generator)
    linear = _linear(base, weight)
    a, b = (entry.parameter.data for entry in linear.entries)
    dim = 1 if base == "fp8_row" else None
    (x_codes, x_scale), (codes, scale) = _e4m3(x.detach(), dim), _e4m3(weight, dim)
    expected = (x_codes.float() * x_scale) @ (codes.float() * scale).t()
    batch = make_batch([(0, (32,))], row_length=32, seq_length=32, vocab_size=131, seed=1)
    y = linear(x, GivenInput(), _model(CASE, None).context(batch, torch.tensor(1), training=True))
    torch.testing.assert_close(y.detach(), expected + 1.5 * (x.detach() @ a.T) @ b.T, rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(y, x, dy)
    dy_codes, dy_scale = _e4m3(dy * (scale.flatten() if dim else scale), dim)
    expected_dx = (dy_codes.float() * dy_scale) @ codes.float()
    torch.testing.assert_close(dx, expected_dx + 1.5 * (dy @ b) @ a, rtol=1e-5, atol=1e-5)
    # what rounding both operands to four bits of mantissa costs: half a step of 2^-3 at most, each way
    exact = x.detach() @ weight.T + 1.5 * (x.detach() @ a.T) @ b.T
    assert 1e-3 < relative_error(y.detach(), exact) < 2**-4 * math.sqrt(2)


@pytest.mark.parametrize("base", NAMES)
def test_a_weight_encoded_in_pieces_has_the_bits_of_the_whole(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 300, generator=torch.Generator().manual_seed(3))
    expected = encoding(base).stacked([50]).encode(weight)
    monkeypatch.setattr(encoded_storage, "ENCODED_AT_ONCE", 7 * 300)
    linear = _linear(base, weight)
    (entry,) = encoded_entries(linear)
    assert entry.spec.encoding == base
    for name, part in entry.parts.items():
        assert torch.equal(part.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_what_is_encoded() -> None:
    """The layers' linears none of whose weights trains; not the embedding, the head, norms, biases or adapters."""
    case = Case(
        config=small_config(qkv_bias=True, tied_embeddings=True), adapters=r".*_proj",
        trained=r"layers\.0\.mlp\.up_proj|layers\.1\.attention\.k_proj",
    )  # fmt: skip
    model = _model(case, "int8")
    encoded = {entry.name for entry in encoded_entries(model)}
    plain = {entry.name for entry in shard_entries(model)}
    beside = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    beside += [f"layers.1.attention.{name}_proj.weight" for name in "qkv"]
    linears = {name for name in whole_parameters(case) if name.endswith("_proj.weight")}
    assert encoded == linears - set(beside)
    assert plain == set(whole_parameters(case)) - encoded
    assert {"embed_tokens.weight", "norm.weight", "layers.0.attention.q_proj.bias", *beside} <= plain


BITS = {
    "nf4": 4 + 8 / 64 + 8 * 13 / 1024,
    "int8": 8 + 32 / 1024,
    "fp8": 8 + 32 / 1024,
    "fp8_row": 8 + 32 / 1024,
    "nvfp4": 4 + 8 / 16 + 32 / 1024,
    "mxfp4": 4 + 8 / 32,
    "mxfp8": 8 + 8 / 32,
    "fp8_block": 8 + 32 / 128**2,
    "int4": 4 + 16 / 128,
}
"""Bits of a number in a row of 1024: codes, a scale of 8 bits for 64 of them and 13 bytes a row; one fp32 scale a row;
or scales of 8, 16 or 32 bits for 16, 32 or 128 of them, and of NVFP4 the matrix's once a row."""


@pytest.mark.parametrize("base", NAMES)
def test_bytes_of_the_model(base: str) -> None:
    """Counts every storage that the model holds, once; parts begin at multiples of 256 bytes."""
    config = small_config(hidden=1024, intermediate=1024, num_heads=8, num_kv_heads=8, head_dim=128, num_layers=1)
    model = _model(Case(config=config), base)
    tensors = [*model.parameters(), *model.buffers()]
    held = sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())
    plain = sum(entry.parameter.nbytes for entry in shard_entries(model))
    numbers = 7 * 1024 * 1024
    linears = [entry.memory for entry in encoded_entries(model)]
    assert held - plain == sum({id(one): one.nbytes for one in linears}.values())
    padding = 4 * 4 * 256
    assert BITS[base] * numbers / 8 <= held - plain <= BITS[base] * numbers / 8 + padding


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of one layer, in bfloat16, as transformers writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class _Prepared:
    """Stored weights that are there before anything is counted, as the pages of a mapped file are."""

    def __init__(self, source: WeightSource) -> None:
        self.weights = {name: source.read_whole(name) for name in source.tensor_names()}

    def dtype(self, name: str) -> torch.dtype:
        return self.weights[name].dtype

    def read(self, name: str, spec: ShardSpec, out: Tensor) -> None:
        assert tuple(out.shape) == spec.local_shape
        out.copy_(self.weights[name])


@pytest.mark.parametrize("base", NAMES)
def test_loading_holds_one_scales_weights_beside_the_model(
    base: str, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every storage that an operation makes is counted until it is freed: gate and up together in NVFP4, else one
    weight."""
    source = open_source(stored)
    prepared, decoder = _Prepared(source), source.model.decoder
    monkeypatch.setattr(encoded_storage, "ENCODED_AT_ONCE", 8 * 1024)
    with LiveStorages() as live:
        layout = TensorLayout(base=BaseEncoding.named(base))
        model = Decoder(decoder, layout=layout, plan=TrainingPlan(), device=CPU, dtype=torch.float32)
        built = live.live
        live.reset()
        load_encoded(encoded_entries(model), prepared, holding=WeightPlacement(Axis("dp_cp")).materialize)
        left, peak = live.live - built, live.peak - built
    largest = 512 * 1024 * (2 if base != "nvfp4" else 4)
    # beside it the maxima of its blocks, and of 8 thousand numbers, or of 128 rows, copies in several dtypes
    beside = 0.5 if base != "fp8_block" else 2.0
    assert left < 8192 and largest <= peak < largest * (1 + beside), peak / largest
    entry = next(entry for entry in encoded_entries(model) if entry.name == "layers.1.mlp.down_proj.weight")
    whole = source.read_whole(entry.name)
    expected = torch.empty(whole.shape)
    encoding(base).decode(encoding(base).encode(whole), expected)
    assert torch.equal(entry.decoded(torch.float32), expected)
    assert relative_error(expected, whole.float()) < 0.15  # of integers of 4 bits


def _refusal(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_a_cut_through_a_block_is_refused_with_the_numbers() -> None:
    base = BaseEncoding.named("nf4")
    message = _refusal(lambda: meta_model(CONFIG, tensor_size=2, base=base))
    assert "parallel.tensor 2 cuts the 64 input features of layers.0.attention.o_proj into 32 a rank" in message
    assert message.endswith("which divides them: use parallel.tensor 1, or model.base_dtype null.")
    wide = small_config(hidden=64, intermediate=256, head_dim=16)
    message = _refusal(lambda: meta_model(wide, tensor_size=8, base=base))
    assert "into 16 a rank" in message and "use parallel.tensor 1 or 2, or" in message
    meta_model(CONFIG, tensor_size=2, base=BaseEncoding.named("int8"))
    meta_model(small_config(hidden=64, intermediate=128, head_dim=16), tensor_size=2, base=base)


def test_a_model_that_trains_in_full_is_refused() -> None:
    config = RunConfig(model=ModelOptions(path="x", base_dtype="nf4"), trainable=("*",))
    message = _refusal(lambda: check_base(config, CONFIG, TrainingPlan(trains=lambda module: True)))
    assert (
        message.startswith("model.base_dtype is nf4 and trainable is ['*']")
        and "set model.base_dtype to null" in message
    )
    check_base(config, CONFIG, TrainingPlan(trains=lambda module: "q_proj" in module))
    codes = RunConfig(model=ModelOptions(path="x", base_dtype="nvfp4", base_products="codes"), trainable=("*",))
    message = _refusal(lambda: check_base(codes, CONFIG, TrainingPlan(trains=lambda module: True)))
    assert "no frozen linear is in fp8_block, mxfp8 or nvfp4: set model.base_products to decoded" in message
    plain = RunConfig(model=ModelOptions(path="x"), trainable=("*",))
    check_base(plain, CONFIG, TrainingPlan(trains=lambda module: True))


def test_names_of_encodings() -> None:
    message = _refusal(lambda: ModelOptions(path="x", base_dtype="int3"))  # type: ignore[arg-type]
    assert "model.base_dtype" in message and "stored, nf4, int8, fp8, fp8_row, nvfp4" in message


def test_sizes_that_fp8_products_cannot_take_are_refused_on_a_gpu() -> None:
    base = BaseEncoding.named("fp8")
    spec = split_spec((40, 24), 0, rank=0, size=1, what="rows")
    message = _refusal(
        lambda: EncodedStorage([("down", spec)], encoding("fp8"), base, tp=Axis("tp"), device=torch.device("cuda"))
    )
    assert "down is 40 x 24" in message and "multiples of 16" in message


def test_fp8_needs_a_gpu_that_has_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability 8.9 multiplies with one scale a matrix, 9.0 with one a row; a CPU does either."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    config = RunConfig(model=ModelOptions(path="x", base_dtype="fp8"))
    message = _refusal(lambda: base_encoding(config, device))
    assert "compute capability 8.9" in message and "this one has 8.6" in message
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    config = RunConfig(model=ModelOptions(path="x", base_dtype="fp8_row"))
    assert "compute capability 9.0" in _refusal(lambda: base_encoding(config, device))
    assert base_encoding(config, CPU) is not None


@pytest.mark.parametrize("base", NAMES)
def test_a_weight_that_is_not_finite_is_named(base: str) -> None:
    weight = torch.ones(48, 64)
    weight[7, 3] = math.nan
    message = _refusal(lambda: _linear(base, weight))
    assert message.startswith("down_proj.weight: ") and "row 7" in message


@pytest.mark.distributed
def test_key_and_value_heads_that_ranks_share_are_counted_once() -> None:
    """Four ranks, two heads: what the scale of the whole matrix is made from comes from every second rank."""
    for found in spawn(_shared_heads, world=4, timeout=60):
        assert all(found.values()) and len(found) == 12, found


def _shared_heads() -> dict[str, bool]:
    """Whether each of this rank's parts has the bits of the whole weight's."""
    mesh = build_mesh(RankGrid(tp=4), device_type="cpu", num_kv_heads=2)
    config = small_config(num_layers=1, hidden=64, intermediate=128, head_dim=16)
    found = {}
    for base in ("fp8", "int8", "nvfp4"):
        layout = TensorLayout(
            tp=mesh.tp, kv_replica=mesh.kv_replica, base=BaseEncoding.named(base)
        )  # fmt: skip
        model = Decoder(config, layout=layout, plan=TrainingPlan(), device=CPU, dtype=torch.float32)
        entries = list(encoded_entries(model))
        fill_encoded(
            entries, lambda entry: cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec)
        )  # fmt: skip
        shapes = {entry.name: entry.spec.global_shape for entry in entries}
        for entry in entries:
            if not entry.name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
                continue
            rows, columns = (entry.spec.runs(dim)[0] for dim in (0, 1))
            codec = encoding(base)
            expected = codec.cut(
                encoded_whole(codec, entry.name, shapes, whole_tensor),
                slice(rows.global_offset, rows.global_offset + rows.length),
                slice(columns.global_offset, columns.global_offset + columns.length),
            )
            found[f"{base} {entry.name}"] = all(
                torch.equal(part.view(torch.uint8), expected[name].contiguous().view(torch.uint8))
                for name, part in entry.parts.items()
            )
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [("codes", None), ("scales", float("nan")), ("tensor_scale", float("inf")), ("tensor_scale", 0.0)],
)
def test_stored_parts_that_mean_no_number_are_refused(name: str, value: float | None) -> None:
    """A matrix's scale of 0 is one where it divides."""
    shape = (4, 32)
    kind = Format(name="nvfp4", group=16, scale_dtype=torch.float8_e4m3fn, divides=True)
    spec, base = ShardSpec(global_shape=shape, local_shape=shape), BaseEncoding(formats=lambda _: kind)
    storage = EncodedStorage([("down", spec)], encoding(kind), base, tp=Axis("tp"), device=torch.device("cpu"))
    (entry,) = storage.entries
    parts = drawn_parts(kind, *shape, seed=0)
    if value is None:
        entry.fill(parts)
        return
    parts[name] = parts[name].float().index_fill(0, torch.tensor([2]), value).to(parts[name].dtype)
    with pytest.raises(UserError, match=f"down.weight has {name} that are not finite as it is stored"):
        entry.fill(parts)
