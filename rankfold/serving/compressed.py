"""Bodies that clients send compressed."""

from __future__ import annotations

from importlib.util import find_spec

from engine.errors import UserError

_PIECE = 1024
"""Bytes that are decompressed at a time: however well they are compressed, they become few MiB."""


class TooLong(UserError):
    """A body has more bytes than it may."""


def can_decompress() -> bool:
    """Returns whether bodies that are compressed with zstd can be read."""
    return find_spec("zstandard") is not None


def decompressed(body: bytes, limit: int) -> bytes:
    """Returns a body that was compressed with zstd.

    Args:
        body: one frame.
        limit: bytes of the result.

    Raises:
        TooLong: it has more.
        UserError: it is no whole frame.
    """
    import zstandard

    # a window is memory that is taken before anything is known of the content
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    found = bytearray()
    try:
        for place in range(0, len(body), _PIECE):
            found += reader.decompress(body[place : place + _PIECE])
            if len(found) > limit:
                raise TooLong(f"the body has more than {limit} bytes when it is decompressed.")
            if reader.eof and (reader.unused_data or place + _PIECE < len(body)):
                raise UserError("the body has bytes behind the compressed ones: send one frame of zstd.")
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not compressed with zstd, as Content-Encoding says ({error}).") from None
    if not reader.eof:
        raise UserError("the compressed body ends too early: send it whole.")
    return bytes(found)
