"""Train the byte-level BPE tokenizer of the tiny model on this repository's own text.

The result is `inference/assets/tiny/tokenizer.json`. The training is deterministic: the same files give
the same bytes. Retraining changes every token count, so it is a deliberate act, never part of a build.

    python scripts/train_tokenizer.py [--output FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("gateway", "compression", "routing", "inference", "configs", "docs", "scripts", "tests")
SUFFIXES: Final = frozenset({".py", ".md", ".yaml", ".toml"})
VOCABULARY: Final = 4096  # the tiny model's config.json holds the same number
# The template's marks are single tokens: begin and end of a message, padding.
SPECIAL: Final = ("<|pad|>", "<|begin|>", "<|end|>")
# The hermes tool-call marks are ordinary text to a reader, so decoding keeps them.
MARKS: Final = ("<tool_call>", "</tool_call>")


def corpus(root: Path) -> list[Path]:
    """The files to learn from, in one fixed order."""
    found = [path for name in FOLDERS for path in (root / name).rglob("*") if path.suffix in SUFFIXES]
    found += [path for path in root.iterdir() if path.suffix in SUFFIXES]
    return sorted(path for path in found if path.is_file())


def texts(paths: Sequence[Path]) -> Iterator[str]:
    """The text of each file; names go through pathlib so that the order is the only input."""
    for path in paths:
        yield path.read_text(encoding="utf-8")


def train(paths: Sequence[Path], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocabulary` tokens.

    Raises ValueError when the text is too small for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKS),
        min_frequency=2,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(paths), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"{len(paths)} files give {tokenizer.get_vocab_size()} tokens, not {vocabulary}")
    return tokenizer


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "inference/assets/tiny/tokenizer.json")
    output: Path = parser.parse_args().output
    paths = corpus(ROOT)
    train(paths).save(str(output))
    print(f"{len(paths)} files -> {output}, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
