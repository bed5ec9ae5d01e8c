"""XXH3-64 and XXH64 with seed 0, in plain Python.

XXH3-64 is the checksum of the framed form (the specification, section 4); XXH64 is the content checksum
that a zstd frame may carry.  Both follow the published algorithms, XXH3-64 with its five classes of length.
"""

from __future__ import annotations

import struct

_M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF

_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME_MX1, _PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)

_STRIPE = 64
_STRIPES_PER_BLOCK = (len(_SECRET) - _STRIPE) // 8  # 16
_BLOCK = _STRIPE * _STRIPES_PER_BLOCK


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _rotate(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & _M64


def _avalanche_xxh64(h: int) -> int:
    h = (h ^ h >> 33) * _P64_2 & _M64
    h = (h ^ h >> 29) * _P64_3 & _M64
    return h ^ h >> 32


def _avalanche(h: int) -> int:
    h = (h ^ h >> 37) * _PRIME_MX1 & _M64
    return h ^ h >> 32


def _fold(a: int, b: int) -> int:
    """The 128-bit product, its halves xored."""
    product = a * b
    return (product ^ product >> 64) & _M64


# --- XXH3-64, by length class -------------------------------------------------------------------------------


def xxh3_64(data: bytes) -> int:
    """The XXH3-64 digest (seed 0) as an unsigned integer."""
    size = len(data)
    if size > 240:
        return _long(data, size)
    if size > 128:
        return _up_to_240(data, size)
    if size > 16:
        return _up_to_128(data, size)
    return _up_to_16(data, size)


def _up_to_16(data: bytes, size: int) -> int:
    if size > 8:
        low = _u64(data, 0) ^ _u64(_SECRET, 24) ^ _u64(_SECRET, 32)
        high = _u64(data, size - 8) ^ _u64(_SECRET, 40) ^ _u64(_SECRET, 48)
        swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
        return _avalanche((size + swapped + high + _fold(low, high)) & _M64)
    if size > 3:
        h = (_u32(data, size - 4) + (_u32(data, 0) << 32)) ^ _u64(_SECRET, 8) ^ _u64(_SECRET, 16)
        h = (h ^ _rotate(h, 49) ^ _rotate(h, 24)) * _PRIME_MX2 & _M64
        h = (h ^ (h >> 35) + size) * _PRIME_MX2 & _M64
        return h ^ h >> 28
    if size:
        combined = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
        return _avalanche_xxh64(combined ^ _u32(_SECRET, 0) ^ _u32(_SECRET, 4))
    return _avalanche_xxh64(_u64(_SECRET, 56) ^ _u64(_SECRET, 64))


def _mix16(data: bytes, at: int, secret: int) -> int:
    return _fold(_u64(data, at) ^ _u64(_SECRET, secret), _u64(data, at + 8) ^ _u64(_SECRET, secret + 8))


def _up_to_128(data: bytes, size: int) -> int:
    acc = size * _P64_1
    for step in range((size - 1) // 32 + 1):
        acc += _mix16(data, 16 * step, 32 * step)
        acc += _mix16(data, size - 16 * (step + 1), 32 * step + 16)
    return _avalanche(acc & _M64)


def _up_to_240(data: bytes, size: int) -> int:
    acc = size * _P64_1 + sum(_mix16(data, 16 * i, 16 * i) for i in range(8))
    acc = _avalanche(acc & _M64)
    acc += sum(_mix16(data, 16 * i, 16 * (i - 8) + 3) for i in range(8, size // 16))
    acc += _mix16(data, size - 16, 136 - 17)
    return _avalanche(acc & _M64)


def _keys(at: int) -> tuple[int, ...]:
    return struct.unpack_from("<8Q", _SECRET, at)


_BLOCK_KEYS = tuple(key for stripe in range(_STRIPES_PER_BLOCK) for key in _keys(8 * stripe))
_SCRAMBLE_KEYS = _keys(len(_SECRET) - _STRIPE)
_LAST_KEYS = _keys(len(_SECRET) - _STRIPE - 7)
_MERGE_KEYS = _keys(11)


def _accumulate(acc: list[int], words: tuple[int, ...], keys: tuple[int, ...]) -> None:
    """Add at most one block of stripes.  Within a block the lanes only grow by sums, in whatever order."""
    keyed = [word ^ key for word, key in zip(words, keys, strict=False)]
    products = [(x & _M32) * (x >> 32) for x in keyed]
    for lane in range(8):
        acc[lane] += sum(products[lane::8]) + sum(words[lane ^ 1 :: 8])


def _scramble(acc: list[int]) -> None:
    for lane, key in enumerate(_SCRAMBLE_KEYS):
        value = acc[lane] & _M64
        acc[lane] = (value ^ value >> 47 ^ key) * _P32_1 & _M64


def _long(data: bytes, size: int) -> int:
    acc = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    last_block = (size - 1) // _BLOCK * _BLOCK
    for at in range(0, last_block, _BLOCK):
        _accumulate(acc, struct.unpack_from(f"<{_BLOCK // 8}Q", data, at), _BLOCK_KEYS)
        _scramble(acc)
    stripes = (size - 1 - last_block) // _STRIPE
    _accumulate(acc, struct.unpack_from(f"<{8 * stripes}Q", data, last_block), _BLOCK_KEYS)
    _accumulate(acc, struct.unpack_from("<8Q", data, size - _STRIPE), _LAST_KEYS)
    lanes = [(value & _M64) ^ key for value, key in zip(acc, _MERGE_KEYS, strict=True)]
    merged = size * _P64_1 + sum(_fold(lanes[i], lanes[i + 1]) for i in range(0, 8, 2))
    return _avalanche(merged & _M64)


# --- XXH64 --------------------------------------------------------------------------------------------------


def _round(acc: int, lane: int) -> int:
    return _rotate((acc + lane * _P64_2) & _M64, 31) * _P64_1 & _M64


def _stripes_xxh64(data: bytes, end: int) -> int:
    lanes = [(_P64_1 + _P64_2) & _M64, _P64_2, 0, -_P64_1 & _M64]
    for words in struct.iter_unpack("<4Q", data[:end]):
        lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
    h = sum(_rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _M64
    for lane in lanes:
        h = ((h ^ _round(0, lane)) * _P64_1 + _P64_4) & _M64
    return h


def xxh64(data: bytes) -> int:
    """The XXH64 digest (seed 0) as an unsigned integer."""
    size = len(data)
    at = size // 32 * 32
    h = ((_stripes_xxh64(data, at) if at else _P64_5) + size) & _M64
    while at + 8 <= size:
        h = (_rotate(h ^ _round(0, _u64(data, at)), 27) * _P64_1 + _P64_4) & _M64
        at += 8
    if at + 4 <= size:
        h = (_rotate(h ^ _u32(data, at) * _P64_1 & _M64, 23) * _P64_2 + _P64_3) & _M64
        at += 4
    for byte in data[at:]:
        h = _rotate(h ^ byte * _P64_5 & _M64, 11) * _P64_1 & _M64
    return _avalanche_xxh64(h)
