"""Questions about the shared sessions, to measure recall with: each asks in other words for what was said.

A paraphrase names one place of a session: it is answered by a window that holds one of the given strings.
Identifier questions are made by code: an exact string in a sentence that says nothing else.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ctxgate.compression.identifiers import IdentifierKind, found_in
from ctxgate.compression.recall_text import searchable
from ctxgate.compression.said import Said, read_said

SESSIONS: Final = Path(__file__).resolve().parents[3] / "shared" / "trajectories"
CODING, SHORT = "coding", "short"

_CODING: Final = (
    ("which of the tests did they say are worth having at all?", "i would only want e2e tests"),
    ("why did a listener vanish after we detached from the agent?", "why does unsubscribe clear"),
    (
        "do not throw away the former sources, I want to look at both next to each other",
        "keep the old code around",
    ),
    (
        "the program crashed at launch since it searched for its manifest in the wrong folder",
        "ENOENT: no such file",
    ),
    (
        "what made the manual shell command break the API's rule on ordering of replies?",
        "Root Cause Analysis",
    ),
    (
        "where did the person want the helper for picking a past conversation to live?",
        "selectSession() function (TUI",
    ),
    ("at what point is a newer release looked for?", "i think we only do this in interactive mode"),
    ("destination folders proposed for the palette and sign-in sources", "oauth -> core/oauth"),
    ("the user complains that a file is read in tiny chunks", "100 lines at a time"),
    ("throw the broken screen class away and start it afresh from both sources", "kill the entire file"),
    (
        "a single function that swaps a picker in and gets told when it has finished",
        "showSelector() that takes",
    ),
    (
        "remaining duplications that were spotted in the terminal front end",
        "duplication/conciseness opportunities",
    ),
    (
        "results of shell runs wait below the conversation until the next prompt is sent",
        "pendingMessageContainer, and on next",
    ),
    (
        "what is a person expected to see that says how the source tree is laid out?",
        "add a code map to AGENTS.md",
    ),
    (
        "writing down the roadmap so that somebody can resume it with a fresh context",
        "pick up from where you left",
    ),
    ("who keeps hold of prompts typed while the model is busy?", "same for queued messages"),
    ("properties can be read, yet how does one change them?", "how do we set things on the agentsession"),
    ("should abbreviations typed after a slash be reloaded each time?", "track the file slash commands"),
    (
        "option for folding the release notes ought to come from the stored preferences",
        "collapseChangelog = false, can't",
    ),
    ("put the settings module one level higher", "move @packages/coding-agent/src/utils/config.ts"),
    ("undo the copying, relocate the sources for good", "actually, can you revert that"),
    (
        "the log of everything we did is stored on disk should you need it",
        "look up the detailed history of this session",
    ),
)
_SHORT: Final = (
    ("she refuses to leave before late morning", "fly before 11 AM"),
    ("he is unwell and bought cover, can the trip be called off", "feeling a bit unwell"),
    ("somebody short of cash wants cheaper seats everywhere", "some issues with money"),
    ("pay with whichever voucher has least left", "gift card with the smallest balance"),
    ("his home is in New Jersey so another airport is fine too", "live in Princeton"),
    ("total of what is left on prepaid cards", "sum of my gift card balances"),
    (
        "splitting the trip into several bookings so that every voucher can be used",
        "book three separate reservations",
    ),
    (
        "a traveller's companion has to be taken off the booking and it is pressing",
        "remove Sophia from the flights",
    ),
    ("client angry about a late plane wants to know the reason", "what caused the delay"),
    ("how long ought the new departure differ at most from the old one", "within 3-4 hours of my original"),
    ("spending ceiling for nicer seats for the two travellers", "pay up to $600 for the business"),
    ("needs to be home early since a relative is in trouble", "due to a family emergency"),
    ("would even accept a small part of the money back", "50% refund, or even 10%"),
    ("keep the certificate if it would lose over a hundred dollars", "reduced by more than $100"),
    ("book my pal onto the identical itinerary", "for my friend Ivan"),
    ("take a piece of luggage away and give the money back", "removing the checked bag"),
    ("somewhere by the Pacific, wherever is least expensive", "any destination on the West Coast"),
    ("conversion of durations to whole numbers loses one unit", "TimeDelta serialization precision"),
    ("the patch was inserted with wrong leading blanks", "did not use the proper indentation"),
    ("throw the little demonstration script away once it has served", "remove the reproduce.py file"),
    ("setting up the checkout with every dependency a contributor needs", "pip install -e .[dev]"),
    ("cheapest fare but not the most restrictive kind, in the early hours", "morning nonstop flights to JFK"),
)
_FORMS: Final = (
    "What do we know about {}?",
    "Look at {} again and tell me what was said there.",
    "Where did {} come up before?",
    "{}",
)
_KINDS: Final = (
    IdentifierKind.PATH,
    IdentifierKind.ID,
    IdentifierKind.COMMAND,
    IdentifierKind.URL,
    IdentifierKind.ERROR,
)
_MOST_OFTEN: Final = 3  # messages that an identifier may stand in, and still name a place


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and a string that a window which answers it holds; `tuned`: it chose the constants."""

    corpus: str
    text: str
    gold: str
    tuned: bool


def corpora() -> dict[str, list[tuple[str, str]]]:
    """Role and text of every message: the long coding session, and all the short ones in a row."""
    names = {CODING: ["coding-long-a"]}
    names[SHORT] = [each.stem for each in sorted(SESSIONS.glob("airline-*"))] + ["repair-a", "repair-b"]
    return {
        corpus: [(said.role, searchable(said)) for stem in stems for said in session(stem)]
        for corpus, stems in names.items()
    }


def session(stem: str) -> list[Said]:
    """The messages of one session without its system message."""
    lines = (SESSIONS / f"{stem}.jsonl").read_bytes().splitlines()[1:]
    return [said for line in lines if (said := read_said(line)).role != "system"]


def paraphrases() -> list[Question]:
    """Every second one was used to choose constants."""
    pairs = [(CODING, *each) for each in _CODING] + [(SHORT, *each) for each in _SHORT]
    return [Question(corpus, text, gold, at % 2 == 0) for at, (corpus, text, gold) in enumerate(pairs)]


def identifiers(count: int = 150) -> list[Question]:
    """For each corpus `count` exact strings that stand in few messages, each in a sentence of its own."""
    found: list[Question] = []
    stems = {CODING: ["coding-long-a"], SHORT: [each.stem for each in sorted(SESSIONS.glob("airline-*"))]}
    for corpus, names in stems.items():
        places: Counter[str] = Counter()
        for said in (said for stem in names for said in session(stem)):
            places.update({each.text for each in found_in(said) if each.kind in _KINDS})
        rare = [text for text, times in places.items() if times <= _MOST_OFTEN and "\n" not in text]
        rare = [text for text in rare if 4 <= len(text) <= 120]
        rare.sort(key=lambda text: hashlib.blake2b(text.encode()).digest())
        found += [
            Question(corpus, _FORMS[at % len(_FORMS)].format(text), text, at % 2 == 0)
            for at, text in enumerate(rare[:count])
        ]
    return found
