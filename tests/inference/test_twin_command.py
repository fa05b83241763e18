"""`ctxgate twin` as a process: its ready line, and what it refuses."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import Final

import pytest

from ctxgate.gateway.cli import main

pytestmark = pytest.mark.integration

COMMAND: Final = (sys.executable, "-m", "ctxgate.gateway.cli", "twin")


def test_it_says_where_it_listens_and_ends_on_a_signal() -> None:
    options: tuple[str, ...] = (
        "--profile",
        "fast",
        "--max-model-len",
        "2048",
        "--block-size",
        "32",
        "--blocks",
        "65",
    )
    options += ("--served-model-name", "other")
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        host, port = line.removeprefix("listening on http://").strip().split(":")
        assert host == "127.0.0.1"
        with urllib.request.urlopen(f"http://{host}:{port}/v1/models", timeout=10) as answer:
            (model,) = json.load(answer)["data"]
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
    assert (model["id"], model["max_model_len"]) == ("other", 2048)
    assert process.returncode in (0, -signal.SIGTERM)


def test_a_window_larger_than_the_cache_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--blocks", "65", "--block-size", "32", "--max-model-len", "2049"]) == 2
    assert "65 blocks of 32 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["jinja2", "tokenizers"])
def test_a_missing_extra_is_told_in_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["twin"]) == 2
    assert capsys.readouterr().err == (
        f"ctxgate twin: {package} is missing; the twin needs the extra `twin`: pip install '.[twin]' in a "
        "checkout, pip install 'ctxgate[twin]' elsewhere\n"
    )


def test_a_port_in_use_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["twin", "--port", str(taken.getsockname()[1])]) == 1
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--profile", "slow"],
        ["--time-scale", "-1"],
        ["--time-scale", "inf"],
        ["--blocks", "0"],
        ["--port", "x"],
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["twin", *options])
    assert caught.value.code == 2
