"""The default report: an item in some twenty lines, a frame like the one before in one, a stream in one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hurray_wire.dump import describe
from hurray_wire.dump.accounting import Usage, references, usage
from hurray_wire.dump.faults import advice, pages_hit, told
from hurray_wire.dump.model import BAD_STATES, Fault, Item, State, is_payload
from hurray_wire.dump.paper import Column, Paper, Part
from hurray_wire.dump.scan import StreamEnd
from hurray_wire.dump.sequences import sequence_table
from hurray_wire.dump.words import clipped, counted, percent, ratio, safe, scaled, size
from hurray_wire.forms import Form
from hurray_wire.inspection import Section
from hurray_wire.tags import Codec, SectionKind

_METADATA_SHOWN = 200
_NAMES_SHOWN = 12
_KINDS_SHOWN = 24
_FAULTS_SHOWN = 8


def print_heading(paper: Paper, item: Item) -> None:
    """The line that opens an item."""
    facts = f"{describe.form(item)} at byte {item.offset}"
    if item.prologue is not None:
        stream = f"stream {item.prologue.stream_id:#x}"
        facts += f", {'last frame' if item.last else 'frame'} {item.prologue.sequence} of {stream}"
    if item.closing:
        facts += ", closing frame, no tensor"
    mark: tuple[Part, ...] = (("  NOT SOUND", "bad"),) if item.faults else ()
    paper.text((describe.title(item), "title"), "  ", facts, *mark, indent=0)


def print_item(paper: Paper, item: Item) -> None:
    """Everything that is known of an item, in the order of its bytes."""
    print_heading(paper, item)
    if item.total is not None:
        paper.field("size", _sizes(item))
    if item.fields is not None:
        _print_descriptor(paper, item)
    for name, value in describe.metadata(item)[:_NAMES_SHOWN]:
        paper.field("metadata", f"{clipped(name, _METADATA_SHOWN)} = {clipped(value, _METADATA_SHOWN)}")
    if item.metadata is not None and len(item.metadata) > _NAMES_SHOWN:
        paper.field("metadata", f"... {counted(len(item.metadata) - _NAMES_SHOWN, 'more name')}")
    if item.sections:
        paper.field("sections" if item.form is Form.HRKV else "buffers", _section_count(item))
        paper.table(_SECTION_COLUMNS, [_section_row(item, rows) for rows in _by_kind(item)[:_KINDS_SHOWN]], indent=4)
    sequence_table(paper, item)
    _print_usage(paper, item)
    print_verdict(paper, item)


def _sizes(item: Item) -> str:
    total = item.total or 0
    buffers = [s for s in item.sections if s.kind >= SectionKind.PAGE_POOL]
    if item.closing or not buffers:
        return size(total)
    raw, stored = (sum(getattr(s, name) for s in buffers) for name in ("raw_length", "stored_length"))
    if raw == stored:
        return f"{size(total)}, buffers {size(raw)} stored raw"
    return f"{size(total)}, buffers {size(raw)} stored in {size(stored)}, ratio {ratio(raw, stored)}"


def _print_descriptor(paper: Paper, item: Item) -> None:
    block_paged = describe.is_block_paged(item)
    facts = [("dtype", describe.dtype(item)), ("extension", describe.extension(item)), ("shape", describe.shape(item))]
    facts.append(("layout", describe.layout(item)))
    if block_paged:
        facts += [("pool", describe.pool(item)), ("tables", describe.tables(item))]
        facts.append(("quantised", describe.quantization(item)))
    facts += [("statistics", describe.statistics(item)), ("composite", describe.composite(item))]
    facts.append(("device", describe.placement(item)))
    for label, text in facts:
        if text:
            paper.field(label, text)


# Sections.

_SECTION_COLUMNS = (
    Column("kind"),
    Column("codec"),
    Column("chunks", right=True),
    Column("at byte", right=True),
    Column("stored", right=True),
    Column("raw", right=True),
    Column("ratio", right=True),
    Column("checksum"),
)


def _section_count(item: Item) -> str:
    if item.form is Form.BARE:
        return f"{len(item.sections)}, one behind the other; the bare form has no checksums"
    stated = item.prologue.section_count if item.prologue is not None else len(item.sections)
    cut = f", {stated - len(item.sections)} of them cut off" if stated > len(item.sections) else ""
    return f"{stated}{cut}"


def _by_kind(item: Item) -> list[list[int]]:
    """Section indices, those of a kind together."""
    kinds: dict[int, list[int]] = {}
    for i, section in enumerate(item.sections):
        kinds.setdefault(section.kind, []).append(i)
    return list(kinds.values())


def _section_row(item: Item, rows: list[int]) -> list[Part]:
    sections = [item.sections[i] for i in rows]
    stored, raw = sum(s.stored_length for s in sections), sum(s.raw_length for s in sections)
    states = [item.states[i] for i in rows]
    return [
        sections[0].name,
        _codecs(sections),
        f"{len(rows):,}",
        f"{item.offset + sections[0].offset}",
        f"{stored:,}",
        f"{raw:,}",
        ratio(raw, stored),
        _states(states) if item.form is Form.HRKV or any(s in BAD_STATES for s in states) else "",
    ]


def _codecs(sections: Sequence[Section]) -> str:
    names = []
    for section in sections:
        name = Codec(section.codec).name.lower() if section.codec in set(Codec) else f"codec {section.codec}"
        name += f"+shuffle{section.element_width}" if section.filter else ""
        if name not in names:
            names.append(name)
        if len(names) > 2:
            return "mixed"
    return ", ".join(names)


def _states(states: Sequence[State]) -> Part:
    """One word where all chunks are alike, else how many are what, the worst first."""
    kinds = [state for state in (*BAD_STATES, State.UNREAD, State.ABSENT, State.OK) if state in states]
    style = "bad" if kinds[0] in BAD_STATES else "good" if kinds[0] is State.OK else "warn"
    if len(kinds) == 1:
        return kinds[0].value, style
    return ", ".join(f"{states.count(kind)} {kind.value}" for kind in kinds), style


# Pages.


def _print_usage(paper: Paper, item: Item) -> None:
    found = references(item)
    if found is None:
        return
    used = usage(item, found)
    paper.field("pages", *_page_words(used))
    if used.pages:
        paper.field("waste", *_waste_words(used))


def _page_words(used: Usage) -> list[Part]:
    lead = f"{used.pages:,} in the pool: "
    shared = f"{used.shared:,} shared"
    if used.live is None or used.spare is None:
        unknown = "which of them hold tokens is not known: the bytes carry no seq_lens"
        return [f"{lead}{used.referenced:,} referenced ({shared}), {used.unreferenced:,} unreferenced; {unknown}"]
    return [f"{lead}{used.live:,} live ({shared}), {used.spare:,} spare, {used.unreferenced:,} unreferenced"]


def _waste_words(used: Usage) -> list[Part]:
    part = percent(used.unreferenced_bytes, used.pool_bytes)
    words = f"{size(used.unreferenced_bytes)} of {size(used.pool_bytes)} in unreferenced pages, {part}"
    if used.empty_slots:
        words += f"; {size(used.empty_slot_bytes or 0)} in {counted(used.empty_slots, 'empty slot')} of live pages"
    wasteful = used.unreferenced_bytes * 4 > used.pool_bytes
    return [(words, "warn" if wasteful else "")]


# Verdicts.


def print_verdict(paper: Paper, item: Item) -> None:
    """Whether the payload was verified, notes, and every fault."""
    words, style = payload_words(item)
    if words:
        paper.field("payload", (words, style))
    for note in item.notes:
        paper.field("note", (note, "warn"))
    for fault in item.faults[:_FAULTS_SHOWN]:
        print_fault(paper, item, fault)
    if len(item.faults) > _FAULTS_SHOWN:
        paper.field("FAULT", f"... {counted(len(item.faults) - _FAULTS_SHOWN, 'more fault')}", style="bad")


def print_fault(paper: Paper, item: Item | None, fault: Fault) -> None:
    """A fault, whom it hits, and what to think of it."""
    paper.field("FAULT", (told(fault), "bad"), f"  [{fault.code}]", style="bad")
    for words in ("" if item is None else pages_hit(item, fault), advice(fault)):
        if words:
            paper.field("", words)


def payload_words(item: Item) -> tuple[str, str]:
    """What is known of the payload, and in which style to say it."""
    states = {state for s, state in zip(item.sections, item.states, strict=True) if is_payload(s.kind)}
    if State.WRONG in states or State.DAMAGED in states:
        return "damaged", "bad"
    if State.MISSING in states:
        return "not all there", "bad"
    if item.form is Form.BARE:
        return ("cannot be verified: the bare form has no checksums", "dim") if item.total is not None else ("", "")
    if item.verified is None or item.head is None:
        return "", ""
    if not item.verified:
        return f"not verified: {size(item.payload_bytes)}; --verify reads it all", "warn"
    if State.ABSENT in states:
        return "read; it carries no checksum of its own", "warn"
    return "verified", "good"


# Many frames.


def likeness(item: Item) -> bytes:
    """What two frames have in common that differ in layer, role, place and payload only."""
    if item.faults or item.notes or item.fields is None or not item.tables_sound or item.closing:
        return b""
    fields = item.fields
    kept = fields._replace(front=fields.front._replace(layout_kv_role=0, layout_layer_index=0))
    sections = [(s.name, s.codec, s.raw_length) for s in item.sections]
    lens = b"" if item.seq_lens is None else item.seq_lens.tobytes()
    facts = repr((item.form, item.version, kept, sections, item.metadata, item.verified, set(item.states)))
    digest = hashlib.sha256(facts.encode("utf-8", "backslashreplace"))
    for part in (lens, *item.tables.values()):
        digest.update(b"|" + part)
    return digest.digest()


def print_alike(paper: Paper, item: Item, like: str) -> None:
    """One line for a frame that says nothing new."""
    raw, stored = item.payload_bytes, sum(s.stored_length for s in item.sections if s.kind >= SectionKind.PAGE_POOL)
    words, style = payload_words(item)
    name = (describe.title(item), "title")
    facts = f"at byte {item.offset}: {describe.role(item)}, {describe.layer(item)}, {scaled(item.total or 0)}"
    squeezed = f", ratio {ratio(raw, stored)}" if stored < raw else ""
    paper.text(name, f"  {facts}{squeezed}; else as {like}; payload ", (words.partition(":")[0], style), indent=0)


def print_stream(paper: Paper, stream: StreamEnd) -> None:
    """What a stream came to, and whether it was whole."""
    if stream.form is Form.BARE:
        name, rest = counted(stream.tensors, "bare tensor"), "; the bare form cannot say whether more should follow"
        whole = f", {size(stream.stored_bytes)}" if stream.stored_bytes else ""
        paper.text((name, "title"), f"{whole}{rest}", indent=0)
        return
    closing = " (the last one closes it)" if stream.closing else ""
    frames = f"{counted(stream.frames, 'frame')}{closing}, {counted(stream.tensors, 'tensor')}"
    totals = f"{size(stream.stored_bytes)} stored, buffers {size(stream.raw_bytes)} raw"
    paper.text((f"stream {stream.stream_id:#x}", "title"), "  ", _verdict(stream), f": {frames}, {totals}", indent=0)


def _verdict(stream: StreamEnd) -> Part:
    if stream.complete:
        return "complete (LAST seen)", "good"
    if stream.last:
        why = "LAST seen, but its frame is cut" if stream.in_order else "LAST seen, but frames are missing or astray"
    else:
        why = "no LAST" if stream.in_order else "no LAST, and frames are missing or astray"
    return f"NOT COMPLETE ({why})", "bad"


def print_end(paper: Paper, faults: int, unverified: int) -> None:
    """The line that closes a file."""
    if faults:
        paper.line((f"NOT SOUND: {counted(faults, 'fault')}", "bad"))
    else:
        paper.line(("sound", "good"), ("; payload not verified" if unverified else "", "warn"))


def print_name(paper: Paper, name: str, total: int | None) -> None:
    """The line that opens a file."""
    paper.text((safe(name), "title"), f"  {size(total)}" if total is not None else "", indent=0)
