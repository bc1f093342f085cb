"""Tensors of requests as arrays: dense or in compressed rows (CSR), of float32, bfloat16, int64 or int32.

What a sparse tensor does not list is 0, as the SDK has it. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from rankfold.serving.protobuf import Message

CELLS = 1 << 22
"""Elements of a tensor, at most, those of a sparse one that it does not list included."""
BFLOAT16 = 4
_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4", BFLOAT16: "<u2"}


def read_tensor(where: str, tensor: Message) -> NDArray[Any]:
    """Returns a tensor of a request in protobuf, float32 or int64.

    Args:
        where: what a sentence calls it.

    Raises:
        UserError: its parts do not fit each other, or it has more than `CELLS` elements.
    """
    dtype = tensor.get("dtype", 0)
    if dtype not in _DTYPES:
        raise UserError(
            f"{where} has dtype {dtype}, but float32, bfloat16, int64 and int32 are read here (1, 4, 2 and 3): send "
            "one of these."
        )
    sparse = tensor.get("sparse_csr")
    values = read_array(where, (sparse or tensor).get("dense" if sparse is None else "values", b""), _DTYPES[dtype])
    if dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    shape = _checked_shape(where, tensor.get("shape", []) or ([len(values)] if sparse is None else []))
    if sparse is not None:
        crow, columns = (read_array(where, sparse.get(name, b""), "<i8") for name in ("crow_indices", "col_indices"))
        found = np.zeros(shape, values.dtype)
        found.reshape(-1)[csr_places(where, shape, crow, columns, len(values))] = values
        return found
    if len(values) != math.prod(shape):
        raise UserError(f"{where} has {len(values)} numbers, but its shape is {list(shape)}: send as many.")
    return values.reshape(shape)


def csr_places(
    where: str, shape: Sequence[int], crow: NDArray[Any], columns: NDArray[Any], count: int
) -> NDArray[np.int64]:
    """Returns int64 [count], the places of a sparse tensor's values in the tensor, row after row.

    Args:
        where: what a sentence calls the tensor.
        shape: of it.
        crow: int64 [rows + 1], how many values are in the rows before each.
        columns: int64 [count] of the values.

    Raises:
        UserError: they do not fit each other.
    """
    fits = (
        len(shape) == 2
        and len(crow) == shape[0] + 1
        and crow[0] == 0
        and crow[-1] == count == len(columns)
        and bool((np.diff(crow) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if fits:
        rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(crow))
        places: NDArray[np.int64] = rows * shape[1] + columns
        if bool((np.diff(places) > 0).all()):
            return places
    raise UserError(
        f"{where} is sparse, but its rows, columns and values do not fit each other and its shape {list(shape)}: send "
        "compressed rows of a matrix, with the columns of a row in their order."
    )


def read_array(where: str, data: bytes, dtype: str) -> NDArray[Any]:
    """Returns the elements that bytes hold.

    Raises:
        UserError: they are no whole number of elements.
    """
    if len(data) % np.dtype(dtype).itemsize:
        raise UserError(f"{where} has {len(data)} bytes, which is no whole number of elements.")
    return np.frombuffer(data, dtype=dtype)


def read_json_tensor(where: str, given: object) -> tuple[NDArray[np.int64], Mapping[str, list[int]]]:
    """Returns a matrix of token ids of a request in JSON, with -1 where it lists none, and the fields of its layout
    where it is sparse.

    Raises:
        UserError: it is none, its parts do not fit each other, or it has more than `CELLS` elements.
    """
    if not isinstance(given, dict) or given.get("dtype") != "int64":
        raise UserError(f"{where} is no tensor of dtype int64: send one.")
    values, shape = _whole_numbers(where, given.get("data")), given.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(one) is int for one in shape):
        raise UserError(f"{where} has shape {shape!r:.60}, but two dimensions are expected: send a matrix.")
    size = _checked_shape(where, shape)
    if given.get("sparse_crow_indices") is None:
        if len(values) != math.prod(size):
            raise UserError(f"{where} has {len(values)} numbers, but its shape is {list(size)}: send as many.")
        return values.reshape(size), {}
    crow, columns = (_whole_numbers(where, given.get(f"sparse_{name}_indices")) for name in ("crow", "col"))
    found = np.full(size, -1, np.int64)
    found.reshape(-1)[csr_places(where, size, crow, columns, len(values))] = values
    return found, {"crow_indices": crow.tolist(), "col_indices": columns.tolist()}


def _whole_numbers(where: str, given: object) -> NDArray[np.int64]:
    if not isinstance(given, list) or not all(type(one) is int and abs(one) < 1 << 62 for one in given):
        raise UserError(f"{where} has something else than lists of whole numbers: send these.")
    return np.asarray(given, np.int64)


def _checked_shape(where: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > 2 or any(one < 0 for one in shape) or math.prod(shape) > CELLS or max(shape, default=0) > CELLS:
        raise UserError(
            f"{where} has shape {list(shape)[:4]}, but at most two dimensions and {CELLS} elements are read here: send "
            "less in it."
        )
    return tuple(shape)
