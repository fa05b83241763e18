"""The kinds of scalar a configuration knows: each reads one node exactly, or says what is wrong.

A kind also describes itself for the reference page and as JSON Schema, so that the three agree.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import yaml

from ctxgate.gateway.config_yaml import BOOL, NULL, STR, describe, looks_like_secret, suggestion
from ctxgate.inference.rates import NANO_PER_DOLLAR

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from urllib.parse import SplitResult

    from ctxgate.gateway.config_yaml import Place

T_co = TypeVar("T_co", covariant=True)

MAX_USD_PER_MILLION: Final = 10_000  # 0.01 USD per token: above it, the unit was mistaken
MIN_PLAUSIBLE_NANO: Final = NANO_PER_DOLLAR // 10_000  # below it, warn: perhaps a price per token
UNIT_HINT: Final = (
    "is below 0.0001 USD per million tokens; is it a price per token? Here they are per million"
)
EMPTY_DIGEST: Final = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?")
_WHOLE: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_HOST_LABEL: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LONGEST_NUMBER: Final = 64
_VARIABLE: Final = "[A-Z_][A-Z0-9_]{0,127}"


class Kind(Protocol[T_co]):
    """Reads a node into a value, or reports why not and raises Unreadable."""

    def read(self, place: Place) -> T_co:
        """The value at a place."""
        ...

    def describe(self) -> str:
        """The type for the reference page."""
        ...

    def schema(self) -> dict[str, object]:
        """JSON Schema (draft 2020-12) of the kind."""
        ...


@dataclass(frozen=True, slots=True)
class Scalar(Generic[T_co]):
    """A kind made of a reader, its words for the reference page and its JSON Schema."""

    reader: Callable[[Place], T_co]
    words: str
    json: Mapping[str, object]

    def read(self, place: Place) -> T_co:
        """The value at a place."""
        return self.reader(place)

    def describe(self) -> str:
        """The type for the reference page."""
        return self.words

    def schema(self) -> dict[str, object]:
        """JSON Schema of the kind."""
        return dict(self.json)


def scalar(place: Place, wanted: str) -> yaml.ScalarNode:
    """The scalar at a place; reports anything else, absent values included."""
    node = place.node
    if not isinstance(node, yaml.ScalarNode) or node.tag == NULL:
        place.fail(f"must be {wanted}, but is {describe(node)}")
    return node


def text(place: Place, wanted: str) -> str:
    """The text at a place, one printable line."""
    node = scalar(place, wanted)
    if node.tag != STR:
        place.fail(f"must be {wanted}, but is {describe(node)}; put it in quotes")
    value = str(node.value)
    if not value.isprintable() or value != value.strip() or not value:
        place.fail(f"must be {wanted}: one line of printable characters, without space around it")
    return value


def number(place: Place, wanted: str) -> Decimal:
    """The exact number at a place, as written: no float in between."""
    node = scalar(place, wanted)
    value = str(node.value)
    if node.style is not None:
        place.fail(f"must be {wanted}, but is text; write it without quotes")
    if re.fullmatch(r"[-+]?\.(?:nan|inf)|nan|inf|-inf", value, re.IGNORECASE):
        place.fail(f"must be {wanted}, but is not finite")
    if len(value) > _LONGEST_NUMBER or not _NUMBER.fullmatch(value):
        what = describe(node)
        place.fail(
            f"must be {wanted}" + (", in plain decimal digits" if what == "a number" else f", but is {what}")
        )
    return Decimal(value)


@dataclass(frozen=True, slots=True)
class Name:
    """A name that appears in ledgers, metrics or logs. `wide` admits the names of models."""

    what: str
    wide: bool = False

    @property
    def pattern(self) -> str:
        """The regular expression of the whole name."""
        return "[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}" if self.wide else "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

    def problem(self, value: str) -> str | None:
        """Why a text is no such name."""
        if not self.wide and looks_like_secret(value):
            return f"looks like a secret; {self.what} is public and must not be one"
        if not re.fullmatch(self.pattern, value):
            signs, longest = (". _ : / @ + -", 128) if self.wide else (". _ -", 64)
            return (
                f"{self.what} is 1 to {longest} letters, digits and {signs}, beginning with a letter or digit"
            )
        return None

    def read(self, place: Place) -> str:
        """The name at a place."""
        value = text(place, self.what)
        problem = self.problem(value)
        if problem:
            place.fail(problem)
        return value

    def describe(self) -> str:
        """The type for the reference page."""
        return "name"

    def schema(self) -> dict[str, object]:
        """JSON Schema of the name."""
        return {"type": "string", "pattern": f"^{self.pattern}$"}


def whole(low: int, high: int, scale: int = 1) -> Scalar[int]:
    """A whole number within bounds, times `scale`."""
    wanted = f"a whole number from {low} to {high}"

    def read(place: Place) -> int:
        value = number(place, wanted)
        if not _WHOLE.fullmatch(str(place.node.value)) or not low <= value <= high:
            place.fail(f"must be {wanted}")
        return int(value) * scale

    return Scalar(
        read, f"whole number, {low} to {high}", {"type": "integer", "minimum": low, "maximum": high}
    )


def seconds(high: int) -> Scalar[float]:
    """A duration above zero. Zero is refused: it reads as "off", and there is no "off"."""
    wanted = f"a number of seconds from 0.001 to {high}"

    def read(place: Place) -> float:
        value = number(place, wanted)
        if not Decimal("0.001") <= value <= high:
            place.fail(f"must be {wanted}")
        return float(value)

    return Scalar(read, f"seconds, 0.001 to {high}", {"type": "number", "minimum": 0.001, "maximum": high})


def choice(*options: str) -> Scalar[str]:
    """One of a few words."""
    few = len(options) < 5
    wanted = " or ".join(f'"{option}"' for option in options) if few else f"one of {', '.join(options)}"

    def read(place: Place) -> str:
        if _is_word(place.node, options):
            return str(place.node.value)
        value = text(place, wanted)
        if value not in options:
            place.fail(f"must be {wanted}{suggestion(value, options)}")
        return value

    return Scalar(read, " or ".join(f"`{option}`" for option in options), {"enum": list(options)})


def _is_word(node: yaml.Node, options: Collection[str]) -> bool:
    """Whether an option stands there unquoted that YAML itself reads as a truth value, such as `off`."""
    return node.tag == BOOL and node.value in options


def _other_words(node: yaml.Node) -> str:
    """What to say where YAML 1.1 reads a truth value that is not written as one."""
    return "; the words yes, no, on and off of YAML 1.1 are not accepted" if node.tag == BOOL else ""


def _flag(place: Place) -> bool:
    value = str(scalar(place, "true or false").value)
    if place.node.tag != BOOL or value.lower() not in ("true", "false"):
        place.fail(f"must be true or false, without quotes{_other_words(place.node)}")
    return value.lower() == "true"


def _day(place: Place) -> date:
    value = str(scalar(place, "a day written YYYY-MM-DD").value)
    if not _DAY.fullmatch(value):
        place.fail("must be a day written YYYY-MM-DD")
    try:
        return date.fromisoformat(value)
    except ValueError:
        place.fail("is not a day of the calendar")


def _price(place: Place) -> int:
    value = number(place, "a number of US dollars per million tokens")
    if value < 0:
        place.fail("a price must not be negative")
    if value > MAX_USD_PER_MILLION:
        place.fail(
            f"is more than {MAX_USD_PER_MILLION:,} USD per million tokens (0.01 USD per token); "
            "prices here are US dollars per million tokens"
        )
    nano = nano_dollars(value)
    if nano is None:
        hint = f"; it {UNIT_HINT}" if value * NANO_PER_DOLLAR < MIN_PLAUSIBLE_NANO else ""
        place.fail(f"has more than nine decimals; prices are whole nano-dollars per million tokens{hint}")
    if 0 < nano < MIN_PLAUSIBLE_NANO:
        place.warn(UNIT_HINT)
    return nano


def nano_dollars(usd: Decimal) -> int | None:
    """Dollars as whole nano-dollars, or None where that is not exact. Independent of any context."""
    numerator, denominator = usd.as_integer_ratio()
    nano, rest = divmod(numerator * NANO_PER_DOLLAR, denominator)
    return None if rest else nano


def host_problem(host: str) -> str | None:
    """Why a text is neither an IP address nor a host name."""
    if host.startswith("["):
        return "an IPv6 address stands here without brackets"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.removesuffix(".").split(".")
        if len(host) > 253 or not all(_HOST_LABEL.fullmatch(part) for part in labels):
            return "is neither an IP address nor a host name"
        if labels[-1].isdigit():
            return "is not an IPv4 address"
    return None


def _host(place: Place) -> str:
    value = text(place, "an IP address or host name")
    problem = host_problem(value)
    if problem:
        place.fail(problem)
    return value


def _server_root(place: Place) -> str:
    value = text(place, "a URL such as http://127.0.0.1:8001")
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        place.fail("is not a URL with a valid host and port")
    problem = _root_problem(value, parts)
    if problem:
        place.fail(problem)
    if not host or port == 0 or parts.netloc.endswith(":"):
        place.fail("is not a URL with a valid host and port")
    problem = host_problem(host)
    if problem:
        place.fail(f"the host {problem}")
    shown = f"[{host}]" if ":" in host else host
    default = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{shown}" + ("" if port in (None, default) else f":{port}")


def _root_problem(value: str, parts: SplitResult) -> str | None:
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if "@" in parts.netloc:
        return "must not carry credentials; name an environment variable in api_key_env"
    if "?" in value or "#" in value:
        return "must not have a query or a fragment"
    if parts.path not in ("", "/"):
        return "must be the root of the server, without a path: ctxgate adds /v1/... itself"
    if not value.isascii() or " " in value or "\\" in value or "%" in value:
        return "must be plain ASCII without spaces, backslashes or percent signs"
    return None


def _sha256(place: Place) -> bytes:
    # Digits alone are a number to YAML, yet a valid hash: only the characters count.
    value = str(scalar(place, "the SHA-256 of the key, in 64 hexadecimal digits").value)
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", value):
        if re.fullmatch(r"[0-9A-Fa-f]{57,71}", value):
            place.fail(f"must be 64 hexadecimal digits, but has {len(value)}")
        if looks_like_secret(value):
            place.fail(
                "looks like the secret itself. A secret never stands in this file: replace the key, "
                "and put its hash here (ctxgate keys new, ctxgate keys hash)"
            )
        place.fail("must be the SHA-256 of the key, in 64 hexadecimal digits (ctxgate keys hash)")
    if value.lower() == EMPTY_DIGEST:
        place.fail("is the hash of nothing: an empty text was hashed")
    return bytes.fromhex(value)


def _variable(place: Place) -> str:
    value = text(place, "the name of an environment variable")
    if not re.fullmatch(_VARIABLE, value):
        place.fail(
            "must be the name of an environment variable, in capitals, digits and _; "
            "a secret itself never stands in this file"
        )
    return value


def _file_path(place: Place) -> str:
    value = text(place, "the path of a file")
    if value.startswith((":memory:", "file:")) or value.endswith("/"):
        place.fail("must be the path of a file: the ledger outlives the process")
    return value


def _model_place(place: Place) -> str:
    value = text(place, "the folder or the name of a model")
    if not value.strip():
        place.fail("must be the folder or the name of a model")
    return value


FLAG: Final = Scalar(_flag, "true or false", {"type": "boolean"})
DAY: Final = Scalar(_day, "day, `YYYY-MM-DD`", {"type": "string", "format": "date"})
PRICE: Final = Scalar(
    _price,
    f"US dollars per million tokens, 0 to {MAX_USD_PER_MILLION:,}, at most nine decimals",
    {"type": "number", "minimum": 0, "maximum": MAX_USD_PER_MILLION},
)
LISTEN_HOST: Final = Scalar(
    _host,
    "IP address (IPv6 without brackets) or host name",
    {"type": "string", "minLength": 1, "maxLength": 253},
)
SERVER_ROOT: Final = Scalar(
    _server_root,
    "URL, `http` or `https`, without a path",
    {"type": "string", "pattern": r"^[Hh][Tt][Tt][Pp][Ss]?://[^/?#@\s]+/?$"},
)
SHA256: Final = Scalar(
    _sha256, "SHA-256, 64 hexadecimal digits", {"type": "string", "pattern": "^[0-9A-Fa-f]{64}$"}
)
VARIABLE: Final = Scalar(
    _variable, "name of an environment variable", {"type": "string", "pattern": f"^{_VARIABLE}$"}
)
MODEL_PLACE: Final = Scalar(
    _model_place, "a folder, or a name that the library downloads", {"type": "string", "minLength": 1}
)
FILE_PATH: Final = Scalar(
    _file_path, "path, relative to the folder of this file", {"type": "string", "minLength": 1}
)
