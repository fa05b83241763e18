"""The containers of a configuration: sections with named fields, lists and named entries.

A container reads everything it holds and reports every problem; what could not be read is left out,
so that one mistake does not hide the next. Read values carry their places for later checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import yaml

from ctxgate.gateway.config_yaml import MERGE, NULL, Place, Unreadable, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.config_kinds import Kind, Name

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Field(Generic[T_co]):
    """A named value of a section: its kind, its default (required where it has none), what it means."""

    name: str
    kind: Kind[T_co]
    about: str
    default: Any = None
    required: bool = False
    default_text: str = ""  # for the reference page, where the default is no constant
    missing: str = "is missing"


@dataclass(frozen=True, slots=True)
class Located(Generic[T_co]):
    """A value and where it stands."""

    value: T_co
    place: Place


class Values:
    """What could be read of a section. Absent optional fields give their defaults."""

    __slots__ = ("_places", "_values", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self._values: dict[str, object] = {}
        self._places: dict[str, Place] = {}

    def __getitem__(self, wanted: Field[T]) -> T:
        """The value or the default; KeyError for a required field, which only a reported file lacks."""
        if wanted.required:
            return cast("T", self._values[wanted.name])
        return cast("T", self._values.get(wanted.name, wanted.default))

    def get(self, wanted: Field[T]) -> T | None:
        """The value that stands in the file, None where it is absent or was reported."""
        return cast("T | None", self._values.get(wanted.name))

    def at(self, wanted: Field[Any]) -> Place:
        """Where the field stands, or the section where it is absent."""
        return self._places.get(wanted.name, self.place)

    def put(self, wanted: Field[Any], place: Place) -> None:
        """Read one field."""
        self._places[wanted.name] = place
        try:
            self._values[wanted.name] = wanted.kind.read(place)
        except Unreadable:  # reported; the other fields are still worth reading
            return


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping with known fields; an unknown one is an error. `hints` answer names that people try."""

    fields: tuple[Field[Any], ...]
    hints: Mapping[str, str] = field(default_factory=dict)
    empty: str = ""

    def read(self, place: Place) -> Values:
        """The fields that can be read; every problem is reported."""
        if place.node.tag == NULL:
            Place(place.key or place.node, place.path, place.report).fail(
                self.empty or "is empty; what belongs to it stands below it, indented deeper"
            )
        known = {one.name: one for one in self.fields}
        values = Values(place)
        present: set[str] = set()
        for name, member in place.members():
            present.add(name)
            if name in known:
                values.put(known[name], member)
            else:
                place.complain(self._unknown(name), at=member.key, path=member.path)
        if not present and any(one.required for one in self.fields) and not _has_merge(place.node):
            place.complain(self.empty or "is empty", at=place.key)
            return values
        for one in self.fields:
            if one.required and one.name not in present:
                place.complain(one.missing, at=place.key, path=place.inside(one.name))
        return values

    def _unknown(self, name: str) -> str:
        if name in self.hints:
            return self.hints[name]
        names = [one.name for one in self.fields]
        close = suggestion(name, names)
        return "is not a known field" + (close or f"; known are {', '.join(names)}")

    def describe(self) -> str:
        """The type for the reference page."""
        return "section"

    def schema(self) -> dict[str, object]:
        """JSON Schema of the kind."""
        properties = {
            one.name: one.kind.schema() | {"description": one.about.replace("`", "")} for one in self.fields
        }
        required = [one.name for one in self.fields if one.required]
        found: dict[str, object] = {"type": "object", "additionalProperties": False, "properties": properties}
        return found | ({"required": required} if required else {})


@dataclass(frozen=True, slots=True)
class ListOf(Generic[T_co]):
    """A list, or with `single` also one entry without the list around it."""

    item: Kind[T_co]
    minimum: int = 0
    single: bool = False

    def read(self, place: Place) -> tuple[Located[T_co], ...]:
        """The entries that can be read, in order."""
        if self.single and not isinstance(place.node, yaml.SequenceNode):
            return (Located(self.item.read(place), place),)
        found: list[Located[T_co]] = []
        entries = tuple(place.items())
        for entry in entries:
            try:
                found.append(Located(self.item.read(entry), entry))
            except Unreadable:  # reported; the next entries are still worth reading
                continue
        if len(entries) < self.minimum:
            place.complain("must have at least one entry", at=place.key)
        return tuple(found)

    def describe(self) -> str:
        """The type for the reference page."""
        inner = self.item.describe()
        return f"{inner}, or a list of them" if self.single else f"list of: {inner}"

    def schema(self) -> dict[str, object]:
        """JSON Schema of the kind."""
        items = self.item.schema()
        listed: dict[str, object] = {"type": "array", "items": items}
        if self.minimum:
            listed["minItems"] = self.minimum
        return {"anyOf": [items, listed]} if self.single else listed


@dataclass(frozen=True, slots=True)
class Entries(Generic[T_co]):
    """Named entries in the order of the file; `names` also holds those that could not be read."""

    found: Mapping[str, Located[T_co]]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MapOf(Generic[T_co]):
    """A mapping from names that the operator chooses to entries of one kind."""

    key: Name
    item: Kind[T_co]
    minimum: int = 0

    def read(self, place: Place) -> Entries[T_co]:
        """The entries that can be read, and every name."""
        found: dict[str, Located[T_co]] = {}
        names: list[str] = []
        for name, member in place.members():
            names.append(name)
            problem = self.key.problem(name)
            if problem:
                place.complain(problem, at=member.key, path=member.path)
            try:
                found[name] = Located(self.item.read(member), member)
            except Unreadable:  # reported; the next entries are still worth reading
                continue
        if len(names) < self.minimum:
            place.complain("must have at least one entry", at=place.key)
        return Entries(found, tuple(names))

    def describe(self) -> str:
        """The type for the reference page."""
        return f"mapping from {self.key.what} to: {self.item.describe()}"

    def schema(self) -> dict[str, object]:
        """JSON Schema of the kind."""
        names = {"pattern": f"^{self.key.pattern}$"}
        found: dict[str, object] = {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": self.item.schema(),
        }
        return found | ({"minProperties": self.minimum} if self.minimum else {})


@dataclass(frozen=True, slots=True)
class Short:
    """A section that may be written as the value of one of its fields alone."""

    section: Section
    field: Field[Any]

    def read(self, place: Place) -> Values:
        """The fields that can be read; every problem is reported."""
        if not isinstance(place.node, yaml.ScalarNode) or place.node.tag == NULL:
            return self.section.read(place)
        values = Values(place)
        values.put(self.field, place)
        return values

    def describe(self) -> str:
        """The type for the reference page."""
        return f"section, or its `{self.field.name}` alone"

    def schema(self) -> dict[str, object]:
        """JSON Schema of the kind."""
        return {"anyOf": [self.field.kind.schema(), self.section.schema()]}


def _has_merge(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode) and any(key.tag == MERGE for key, _ in node.value)
