"""Encodings of frozen weights: what is stored, that shards and stacks have the bits of the whole, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.reference_quantize import NF4_VALUES, dynamic_map
from engine.quantization.encoded_parts import WholeMatrix
from engine.quantization.encoding import ENCODING_NAMES, Encoding, encoding
from engine.quantization.nf4 import num_groups

names = pytest.mark.parametrize("name", ENCODING_NAMES)


def _cuttable(name: str) -> Encoding:
    """The encoding whose matrices may begin at any row."""
    return encoding(name).stacked([1])


def _unit(name: str) -> int:
    """Columns between which every cut is allowed."""
    return max(64, encoding(name).block)


def _weight(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers whose rows differ in size, so that a scale of another row shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator) + 0.01
    return (torch.randn(rows, columns, generator=generator) * sizes).to(dtype)


def _decoded(code: Encoding, parts: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    out = torch.full((rows, columns), torch.nan)
    code.decode(parts, out)
    return out


def _assert_equal_parts(ours: dict[str, Tensor], theirs: dict[str, Tensor], where: object) -> None:
    assert ours.keys() == theirs.keys()
    for part, tensor in ours.items():
        other = theirs[part]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, (where, part, tensor.shape, other.shape)
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), (where, part)


@names
@pytest.mark.parametrize("shape", [(5, 123), (1, 64), (3, 1), (0, 64), (7, 320), (2, 64 * 300 + 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_what_is_announced(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    code, weight = encoding(name), _weight(*shape, dtype)
    parts = code.encode(weight)
    assert {k: (tuple(t.shape), t.dtype) for k, t in parts.items()} == code.parts(*shape)
    assert all(tensor.shape[0] == shape[0] for part, tensor in parts.items() if (name, part) != ("fp8_block", "scales"))
    assert torch.isfinite(_decoded(code, parts, *shape)).all()


def test_bytes_of_a_large_matrix_by_hand() -> None:
    def bytes_per_parameter(name: str) -> float:
        parts = encoding(name).parts(4096, 4096).values()
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts) / 4096**2

    # 4096 x 4096: half a byte, one byte to 64, and a row has an offset, two groups and a place: 13 bytes to 4096
    assert bytes_per_parameter("nf4") == 0.5 + 1 / 64 + 13 / 4096
    for name in ("int8", "fp8", "fp8_row"):
        assert bytes_per_parameter(name) == 1 + 4 / 4096


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8", "fp8_row"])
def test_error_is_within_half_a_step(name: str) -> None:
    """The distance to the nearest code, by the steps that each format has."""
    weight = _weight(40, 640)
    code = encoding(name)
    error = (_decoded(code, code.encode(weight), 40, 640) - weight).abs()
    row_largest = weight.abs().amax(1, keepdim=True)
    if name == "int8":
        assert bool((error <= row_largest / 127 * 0.5 * 1.0001).all())
    elif name == "nf4":
        # half of the widest gap of the table, between -1 and -0.696, and what the 8-bit scales add
        largest = weight.unflatten(1, (10, 64)).abs().amax(-1, keepdim=True)
        spread = (largest - largest.mean()).abs().max()
        assert bool((error.unflatten(1, (10, 64)) <= largest * 0.152 + spread * 0.007).all())
    else:
        # three bits of fraction: half of 2^-3 of the power of two below; under 2^-6 of the scale steps are even
        scale = row_largest / 448 if name == "fp8_row" else weight.abs().max() / 448
        step = torch.maximum(weight.abs() / 16, scale * 2.0**-10)
        assert bool((error <= step * 1.0001).all())


def test_tables() -> None:
    """Those of the papers: ends, zero, symmetry, number of entries in each decade."""
    values = dynamic_map(torch.device("cpu"))
    assert len(values) == 256 and bool((values.diff() > 0).all())
    assert values[127] == 0 and values[-1] == 1 and torch.equal(values[:127], -values[128:255].flip(0))
    for decade in range(7):
        inside = (values > 0.1 * 10.0 ** (decade - 6)) & (values < 10.0 ** (decade - 6))
        assert int(inside.sum()) == 2**decade
    assert len(NF4_VALUES) == 16 and NF4_VALUES[0] == -1 and NF4_VALUES[7] == 0 and NF4_VALUES[15] == 1


def _cuts(rows: int, columns: int, pieces: int, dim: int) -> list[tuple[slice, slice]]:
    step = (rows, columns)[dim] // pieces
    spans = [slice(i * step, (i + 1) * step) for i in range(pieces)]
    return [(span, slice(0, columns)) if dim == 0 else (slice(0, rows), span) for span in spans]


@names
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("pieces", [2, 4, 5])
@pytest.mark.parametrize(("rows", "units"), [(40, 20), (20, 520)])
def test_a_shard_of_the_parts_is_the_parts_of_the_shard(
    name: str, dim: int, pieces: int, rows: int, units: int
) -> None:
    """Row cuts are column-parallel linears, column cuts row-parallel ones. Groups are cut anywhere by both."""
    columns = units * _unit(name)
    code, weight = _cuttable(name), _weight(rows, columns)
    whole = code.encode(weight)
    cuts = _cuts(rows, columns, pieces, dim)
    absmax = code.join([code.absmax(weight[cut]) for cut in cuts], dim)
    assert torch.equal(absmax, code.absmax(weight))
    decoded = _decoded(code, whole, rows, columns)
    for cut in cuts:
        record = WholeMatrix(absmax=absmax, first_row=cut[0].start, first_column=cut[1].start)
        shard = code.encode(weight[cut], record)
        _assert_equal_parts(code.cut(whole, *cut), shard, cut)
        assert {k: (tuple(t.shape), t.dtype) for k, t in shard.items()} == code.parts(*weight[cut].shape)
        assert torch.equal(_decoded(code, shard, *weight[cut].shape), decoded[cut])


@names
def test_a_matrix_encoded_a_few_rows_at_a_time(name: str) -> None:
    """Groups of scales begin before and end after the rows."""
    code, weight = _cuttable(name), _weight(50, 64 * 11)
    absmax, expected = code.absmax(weight), code.encode(weight)
    runs = [
        code.encode(weight[first : first + 7], WholeMatrix(absmax=absmax, first_row=first)) for first in range(0, 50, 7)
    ]
    _assert_equal_parts({part: torch.cat([run[part] for run in runs]) for part in expected}, expected, name)


@names
def test_a_cut_of_a_cut(name: str) -> None:
    unit = _unit(name)
    code, weight = _cuttable(name), _weight(24, unit * 30)
    once = code.cut(code.encode(weight), slice(3, 23), slice(unit * 5, unit * 29))
    twice = code.cut(once, slice(2, 9), slice(unit * 7, unit * 20))
    direct = code.cut(code.encode(weight), slice(5, 12), slice(unit * 12, unit * 25))
    _assert_equal_parts(twice, direct, name)


@names
@pytest.mark.parametrize("pieces", [1, 2])
def test_stacked_sections_are_stacked_parts(name: str, pieces: int) -> None:
    """q, k, v in one storage: each a matrix of its own, cut on its own, and its rows stacked."""
    code = _cuttable(name)
    matrices = [_weight(rows, 320, seed=rows) for rows in (32, 8, 12)]
    for rank in range(pieces):
        spans = [slice(rank * len(m) // pieces, (rank + 1) * len(m) // pieces) for m in matrices]
        shards = [code.cut(code.encode(m), span, slice(0, 320)) for m, span in zip(matrices, spans, strict=True)]
        stacked = {part: torch.cat([shard[part] for shard in shards]) for part in shards[0]}
        expected = [_decoded(code, code.encode(m), *m.shape)[span] for m, span in zip(matrices, spans, strict=True)]
        rows = sum(len(part) for part in expected)
        assert torch.equal(_decoded(code, stacked, rows, 320), torch.cat(expected))


@names
@pytest.mark.parametrize("beyond", [59, 136])
def test_rows_that_do_not_divide_are_cut_at_blocks(name: str, beyond: int) -> None:
    unit = _unit(name)
    columns = unit + beyond
    code, weight = _cuttable(name), _weight(6, columns)
    whole = code.encode(weight)
    for cut in ((slice(1, 5), slice(0, unit)), (slice(0, 6), slice(unit, columns))):
        shard = code.encode(weight[cut], WholeMatrix(absmax=code.absmax(weight), first_row=cut[0].start,
                                               first_column=cut[1].start))  # fmt: skip
        _assert_equal_parts(code.cut(whole, *cut), shard, cut)


@names
def test_decoding_into_part_of_a_wider_storage(name: str) -> None:
    code, weight = encoding(name), _weight(9, 130)
    parts = code.encode(weight)
    plain = _decoded(code, parts, 9, 130)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        storage = torch.full((9, 144), 7.0, dtype=dtype)
        code.decode(parts, storage[:, :130])
        assert torch.equal(storage[:, :130], plain.to(dtype)) and bool((storage[:, 130:] == 7).all())


@names
def test_strides_of_the_weight_do_not_matter(name: str) -> None:
    code, weight = encoding(name), _weight(10, 192)
    expected = code.encode(weight)
    _assert_equal_parts(code.encode(weight.t().contiguous().t()), expected, "transposed")
    wide = torch.full((20, 200), torch.nan)
    wide[::2, :192] = weight
    _assert_equal_parts(code.encode(wide[::2, :192]), expected, "every other row")


@names
def test_zeros_stay_zeros(name: str) -> None:
    code, weight = encoding(name), _weight(6, 192)
    weight[2] = 0
    weight[4, 64:128] = 0
    decoded = _decoded(code, code.encode(weight), 6, 192)
    assert bool((decoded[2] == 0).all()) and bool((decoded[4, 64:128] == 0).all())
    assert bool((_decoded(code, code.encode(torch.zeros(3, 70)), 3, 70) == 0).all())


@names
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    weight = _weight(6, 100)
    weight[4, 99] = value
    with pytest.raises(UserError, match=f"stored as {name} has a number that is not finite in row 4: repair"):
        encoding(name).encode(weight)


def test_a_cut_inside_a_block_is_refused() -> None:
    code, weight = encoding("nf4"), _weight(4, 256)
    sentence = "64 columns under one scale, and a cut at column 100 divides such a block"
    for columns in (slice(100, 256), slice(0, 100)):
        with pytest.raises(UserError, match=sentence):
            code.cut(code.encode(weight), slice(0, 4), columns)
    with pytest.raises(UserError, match=sentence):
        code.encode(weight[:, 100:], WholeMatrix(absmax=code.absmax(weight), first_column=100))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="no encoding 'nf5': choose one of nf4, int8, fp8, fp8_row"):
        encoding("nf5")


@pytest.mark.parametrize("blocks", [1, 2, 255, 256, 257, 258, 512, 513, 514])
def test_number_of_groups_that_a_run_can_touch(blocks: int) -> None:
    """By counting, for every place to begin."""
    touched = max((start + blocks - 1) // 256 - start // 256 + 1 for start in range(256))
    assert num_groups(blocks) == touched
