"""Block-paged layouts, index buffers and quantisation, in code that runs on the reference's API as well.

`import hurray_wire as hurray` and `import hurray` both serve everything above the line near the end.
"""

import hurray_wire as hurray


def show_layout() -> None:
    """Describe a pool of 5 pages of 4 tokens, and check shapes and tables against it."""
    layout = hurray.BlockPagedLayout(page_size=4, num_pages=5, paged_axis=0, num_seqs=2, kv_role="key", layer_index=3)
    print(layout)
    print(layout.tag, layout.name, layout.buffer_count, layout.is_dense, layout.is_virtual)
    layout.validate_against_shape([9, 2, 8])
    layout.validate_index_buffers([0, 2, 3], [0, 1, 0])  # both sequences share page 0: fine
    for seq_ptr, block_table, why in (
        ([0, 2, 3], [0, 5, 0], "page id equal to num_pages"),
        ([0, 3, 2], [0, 1, 0], "offsets that decrease"),
        ([1, 2, 3], [0, 1, 0], "offsets that do not start at 0"),
        ([0, 2, 4], [0, 1, 0], "offsets that end elsewhere than the table"),
    ):
        try:
            layout.validate_index_buffers(seq_ptr, block_table)
        except hurray.InvalidDescriptorError as error:
            print(f"{why}: {error}")
    empty = hurray.BlockPagedLayout(page_size=4, num_pages=5, paged_axis=0, num_seqs=0)
    empty.validate_index_buffers([0], [])
    print("an empty batch is fine")


def show_quantization() -> None:
    """One scale a page slot fits block-paged; one a token position does not."""
    layout = hurray.BlockPagedLayout(page_size=4, num_pages=5, paged_axis=0, num_seqs=2)
    per_block = hurray.PerBlockAffine.symmetric(axis=0, block_size=4, scale_buffer_index=3, scale_type=hurray.float32)
    layout.validate_quantization_compatibility(per_block)
    print(per_block)
    try:
        layout.validate_quantization_compatibility(hurray.PerChannelAffine.symmetric(axis=0, scale_buffer_index=3))
    except hurray.InvalidDescriptorError as error:
        print(f"per channel of the token axis: {error}")


# What follows is this package's own.


def show_offsets() -> None:
    """Where elements stand, in elements of the pool: two sequences that share a page share offsets."""

    def offset(seq: int, token: int, head: int, dim: int) -> int:
        sizes = {"page_size": 4, "num_pages": 5, "num_heads": 2, "head_dim": 8}
        return int(hurray.element_offset(seq, token, head, dim, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], **sizes))

    print("sequence 0, token 4:", offset(0, 4, 0, 0))
    print("token 2 of both:", offset(0, 2, 1, 3), offset(1, 2, 1, 3))


if __name__ == "__main__":
    show_layout()
    show_quantization()
    show_offsets()
