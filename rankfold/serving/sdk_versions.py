"""Which versions of the SDK the server is tested with."""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 25), (0, 38)
_ADVICE = "install one of them, such as with pip install tinker==0.38.0"


def remark(version: object) -> dict[str, str]:
    """Returns what a client's log is to say of its SDK, in the fields of an answer to create_session; {} for nothing.

    Args:
        version: of the SDK, as it says.
    """
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    tested = f"{_text(OLDEST)} to {_text(NEWEST)}"
    if match is None:
        return {"warning_message": f"the client does not say its SDK's version; the server is tested with {tested}."}
    found = int(match[1]), int(match[2])
    if found < OLDEST:
        reason = f"requests of SDK {_text(found)} are not read by this server, which is tested with {tested}"
        return {"error_message": f"{reason}: {_ADVICE}."}
    if found > NEWEST:
        reason = f"SDK {_text(found)} is newer than those that this server is tested with, {tested}"
        return {"warning_message": f"{reason}: where a request is refused, {_ADVICE}."}
    return {}


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
