"""The forms of text that changes from request to request.

Rules for every pattern here: a bounded width; a boundary on the left, so that a long run is tried once
and not from each of its characters; few ways to match from one place.
"""

from __future__ import annotations

import re
from typing import Final

_MONTH: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_WEEKDAY: Final = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_YEAR: Final = r"(?:19|20)\d\d"
_DAY: Final = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?"
_DATE: Final = (
    rf"(?:(?:{_WEEKDAY},? )?(?:{_YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
    rf"|{_YEAR}/(?:0[1-9]|1[0-2])/(?:0[1-9]|[12]\d|3[01])"
    rf"|\d{{1,2}}[/.]\d{{1,2}}[/.]{_YEAR}"
    rf"|{_DAY}[ -](?:of )?{_MONTH}[ ,-]{{1,2}}{_YEAR}"
    rf"|{_MONTH} {_DAY},? {_YEAR}))"
)
_ZONE: Final = (
    r"(?: ?Z|[ ]?[+-]\d\d:?\d\d|[ ](?:UTC|GMT|[A-Z]{1,3}[SD]?T)(?:[+-]\d{1,2})?"
    r"|[ ]?\(?[A-Z][a-z]{2,9}/[A-Z][A-Za-z_]{2,20}\)?)?"
)
_TIME: Final = (
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d{1,9})?)?"
    rf"(?:[ ]?(?:[AaPp]\.[Mm]\.|[AaPp][Mm]\b))?{_ZONE}"
)
_LEFT: Final = r"(?<![\w.])"  # no longer number or word begins further left
_RIGHT: Final = r"(?![\w]|[.:,-]\d)"

CLOCK: Final = re.compile(
    rf"{_LEFT}(?<!\d-)(?:{_DATE}(?:T|,? (?:at )?|_|, ?){_TIME}"
    rf"|{_TIME}(?:,? (?:on )?){_DATE}"
    rf"|{_WEEKDAY} {_MONTH} [ ]?\d{{1,2}} {_TIME} {_YEAR}"
    rf"|{_YEAR}-\d\d-\d\d[T_-](?:[01]\d|2[0-3])[-_.][0-5]\d(?:[-_.][0-5]\d)?Z?"
    rf"|{_YEAR}(?:0[1-9]|1[0-2])[0-3]\d[T_-](?:[01]\d|2[0-3])[0-5]\d[0-5]\dZ?){_RIGHT}"
)
TIME: Final = re.compile(rf"{_LEFT}{_TIME}{_RIGHT}")
DATE: Final = re.compile(rf"(?<![\w./-]){_DATE}{_RIGHT}")
EPOCH: Final = re.compile(rf"{_LEFT}1[5-9]\d{{8}}(?:\d{{3}}|\d{{6}}|\d{{9}})?(?:\.\d{{1,9}})?{_RIGHT}")
EPOCH_MILLIS: Final = re.compile(r"(?<![\w.,:/=-])1[5-9]\d{11}(?![\w.-])")
UUID: Final = re.compile(
    r"(?<![0-9A-Za-z])(?!0{8}-)[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
    r"(?![0-9A-Za-z-])"
)
HEX: Final = re.compile(r"(?<![0-9A-Za-z#])(?:[0-9a-f]{32,128}|[0-9A-F]{32,128})(?![0-9A-Za-z])")
BASE64: Final = re.compile(r"(?<![0-9A-Za-z+/_=-])[0-9A-Za-z+/_-]{22,172}={0,2}(?![0-9A-Za-z+/_=-])")
TEMP_PATH: Final = re.compile(
    r"(?<![\w/.])(?:(?:/private)?/(?:tmp|var/tmp|var/run|run|dev/shm)/"
    r"|(?:/private)?/var/folders/\w{2}/|[A-Z]:\\Users\\[^\\\s]{1,64}\\AppData\\Local\\Temp\\)"
    r"(?P<name>[\w.@+-]{1,128})"
)
PROCESS_PATH: Final = re.compile(r"(?<![\w.])/proc/(?P<name>\d{2,7})(?=/)")
PID: Final = re.compile(
    r"(?<![\w.-])(?:pid|PID|process id|Process ID)[\"']?[ ]?[:=#]?[ ]?(?P<value>\d{2,7})(?![\w.])"
)
GIT_BRANCH: Final = re.compile(
    r"(?<![\w-])(?:(?:git|current|active|working) branch|branch(?= ?[:=])|checked[ -]out branch)"
    r"(?: is)?[ ]?[:=]?[ ]?[`\"']?"
    r"(?P<value>(?:main|master|develop)\b|(?=[\w.@-]{1,60}[/\d])[A-Za-z][\w./@-]{1,120})",
    re.IGNORECASE,
)
GIT_COMMIT: Final = re.compile(
    r"(?<![\w-])(?:(?:[Gg]it )?(?:[Cc]ommit|[Rr]evision|sha|SHA|HEAD)|HEAD is now)(?: is)?(?: at)?"
    r"[ ]?[:=]?[ ]?[`\"'(]?(?P<value>(?=[a-f]{0,40}\d)[0-9a-f]{7,40})\b"
)

HEADER: Final = re.compile(
    r"^x-[a-z0-9-]{1,48}-header:[ ]?(?P<value>\S[^\n]{0,300})", re.IGNORECASE | re.MULTILINE
)

_FIGURE: Final = r"[$\u20ac\u00a3]?\d[\d,._]{0,20}"
_AMOUNT: Final = rf"{_FIGURE}[kKM%]?(?:[ ]?(?:/|of|out of)[ ]?{_FIGURE}[kKM]?)?"
_METERED: Final = (
    r"(?:(?:input|output|context|total|completion|prompt) )?"
    r"(?:tokens?|context(?: window)?|budget|credits?|quota|cost|spend|balance"
    r"|requests?|messages?|turns?|steps?|calls?)"
)
_STATE: Final = r"(?:left|remaining|used|spent|consumed|so far|to date|usage)"
USAGE: Final = re.compile(
    rf"(?<![\w-])(?:{_METERED}[ _]{_STATE}"
    rf"|(?:remaining|used|current|accumulated|session|estimated)[ _]{_METERED})"
    rf"(?: is)?[\"']?[ ]?[:=>]?[ ]?(?P<value>{_AMOUNT})",
    re.IGNORECASE,
)
# A bare number is no amount of anything: `when 3 is used`. A share or a sum of money is.
USAGE_AFTER: Final = re.compile(
    rf"(?<![\w.,$-])(?P<value>{_AMOUNT}(?= (?:{_METERED}|of (?:the |your )?{_METERED}) )"
    rf"|[$\u20ac\u00a3]\d[\d,._]{{0,20}}|\d[\d.]{{0,6}}%) (?:{_METERED} |of (?:the |your )?{_METERED} )?"
    r"(?:is |are |has been |have been )?"
    r"(?:left|remaining|used so far|used|spent so far|spent|consumed|so far)\b",
    re.IGNORECASE,
)

_EVENT: Final = r"step|turn|iteration|iter|round|attempt|request"
# Words that count only where a mark says so: `run 3 tests` is an order, `run #3` a number.
_NAMED_EVENT: Final = r"run|call|message|session|job|build|retry|query|loop|cycle|episode|invocation"
COUNTER: Final = re.compile(
    rf"(?<![\w-])(?:(?P<word>{_EVENT})(?P<mark>[ ]?#|[ ](?:no\.|number|count|counter)|[_ ]?id)?"
    rf"|(?:{_NAMED_EVENT})(?:[ ]?#|[ ](?:no\.|number)|[_ ]id))[\"']?(?:[ ]is)?[ ]?[:=>]?[ ]?"
    r"(?P<value>\d{1,9}(?:[ ]?(?:/|of|out of)[ ]?\d{1,9})?)"
    r"(?=$|[\s\"'<)\]}]?$|[.,;!)\]}<\"'](?:\D|$)|[\r\n])",
    re.IGNORECASE | re.MULTILINE,
)
# Any number after an event's word: a text that has several numbers them for its own use.
NUMBERED: Final = re.compile(
    rf"(?<![\w-])(?P<word>{_EVENT})s?[ ]?[#:]?[ ]?(?P<value>\d{{1,9}})", re.IGNORECASE
)


def is_mixed_hex(text: str) -> bool:
    """Whether hex digits look drawn at random: letters, digits, and no run of one character."""
    letters = sum(character.isalpha() for character in text)
    return 3 <= letters <= len(text) - 3 and len(set(text)) >= 8


def is_dense(text: str) -> bool:
    """Whether base64 looks drawn at random: digits, both cases, and no words joined by marks."""
    digits = sum(character.isdigit() for character in text)
    upper = sum(character.isupper() for character in text)
    lower = sum(character.islower() for character in text)
    return digits >= 3 and upper >= 3 and lower >= 3 and len(set(text)) >= 14


_TRAILING_NUMBER: Final = re.compile(r"[_.@-]\d{3,10}(?:\.[a-z]{1,8})?$")
_MKDTEMP: Final = re.compile(
    r"tmp[a-z0-9_]{8}$|tmp[._-]?(?=[A-Za-z0-9_]{0,15}\d)[A-Za-z0-9_]{3,16}$|tmp\.\w{6,12}$"
)
_RANDOM_SUFFIX: Final = re.compile(r"[._-](?=[A-Za-z]{0,11}\d)(?=\d{0,11}[A-Za-z])[A-Za-z0-9]{6,16}$")


def is_changing_path(name: str) -> bool:
    """Whether the part of a path after the temporary folder carries a random or a process's number."""
    return (
        name.isdigit()
        or bool(_TRAILING_NUMBER.search(name))
        or bool(_MKDTEMP.match(name))
        or bool(_RANDOM_SUFFIX.search(name))
    )
