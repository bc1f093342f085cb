"""Files that clients download by an address that is a secret, and good for an hour."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

_SECONDS = 3600


class SignedFiles:
    """Addresses of files in a folder; those of an earlier process are not good any more.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._secret = root, secrets.token_bytes(32)

    def expiry(self) -> int:
        """Returns until when an address is good that is made now, in seconds since 1970."""
        return int(time.time()) + _SECONDS

    def url(self, request: Request, file: Path) -> str:
        """Returns the address of a file.

        Args:
            request: names the host that the client has asked.
            file: in the folder.
        """
        expires, name = self.expiry(), file.relative_to(self._root).as_posix()
        return f"{request.base_url}api/v1/files/{expires}/{self._signature(expires, name)}/{name}"

    def _signature(self, expires: int, name: str) -> str:
        return hmac.new(self._secret, f"{expires}/{name}".encode(), hashlib.sha256).hexdigest()

    async def download(self, request: Request) -> Response:
        """Answers a request for an address."""
        expires, signature, name = (request.path_params[one] for one in ("expires", "signature", "name"))
        good = expires.isdecimal() and len(expires) < 20
        if not good or not hmac.compare_digest(signature.encode(), self._signature(int(expires), name).encode()):
            raise HTTPException(403, "the address is none of this server's, or of an earlier start: ask for another.")
        if int(expires) < time.time():
            raise HTTPException(403, "the address is not good any more: ask for another.")
        file = self._root / name
        if not file.is_file():
            raise HTTPException(404, "the file was deleted.")
        return FileResponse(file, media_type="application/octet-stream", filename=file.name)
