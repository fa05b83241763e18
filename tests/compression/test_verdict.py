"""Compaction that loses money switches itself off, for a while."""

from __future__ import annotations

from ctxgate.compression.verdict import NEW, PAUSE, STRETCH, Verdict, judged, passed


def after(verdict: Verdict, *nets: int) -> Verdict:
    for net in nets:
        verdict = judged(verdict, net)
    return verdict


def waited(verdict: Verdict, requests: int) -> Verdict:
    for _ in range(requests):
        verdict = passed(verdict)
    return verdict


def test_gateways_n5_it_goes_off_when_a_whole_stretch_has_lost() -> None:
    almost = after(NEW, *[-5] * (STRETCH - 1))
    assert almost.on
    off = judged(almost, -5)
    assert not off.on
    assert (off.net, off.pause, off.times) == (-5 * STRETCH, PAUSE, 1)


def test_one_that_saves_much_pays_for_many_that_lose() -> None:
    assert after(NEW, *[-5] * (STRETCH - 1), 35).on
    assert not after(NEW, *[-5] * (STRETCH - 1), 34).on


def test_only_the_latest_stretch_counts() -> None:
    assert not after(NEW, 1_000_000, *[-5] * STRETCH).on


def test_while_it_is_off_nothing_is_judged() -> None:
    off = after(NEW, *[-5] * STRETCH)
    assert after(off, 1000, -1000) == off


def test_it_is_tried_again_and_each_pause_is_twice_as_long() -> None:
    off = after(NEW, *[-5] * STRETCH)
    assert not waited(off, PAUSE - 1).on
    again = waited(off, PAUSE)
    assert (again.on, again.nets) == (True, ())
    assert passed(again) == again
    second = after(again, *[-1] * STRETCH)
    assert (second.pause, second.times) == (2 * PAUSE, 2)
    assert waited(second, 2 * PAUSE).on
    many = Verdict(times=50)
    assert after(many, *[-1] * STRETCH).pause == 64 * PAUSE
