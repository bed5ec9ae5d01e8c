# The HRKV frame (schema/hrkv.md, section 4): prologue, section table, header checksum, sections at their offsets.
# Structure only: what the fields must hold is said there. Field names and order are those of the tables there.
meta:
  id: hrkv
  title: HRKV frame of a paged KV cache
  file-extension: hrkv
  endian: le
  imports:
    - hurray
seq:
  - id: prologue
    type: prologue
  - id: sections
    type: section
    repeat: expr
    repeat-expr: prologue.section_count
  - id: header_checksum
    type: header_checksum
instances:
  descriptor:
    pos: sections[0].offset
    size: sections[0].stored_length
    type: hurray::descriptor
    if: prologue.section_count != 0
types:
  prologue:
    seq:
      - id: magic
        contents: [0x89, 0x48, 0x52, 0x4b, 0x56, 0x0d, 0x0a, 0x1a]
      - id: version_major
        type: u1
      - id: version_minor
        type: u1
      - id: flags
        type: u2
      - id: sequence
        type: u4
      - id: header_length
        type: u4
      - id: section_count
        type: u2
      - id: reserved
        type: u2
      - id: frame_length
        type: u8
      - id: stream_id
        type: u8
  section:
    seq:
      - id: kind
        type: u1
      - id: codec
        type: u1
      - id: filter
        type: u1
      - id: element_width
        type: u1
      - id: flags
        type: u2
      - id: reserved
        type: u2
      - id: raw_offset
        type: u8
      - id: raw_length
        type: u8
      - id: offset
        type: u8
      - id: stored_length
        type: u8
      - id: checksum
        type: u8
    instances:
      stored:
        io: _root._io
        pos: offset
        size: stored_length
  header_checksum:
    seq:
      - id: header_checksum
        type: u8
