"""Which lines of a tool's output say that something went wrong.

One line is judged at a time and only its first characters, so that the cost is linear whatever the text.
Source code that *handles* errors is no error: a line is judged by how tools print, not by its words.
"""

from __future__ import annotations

import re
from typing import Final

LOOKED_AT: Final = 400  # characters of a line

_HINTS: Final = (  # in lower case: a line without any of them is no error, and most lines have none
    *(
        "error",
        "exception",
        "fail",
        "fatal",
        "panic",
        "exit",
        "err!",
        "cannot",
        "could not",
        "denied",
        "refused",
    ),
    *("not found", "no such", "undefined", "unresolved", "abort", "segmentation", "traceback", "timed out"),
    *("killed", "unable", "warn", "directory", "sh: ", "***", "code", "status", "interrupt", "core dumped"),
    *("critical", "severe", "not ok", "return", "e   ", "e: ", "\u00d7", "\u2717", "\u2716", "\u274c"),
    *("violat", "conflict", "out of memory", "http 4", "http 5", "http/", "ora-", "reset by"),
    *("notfound", "timeout", "doesnotexist"),
)
_ERROR: Final = re.compile(
    r"^\s{0,8}(?:"
    r"(?:[\w.]{1,80}\.)?[A-Z]\w{0,60}(?:Error|Exception|Exit|Interrupt|Warning)(?:\s?\[[\w-]{1,40}\])?(?::|$)"
    r"|(?:\[?\d[\d:T.,/ +Z-]{4,40}\]?\s{1,4})?[\[(<]?(?:ERROR|FATAL|CRITICAL|SEVERE|PANIC)\b"
    r"|(?:Uncaught |Unhandled |Caused by: ?|Fatal |fatal |Internal |Compile |Build |Parse |Syntax |Runtime )?"
    r"(?:[Ee]rror|[Ff]atal|[Pp]anic|FAILED|FAIL|E)(?:\[\w{1,20}\])?(?::|!|\b\s?\(|\s{2,})"
    r"|npm (?:ERR!|error)|make(?:\[\d{1,3}\])?: \*\*\*|(?:ba|z|k)?sh: |thread '[^']{1,60}' panicked"
    r"|[\u00d7\u2717\u2716\u274c]\s|Traceback \(most recent call last\)|Segmentation fault|Killed$"
    r"|Aborted|E {3,7}\S|FAILED |not ok \d"
    r")"
    r"|\berror(?: [A-Z]{1,8}-?\d{1,6}|\[\w{1,12}\])(?::|\b)"
    r"|^\s{0,8}\S{1,300}[:(]\d{1,7}(?:[:,]\d{1,7})?\)?:? (?:fatal )?(?:[Ee]rror|ERROR)\b"
    r"|\b(?:exit(?:ed)?|return(?:ed)?|finished|terminated) (?:with )?(?:non-zero )?"
    r"(?:exit )?(?:code|status|signal)[ :=]{1,3}-?[1-9A-Z]"
    r"|\b(?:exit|status|return) ?(?:code|status)[\"']?[ ]?[:=][ ]?-?[1-9]"
    r"|^\s{0,8}[^\s:]{1,200}: (?:[^:\n]{1,200}: )?(?:No such file or directory|Permission denied"
    r"|command not found|cannot [a-z]{3,20}\b|not found$|Is a directory|Connection refused)"
    r"|\b(?:[1-9]\d{0,5}) (?:failed|errors?|failures?)\b"
    r"|\b(?:Could not|Cannot|Unable to|Failed to|failed to) [a-z]{3,20}\b"
    r"|\b(?:undefined reference to|unresolved external|core dumped|timed out after|Connection refused)\b"
    r"|^\s{0,8}(?:[\w .-]{1,40}: )?(?:[A-Z][\w+]{1,20} ){1,2}(?:[Ff]atal )?[Ee]rror(?::| at | from |  )"
    r"|^\s{0,8}(?:[a-z][\w.-]{0,40}: )?Error (?:response )?from [^:]{1,80}:"
    r"|^\s{0,8}(?:Exception in thread \"|--- FAIL: |CONFLICT \(|(?:ORA|TNS|PLS)-\d{4,5}: )"
    r"|^\s{0,8}(?:\w{1,40}\.){1,8}[A-Z]\w{0,40}(?:Violation|Failure|Timeout|Refused|NotFound|DoesNotExist): "
    r"|^\s{0,8}\S{1,300}:\d{1,7}:\d{1,7}: (?:undefined|undeclared|unresolved|cannot|could not)\b"
    r"|^(?=.{0,400}\b(?:msg|message|event)[\"']?\s?[=:]).{0,300}"
    r"\b(?:level|lvl|severity|levelname)[\"']?\s?[=:]\s?[\"']?(?:error|fatal|critical|panic|ERROR|FATAL|CRITICAL)\b"
    r"|\bHTTP(?:/\d(?:\.\d)?)? [45]\d\d [A-Z]"
    r"|: (?:Connection|Operation) (?:timed out|reset by peer)\b|\bOut of memory: "
    r"|, status=[1-9]\d{0,2}/[A-Z]"
)
_CODE: Final = re.compile(
    r"^\s*(?:throw|catch|raise|except|import|export|return|if|else|elif|for|while|const|let|var|def|class"
    r"|public|private|protected|function|async|await|case|try|//|#|\*|/\*)\b"
    r"|^\s*(?:\}|//|#|\*|/\*|console\.|logger?\.|print|assert)|=>|\bnew Error\(|[;{,]\s*$|\$\{"
)


def is_error(line: str) -> bool:
    """Whether a line reports an error, a failure or an exit code that is not zero."""
    line = line[:LOOKED_AT]
    lower = line.lower()
    for hint in _HINTS:
        if hint in lower:
            return _ERROR.search(line) is not None and _CODE.search(line) is None
    return False


def same_kind(line: str) -> str:
    """A line without quoted names and numbers: reports that only differ in these are one kind.

    Digits behind a letter stay: they belong to the code of an error.
    """
    return _NUMBER.sub("0", _QUOTED.sub("''", line.strip()[:LOOKED_AT]))


_QUOTED: Final = re.compile(r"'[^']{1,200}'|\"[^\"]{1,200}\"|`[^`]{1,200}`")
_NUMBER: Final = re.compile(r"(?<![A-Za-z\d])\d++")
