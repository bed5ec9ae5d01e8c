"""A cache of 32 layers in one file of a file system or object store; then one sequence of one layer, by byte ranges.

    python examples/fsspec_layers.py [URL]        (memory://cache.hrkv; s3://bucket/cache.hrkv with s3fs, and so on)

The real snapshot in `fixtures/real` stands for every layer. Needs the extra `fsspec`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fsspec
import numpy as np
from snapshot import ROLES, Snapshot

from hurray_wire.integrations.fsspec import FrameFile, FrameFileWriter

LAYERS = 32


def counted(fs: Any) -> list[int]:
    """The sizes of what a file system is asked for from now on."""
    sizes: list[int] = []
    cat_file = fs.cat_file

    def asked(path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        data = cat_file(path, start=start, end=end, **options)
        sizes.append(len(data))
        return data

    fs.cat_file = asked
    return sizes


def main() -> None:
    """Write, find, read a little, compare with what the model computed."""
    url = sys.argv[1] if len(sys.argv) > 1 else "memory://cache.hrkv"
    fs, path = fsspec.core.url_to_fs(url)
    snapshot = Snapshot.load()
    with FrameFileWriter(path, fs=fs, pages="live", chunk_bytes=12 << 10) as writer:
        for layer in range(LAYERS):
            for role in ROLES:
                writer.write(snapshot.tensor(role).replace(layer_index=layer))
    sizes = counted(fs)
    file = FrameFile(path, fs=fs)
    print(f"{url}: {len(file)} frames, {fs.info(path)['size']:,} bytes; its index has {sum(sizes):,}")
    sizes.clear()
    tokens = file.gather(1, layer_index=17, kv_role="value", expect={"dtype": "bfloat16"})
    print(f"sequence 1 of layer 17: {len(tokens)} tokens, read in {len(sizes)} requests of {sum(sizes):,} bytes")
    if not np.array_equal(tokens.view(np.uint16), snapshot.tensor("value").gather(1).view(np.uint16)):
        sys.exit("tokens differ")
    if not all(snapshot.agrees(file.tensor(entry=entry)) for entry in file):
        sys.exit("tokens differ")
    print("identical: every token of every layer has the bits that the model computed")


if __name__ == "__main__":
    main()
