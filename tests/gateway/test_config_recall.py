"""The model of recall: a folder beside the configuration, or a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from config_texts import VALID, shown
from ctxgate.gateway.config_load import read

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_beside_the_file_is_meant_before_a_name(tmp_path: Path) -> None:
    file = tmp_path / "ctxgate.yaml"
    file.write_text(VALID + "\nstore: {recall_model: models/mini}\n")
    assert read(file, {}).config.recall_model == "models/mini"
    (tmp_path / "models" / "mini").mkdir(parents=True)
    assert read(file, {}).config.recall_model == str(tmp_path / "models" / "mini")
    file.write_text(VALID)
    assert read(file, {}).config.recall_model is None


@pytest.mark.parametrize("value", ["3", "''", "' '", "[a]"])
def test_what_names_no_model_is_refused(value: str) -> None:
    problems = shown(VALID + f"\nstore: {{recall_model: {value}}}\n")
    assert any("store.recall_model: must be the folder or the name of a model" in each for each in problems)
