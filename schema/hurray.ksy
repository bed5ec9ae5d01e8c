# The bare form: a Hurray tensor descriptor with the block-paged layout, then its buffers (schema/hrkv.md, section 1).
# Structure only: what the fields must hold is said there. Field names and order are those of the tables there.
meta:
  id: hurray
  title: Hurray block-paged tensor, bare form
  file-extension: hrry
  endian: le
seq:
  - id: descriptor
    type: descriptor
    size: descriptor_length
  - id: buffers
    type: buffer(_index)
    repeat: expr
    repeat-expr: descriptor.buffer_count
instances:
  descriptor_length:
    pos: 6
    type: u4
types:
  buffer:
    params:
      - id: index
        type: u4
    seq:
      - id: bytes
        size: _root.descriptor.buffers[index].byte_size
  descriptor:
    seq:
      - id: magic
        contents: HRRY
      - id: version_major
        type: u1
      - id: version_minor
        type: u1
      - id: descriptor_length
        type: u4
      - id: flags
        type: u4
      - id: type_tag
        type: u1
      - id: layout_tag
        type: u1
      - id: rank
        type: u4
      - id: shape
        type: u8
        repeat: expr
        repeat-expr: 3
      - id: byte_offset
        type: u8
      - id: layout
        type: block_paged
      - id: buffer_count
        type: u1
      - id: buffers
        type: handle
        repeat: expr
        repeat-expr: buffer_count
      - id: quantization
        type: quantization
        if: (flags & 1) != 0
      - id: shard
        type: shard
        if: (flags & 2) != 0
      - id: statistics
        type: statistics
        if: (flags & 8) != 0
      - id: extension_type
        type: extension_type
        if: (flags & 4) != 0
      - id: composite
        type: composite
        if: (flags & 16) != 0
      - id: of_a_newer_minor
        size-eos: true
  block_paged:
    seq:
      - id: page_size
        type: u4
      - id: num_pages
        type: u8
      - id: paged_axis
        type: u4
      - id: num_seqs
        type: u4
      - id: kv_role
        type: u1
      - id: layer_index
        type: u4
      - id: block_table_index_type
        type: u1
      - id: reserved
        size: 6
  handle:
    seq:
      - id: byte_size
        type: u8
      - id: alignment
        type: u4
      - id: device_tag
        type: u1
      - id: sync_mode
        type: u1
      - id: memory_class
        type: u1
      - id: reserved
        type: u1
  quantization:
    seq:
      - id: length
        type: u4
      - id: scheme
        type: scheme
        size: length
  scheme:
    seq:
      - id: scheme_tag
        type: u1
      - id: scheme_version
        type: u1
      - id: flags
        type: u2
      - id: parameters
        type:
          switch-on: scheme_tag
          cases:
            1: per_tensor
            2: per_channel
            3: per_block
            4: float_block
            5: float_block
      - id: padding
        size-eos: true
  per_tensor:
    seq:
      - id: scale
        type: f4
      - id: zero_point
        type: s4
      - id: reserved
        size: 4
  per_channel:
    seq:
      - id: axis
        type: u4
      - id: scale_buffer_index
        type: u4
      - id: zero_point_buffer_index
        type: u4
      - id: scale_type
        type: u1
      - id: reserved
        size: 3
  per_block:
    seq:
      - id: axis
        type: u4
      - id: block_size
        type: u4
      - id: scale_buffer_index
        type: u4
      - id: zero_point_buffer_index
        type: u4
      - id: scale_type
        type: u1
      - id: reserved
        size: 3
  float_block:
    seq:
      - id: axis
        type: u4
      - id: block_size
        type: u4
      - id: scale_buffer_index
        type: u4
  shard:
    seq:
      - id: payload
        size: 48
  statistics:
    seq:
      - id: mask
        type: u4
      - id: reserved
        type: u4
      - id: nnz
        type: u8
      - id: sparsity_ratio
        type: f8
      - id: value_min
        type: f8
      - id: value_max
        type: f8
      - id: value_abs_max
        type: f8
      - id: value_mean
        type: f8
      - id: value_stddev
        type: f8
      - id: nm_n
        type: u1
      - id: nm_m
        type: u1
      - id: has_nan
        type: u1
      - id: has_inf
        type: u1
      - id: reserved_tail
        size: 4
  extension_type:
    seq:
      - id: bit_width
        type: u4
      - id: packing
        type: u1
      - id: is_float
        type: u1
      - id: is_signed
        type: u1
      - id: sign_bits
        type: u1
      - id: exponent_bits
        type: u1
      - id: mantissa_bits
        type: u1
      - id: reserved
        size: 2
      - id: exponent_bias
        type: u4
      - id: has_nan
        type: u1
      - id: has_inf
        type: u1
      - id: reserved_tail
        size: 2
  composite:
    seq:
      - id: role
        type: u1
      - id: reserved
        size: 15
