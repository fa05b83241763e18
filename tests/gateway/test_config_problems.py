"""Every kind of mistake is found, at its line and column, with its field and a clear sentence."""

from __future__ import annotations

import pickle

import pytest

from config_texts import DIGEST, VALID, edited, problems, read_text, shown
from ctxgate.gateway.config_load import ConfigError
from ctxgate.inference.wire_fields import ENGINE_FIELDS

RATES_FAST = (
    "    rates: {effective: 2026-01-01, usd_per_million_uncached: 1.25, usd_per_million_cached: 0.125,\n"
    "            usd_per_million_output: 10}\n"
)


def test_all_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = (
        VALID.replace("0.4,", "'0.4',", 1)
        .replace("  fast:\n", "  fast:\n    abort: yes\n    retry: 3\n", 1)
        .replace("[standard]", "[standrad]")
        .replace("team: research,", "team: reserch,")
        + "lisen: {}\n"
    )
    assert shown(text) == [
        "c.yaml:4:62: pools.standard.rates.usd_per_million_uncached: must be a number of US dollars per "
        "million tokens, but is text; write it without quotes",
        "c.yaml:7:12: pools.fast.abort: must be true or false, without quotes; "
        "the words yes, no, on and off of YAML 1.1 are not accepted",
        "c.yaml:8:5: pools.fast.retry: is not a known field; known are replicas, provider, rates, profile, "
        "speed, engine, api_key_env, abort, continuous_usage, usage_convention, cache_isolation, probe, load",
        "c.yaml:13:18: models.tiny.pools[0]: there is no pool standrad; did you mean standard?",
        "c.yaml:18:29: keys[0].team: there is no team reserch; did you mean research?",
        "c.yaml:19:1: lisen: is not a known field; did you mean listen?",
    ]


def test_an_empty_mapping_lacks_what_is_required() -> None:
    assert shown("{}") == ["c.yaml:1:1: is empty"]
    assert shown("docs: true\n") == ["c.yaml:1:1: models: is missing", "c.yaml:1:1: pools: is missing"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1, 2]", "1:1: must be a mapping, not a list"),
        ("just words", "1:1: must be a mapping, not text"),
        ("pools: {a: [}\n", "1:13: not valid YAML: "),
        (
            "pools:\n\tfast: 1\n",
            "2:1: not valid YAML: a tab stands where only spaces may; indent with spaces",
        ),
        (
            "pools: {a: 1\nb: 2\n",
            "2:2: not valid YAML: the { of line 1 is not closed: a comma or } is missing",
        ),
        ("pools: [1, 2\n", "2:1: not valid YAML: the [ of line 1 is not closed: a comma or ] is missing"),
        ("a: 1\npools: 'x\n", "3:1: not valid YAML: the quoted text that begins on line 2 is not closed"),
        (
            "pools: 1\npools: 2: 3\n",
            "2:9: not valid YAML: a name and its value cannot stand here: the line is indented too deep, or "
            "a text with a colon is not in quotes",
        ),
        (
            "pools:\n    a: 1\n     b: 2\n  c: 3\n",
            "3:7: not valid YAML: a name and its value cannot stand here: the line is indented too deep",
        ),
        (
            "pools:\n    a: [1]\n     b: 2\n",
            "3:6: not valid YAML: this line begins in no column where one may: the entries beside it, from "
            "line 2 on, begin in column 5",
        ),
        (
            "keys:\n  - id: a\n  team: b\n",
            "3:3: not valid YAML: each entry of the list that begins on line 2 starts with '- ' in column 3",
        ),
        ("a: 1\n---\nb: 2\n", "2:1: not valid YAML: "),
        ("a: *nowhere\n", "1:4: not valid YAML: found undefined alias (...)"),
        ("a: \x07\n", "1:4: has a character that YAML does not allow"),
        ("[" * 1200, "1:1: is nested too deeply"),
        ('a: "\\UFFFFFFFF"\n', "1:1: not valid YAML: an escape or directive is malformed"),
    ],
)
def test_text_that_is_no_yaml_mapping(text: str, problem: str) -> None:
    (only,) = shown(text)
    assert only.startswith(f"c.yaml:{problem}")


def test_repeated_keys_are_errors_with_both_lines() -> None:
    assert shown(VALID + "docs: true\ndocs: false\n") == [
        "c.yaml:18:1: docs: appears twice; the first is on line 17"
    ]
    text = edited("  fast:\n", "  standard:\n")
    assert "c.yaml:6:3: pools.standard: appears twice; the first is on line 2" in shown(text)


def test_merge_keys_and_odd_keys_are_errors() -> None:
    assert shown(VALID + "<<: {docs: true}\n") == [
        "c.yaml:17:1: merge keys (<<) are not supported; an alias (*name) for a whole value is"
    ]
    assert shown(VALID + "? [a]\n: 1\n") == ["c.yaml:17:3: a name must be text, not a list; put it in quotes"]
    assert shown(edited("research: {org", "on: {org"))[0] == (
        "c.yaml:14:3: teams: a name must be text, not true or false; put it in quotes"
    )


def test_an_alias_that_contains_itself_is_no_trap() -> None:
    assert [p.field for p in problems("pools: &a {x: *a}\nmodels: {m: {pools: [x]}}\n")] == [
        "pools.x.rates",
        "pools.x.replicas",
        "pools.x.x",
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (VALID[: VALID.index("models:")], "pools: []\n", "1:8: pools: must be a mapping, not a list"),
        ("[standard]", "[]", "11:10: models.tiny.pools: must have at least one entry"),
        ("[standard]", "standard", "11:17: models.tiny.pools: must be a list, not text"),
        ("[standard]", "[fast, fast]", "11:24: models.tiny.pools[1]: names the same pool twice"),
        ("{pools: [standard]}", "{}", "11:3: models.tiny: is empty"),
        ("{pools: [standard]}", "", "11:3: models.tiny: is empty"),
        (
            "organisation: acme",
            "organisation: acme, layout: on",
            '14:42: teams.research.layout: must be "off" or "safe"',
        ),
        (
            "organisation: acme",
            "organisation: acme, layout: save",
            '14:42: teams.research.layout: must be "off" or "safe" or "declared" or "learned"; did you mean',
        ),
        ("{organisation: acme}", "{organization: acme}", "14:14: teams.research.organization: is spelled"),
        (
            "acme",
            "7",
            "14:28: teams.research.organisation: must be the name of an organisation, but is a num",
        ),
        ("acme", '"a b"', "14:28: teams.research.organisation: the name of an organisation is 1 to 64 lett"),
        ("id: research-ci, ", "", "16:5: keys[0].id: is missing"),
        ("  tiny:", "  'white space':", "11:3: models.<11 characters>: a model's name is 1 to 128 letters"),
        (
            '[{name: quick, url: "http://10.0.0.3:8000"}]',
            "[]",
            "7:5: pools.fast.replicas: must have at least one entry",
        ),
        (
            '[{name: quick, url: "http://10.0.0.3:8000"}]',
            "[{name: a}]",
            "7:16: pools.fast.replicas[0].url: is",
        ),
        ('[{name: quick, url: "http://10.0.0.3:8000"}]', "[~]", "7:16: pools.fast.replicas[0]: is empty"),
    ],
)
def test_wrong_types_names_and_missing_fields(old: str, new: str, problem: str) -> None:
    assert any(one.startswith(f"c.yaml:{problem}") for one in shown(edited(old, new))), shown(
        edited(old, new)
    )


@pytest.mark.parametrize(
    ("listen", "problem"),
    [
        ('{host: "[::1]"}', "1:16: listen.host: an IPv6 address stands here without brackets"),
        ('{host: ""}', "1:16: listen.host: must be an IP address or host name: one line"),
        ('{host: "a b"}', "1:16: listen.host: is neither an IP address nor a host name"),
        ("{host: -x.example}", "1:16: listen.host: is neither an IP address nor a host name"),
        ("{host: 300.1.1.1}", "1:16: listen.host: is not an IPv4 address"),
        ("{host: 8080}", "1:16: listen.host: must be an IP address or host name, but is a number"),
        ("{port: 65536}", "1:16: listen.port: must be a whole number from 0 to 65535"),
        ("{port: -1}", "1:16: listen.port: must be a whole number from 0 to 65535"),
        ("{port: 80.0}", "1:16: listen.port: must be a whole number from 0 to 65535"),
        ("{port: 0x50}", "1:16: listen.port: must be a whole number from 0 to 65535, in plain decimal"),
        ("{port: 0800}", "1:16: listen.port: must be a whole number from 0 to 65535"),
        ("{port: 1:30}", "1:16: listen.port: must be a whole number from 0 to 65535, in plain decimal"),
        ('{port: "80"}', "1:16: listen.port: must be a whole number from 0 to 65535, but is text; write"),
        ("{port: true}", "1:16: listen.port: must be a whole number from 0 to 65535, but is true or false"),
        ("{port: }", "1:15: listen.port: must be a whole number from 0 to 65535, but is empty"),
        ("127.0.0.1:8080", "1:9: listen: must be a mapping, not text"),
    ],
)
def test_bad_hosts_and_ports(listen: str, problem: str) -> None:
    (only,) = shown(f"listen: {listen}\n{VALID}")
    assert only.startswith(f"c.yaml:{problem}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://10.0.0.3:8000/v1", "must be the root of the server, without a path: ctxgate adds /v1/"),
        ("http://10.0.0.3:8000?x=1", "must not have a query or a fragment"),
        ("http://10.0.0.3:8000/#", "must not have a query or a fragment"),
        ("http://user:hunter2@10.0.0.3", "must not carry credentials"),
        ("ftp://10.0.0.3", "must begin with http:// or https://"),
        ("10.0.0.3:8000", "must begin with http:// or https://"),
        ("//10.0.0.3:8000", "must begin with http:// or https://"),
        ("http://10.0.0.3:0", "is not a URL with a valid host and port"),
        ("http://10.0.0.3:", "is not a URL with a valid host and port"),
        ("http://10.0.0.3:65536", "is not a URL with a valid host and port"),
        ("http://10.0.0.3:80x", "is not a URL with a valid host and port"),
        ("http://:8000", "is not a URL with a valid host and port"),
        ("http://[::1", "is not a URL with a valid host and port"),
        ("http://10.0.0.256", "the host is not an IPv4 address"),
        ("http://bad_-.example", "the host is neither an IP address nor a host name"),
        ("http://a b", "must be plain ASCII without spaces, backslashes or percent signs"),
        ("http://b\u00fccher.example", "must be plain ASCII without spaces"),
        ("http://10.0.0.3%2f8000", "must be plain ASCII without spaces"),
    ],
)
def test_replica_urls_that_are_no_server_root(url: str, message: str) -> None:
    (only,) = problems(edited("http://10.0.0.3:8000", url))
    assert (only.line, only.column, only.field) == (7, 35, "pools.fast.replicas[0].url")
    assert only.message.startswith(message)
    assert "hunter2" not in str(only)


def test_the_same_server_twice_in_a_pool_is_an_error_however_it_is_spelled() -> None:
    text = edited('"http://10.0.0.2:8000"', '{url: "HTTP://10.0.0.1:8000/"}')
    assert shown(text) == [
        "c.yaml:3:46: pools.standard.replicas[1].url: the same server stands on line 3",
    ]


def test_replica_names_are_unique_given_or_derived() -> None:
    two = '[{{name: {0}, url: "http://10.0.0.4"}}, {1}]'
    old = '[{name: quick, url: "http://10.0.0.3:8000"}]'
    same = edited(old, two.format("a", '{name: a, url: "http://10.0.0.5"}'))
    assert [p.message for p in problems(same)] == ["the same name stands on line 7"]
    derived = edited(old, two.format("fast-1", '"http://10.0.0.5"'))
    assert [p.message for p in problems(derived)] == [
        "needs a name: the one it would get is given to another replica"
    ]


def test_keys_with_the_same_id_or_hash_are_errors() -> None:
    text = VALID + f"  - {{id: research-ci, team: research, sha256: {DIGEST.upper()}}}\n"
    assert shown(text) == [
        "c.yaml:17:10: keys[1].id: the same id stands on line 16",
        "c.yaml:17:47: keys[1].sha256: the same key stands on line 16",
    ]


def test_a_broken_pool_is_not_also_reported_as_unknown() -> None:
    text = edited('[{name: quick, url: "http://10.0.0.3:8000"}]', "7")
    assert [p.field for p in problems(text)] == ["pools.fast.replicas"]
    text = VALID.replace("  fast:\n", "  fast: 7\nx:\n", 1)
    assert [p.field for p in problems(text)] == ["pools.fast", "x"]


ENGINE_WORDS = ", ".join(sorted(ENGINE_FIELDS))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[prioriy]", f"must be one of {ENGINE_WORDS}; did you mean priority?"),
        ("[temperature]", f"must be one of {ENGINE_WORDS}"),
        ("priority", "must be a list, not text"),
    ],
)
def test_engine_fields_that_do_not_exist_cannot_be_granted(written: str, message: str) -> None:
    (only,) = problems(edited(f"sha256: {DIGEST}", f"sha256: {DIGEST}, allow_engine_fields: {written}"))
    assert only.message == message


@pytest.mark.parametrize(
    "limit",
    [
        "max_body_mib",
        "connect_timeout_s",
        "first_byte_timeout_s",
        "idle_timeout_s",
        "total_timeout_s",
        "abort_drain_s",
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "0.0", ".inf", ".nan", "1e9", "null", "off", "[1]", "1_000"])
def test_gateways_o2_zero_is_not_off_and_no_limit_can_be_unlimited(limit: str, value: str) -> None:
    """The loader admits only what the run time can mean: there is no value that silently means "off"."""
    (only,) = problems(f"limits: {{{limit}: {value}}}\n{VALID}")
    assert (only.line, only.field) == (1, f"limits.{limit}")
    assert only.message.startswith("must be a")


@pytest.mark.parametrize("value", ["0", "11", "2.5", "yes"])
def test_attempts_are_a_small_whole_number(value: str) -> None:
    (only,) = problems(f"limits: {{max_attempts: {value}}}\n{VALID}")
    assert only.message.startswith("must be a whole number from 1 to 10")


@pytest.mark.parametrize("value", ['":memory:"', '"file:x?mode=memory"', "data/", '""', '"a\\0b"', "~"])
def test_the_ledger_must_be_a_file(value: str) -> None:
    (only,) = problems(f"store: {{sqlite: {value}}}\n{VALID}")
    assert only.field == "store.sqlite"


def test_what_works_but_is_hardly_meant_is_a_warning() -> None:
    text = VALID.replace("[standard]", "[fast]").replace("10.0.0.3", "10.0.0.2")
    text = text[: text.index("keys:")]
    assert [str(warning) for warning in read_text(text).warnings] == [
        "c.yaml:1:1: there is no key, so every call is refused",
        "c.yaml:2:3: pools.standard: no model names this pool, so it never serves",
        "c.yaml:7:30: pools.fast.replicas[0].url: is also in another pool (line 3): "
        "one server with two prices",
    ]
    assert read_text(VALID).warnings == ()


def test_a_model_may_have_several_pools_in_the_order_of_the_file() -> None:
    loaded = read_text(edited("[standard]", "[standard, fast]"))
    assert loaded.config.models["tiny"].pools == ("standard", "fast")
    assert loaded.warnings == ()


@pytest.mark.parametrize("word", ["yes", "no", "on", "Off"])
def test_yaml_1_1_truth_words_are_refused_with_the_reason(word: str) -> None:
    (only,) = problems(VALID + f"docs: {word}\n")
    assert only.message == (
        "must be true or false, without quotes; the words yes, no, on and off of YAML 1.1 are not accepted"
    )


def test_the_error_survives_pickling_and_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
    with pytest.raises(ConfigError, match="is not a known field") as caught:
        read_text(VALID + "x: 1\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ConfigError)
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)


def test_the_gateways_own_organisation_is_no_teams() -> None:
    assert shown(edited("organisation: acme", "organisation: ctxgate")) == [
        "c.yaml:14:28: teams.research.organisation: ctxgate is reserved: the gateway books its own calls "
        "to it"
    ]


@pytest.mark.parametrize("value", ["Team", "everybody", "false", "[team]"])
def test_what_is_no_isolation(value: str) -> None:
    (only,) = problems(edited("  fast:\n", f"  fast:\n    cache_isolation: {value}\n"))
    assert only.field == "pools.fast.cache_isolation"
