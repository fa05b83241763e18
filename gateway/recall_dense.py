"""Embeddings and their indexes: only the recall process loads this, and only with the extra `dense`.

One conversation has thousands of windows: a flat index with one byte per dimension is exact enough, and on
a GPU one with two bytes. Both take vectors as they come and need no training data.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NEAREST: Final = 100
_RANGE: Final = 0.4  # no dimension of a unit vector of some hundred goes beyond, but for outliers
_SCRATCH: Final = 256 * 2**20  # bytes of a GPU
_LONGEST: Final = 2_000  # characters of one text; a model reads some hundred tokens


def installed() -> bool:
    """Whether the extra `dense` is there."""
    return all(find_spec(name) is not None for name in ("faiss", "sentence_transformers"))


class Embedder:
    """A sentence-transformers model, by its name or its folder. Making it takes seconds."""

    def __init__(self, model: str) -> None:
        # Imported here: it takes seconds, and half a gigabyte.
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415 # pyright: ignore[reportMissingImports]  # an extra

        self._model: Any = SentenceTransformer(model)

    def embedded(self, texts: Sequence[str]) -> Any:
        """A unit vector for each text: float32 of the shape (texts, dimensions)."""
        return self._model.encode(
            [text[:_LONGEST] for text in texts],
            batch_size=len(texts),
            normalize_embeddings=True,
            show_progress_bar=False,
        )


class Vectors:
    """The vectors of one conversation's windows, by the windows' numbers. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index: Any = None
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def size(self) -> int:
        """Bytes of memory, roughly."""
        return 0 if self._index is None else len(self._numbers) * (self._index.d * 2 + 40)

    def add(self, numbers: Sequence[int], vectors: Any) -> None:
        """Add vectors of the shape (numbers, dimensions)."""
        with self._lock:
            if self._index is None:
                self._index = _flat(vectors[:1])
            self._index.add(vectors)
            self._numbers.extend(numbers)

    def likeness(self, vector: Any) -> dict[int, float]:
        """The windows nearest to a vector of the shape (1, dimensions), with the cosines of their angles."""
        with self._lock:
            if self._index is None:
                return {}
            found, places = self._index.search(vector, min(NEAREST, len(self._numbers)))
        return {
            self._numbers[at]: float(cosine)
            for at, cosine in zip(places[0], found[0], strict=True)
            if at >= 0
        }


@cache
def _gpu() -> Any:
    """What all indexes on the GPU share: its scratch memory would be gigabytes for each."""
    import faiss  # noqa: PLC0415 # pyright: ignore[reportMissingImports]  # an extra, imported where used

    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_SCRATCH)
    return resources


def _flat(first: Any) -> Any:
    """An empty index for vectors like this one, of the shape (1, dimensions)."""
    import faiss  # noqa: PLC0415 # pyright: ignore[reportMissingImports]  # an extra, imported where used

    dimensions = first.shape[1]
    if getattr(faiss, "get_num_gpus", int)() > 0:
        config = faiss.GpuIndexFlatConfig()
        config.useFloat16 = True
        return faiss.GpuIndexFlatIP(_gpu(), dimensions, config)
    index = faiss.IndexScalarQuantizer(
        dimensions, faiss.ScalarQuantizer.QT_8bit_uniform, faiss.METRIC_INNER_PRODUCT
    )
    # The quantizer learns its range from these, whatever comes later: the same for every conversation.
    bounds = first.repeat(2, axis=0) * 0
    bounds[0] -= _RANGE
    bounds[1] += _RANGE
    index.train(bounds)
    return index
