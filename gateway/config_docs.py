"""The reference page and the JSON Schema of the configuration, both made from `config_fields`.

`python -m ctxgate.gateway.config_docs ROOT` rewrites them in a checkout: the tables of
docs/configuration.md and configs/ctxgate.schema.json. A test fails while they differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ctxgate.gateway import config_fields
from ctxgate.gateway.config_schema import Field, ListOf, MapOf, Section, Short

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ctxgate.gateway.config_kinds import Kind

PAGE: Final = Path("docs/configuration.md")
SCHEMA: Final = Path("configs/ctxgate.schema.json")
BEGIN: Final = "<!-- fields: begin (made by config_docs) -->"
END: Final = "<!-- fields: end -->"
_TITLES: Final = {
    "listen": "address",
    "store": "ledger",
    "limits": "bounds",
    "pools.NAME": "one pool",
    "pools.NAME.provider": "a hosted model as a pool",
    "pools.NAME.engine": "how the servers are started",
    "pools.NAME.engine.speculative": "speculative decoding",
    "pools.NAME.replicas[]": "one vLLM server",
    "pools.NAME.replicas[].kv_events": "its cache events",
    "pools.NAME.speed": "how fast a replica is",
    "pools.NAME.rates": "one dated version of the prices",
    "pools.NAME.rates.tiers[]": "prices for long prompts",
    "models.NAME": "one model",
    "models.NAME.tokenizer": "what counts a model's tokens",
    "models.NAME.routing": "how replicas are chosen",
    "teams.NAME": "one team",
    "teams.NAME.layout": "layout for the prefix cache",
    "teams.NAME.layout.volatile[]": "text that changes",
    "teams.NAME.context": "long conversations",
    "teams.NAME.classes": "how long requests may take",
    "teams.NAME.classes.interactive": "somebody waits",
    "teams.NAME.classes.agent": "a loop of tool calls",
    "teams.NAME.classes.batch": "nobody waits",
    "teams.NAME.classes.reasoning": "long answers",
    "keys[]": "one client key",
}


def tables() -> str:
    """Markdown: one table per section, one row per field."""
    parts = []
    for path, section in sections("", config_fields.ROOT):
        heading = f"### `{path}`: {_TITLES[path]}" if path else "### The file"
        rows = "\n".join(_row(one) for one in section.fields)
        parts.append(f"{heading}\n\n| field | type | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def page(current: str) -> str:
    """The reference page with its tables renewed. Raises ValueError where the markers are missing."""
    before, begin, rest = current.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def json_schema() -> str:
    """JSON Schema (draft 2020-12) of the file, for editors; what spans fields is left to `ctxgate check`."""
    head: dict[str, object] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of ctxgate",
    }
    return json.dumps(head | config_fields.ROOT.schema(), indent=2) + "\n"


def sections(path: str, section: Section) -> Iterator[tuple[str, Section]]:
    """Every section below one, itself first, with the path by which the page names it."""
    yield path, section
    for one in section.fields:
        below = f"{path}.{one.name}" if path else one.name
        yield from _inside(below, one.kind)


def _inside(path: str, kind: Kind[Any]) -> Iterator[tuple[str, Section]]:
    if isinstance(kind, Section):
        yield from sections(path, kind)
    elif isinstance(kind, Short):
        yield from sections(path, kind.section)
    elif isinstance(kind, ListOf):
        yield from _inside(path if kind.single else f"{path}[]", kind.item)
    elif isinstance(kind, MapOf):
        yield from _inside(f"{path}.NAME", kind.item)


def _row(one: Field[Any]) -> str:
    kind = one.kind.describe().replace("|", "\\|")
    return f"| `{one.name}` | {kind} | {_default(one)} | {one.about} |"


def _default(one: Field[Any]) -> str:
    if one.required:
        return "**required**"
    if one.default_text:
        return one.default_text
    if isinstance(one.default, bool):
        return f"`{str(one.default).lower()}`"
    if isinstance(one.default, float):
        return f"`{one.default:g}`"
    return f"`{one.default}`"


def main(root: Path) -> None:
    """Rewrite both files of a checkout."""
    target = root / PAGE
    target.write_text(page(target.read_text("utf-8")), "utf-8")
    (root / SCHEMA).write_text(json_schema(), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
