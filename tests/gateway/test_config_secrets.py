"""Secrets: hashes and names of variables in the file, values nowhere else."""

from __future__ import annotations

import pytest

from config_texts import DIGEST, VALID, edited, problems, read_text, shown
from ctxgate.gateway.config_yaml import label, looks_like_secret
from ctxgate.gateway.keys import new_key

SECRET = new_key(bytes(range(32)))[0]
WITH_VARIABLE = edited("    replicas: [{name", "    api_key_env: FAST_KEY\n    replicas: [{name")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "the environment variable named here is not set"),
        ({"FAST_KEY": ""}, "the environment variable named here is empty"),
        ({"FAST_KEY": "tail-secret\n"}, "the environment variable named here has spaces, line ends"),
        ({"FAST_KEY": "two secrets"}, "the environment variable named here has spaces, line ends"),
        ({"FAST_KEY": "s\u00e9cret"}, "the environment variable named here has spaces, line ends"),
    ],
)
def test_a_variable_that_gives_no_usable_key(environ: dict[str, str], message: str) -> None:
    (only,) = problems(WITH_VARIABLE, environ)
    assert (only.line, only.column, only.field) == (7, 18, "pools.fast.api_key_env")
    assert only.message.startswith(message)
    assert "secret" not in only.message
    assert "cret" not in only.message


def test_gateways_p2_an_upstream_key_is_in_no_representation() -> None:
    config = read_text(WITH_VARIABLE, {"FAST_KEY": "upstream-value-7261"}).config
    assert config.pools["fast"].api_key == "upstream-value-7261"
    for shown_value in (repr(config), str(config), f"{config.pools}", repr(config.pools["fast"])):
        assert "upstream-value-7261" not in shown_value
    assert DIGEST not in repr(config)
    assert repr(bytes.fromhex(DIGEST)) not in repr(config)


@pytest.mark.parametrize(
    "value", [SECRET, "sk-proj-0123456789abcdefghij", "FAST_KEY $", "lower_case", '"A B"']
)
def test_a_value_in_place_of_the_name_of_a_variable_is_not_repeated(value: str) -> None:
    (only,) = problems(WITH_VARIABLE.replace("FAST_KEY", value))
    assert only.message == (
        "must be the name of an environment variable, in capitals, digits and _; "
        "a secret itself never stands in this file"
    )


def test_a_secret_in_place_of_its_hash_is_named_as_such_and_not_repeated() -> None:
    (only,) = problems(edited(DIGEST, SECRET))
    assert (only.line, only.column, only.field) == (16, 47, "keys[0].sha256")
    assert only.message.startswith(
        "looks like the secret itself. A secret never stands in this file: replace"
    )
    assert SECRET[3:] not in str(only)


@pytest.mark.parametrize("value", [DIGEST[1:], DIGEST + "0", "g" * 64, "''", "[a]", "hunter2"])
def test_what_is_no_hash(value: str) -> None:
    (only,) = problems(edited(DIGEST, value))
    assert only.field == "keys[0].sha256"
    assert "64 hexadecimal digits" in only.message
    assert "hunter2" not in only.message


def test_the_hash_of_nothing_is_refused() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert [p.message for p in problems(edited(DIGEST, empty))] == [
        "is the hash of nothing: an empty text was hashed"
    ]


@pytest.mark.parametrize("field", ["key", "secret", "token", "api_key", "value", "password"])
def test_fields_that_would_hold_a_secret_point_to_the_hash(field: str) -> None:
    missing, only = problems(edited(f"sha256: {DIGEST}", f"{field}: {SECRET}"))
    assert (missing.field, missing.message) == ("keys[0].sha256", "is missing")
    assert only.field == f"keys[0].{field}"
    assert only.message.startswith("a secret never stands in this file; give its hash as sha256")
    assert SECRET not in f"{only}{missing}"


def test_a_literal_upstream_key_points_to_the_variable() -> None:
    (only,) = problems(WITH_VARIABLE.replace("api_key_env: FAST_KEY", f"api_key: {SECRET}"))
    assert only.message == "a secret never stands in this file; name an environment variable in api_key_env"


def test_a_secret_as_the_id_of_a_key_is_refused() -> None:
    (only,) = problems(edited("id: research-ci", f"id: {SECRET}"))
    assert only.message == "looks like a secret; the id of a key is public and must not be one"
    assert SECRET not in str(only)


@pytest.mark.parametrize(
    "text",
    [
        VALID + f"{SECRET}: 1\n",
        VALID + f"keys:\n  {SECRET}: research\n",
        VALID + f"x: *{SECRET}\n",
        VALID + f"x: [&{SECRET} 1, &{SECRET} 2]\n",
        VALID + f"x: !{SECRET}! 1\n",
        VALID + f"x: !<tag:{SECRET}> 1\n",
        VALID + f"x: '{SECRET}\n",
        VALID + f"x: {{{SECRET}: {SECRET}\n",
        edited("research: {org", f"{SECRET}: {{org"),
        edited("team: research,", f"team: {SECRET},"),
        edited("[standard]", f"[standard, {SECRET}]"),
        edited("http://10.0.0.3:8000", f"http://{SECRET}@10.0.0.3"),
        edited("http://10.0.0.3:8000", f"http://10.0.0.3/?key={SECRET}"),
        edited("usd_per_million_output: 10}", f"usd_per_million_output: {SECRET}}}"),
    ],
)
def test_a_secret_anywhere_in_the_file_is_in_no_problem(text: str) -> None:
    assert SECRET[3:] not in "\n".join(shown(text))


@pytest.mark.parametrize(
    "text",
    [
        "cg-" + "A" * 43,
        "sk-proj-aaaaaaaaaaaaaaaa",
        "ghp_abcdefghijklmnopqrst",
        "eyJhbGciOiJIUzI1NiJ9.e30",
        "0a" * 16,
    ],
)
def test_forms_of_credentials(text: str) -> None:
    assert looks_like_secret(text)
    assert label(text) == f"<{len(text)} characters>"


@pytest.mark.parametrize(
    "text",
    [
        "research-ci",
        "fast",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "cg-fast",
        "first_byte_timeout_s",
        "team-2026-01-01",
    ],
)
def test_names_are_no_credentials(text: str) -> None:
    assert not looks_like_secret(text)
    assert label(text) == text


SALTED = VALID + "cache_salt_env: CACHE_SALT\n"


def test_the_secret_of_cache_salts_comes_from_the_environment() -> None:
    secret = "sixteen or more.\u00e9"
    loaded = read_text(SALTED, {"CACHE_SALT": secret})
    assert loaded.config.cache_salt_secret == secret.encode()
    assert "sixteen" not in repr(loaded)
    assert read_text(VALID).config.cache_salt_secret is None


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({}, "is not set"),
        ({"CACHE_SALT": ""}, "is empty"),
        (
            {"CACHE_SALT": "fifteen charact"},
            "is shorter than 16 characters: a secret that short can be guessed",
        ),
    ],
)
def test_a_secret_of_cache_salts_that_is_none(environ: dict[str, str], problem: str) -> None:
    assert shown(SALTED, environ) == [
        f"c.yaml:17:17: cache_salt_env: the environment variable named here {problem}"
    ]


def test_the_variables_name_is_no_place_for_the_secret() -> None:
    (only,) = problems(VALID + f"cache_salt_env: {SECRET}\n")
    assert only.field == "cache_salt_env"
    assert SECRET not in str(only)
