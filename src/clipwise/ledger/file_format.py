"""The lines of a ledger file, and the rules by which the writer and every reader apply them.

The file is append-only text. A line is a JSON object, a space and a checksum:

    header      format, run id, the largest block, the caller's public configuration
    event       the id of an event, and the event
    reserve     `count` releases of an event are spent; closes the reservation of that run before it
    settle      `used` of the run's open reservation were released, the rest is given back
    restart     the run takes a new noise key: later releases are not merged with earlier ones
    recovered   the end before it was not clean: open reservations stay spent, and so do the most releases that a
                torn line may have reserved; also a restart of every run
    join        another run begins in this file, with its own header
    import      the history of a run that is resumed here from its checkpoint
    about       the description of a run, for statements: strategy, software versions and so on
    declared    a change of the weights that no release made, as the user declared it: public, not verified
    closed      a run ended, and whether the model's weights were verified

A line may name the `run` that it is about; without it, it is about the run that begins with the header or with the
last join. A line with `exact: false` records that a counted release may not have been made.

A checksum is the hash of the previous checksum and of its own line, so it detects lines that were changed, removed or
moved. It has no secret key: it detects damage and careless edits, but not a forger. A file cannot show that lines are
missing at its *end*; a checkpoint, which holds a position, can. Each line is on disk before the next is written, so a
crash tears the last line at most.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from clipwise.errors import ConfigurationError, LedgerError
from clipwise.privacy import Entry, Event

Record: TypeAlias = "dict[str, Any]"
JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"

FORMAT = 2
WHOLE = re.compile(rb"\{[ -~]*\} [0-9a-f]{32}")  # a complete line, with a right or wrong checksum
PLAN = ("budget", "delta", "planned")  # the keys of a description that hold the plan of its run

# A reservation is at most 1/SHARE of the run's releases or LEAST_BLOCK, whichever is more, and at most LARGEST_BLOCK.
# So a crash after n releases overcounts by at most max(4, n / 50). One step in 4 waits for an fsync at first, one in 64
# from 3,200 steps on.
SHARE, LEAST_BLOCK, LARGEST_BLOCK = 50, 4, 64


class LedgerState:
    """The state after applying lines in order."""

    def __init__(self) -> None:
        self.run, self.untagged = "", ""  # id of the ledger, and the run of lines without a `run`
        self.block = 0
        self.header: Record = {}
        self.about: list[Record] = []
        self.plan: Record | None = None  # the first plan in a description
        self.declared: list[tuple[str, str]] = []  # kind and reason
        self._verified: dict[str, bool] = {}  # for each closed run
        self.ids: dict[Event, int] = {}
        self.counts: dict[str, int] = {}  # releases of each run
        self.open: dict[str, int] = {}  # size of each run's open reservation, which is in its last entry
        self.exact = True  # whether every counted release was made
        self._entries: dict[int, Entry] = {}  # by order of creation
        self._begun = 0
        self._growing: dict[str, int] = {}  # the entry of each run that its next release may be added to
        self._latest: tuple[str, Event] | None = None  # the run and event last named
        self._events: list[Event] = []
        self._joined, self._checksum = 0, b""

    @property
    def total(self) -> int:
        """The number of releases."""
        return sum(self.counts.values())

    def entries_with(self, changes: Mapping[str, int]) -> list[Entry]:
        """All entries, with the counts in `changes` added to the last entry of each run."""
        entries = dict(self._entries)
        for run, change in changes.items():
            if change:
                place = self._growing[run]
                entries[place] = _grown(entries[place], change)
        return [entry for entry in entries.values() if entry.count]

    def entries_after(self, run: str, event: Event, count: int, changes: Mapping[str, int]) -> list[Entry]:
        """`entries_with(changes)` after `count` more releases of `event` by `run`."""
        if self.is_growing(run, event):
            return self.entries_with({**changes, run: changes.get(run, 0) + count})
        return [*self.entries_with(changes), Entry(event, count, run)]

    @property
    def verified(self) -> bool | None:
        """Whether the weights were verified when each run was closed; None if a run is not closed."""
        closed = [self._verified.get(run) for run, count in self.counts.items() if count]
        return None if None in closed or not closed else all(closed)

    def is_growing(self, run: str, event: Event | None = None) -> bool:
        """Whether the next release of the run, with this event, is added to its last entry."""
        return run in self._growing and event in (None, self._entries[self._growing[run]].event)

    def next_block(self, run: str, event: Event) -> int:
        """The number of releases to reserve next: 1, 2, 4, 4, ... and 2% of the run's releases, once that is more.

        It depends on the counts alone: if it depended on the time of steps, it would depend on the drawn batches. After
        another event or a restart it begins with 1 again, so that alternating events leave no unused blocks.
        """
        in_a_row = self._entries[self._growing[run]].count if self.is_growing(run, event) else 0
        return min(in_a_row + 1, self._largest_next(self.counts.get(run, 0)))

    def recovery(self, torn: bool) -> Record:
        """The line that recovers a file whose end is not clean.

        A torn line is that of a charge that has not returned, or a reservation that was damaged later. So it counts as
        the largest reservation that each run may have made next. Before the first event line nothing can have been
        released.
        """
        named = [(run, self._entries[place].event) for run, place in self._growing.items()] if torn else []
        if torn and self._latest and self._latest not in named:
            named.append(self._latest)
        most = self._largest_next(max(self.counts.values(), default=0))
        counts = [[run, self.ids[event], most] for run, event in named]
        return {"kind": "recovered", "reserved": sum(self.open.values()), "torn": counts}

    def seal(self, record: Record) -> bytes:
        """A record as the next line, without its line end."""
        return (text := encode(record)) + b" " + self._sum(text)

    def follows(self, line: bytes) -> bool:
        """Whether the line is complete and its checksum follows the previous one."""
        text, _, checksum = line.rpartition(b" ")
        return checksum == self._sum(text)

    def take(self, line: bytes) -> None:
        """Apply a line for which `follows` is true."""
        text, _, self._checksum = line.rpartition(b" ")
        self.apply(json.loads(text))

    def apply(self, record: Record) -> None:
        """Apply the record of a line."""
        kind = record["kind"]
        if (kind == "header") == bool(self.run):
            raise ValueError("a header is the first line and no other")
        if record.get("format", FORMAT) != FORMAT:
            raise ValueError("an unknown format")
        run = record.get("run", self.untagged)
        match kind:
            case "header":
                self.run, self.block, self.header = record["run"], record["block"], record["header"]
                self.untagged = self.run
            case "event":
                self._latest = run, self._define(Event.from_dict(record["event"]))
            case "declared":
                self.declared.append((str(record["update"]), str(record["reason"])))
            case "closed":
                self._verified[run] = bool(record["verified"])
            case "reserve":
                self._verified.pop(run, None)
                self._add(run, self._events[record["event"]], record["count"])
                self.open[run] = record["count"]
            case "settle":
                self._settle(run, record["used"])
            case "restart":
                self._part(run)
            case "recovered":
                self._recover(record)
            case "join":
                self._joined += 1
                self.header, self.untagged = record["header"], f"{self.run}.{self._joined}"
                self._forget_planned_run()
            case "import":
                self._import(record)
            case "about":  # a description never changes counts
                self._describe(dict(record["about"]))
            case _:
                raise ValueError("an unknown kind of line")
        self.exact = self.exact and record.get("exact", True)

    def _settle(self, run: str, used: int) -> None:
        unused = self.open.pop(run, 0) - used
        place = self._growing[run]
        self._entries[place] = _grown(self._entries[place], -unused)
        self.counts[run] -= unused
        if not self._entries[place].count:
            del self._entries[place]
        if used == 0:
            self._part(run)

    def _recover(self, record: Record) -> None:
        for run, event, count in record["torn"]:
            self._add(run, self._events[event], count)
        self.exact = self.exact and not (record["torn"] or record["reserved"])
        self.open.clear()
        self._growing.clear()

    def _import(self, record: Record) -> None:
        for event, count, run in record["entries"]:
            self._part(run)  # imported entries are never merged
            self._add(run, self._define(Event.from_dict(event)), count)
            self._part(run)
            self._verified[run] = True  # a checkpoint is loaded into a model that holds its weights
        self.plan = record["plan"]
        self._forget_planned_run()

    def _forget_planned_run(self) -> None:
        """Keep the plan for the filter only: the ledger holds more than the run that it names."""
        if self.plan is not None:
            self.plan = {name: value for name, value in self.plan.items() if name != "run"}

    def _describe(self, about: Record) -> None:
        if self.plan is None and (about.get("budget") or (about.get("planned") and not self.total)):
            self.plan = {name: about.get(name) for name in PLAN} | {"late": self.total > 0}
            if about.get("event") and not self.total:
                self.plan |= {"event": about["event"], "run": about["run"]}
        self.about.append(about)

    def _define(self, event: Event) -> Event:
        if event not in self.ids:
            self.ids[event] = len(self._events)
            self._events.append(event)
        return event

    def _add(self, run: str, event: Event, count: int) -> None:
        if self.is_growing(run, event):
            place = self._growing[run]
            self._entries[place] = _grown(self._entries[place], count)
        else:
            self._begun += 1
            self._growing[run] = self._begun
            self._entries[self._begun] = Entry(event, count, run)
        self.counts[run] = self.counts.get(run, 0) + count
        self._latest = run, event

    def _part(self, run: str) -> None:
        """Make the next release of the run begin a new entry."""
        self.open.pop(run, None)
        self._growing.pop(run, None)

    def _largest_next(self, made: int) -> int:
        return min(self.block, max(LEAST_BLOCK, made // SHARE))

    def _sum(self, text: bytes) -> bytes:
        return blake2b(self._checksum + text, digest_size=16, person=b"clipwise-ledger").hexdigest().encode()


def _grown(entry: Entry, change: int) -> Entry:
    return Entry(entry.event, entry.count + change, entry.run)


def replay(data: bytes, path: Path) -> tuple[LedgerState, Record | None, bool]:
    """The state of a file, the line that recovers it if its end is not clean, and whether its end is torn.

    A torn line stays in the file. Unlike a damaged line it is incomplete, and followed by nothing or by the line that
    recovers it, of which there may also be torn copies.
    """
    state, number = LedgerState(), 0
    bad: list[bytes] = []
    *lines, rest = data.split(b"\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        if not state.follows(line):
            bad.append(line)
            continue
        if bad:
            _require_torn(state, [*bad, line], number - len(bad), path)
            bad = []
        try:
            state.take(line)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{path}, line {number}: cannot be understood ({error}); it was not written by this version "
                "of clipwise. Use the version that wrote it."
            ) from error
    if bad:
        _require_torn(state, bad, number + 1 - len(bad), path)
    is_clean = not (rest or bad or state.open)
    return state, None if is_clean else state.recovery(torn=bool(bad)), bool(bad)


@dataclass(frozen=True)
class Snapshot:
    """The contents of a ledger file. Everything that may have been released is counted."""

    path: Path
    run: str  # the id of the ledger
    header: Mapping[str, JSON]  # the public configuration; the latest one if runs have joined
    history: list[Entry]  # the releases, run-length coded, with reservations in full until they are settled
    position: int  # their number
    clean: bool  # whether the last writer has ended cleanly
    torn: bool  # whether the last line is torn; if so, the most that it may have reserved is counted
    about: tuple[Mapping[str, JSON], ...] = ()  # a description of each run for each time it began or continued
    exact: bool = True  # whether every counted release was made
    plan: Mapping[str, JSON] | None = None  # the first plan that a run has described; None in older files
    declared: tuple[tuple[str, str], ...] = ()  # kind and reason of updates that a user declared
    verified: bool | None = None  # whether weights were verified when runs were closed; None if one is open


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read the ledger at `path`. Neither changes nor locks the file, which may be in use."""
    path = Path(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe would block
            raise LedgerError(f"{path} cannot be read as a ledger: it is not a regular file.")
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise LedgerError(f"{path} cannot be read as a ledger: {reason}.") from error
    if not data:
        raise LedgerError(f"{path} is empty: no run has begun in it.")
    state, recovery, torn = replay(data, path)
    if recovery is not None:
        state.apply(recovery)
    return Snapshot(
        path=path,
        run=state.run,
        header=state.header,
        history=state.entries_with({}),
        position=state.total,
        clean=recovery is None,
        torn=torn,
        about=tuple(state.about),
        exact=state.exact and recovery is None,
        plan=state.plan,
        declared=tuple(state.declared),
        verified=state.verified,
    )


def _require_torn(state: LedgerState, lines: list[bytes], number: int, path: Path) -> None:
    """Raise for bad lines, from line `number` on, that a crash cannot have left."""
    if number == 1:
        raise LedgerError(
            f"{path}, line 1: wrong checksum: this is not a ledger, or the file was changed or damaged; "
            "restore it from a copy. (If a crash interrupted its creation, this is its only line: "
            "nothing was released yet, and the file can be deleted.)"
        )
    recovery = state.seal(state.recovery(torn=True))
    if WHOLE.fullmatch(lines[0]) or not all(recovery.startswith(line.rstrip(b"\0")) for line in lines[1:]):
        raise LedgerError(
            f"{path}, line {number}: wrong checksum: the file was changed or damaged; restore it from a "
            "copy. Releases may be missing, so it cannot be used for accounting."
        )


def require_same_run(found: Record, given: Record | None, path: Path) -> None:
    """Raise if the given header differs from the one in the file."""
    if given is None or given == found:
        return
    differ = [k for k in sorted({*found, *given}) if k not in found or k not in given or found[k] != given[k]]
    raise LedgerError(
        f"{path} belongs to another run: it has another {', '.join(differ)}. Use another file, or join=True "
        "to count the releases of this run together with those in the file."
    )


def new_tag() -> str:
    """A tag for a new run."""
    return secrets.token_hex(8)


def header_line(run: str | None, block: int | None = None, header: Record | None = None) -> Record:
    """The first line of a file."""
    run, block = run or secrets.token_hex(16), block or LARGEST_BLOCK
    return {"kind": "header", "format": FORMAT, "run": run, "block": block, "header": header or {}}


def encode(value: Mapping[str, Any]) -> bytes:
    """A record as JSON text."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "the header and the events of a ledger hold plain JSON (text, finite Python numbers, lists, "
            "mappings): convert arrays, tensors and their scalars first."
        ) from error
