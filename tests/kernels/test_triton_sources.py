"""Rules of the Triton kernels that their source tells, and neither numbers nor compiled code do at the sizes of tests.

A row's index times a stride exceeds 32 bits in long inputs, which no test has. A masked load that names no value for
what it masks gets whatever the register held; Triton 3.9 puts zeros there, which nothing promises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.kernels.resource_tables import ROOT

FILES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "triton_kernels").glob("*.py")}

ROW_STRIDE = re.compile(r"\(?\w*stride(_[ts])?( \* [A-Z]+\))?")
"""Of tokens or other rows, perhaps in units; heads are few, and near each other."""
FEW = re.compile(r"expert|[A-Z]+")
"""What is multiplied by a stride and no row: an expert, a constant."""

ANY_VALUE = {"quantize._row_decode_kernel": "0 is not cast to e4m3, and nothing is stored of what is masked"}
"""Kernels with a masked load that names no value, and why."""


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Yields the functions that are compiled, and whether they are launched; others are called by these."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if "jit" in decorators or "kernel" in decorators:
                yield node, node.name.endswith("_kernel")


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yields name and value, also of each name of a tuple and of a loop."""
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, ast.AugAssign):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            targets, value = node.targets[0].elts, node.value
            alone = value.elts if isinstance(value, ast.Tuple) else [value] * len(targets)
            pairs = list(zip(targets, alone, strict=True))
        elif isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
        else:
            continue
        yield from ((ast.unparse(target), value) for target, value in pairs)


def _wide_names(function: ast.FunctionDef, launched: bool, widening: set[str]) -> set[str]:
    """Returns the names of 64 bits: made so, computed from others, or given by a kernel that calls the function."""
    found = set() if launched else {argument.arg for argument in function.args.args}
    assignments = list(_assignments(function))
    while more := {name for name, value in assignments if name not in found and _is_wide(value, found, widening)}:
        found |= more
    return found


def _is_wide(value: ast.expr, wide: set[str], widening: set[str]) -> bool:
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return "tl.int64" in ast.unparse(value) or bool(names & (wide | widening))


def _written(value: ast.expr) -> str:
    """Returns its text, in brackets where it is a product."""
    return f"({ast.unparse(value)})" if isinstance(value, ast.BinOp) else ast.unparse(value)


def _narrow_products(trees: dict[str, ast.Module]) -> list[str]:
    """Lists products of a stride and an index that nothing has made 64 bits wide."""
    helpers = [function for tree in trees.values() for function, launched in _functions(tree) if not launched]
    widening = {function.name for function in helpers if "tl.int64" in ast.unparse(function)}
    found = []
    for file, tree in trees.items():
        for function, launched in _functions(tree):
            wide = _wide_names(function, launched, widening)
            for node in ast.walk(function):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                    for index, stride in ((node.left, node.right), (node.right, node.left)):
                        is_row = ROW_STRIDE.fullmatch(_written(stride)) and not FEW.fullmatch(ast.unparse(index))
                        if is_row and not _is_wide(index, wide, widening):
                            found.append(f"{file}.{function.name}: {ast.unparse(node)}")
    return found


def test_what_is_multiplied_by_a_stride_has_64_bits() -> None:
    assert _narrow_products(FILES) == []


@pytest.mark.parametrize("wide", [True, False])
def test_a_narrow_index_is_found(wide: bool) -> None:
    source = f"""
@kernel(do_not_specialize=["key"])
def _copy_kernel(x_ptr, x_stride, TOKENS: tl.constexpr):
    tokens_T = tl.program_id(0){".to(tl.int64)" if wide else ""} * TOKENS + tl.arange(0, TOKENS)
    rows_T, columns_F = tokens_T + 1, tl.arange(0, 16)
    for step in range(4):
        tl.load(x_ptr + rows_T[:, None] * x_stride + columns_F[None, :])

@triton.jit
def helper(x_ptr, rows_T, stride):
    return tl.load(x_ptr + rows_T * stride)
"""
    found = _narrow_products({"copies": ast.parse(source)})
    assert found == ([] if wide else ["copies._copy_kernel: rows_T[:, None] * x_stride"])


def test_masked_loads_say_what_is_masked() -> None:
    found = set()
    for file, tree in FILES.items():
        for function, _ in _functions(tree):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
                    given = {keyword.arg for keyword in node.keywords}
                    if len(node.args) > 1 or ("mask" in given and "other" not in given):
                        found.add(f"{file}.{function.name}")
    assert found == set(ANY_VALUE)
