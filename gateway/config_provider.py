"""The fields of a pool at a hosted provider; see `config_fields`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ctxgate.gateway.config_kinds import VARIABLE, Scalar, text
from ctxgate.gateway.config_schema import Field, Section

if TYPE_CHECKING:
    from ctxgate.gateway.config_yaml import Place

_MODEL: Final = "[a-z0-9_]+/[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"


def _model(place: Place) -> str:
    value = text(place, "a model with its provider, such as openai/gpt-4o-mini")
    if not re.fullmatch(_MODEL, value):
        place.fail("must be a model with its provider, such as openai/gpt-4o-mini")
    return value


def _base_url(place: Place) -> str:
    value = text(place, "a URL such as https://api.example.com/v1")
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError:
        place.fail("must be a URL such as https://api.example.com/v1")
    if not host or parts.scheme not in ("http", "https"):
        place.fail("must be a URL such as https://api.example.com/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        place.fail(
            "must not carry credentials, a query or a fragment; name the key's variable in api_key_env"
        )
    return value.rstrip("/")


MODEL: Final = Field(
    "model",
    Scalar(_model, "provider and model, as LiteLLM names them", {"type": "string", "pattern": f"^{_MODEL}$"}),
    "The model there, whatever name a client asks for, such as `openai/gpt-4o-mini`.",
    required=True,
)
KEY_ENV: Final = Field(
    "api_key_env", VARIABLE, "Environment variable with the key of the provider.", required=True
)
BASE_URL: Final = Field(
    "base_url",
    Scalar(_base_url, "URL, `http` or `https`", {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"}),
    "Where its API is, where that is not the provider's usual place.",
    default_text="the provider's",
)
PROVIDER_SECTION: Final = Section((MODEL, KEY_ENV, BASE_URL))
PROVIDER: Final = Field(
    "provider",
    PROVIDER_SECTION,
    "In place of `replicas`: the pool is a hosted model, called through LiteLLM. It serves chat completions; "
    "fields that only vLLM knows are left out, and a call whose client left is metered by estimate. Without "
    "`rates` the prices are those of LiteLLM's catalogue, at the provider's usual service tier. Needs the "
    "extra `providers`.",
    default_text="the pool has `replicas`",
)
