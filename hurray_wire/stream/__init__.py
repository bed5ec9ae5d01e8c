"""Streams of frames: `incoming` and `decoder` without I/O, then the thin I/O around them.

`endpoints` moves bytes, `reader` and `writer` are the blocking pair, `aio` the asyncio pair (imported when
asked for), `partial` reads pieces of an item that stays where it is.
"""

from hurray_wire.stream.decoder import NEED_DATA, FrameDecoder
from hurray_wire.stream.partial import Frame, open_frame
from hurray_wire.stream.reader import FrameHeader, StreamReader
from hurray_wire.stream.writer import StreamWriter

__all__ = [
    "NEED_DATA",
    "Frame",
    "FrameDecoder",
    "FrameHeader",
    "StreamReader",
    "StreamWriter",
    "open_frame",
]
