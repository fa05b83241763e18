"""The reference page, the JSON Schema and the loader say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ctxgate.gateway import config_docs, config_fields
from ctxgate.gateway.config_schema import ListOf, MapOf, Short

ROOT = Path(__file__).parents[2]


def test_routing_i2_the_reference_page_is_made_from_the_fields() -> None:
    """Mend a failure with `python -m ctxgate.gateway.config_docs .`."""
    text = (ROOT / config_docs.PAGE).read_text("utf-8")
    assert text == config_docs.page(text)


def test_the_schema_file_is_made_from_the_fields() -> None:
    """Mend a failure with `python -m ctxgate.gateway.config_docs .`."""
    assert (ROOT / config_docs.SCHEMA).read_text("utf-8") == config_docs.json_schema()


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        config_docs.page("no markers")


def test_every_field_has_a_row_with_its_meaning() -> None:
    page = (ROOT / config_docs.PAGE).read_text("utf-8")
    seen = 0
    for _, section in config_docs.sections("", config_fields.ROOT):
        for field in section.fields:
            assert re.search(rf"^\| `{field.name}` \|.*\| {re.escape(field.about)} \|$", page, re.MULTILINE)
            assert field.about.endswith(".")
            seen += 1
    assert seen == 126


def test_the_example_names_every_top_level_section() -> None:
    example = (ROOT / "configs" / "ctxgate.yaml").read_text("utf-8")
    assert "schema=ctxgate.schema.json" in example
    for field in config_fields.ROOT.fields:
        # The variable of a secret is shown as a comment: the example must start without it.
        mark = "# " if field is config_fields.CACHE_SALT_ENV else ""
        assert field is config_fields.DOCS or re.search(rf"^{mark}{field.name}:", example, re.MULTILINE)


def test_the_schema_knows_the_same_fields_and_admits_no_others() -> None:
    schema = json.loads((ROOT / config_docs.SCHEMA).read_text("utf-8"))
    sections = [section for _, section in config_docs.sections("", config_fields.ROOT)]
    assert list(schema["properties"]) == [field.name for field in config_fields.ROOT.fields]
    assert schema["required"] == ["pools", "models"]
    objects = [found for found in _objects(schema) if "properties" in found]
    assert all(found["additionalProperties"] is False for found in objects)
    names = {tuple(found["properties"]) for found in objects}
    assert names == {tuple(field.name for field in section.fields) for section in sections}


def _objects(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in _objects(item)]
    if not isinstance(node, dict):
        return []
    below = [found for item in node.values() for found in _objects(item)]
    return [node, *below] if node.get("type") == "object" else below


def test_every_kind_describes_itself() -> None:
    for _, section in config_docs.sections("", config_fields.ROOT):
        for field in section.fields:
            assert field.kind.describe()
            assert field.kind.schema()
            assert isinstance(field.kind, ListOf | MapOf | Short) or field.kind.schema().get("anyOf") is None
