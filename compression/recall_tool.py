"""The tool `context_recall`: what the model is offered, asks and is told, and how that stays in a prompt.

A client never sees a call of this tool. The gateway answers it, and the calls with their results are a part
of the conversation that only later prompts show: *hidden rounds*. They are kept under a key made of the chain
hash before the client's own message that came of them and of what that message says, so that they are put
back at the same place in every later request that holds it, by any process. Where a client has changed what
the message says, it is another message, and nothing is put back.

Whether a conversation has the tool is decided once, by its first request, and kept as well.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.ask import Ask
from ctxgate.compression.canonical import DIGEST_BYTES
from ctxgate.compression.recent import Recent
from ctxgate.inference import wire
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.ask import Asking, Text
    from ctxgate.compression.dialects.chat import Facts

NAME: Final = "context_recall"
VERSION: Final = 1
MOST_PASSAGES: Final = 10
PASSAGES: Final = 5
REMEMBERED_BYTES: Final = 32 * 2**20
REMEMBERED: Final = 300_000  # conversations, and messages that nothing is hidden before

DEFINITION: Final = msgspec.json.encode(
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Looks up earlier messages of this conversation that are no longer shown in full: "
            "what was left out, summarized or shortened. Returns passages of them, word for word.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "description": "What to look for: names, paths, error texts or a question.",
                    },
                    "k": {"type": "integer", "description": "The most passages to return, 1 to 10."},
                    "id": {
                        "type": "string",
                        "description": "The id of one message, as a reference in the conversation names it.",
                    },
                },
                "required": ["query"],
            },
        },
    }
)
"""The tool as it stands in a request: the same bytes in every one, for they lie at a prompt's beginning."""

_OFF: Final = b"off"
_ON: Final = b"on"
_NOTHING: Final = b""
_OVERHEAD: Final = 300
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_THOUGHTS: Final = ("reasoning_content", "reasoning")


class Wanted(Record, frozen=True):
    """What a call asks for: at most `k` passages that bear on `query`, of the message `id` alone if set."""

    query: str
    k: int = PASSAGES
    id: str = ""


class HiddenRounds(Record, frozen=True):
    """What a prompt holds around one message of the client's, all of it JSON.

    `before`: messages in front of it, calls of the tool and their results. `said` and `thought`: text of
    these that the client saw, and that its message therefore begins with. `calls`: calls of the tool among
    those of the message, each with its place; `after`: their results.
    """

    before: tuple[bytes, ...] = ()
    said: str = ""
    thought: str = ""
    calls: tuple[tuple[int, bytes], ...] = ()
    after: tuple[bytes, ...] = ()


NO_ROUNDS: Final = HiddenRounds()
_RECORD: Final = msgspec.msgpack.Decoder(
    tuple[int, tuple[bytes, ...], str, str, tuple[tuple[int, bytes], ...], tuple[bytes, ...]]
)


def encode(rounds: HiddenRounds) -> bytes:
    """Hidden rounds as they are kept."""
    return msgspec.msgpack.encode((VERSION, *msgspec.structs.astuple(rounds)))


def decode(text: bytes) -> HiddenRounds:
    """Kept rounds; none where it is no record of them, or one of a version that this code does not know."""
    try:
        version, *values = _RECORD.decode(text)
    except msgspec.DecodeError:
        return NO_ROUNDS
    return HiddenRounds(*values) if version == VERSION else NO_ROUNDS  # type: ignore[arg-type]  # decoded


class ToolMemory:
    """What one process remembers to save reads; its contents never change a result."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing of the store any more: what is in use is asked for again, so that it is kept."""
        self.offered: Recent[bytes, bytes] = Recent(REMEMBERED)
        self.plain: Recent[bytes, bool] = Recent(REMEMBERED)
        self.rounds: Recent[bytes, HiddenRounds] = Recent(REMEMBERED_BYTES, _weight)


def wanted(arguments: str) -> Wanted | None:
    """What a call's arguments ask for; None where they cannot be read."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    query, count, id_ = found.get("query"), found.get("k"), found.get("id")
    query = query.strip() if isinstance(query, str) else ""
    id_ = id_.strip() if isinstance(id_, str) else ""
    if not query and not id_:
        return None
    k = count if type(count) is int else PASSAGES
    return Wanted(query, min(max(k, 1), MOST_PASSAGES), id_)


def has_tool(root: bytes, memory: ToolMemory, *, begins: bool) -> Asking[bool]:
    """Whether a conversation has the tool. `begins`: this is its first request, and it may be given it."""
    offered = memory.offered  # what is forgotten meanwhile stays forgotten
    known = offered.get(root)
    if known is None:
        key = blake2b(root, digest_size=DIGEST_BYTES, person=b"ctxgate tool").digest()
        answer = yield Ask({key: _ON if begins else _OFF})
        known = answer[key]
        offered.put(root, known)
    return known == _ON


def key_of(before: bytes, identity: bytes) -> bytes:
    """The key of the hidden rounds of a message, from the chain hash before it and its `identity_of`."""
    return blake2b(before + identity, digest_size=DIGEST_BYTES, person=b"ctxgate hidden").digest()


def identity_of(text: str, calls: Sequence[tuple[str, str]]) -> bytes:
    """What an answer says: its text, and its calls' names and arguments.

    Not what it thought, nor the ids of its calls, nor white space around its text: clients return these
    otherwise, or not at all.
    """
    said = [text.strip(), [[name, _spelled(arguments)] for name, arguments in calls]]
    return blake2b(json.dumps(said).encode(), digest_size=DIGEST_BYTES, person=b"ctxgate answer").digest()


def identity_of_message(raw: Text) -> bytes | None:
    """The same of an assistant message that a client sends back; None where it cannot be read."""
    try:
        message = json.loads(bytes(raw))
        calls = message.get("tool_calls") or []
        named = [(each["function"]["name"], _argued(each["function"].get("arguments"))) for each in calls]
        return identity_of(_text_of(message.get("content")), named)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _known(
    messages: Sequence[Text], facts: Sequence[Facts], hashes: Sequence[bytes], memory: ToolMemory
) -> tuple[dict[int, HiddenRounds], dict[int, bytes]]:
    """What is remembered to be hidden, by message; and the keys of those of which nothing is known."""
    found: dict[int, HiddenRounds] = {}
    keys: dict[int, bytes] = {}
    for at in range(1, len(facts)):
        if facts[at].role != "assistant" or memory.plain.get(hashes[at]):
            continue
        known = memory.rounds.get(hashes[at])
        if known is None and (identity := identity_of_message(messages[at])) is not None:
            keys[at] = key_of(hashes[at - 1], identity)
            if (known := memory.rounds.get(keys[at])) is not None:
                memory.rounds.put(hashes[at], known)
        if known is not None:
            found[at] = known
            keys.pop(at, None)
    return found, keys


def at_hand(
    root: bytes,
    messages: Sequence[Text],
    facts: Sequence[Facts],
    hashes: Sequence[bytes],
    memory: ToolMemory,
) -> tuple[bool, dict[int, HiddenRounds]]:
    """What one process remembers: whether a conversation has the tool, and what is hidden in it."""
    if memory.offered.get(root) != _ON:
        return False, {}
    return True, _known(messages, facts, hashes, memory)[0]


def hidden(
    messages: Sequence[Text], facts: Sequence[Facts], hashes: Sequence[bytes], memory: ToolMemory
) -> Asking[dict[int, HiddenRounds]]:
    """By message of the client's: what is hidden around it, where anything is.

    That there is nothing is kept too, so that it is never decided again.
    """
    plain, rounds = memory.plain, memory.rounds  # what is forgotten meanwhile stays forgotten
    found, keys = _known(messages, facts, hashes, memory)
    if keys:
        answer = yield Ask(dict.fromkeys(keys.values(), _NOTHING))
        for at, key in keys.items():
            each = decode(answer[key])
            if each == NO_ROUNDS:
                plain.put(hashes[at], True)
            else:
                rounds.put(hashes[at], each)
                found[at] = each
    return found


def kept(before: bytes, identity: bytes, rounds: HiddenRounds, memory: ToolMemory) -> Asking[bytes]:
    """Keep the hidden rounds of an answer that is about to end; returns their key."""
    remembered = memory.rounds  # what is forgotten meanwhile stays forgotten
    key = key_of(before, identity)
    answer = yield Ask({key: encode(rounds)})
    if (first := decode(answer[key])) != NO_ROUNDS:  # of equal answers the first one counts
        remembered.put(key, first)
    return key


def put_back(raw: Text, rounds: HiddenRounds) -> tuple[bytes, ...] | None:
    """A message of the client's with what is hidden around it, as one or more messages.

    None where the message does not begin with what the hidden rounds said: then it is not what came of them.
    """
    try:
        members = wire.decoded(_MEMBERS, raw)
        message = bytes(raw)
        if rounds.said or rounds.thought or rounds.calls:
            if not _without_said(members, rounds.said):
                return None
            _without_thought(members, rounds.thought)
            _with_calls(members, rounds.calls)
            message = msgspec.json.encode(members)
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError):
        return None
    return (*rounds.before, message, *rounds.after)


def call_message(text: str, thought: tuple[str, str], calls: Sequence[bytes]) -> bytes:
    """The message in which a model called; `thought`: the member that its thinking stood in, and the text."""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if thought[1]:
        message[thought[0]] = thought[1]
    return msgspec.json.encode(message | {"tool_calls": [msgspec.Raw(call) for call in calls]})


def call_json(id_: str, arguments: str) -> bytes:
    """A call of the tool as it stands in a message. Arguments that are no JSON object are left out.

    Engines refuse a history with such ones.
    """
    try:
        sound = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        sound = False
    function = {"name": NAME, "arguments": arguments if sound else "{}"}
    return msgspec.json.encode({"id": id_, "type": "function", "function": function})


def distinct_ids(ids: Sequence[str]) -> list[str]:
    """The ids of one message's calls, another one in the place of each that is missing or came before.

    Nine letters and digits: some templates take no other ones.
    """
    found: list[str] = []
    for place, id_ in enumerate(ids):
        fresh = blake2b(f"{place} {id_}".encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]
        found.append(fresh if not id_ or id_ in found else id_)
    return found


def result_message(id_: str, text: str) -> bytes:
    """The result of a call."""
    return msgspec.json.encode({"role": "tool", "tool_call_id": id_, "content": text})


def _without_said(members: dict[str, msgspec.Raw], said: str) -> bool:
    """Cut what was said before off a message's content; whether it begins with that."""
    content = members.get("content")
    if not said.strip():
        return True
    text = None if content is None else msgspec.json.decode(content)
    for begins in (said, said.lstrip()):
        if isinstance(text, str) and text.startswith(begins):
            rest = text[len(begins) :]
            empty = not rest and "tool_calls" in members
            members["content"] = msgspec.Raw(b"null" if empty else msgspec.json.encode(rest))
            return True
        if isinstance(text, list) and text and str(text[0].get("text", "")).startswith(begins):
            text[0]["text"] = text[0]["text"][len(begins) :]
            members["content"] = msgspec.Raw(msgspec.json.encode(text))
            return True
    return False


def _without_thought(members: dict[str, msgspec.Raw], thought: str) -> None:
    """Cut what was thought before off a message, where its client sends that back."""
    for name in _THOUGHTS:
        text = msgspec.json.decode(members[name]) if thought and name in members else None
        if isinstance(text, str) and text.startswith(thought):
            members[name] = msgspec.Raw(msgspec.json.encode(text[len(thought) :]))


def _with_calls(members: dict[str, msgspec.Raw], calls: Sequence[tuple[int, bytes]]) -> None:
    """Put calls at their places among those of a message."""
    if not calls:
        return
    all_calls = wire.decoded(_ITEMS, members.get("tool_calls") or b"[]")
    for place, call in calls:
        all_calls.insert(place, msgspec.Raw(call))
    members["tool_calls"] = msgspec.Raw(msgspec.json.encode(all_calls))


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _argued(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _spelled(arguments: str) -> str:
    """Arguments however they are spelled."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _weight(rounds: HiddenRounds) -> int:
    texts = (*rounds.before, *rounds.after, *(call for _, call in rounds.calls))
    return _OVERHEAD + len(rounds.said) + len(rounds.thought) + sum(map(len, texts))
