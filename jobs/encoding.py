"""JSON as the job's files hold it: what goes in comes out, whatever strings and numbers a user's data has."""

from __future__ import annotations

import json
from typing import Any

import orjson


def encode(value: object) -> bytes:
    """One line of JSON without a newline. NaN and infinities have no JSON form and become null.

    orjson refuses lone surrogates and integers beyond 64 bits, both of which occur in real data; the standard
    library writes them, as escapes.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def decode(data: bytes | str) -> Any:
    """The value that `encode` was given. Raises ValueError for anything that is not JSON.

    The standard library's parser, because orjson's turns large integers into floats and refuses lone surrogates.
    """
    return json.loads(data, parse_constant=lambda _: None)
