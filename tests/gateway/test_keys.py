"""Client keys: strength, form, look-up."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from ctxgate.gateway.config import Key
from ctxgate.gateway.keys import KeyRing, digest, new_key, secret_problem

ALPHABET = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def key(key_id: str, secret: str) -> Key:
    return Key(key_id, hashlib.sha256(secret.encode()).digest(), "research", "acme")


def test_a_new_key_carries_all_its_random_bytes_behind_a_known_prefix() -> None:
    secret, hashed = new_key(bytes(range(32)))
    assert secret == "cg-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert hashed == hashlib.sha256(secret.encode("ascii")).digest()
    flipped, _ = new_key(bytes(range(31)) + b"\x1e")
    assert flipped != secret
    assert set(new_key(b"\xff" * 32)[0][3:]) <= ALPHABET


def test_a_new_key_needs_256_bits() -> None:
    with pytest.raises(ValueError, match="at least 32 random bytes"):
        new_key(b"x" * 31)
    assert len(new_key(b"x" * 48)[0]) == 3 + 64


def test_the_digest_is_plain_sha_256() -> None:
    """The well-known test vector, so that `sha256sum` and this agree."""
    assert digest("abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_every_new_key_is_usable() -> None:
    for seed in range(50):
        assert secret_problem(new_key(hashlib.sha256(bytes([seed])).digest())[0]) is None


def test_the_ring_finds_exactly_its_own_keys() -> None:
    secrets = [new_key(bytes([n]) * 32)[0] for n in range(5)]
    ring = KeyRing(key(f"k{n}", secret) for n, secret in enumerate(secrets[:4]))
    assert len(ring) == 4
    for n, secret in enumerate(secrets[:4]):
        found = ring.find(secret)
        assert found is not None
        assert found.key_id == f"k{n}"
    assert ring.find(secrets[4]) is None
    for near in (
        secrets[0][:-1],
        secrets[0] + "A",
        secrets[0].upper(),
        " " + secrets[0],
        secrets[0] + "\n",
        "",
    ):
        assert ring.find(near) is None


def test_the_hash_itself_opens_nothing() -> None:
    secret, hashed = new_key(b"7" * 32)
    ring = KeyRing([key("k", secret)])
    assert ring.find(hashed.hex()) is None
    assert ring.find(hashed.decode("latin-1")) is None


@pytest.mark.parametrize(
    "presented", ["x" * 257, "x" * 10_000_000, "caf\u00e9" * 10, "\ud800", "a\0b", "a b", ""]
)
def test_text_that_no_key_can_be_is_refused_before_it_is_hashed(
    presented: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = KeyRing([key("k", "x" * 256)])

    def hashed(secret: str) -> bytes:
        raise AssertionError("hashed")

    monkeypatch.setattr("ctxgate.gateway.keys.digest", hashed)
    assert ring.find(presented) is None


def test_the_longest_secret_is_found() -> None:
    secret = "x" * 256
    assert KeyRing([key("k", secret)]).find(secret) is not None


def test_the_comparison_takes_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word belongs to `hmac.compare_digest`."""
    secret, hashed = new_key(b"9" * 32)
    ring = KeyRing([key("k", secret)])
    seen: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        seen.append((left, right))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert ring.find(secret) is None
    assert seen == [(hashed, hashed)]


def test_the_ring_shows_no_digest() -> None:
    secret, hashed = new_key(b"5" * 32)
    ring = KeyRing([key("k", secret)])
    assert hashed.hex() not in repr(ring)
    assert repr(hashed) not in repr(ring.find(secret))


@pytest.mark.parametrize(
    ("secret", "usable"),
    [("a" * 31, False), ("a" * 32, True), ("a" * 256, True), ("a" * 257, False), ("a b" * 20, False),
     ("\u00e9" * 40, False), ("a" * 40 + "\n", False), ("", False)],
)  # fmt: skip
def test_which_texts_can_be_secrets(secret: str, usable: bool) -> None:
    problem = secret_problem(secret)
    assert (problem is None) is usable
    assert problem is None or "aaaa" not in problem
