"""dH and dB of one and of several adapters, from one launch, against plain torch in fp64 and in the tested dtype.

On a GPU: python -m pytest -m gpu tests/kernels/test_triton_output_gradients.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.distributed.mesh import Axis
from engine.kernels.records import AdapterSection
from engine.kernels.triton import output_gradients as module
from engine.kernels.triton.output_gradients import output_gradients
from engine.ops.embedding import EmbeddingOperands, embedding
from engine.ops.gradients import GradientSink
from engine.ops.kernels import backend
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places, random_rows

TRITON = backend("triton")

LAYOUTS = {
    "one": (5, [(45, 3)]),
    "one token": (1, [(20, 16)]),
    "one column": (4, [(1, 1)]),
    "split every way": (150, [(270, 24)]),
    "gate and up": (37, [(100, 8), (100, 8)]),
    "q, k and v of a group": (70, [(300, 16), (70, 16), (70, 16)]),
    "ranks of all kinds": (33, [(17, 5), (130, 40), (1, 1), (64, 16)]),
    "a section without columns": (9, [(0, 4), (33, 8), (0, 3)]),
}
"""Tokens; columns and rank of each section. Columns of dY and of H lie beside the sections' too."""
NAMES = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
SCALES = (2.0, 0.25, 1.0, 3.0)


def _problem(place, layout: str) -> tuple[Tensor, Tensor, list[AdapterSection]]:
    """dY and H with gaps between their rows and columns that are nobody's, and the sections with their B."""
    num_tokens, sizes = LAYOUTS[layout]
    sections, column, row = [], 2, 1
    for number, (columns, rank) in enumerate(sizes):
        b = random_rows(place, columns, rank, gap=number, seed=number)
        db = random_rows((place[0], torch.float32), columns, rank, gap=3 * number, seed=10 + number)
        sections.append(
            AdapterSection(
                first_column=column, num_columns=columns, first_row=row, num_ranks=rank, b=b,
                scale=SCALES[number], db=db,
            )
        )  # fmt: skip
        column, row = column + columns, row + rank
    dy = random_rows(place, num_tokens, column + 1, gap=3, seed=20)
    return dy, random_rows(place, num_tokens, row + 1, gap=2, seed=21), sections


def _expected(dy: Tensor, h: Tensor, one: AdapterSection, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dH and dB of a section by torch's products."""
    part = dy[:, one.first_column : one.first_column + one.num_columns].to(dtype)
    low = h[:, one.first_row : one.first_row + one.num_ranks].to(dtype)
    assert one.b is not None
    return part @ one.b.to(dtype) * one.scale, part.t() @ low


@places
@NAMES
def test_both(place, layout: str) -> None:
    dy, h, sections = _problem(place, layout)
    before = [one.db.clone() for one in sections]
    dh = torch.full((dy.shape[0], h.shape[1] + 2), 7.0, dtype=place[1], device=place[0])
    output_gradients(dy, h, sections, dh_out=dh, add=True)
    for one, old in zip(sections, before, strict=True):
        (torch_dh, torch_db), (exact_dh, exact_db) = (_expected(dy, h, one, t) for t in (place[1], torch.float64))
        ours = dh[:, one.first_row : one.first_row + one.num_ranks]
        assert_as_exact_as_torch(ours, torch_dh, exact_dh, "dH")
        assert_as_exact_as_torch(one.db, old + torch_db, old.double() + exact_db, "dB")
        assert_rounded_once(ours, exact_dh, "dH")
        assert_rounded_once(one.db, old.double() + exact_db, "dB")
    last = sections[-1].first_row + sections[-1].num_ranks
    assert (dh[:, :1] == 7).all() and (dh[:, last:] == 7).all(), "wrote columns that are nobody's"


@places
@NAMES
def test_either_alone_has_the_same_bits(place, layout: str) -> None:
    dy, h, sections = _problem(place, layout)
    dh, alone = torch.zeros_like(h), torch.zeros_like(h)
    output_gradients(dy, h, sections, dh_out=dh)
    both = [one.db.clone() for one in sections]
    output_gradients(dy, None, [replace(one, db=None) for one in sections], dh_out=alone)
    assert torch.equal(alone, dh), "dH depends on whether dB is made"
    output_gradients(dy, h, [replace(one, b=None) for one in sections])
    for one, expected in zip(sections, both, strict=True):
        assert torch.equal(one.db, expected), "dB depends on whether dH is made"


@places
def test_frozen_ones_among_the_sections(place) -> None:
    """A section whose B is frozen has a dH, and no dB."""
    dy, h, sections = _problem(place, "ranks of all kinds")
    expected, dh = torch.zeros_like(h), torch.zeros_like(h)
    output_gradients(dy, h, sections, dh_out=expected)
    trained = [one.db.clone() for one in sections]
    for one in sections:
        one.db.fill_(5)
    some = [replace(one, db=None) if number % 2 else one for number, one in enumerate(sections)]
    output_gradients(dy, h, some, dh_out=dh)
    assert torch.equal(dh, expected)
    for number, (one, gradient) in enumerate(zip(sections, trained, strict=True)):
        assert torch.equal(one.db, torch.full_like(gradient, 5.0) if number % 2 else gradient)


@places
def test_no_tokens(place) -> None:
    dy, h, sections = _problem(place, "gate and up")
    before = [one.db.clone() for one in sections]
    output_gradients(dy[:0], h[:0], sections, dh_out=h[:0].clone(), add=True)
    assert all(torch.equal(one.db, old) for one, old in zip(sections, before, strict=True)), "nothing is added"
    output_gradients(dy[:0], h[:0], sections, dh_out=h[:0].clone())
    assert all((one.db == 0).all() for one in sections), "no tokens have a gradient of zero"


@places
def test_an_adapter_on_the_embedding(place) -> None:
    """y = s A^T[id] B^T for the ids held here: both gradients against autograd."""
    ids, vocabulary, rank, hidden, scale = torch.tensor([0, 10, 3, 3, 12, 7], device=place[0]), 11, 5, 40, 1.3
    weight, b = random_rows(place, vocabulary, hidden), random_rows(place, hidden, rank, seed=2)
    a, dy = random_rows(place, rank, vocabulary, seed=1), random_rows(place, len(ids), hidden, seed=3)
    sinks = [GradientSink(factor.shape, factor.device) for factor in (a, b)]
    operands = EmbeddingOperands(
        weight_VH=weight, first_id=0, num_ids=vocabulary, sink=None, a_RV=a, b_HR=b, scale=scale, sink_a=sinks[0],
        sink_b=sinks[1], axis=Axis("tp"), sequence_parallel=False, kernels=TRITON,
    )  # fmt: skip
    leaf = torch.zeros((), requires_grad=True)
    y = embedding(ids, operands, (leaf,))
    y.backward(dy)
    found = {}
    for dtype in (place[1], torch.float64):
        leaves = [factor.to(dtype).detach().clone().requires_grad_() for factor in (a, b)]
        here = (ids < vocabulary)[:, None].to(dtype)
        low = leaves[0].t()[ids.clamp(max=vocabulary - 1)] * here
        out = weight.to(dtype)[ids.clamp(max=vocabulary - 1)] * here + scale * low @ leaves[1].t()
        found[dtype] = (out.detach(), *torch.autograd.grad(out, leaves, dy.to(dtype)))
    ours = (y.detach(), sinks[0].buffer, sinks[1].buffer)
    for name, one, torchs, exact in zip(("y", "dA", "dB"), ours, found[place[1]], found[torch.float64], strict=True):
        assert_as_exact_as_torch(one, torchs.to(one.dtype), exact, name)


@places
def test_the_same_bits_in_every_run(place) -> None:
    results = []
    for _ in range(3):
        dy, h, sections = _problem(place, "split every way")
        dh = torch.zeros_like(h)
        output_gradients(dy, h, sections, dh_out=dh, add=True)
        results.append((dh, *(one.db for one in sections)))
    for again in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], again, strict=True))


@places
def test_every_column_is_read_once(place, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sections are one launch: its column blocks cover each section's columns once."""
    dy, h, sections = _problem(place, "q, k and v of a group")
    launches = []
    kernel = module._output_gradients_kernel

    class Recording:
        def __getitem__(self, grid: tuple[int, int, int]):
            def launch(records, *arguments, **options) -> None:
                launches.append((grid, [record[0] for record in records], options["OUTPUTS"]))
                kernel[grid](records, *arguments, **options)

            return launch

    monkeypatch.setattr(module, "_output_gradients_kernel", Recording())
    output_gradients(dy, h, sections, dh_out=torch.zeros_like(h))
    [(grid, first_blocks, outputs)] = launches
    widths = [one.num_columns for one in sections]
    blocks = [last - first for first, last in zip(first_blocks, [*first_blocks[1:], grid[0]], strict=True)]
    assert blocks == [-(-width // outputs) for width in widths]
    assert grid[2] == 1, "ranks are one block, or dY would be read once for each"


@places
@NAMES
@pytest.mark.parametrize("add", [False, True])
def test_specification(place, layout: str, add: bool) -> None:
    """`reference_fused.output_gradients`, which the plain backend takes, against the same products."""
    from engine.kernels import reference_fused

    dy, h, sections = _problem((place[0], torch.float64), layout)
    before = [one.db.clone() if add else torch.zeros_like(one.db) for one in sections]
    dh = torch.zeros_like(h)
    reference_fused.output_gradients(dy, h, sections, dh_out=dh, add=add)
    for one, old in zip(sections, before, strict=True):
        exact_dh, exact_db = _expected(dy, h, one, torch.float64)
        torch.testing.assert_close(dh[:, one.first_row : one.first_row + one.num_ranks], exact_dh)
        torch.testing.assert_close(one.db.double(), old + exact_db, rtol=1e-6, atol=1e-5)
