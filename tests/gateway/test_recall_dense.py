"""The index of embeddings where there is a GPU; the library is a double (the real one: `tests/e2e`)."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ctxgate.gateway.recall_dense import Vectors


class Matrix(list[list[float]]):
    """As much of an array as the index needs."""

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self), len(self[0]))

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return Matrix(found) if isinstance(at, slice) else found


class Flat:
    """An exact index by inner products, and what it was made with."""

    def __init__(self, resources: Any, dimensions: int, config: Any) -> None:
        self.resources, self.d, self.config = resources, dimensions, config
        self.rows: list[list[float]] = []

    def add(self, rows: Matrix) -> None:
        self.rows += rows

    def search(self, question: Matrix, count: int) -> tuple[list[list[float]], list[list[int]]]:
        [one] = question
        products = [sum(a * b for a, b in zip(one, row, strict=True)) for row in self.rows]
        order = sorted(range(len(products)), key=lambda at: -products[at])[:count]
        return [[products[at] for at in order]], [order]


class Resources:
    """The memory of a GPU."""

    def __init__(self) -> None:
        self.scratch = 0

    def setTempMemory(self, size: int) -> None:  # noqa: N802 - the library's name
        self.scratch = size


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Flat]:
    """A library that sees one GPU; the indexes that were made on it."""
    indexes: list[Flat] = []

    def make(*parts: Any) -> Flat:
        indexes.append(Flat(*parts))
        return indexes[-1]

    library: Any = ModuleType("faiss")
    library.get_num_gpus = lambda: 1
    library.GpuIndexFlatConfig = SimpleNamespace
    library.GpuIndexFlatIP = make
    library.StandardGpuResources = Resources
    monkeypatch.setitem(sys.modules, "faiss", library)
    return indexes


def test_indexes_on_a_gpu_take_two_bytes_a_dimension_and_share_its_memory(made: list[Flat]) -> None:
    for _ in range(3):
        Vectors().add([0], Matrix([[1.0, 0.0]]))
    assert [index.config.useFloat16 for index in made] == [True] * 3
    assert len({id(index.resources) for index in made}) == 1
    assert 0 < made[0].resources.scratch <= 2**30


@pytest.mark.usefixtures("made")
def test_vectors_are_found_by_the_numbers_of_their_windows() -> None:
    vectors = Vectors()
    assert vectors.likeness(Matrix([[0.0, 1.0]])) == {}
    assert (len(vectors), vectors.size) == (0, 0)
    vectors.add([3, 5], Matrix([[1.0, 0.0], [0.0, 1.0]]))
    vectors.add(range(7, 8), Matrix([[0.6, 0.8]]))
    assert vectors.likeness(Matrix([[0.0, 1.0]])) == {5: 1.0, 7: 0.8, 3: 0.0}
    assert len(vectors) == 3
    assert vectors.size > 0
