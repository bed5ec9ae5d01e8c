"""LMCache's own file storage with values that say what they are: a chunk stored, another worker's refused.

Runs LMCache's L1 manager, file adapter and serde wrapper as its server does, on the CPU (tested with lmcache 0.5.6):

    pip install torch lmcache && python examples/lmcache_serde.py
"""

from __future__ import annotations

import logging
import os
import select
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

import hurray_wire as hw
from hurray_wire.integrations import lmcache as hurray_lmcache

SERDE = {"page_size": 16, "num_heads": 4, "compression": "zstd", "fit": 0.8}
"""Values of 0.8 times the raw size: real bfloat16 keys and values take 0.67 to 0.7 of it."""


class Storage:
    """LMCache's memory and one folder on disk, with a serde between them or without."""

    def __init__(self, folder: Path, serde: Mapping[str, Any] | None, nbytes: int = 64 << 20) -> None:
        self.folder = folder
        self.memory = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(nbytes, use_lazy=False, shm_name="")))
        files: Any = FSL2Adapter(FSL2AdapterConfig(str(folder)))
        if serde is not None:
            hurray_lmcache.register()
            files = SerdeL2AdapterWrapper(files, create_serde_processor(SerdeConfig("hrkv", dict(serde))), self.memory)
        self.files = files

    def new(self, key: ObjectKey, layout: MemoryLayoutDesc) -> Any:
        """A memory object for a key, and out of the key's way."""
        _, made = self.memory.reserve_write([key], [False], layout, tag="example")[key]
        assert made is not None, "LMCache's memory is full"
        return made

    def store(self, key: ObjectKey, memory_obj: Any) -> bool:
        """Put an object under its key; whether LMCache counts it as stored."""
        task = self.files.submit_store_task([key], [memory_obj])
        self._wait(self.files.get_store_event_fd())
        return bool(self.files.pop_completed_store_tasks()[task].is_successful())

    def load(self, key: ObjectKey, memory_obj: Any) -> bool:
        """Fill an object with what a key holds; whether LMCache counts it as loaded."""
        task = self.files.submit_load_task([key], [memory_obj])
        self._wait(self.files.get_load_event_fd())
        return bool(self.files.query_load_result(task).test(0))

    def close(self) -> None:
        """Stop LMCache's threads."""
        self.files.close()
        self.memory.close()

    def _wait(self, notifier: int) -> None:
        ready, _, _ = select.select([notifier], [], [], 30)
        assert ready, "LMCache has not answered for 30 s"
        os.read(notifier, 8)


def key_of(number: int, model: str = "tiny/llama") -> ObjectKey:
    """The key of some chunk."""
    return ObjectKey(number.to_bytes(32, "big"), model, ObjectKey.ComputeKVRank(1, 0, 1, 0))


def main() -> None:
    """Store a chunk of 4 layers, read it back, then ask for it as another model's and with other heads."""
    logging.disable(logging.CRITICAL)  # LMCache logs what it refuses
    layout = MemoryLayoutDesc([torch.Size([2, 4, 256, 4 * 64])], [torch.bfloat16])
    with tempfile.TemporaryDirectory() as name:
        storage = Storage(Path(name), SERDE)
        mine = storage.new(key_of(1), layout)
        mine.tensor.copy_(torch.randn(mine.tensor.shape))
        assert storage.store(key_of(1), mine)
        (file,) = Path(name).iterdir()
        print(f"{mine.get_size()} bytes of memory, {file.stat().st_size} on disk")
        first = hw.decode_from(file.read_bytes())[0]
        print(f"the file says: {first}")
        print(f"and: {first.metadata}")
        theirs = storage.new(key_of(2), layout)
        assert storage.load(key_of(1), theirs)
        assert torch.equal(theirs.tensor, mine.tensor)
        print("read back: identical")
        file.rename(file.with_name(file.name.replace("llama", "qwen")))
        print(f"under another model's key: loaded {storage.load(key_of(1, 'tiny/qwen'), theirs)}")
        storage.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
