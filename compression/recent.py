"""A bounded memory of what was used last, in two generations instead of an ordered list.

A hit costs one or two look-ups and moves nothing. When the young generation holds half of the limit, it
becomes the old one, and what was old and not asked for since is forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key. `limit` bounds the sum of the weights; without `weigh` every value weighs 1."""

    __slots__ = ("_half", "_old", "_weigh", "_weight", "_young")

    def __init__(self, limit: int, weigh: Callable[[V], int] | None = None) -> None:
        self._half = max(1, limit // 2)
        self._weigh = weigh
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def get(self, key: K) -> V | None:
        """The value, which is then young again; None where it is not known or no longer known."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def get_all(self, keys: Sequence[K]) -> list[V | None]:
        """The value of each key, as `get` gives it; much cheaper for many keys that are known."""
        found = list(map(self._young.get, keys))
        for at in [at for at, value in enumerate(found) if value is None]:
            found[at] = self.get(keys[at])
        return found

    def known(self, keys: Iterable[K]) -> Iterator[K]:
        """Those of the keys that have a value, in their order; cheap for many that have none."""
        young, old = self._young, self._old
        return (key for key in keys if key in young or key in old)

    def put(self, key: K, value: V) -> None:
        """Keep a value. One that weighs more than half of the limit is not kept."""
        weigh, young = self._weigh, self._young
        weight = 1 if weigh is None else weigh(value)
        if weight > self._half:
            return
        if self._weight + weight > self._half:
            young = {}
            self._old, self._young, self._weight = self._young, young, 0
        if key in young:
            weight -= 1 if weigh is None else weigh(young[key])
        young[key] = value
        self._weight += weight
