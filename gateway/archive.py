"""The archive: originals of messages that left a prompt or went out shortened, and the port of its store.

What a prompt no longer holds can be had again by its id, for as many days as the operator says, by the
team whose conversation it was and by nobody else.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ID_LENGTH: Final = 24
"""Characters of an id: 96 bits in hexadecimal."""


class Original(NamedTuple):
    """An archived message: its id, and its JSON in the client's bytes."""

    id: str
    body: bytes


class Deleted(NamedTuple):
    """What went with a task: how many originals, and the keys of the forms whose texts are gone."""

    originals: int
    forms: tuple[bytes, ...]


def reference_of(tenant: str, digest: bytes) -> str:
    """The id of a tenant's message, from the digest of what it says: the same in every process, for ever.

    It stands in prompts that must never change, so neither a secret nor a store goes into it. It opens
    nothing: an original is looked up among its own tenant's alone. Equal messages of two tenants have
    unrelated ids.
    """
    owner = tenant.encode()
    name = len(owner).to_bytes(4, "big") + owner + digest
    return blake2b(name, digest_size=ID_LENGTH // 2, person=b"ctxgate archive").hexdigest()


def is_reference(text: str) -> bool:
    """Whether a text can be an id."""
    return len(text) == ID_LENGTH and all(each in "0123456789abcdef" for each in text)


class Archive(Protocol):
    """Where originals are kept. All methods raise LedgerError where the store cannot serve."""

    async def keep(
        self,
        tenant: str,
        task: str,
        items: Mapping[str, bytes],
        now_us: int,
        conversation: bytes = b"",
        *,
        forms: Collection[bytes] = (),
        since_us: int | None = None,
    ) -> bool:
        """Keep originals under their ids, in their order, for a task; durable when it returns.

        The first text under an id stays; keeping it again makes it last longer. With the name of a
        conversation they are found as its own too, so that it can be searched after a restart. `forms` are
        keys of the form store whose texts go when the task is deleted. `since_us`: when the request came
        whose they are. False where the task was deleted after that: nothing is kept, and their texts go.
        """
        ...

    async def get(self, tenant: str, id_: str) -> bytes | None:
        """An original in the client's bytes; None where this tenant has none under that id."""
        ...

    async def of_conversation(self, tenant: str, conversation: bytes) -> list[Original]:
        """The originals that were kept for a conversation, in the order in which they came."""
        ...

    async def delete(self, tenant: str, task: str, now_us: int) -> Deleted:
        """Delete a task's originals and the texts of its forms. Other tasks keep those they share.

        What comes of requests from before `now_us` is not kept any more. A form whose text is gone stays
        as an empty one, so that what was decided is not decided anew.
        """
        ...

    async def expire(self, kept_before_us: int, limit: int) -> int:
        """Delete at most `limit` originals that were last kept before then; returns how many."""
        ...
