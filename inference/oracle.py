"""The most a prefix cache could have answered, given the prompts that came before.

The bound is the engine's own hit rule without eviction: the longest block-aligned prefix that an
earlier prompt of the same domain begins with, and never the whole prompt, for the last token is always
computed: hit <= floor((P - 1) / b) * b.

Only prompts are remembered. An engine caches the blocks of generated tokens too, but whether an answer
comes back token for token in a later prompt depends on what the model said, which a replay of recorded
answers does not send; prompts are certain. A measured hit above this bound therefore means that an
answer was reused, and is possible.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DIGEST: Final = 16  # bytes: among 2**32 blocks, two collide with probability below 2**-64


def chain_hashes(tokens: Sequence[int], block_size: int, domain: str = "") -> Iterator[bytes]:
    """Hashes of the full blocks of `tokens`, each covering everything before it and the domain.

    Token ids lie in 0..2**32-1; a trailing partial block has no hash.
    """
    ids = array("I", tokens)
    packed = memoryview(ids.tobytes())
    width = block_size * ids.itemsize
    parent = blake2b(domain.encode(), digest_size=_DIGEST).digest()
    for block in range(len(tokens) // block_size):
        step = blake2b(parent, digest_size=_DIGEST)
        step.update(packed[block * width : (block + 1) * width])
        parent = step.digest()
        yield parent


class PrefixOracle:
    """Remembers the blocks of all earlier prompts and bounds the hit of the next.

    A domain is what isolates caches: a salt or a tenant. Memory is one digest per distinct block,
    independent of the number of requests that share it.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError("a block has at least one token")
        self.block_size = block_size
        self._seen: set[bytes] = set()

    def __len__(self) -> int:
        """Distinct blocks remembered."""
        return len(self._seen)

    def observe(self, tokens: Sequence[int], domain: str = "") -> int:
        """Most tokens of this prompt that earlier prompts could have left cached; then remember it."""
        reusable = max(len(tokens) - 1, 0) // self.block_size
        hit = 0
        for at, digest in enumerate(chain_hashes(tokens, self.block_size, domain)):
            # Prefixes are remembered whole, so the seen blocks of a prompt form one leading run.
            if digest in self._seen:
                hit += at < reusable
            else:
                self._seen.add(digest)
        return hit * self.block_size
