"""The base of values that are made for every request."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True):
    """An immutable value, compared, hashed and printed by its fields.

    A frozen dataclass is the same and takes some ten times as long to make; a request makes forty. The
    types of the fields are for readers and checkers: a record is never decoded, so they are not looked at.
    `msgspec.structs.replace` copies one with changes.
    """
