"""The lines of a ledger file, and the rules by which the writer and every reader take them.

The file is text that only ever grows. A line is a JSON object, a space and a checksum:

    header      format, run id, the largest block, the caller's public configuration
    event       the id of an event, and the event
    reserve     `count` releases of an event are spent; closes the reservation before it
    settle      `used` of the open reservation were released, the rest is given back
    restart     a new noise key: what follows is not merged with what came before
    recovered   the end before it was not clean: the open reservation stays spent, and with it `count`
                releases of `event` for a line that was torn; also a restart
    join        another run goes on in this file, under its own header; also a restart
    import      the history of a run whose checkpoint goes on here; also a restart
    about       what a run says about itself, for a statement: how it clips, which software it runs on
    declared    a change of the weights that no release made, as the user declared it: public, not verified
    closed      a run ended, and whether the model's weights were then what its releases left

A checksum is the hash of the one before it and of its own line, so a line that was changed, removed or
moved is found. It holds no secret: it shows damage and careless edits, not a forger who computes it
anew. Nor can a file show that whole lines are missing at its *end*; a checkpoint, which holds a position,
can. Each line is on disk before the next is written, so a crash tears the last line at most.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from clipwise.errors import ConfigurationError, LedgerError
from clipwise.privacy import Entry, Event

Record: TypeAlias = "dict[str, Any]"

FORMAT = 1
WHOLE = re.compile(rb"\{[ -~]*\} [0-9a-f]{32}")  # a line as it is written, whether or not it follows


class Book:
    """What the lines say, taken one after another. The writer and every reader share these rules."""

    def __init__(self) -> None:
        self.run = ""
        self.block = 0
        self.header: Record = {}
        self.about: list[Record] = []
        self.declared: list[tuple[str, str]] = []  # kind and reason
        self.verified: bool | None = (
            None  # the weights, at the end of the last run; None while it is not closed
        )
        self.ids: dict[Event, int] = {}
        self.latest: Event | None = None  # the event last named
        self.entries: list[Entry] = []
        self.total = 0
        self.reserved = 0  # the size of the open reservation, all of which is in the last entry
        self.parted = True  # the next release begins an entry of its own
        self._events: list[Event] = []
        self._checksum = b""

    def entries_without(self, count: int) -> list[Entry]:
        """The entries, less `count` releases of the last one."""
        if not count:
            return list(self.entries)
        *rest, last = self.entries
        return [*rest, Entry(last.event, last.count - count)] if last.count > count else rest

    def recovery(self, torn: bool) -> Record:
        """The line that closes an end that was not clean.

        A crash tears the line of a charge that has not returned. But a reservation may also have been
        damaged later, so the largest block is counted for a torn line. Before the first event nothing
        can have been released: a reservation comes only after the line of its event.
        """
        event = self.ids[self.latest] if torn and self.latest else None
        count = 0 if event is None else self.block
        return {"kind": "recovered", "reserved": self.reserved, "event": event, "count": count}

    def seal(self, record: Record) -> bytes:
        """The line that would come next, without its end."""
        text = encode(record)
        return text + b" " + self._sum(text)

    def follows(self, line: bytes) -> bool:
        """Whether the line is whole and comes next."""
        text, _, checksum = line.rpartition(b" ")
        return checksum == self._sum(text)

    def take(self, line: bytes) -> None:
        """Take in a line that follows."""
        text, _, self._checksum = line.rpartition(b" ")
        self.apply(json.loads(text))

    def apply(self, record: Record) -> None:
        """Take in what a line says."""
        kind = record["kind"]
        if (kind == "header") == bool(self.run):
            raise ValueError("a header is the first line and no other")
        match kind:
            case "header":
                if record["format"] != FORMAT:
                    raise ValueError("an unknown format")
                self.run, self.block, self.header = record["run"], record["block"], record["header"]
            case "event":
                self._define(Event.from_dict(record["event"]))
            case "declared":
                self.declared.append((str(record["update"]), str(record["reason"])))
                self.verified = None
            case "closed":
                self.verified = bool(record["verified"])
            case "reserve":
                self.verified = None
                self._add(self._events[record["event"]], record["count"])
                self.reserved = record["count"]
            case "settle":
                unused = self.reserved - record["used"]
                self.entries, self.total = self.entries_without(unused), self.total - unused
                self.reserved, self.parted = 0, self.parted or record["used"] == 0
            case "restart":
                self._part()
            case "recovered":
                if record["count"]:
                    self._add(self._events[record["event"]], record["count"])
                self._part()
            case "join":
                self.header = record["header"]
                self._part()
            case "import":
                self.verified = None
                for event, count in record["entries"]:
                    self._part()
                    self._add(self._define(Event.from_dict(event)), count)
                self._part()
            case "about":  # counts for nothing: whatever it says, the releases stay what they are
                self.about.append(dict(record["about"]))
            case _:
                raise ValueError("an unknown kind of line")

    def _define(self, event: Event) -> Event:
        if event not in self.ids:
            self.ids[event] = len(self._events)
            self._events.append(event)
        self.latest = event
        return event

    def _add(self, event: Event, count: int) -> None:
        if not self.parted and self.entries[-1].event == event:
            self.entries[-1] = Entry(event, self.entries[-1].count + count)
        else:
            self.entries.append(Entry(event, count))
        self.total += count
        self.latest, self.parted = event, False

    def _part(self) -> None:
        self.reserved, self.parted = 0, True

    def _sum(self, text: bytes) -> bytes:
        digest = blake2b(self._checksum + text, digest_size=16, person=b"clipwise-ledger")
        return digest.hexdigest().encode()


def replay(data: bytes, path: Path) -> tuple[Book, Record | None, bool]:
    """The book of a file, the line that recovers it if its end is not clean, and whether that is torn.

    A torn line stays in the file for ever. Two things tell it from a damaged one. It is not whole: a whole
    line that does not follow shows that lines before it are gone. And what comes after it is nothing, or
    the very line that recovers it, which may have been torn itself before it got written.
    """
    book = Book()
    bad: list[bytes] = []
    number = 0
    *lines, rest = data.split(b"\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        if not book.follows(line):
            bad.append(line)
            continue
        if bad:
            _require_torn(book, [*bad, line], number - len(bad), path)
            bad = []
        try:
            book.take(line)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{path}, line {number}: cannot be understood ({error}); it was not written by this version "
                "of clipwise. Use the version that wrote it."
            ) from error
    if bad:
        _require_torn(book, bad, number + 1 - len(bad), path)
    clean = not (rest or bad or book.reserved)
    return book, None if clean else book.recovery(torn=bool(bad)), bool(bad)


def _require_torn(book: Book, lines: list[bytes], number: int, path: Path) -> None:
    """Refuse bad lines, from line `number` on, that no crash leaves behind."""
    if number == 1:
        raise LedgerError(
            f"{path}, line 1: wrong checksum: this is not a ledger, or the file was changed or damaged; "
            "restore it from a copy. (If a crash broke off its creation, this is its only line: nothing was "
            "released yet and it can be deleted.)"
        )
    recovery = book.seal(book.recovery(torn=True))
    if WHOLE.fullmatch(lines[0]) or not all(recovery.startswith(line.rstrip(b"\0")) for line in lines[1:]):
        raise LedgerError(
            f"{path}, line {number}: wrong checksum: the file was changed or damaged; restore it from a "
            "copy. It may hide releases, so nothing can be counted with it."
        )


def require_same_run(found: Record, given: Record | None, path: Path) -> None:
    """Refuse a header that is not the one in the file."""
    if given is None or given == found:
        return
    differ = [k for k in sorted({*found, *given}) if k not in found or k not in given or found[k] != given[k]]
    raise LedgerError(
        f"{path} belongs to another run: it has another {', '.join(differ)}. Use another file, or join=True "
        "if the releases of this run shall be counted together with those there."
    )


def header_line(run: str | None, block: int, header: Record) -> Record:
    """The first line of a file."""
    run = run or secrets.token_hex(16)
    return {"kind": "header", "format": FORMAT, "run": run, "block": block, "header": header}


def encode(value: Mapping[str, Any]) -> bytes:
    """A line's text."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "the header and the events of a ledger hold plain JSON (text, finite Python numbers, lists, "
            "mappings): convert arrays, tensors and their scalars first."
        ) from error
