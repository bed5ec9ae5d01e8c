"""Frames in an object store by s3fs, against an S3 server on loopback: uploads appear whole or are dropped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from stream_helpers import large

from hurray_wire.integrations.fsspec import FrameFile, FrameFileWriter, build_index, open_frame

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def fs() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn of while they are imported is theirs
        s3fs = pytest.importorskip("s3fs", reason="needs the s3fs package")
        moto = pytest.importorskip("moto.server", reason="needs moto[server]")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"endpoint_url": f"http://{host}:{port}"}
        settings = {"default_block_size": 5 << 20, "skip_instance_cache": True}
        fs = s3fs.S3FileSystem(key="x", secret="x", client_kwargs=options, **settings)
        fs.call_s3("create_bucket", Bucket="bucket")
        yield fs
    finally:
        server.stop()


def names(fs: Any) -> set[str]:
    fs.invalidate_cache()
    return set(fs.find("bucket"))


def uploads(fs: Any) -> Any:
    return fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")


def test_a_file_of_frames_in_several_parts(fs: Any) -> None:
    tensors = [large(n, pages=1500, noise=True) for n in range(3)]
    assert tensors[0].nbytes > 5 << 20, "more than a part of an upload"
    with FrameFileWriter("s3://bucket/a/frames.hrkv", fs=fs, chunk_bytes=1 << 18) as writer:
        for tensor in tensors:
            writer.write(tensor)
        assert names(fs) == set(), "nothing is there before all of it is"
    assert names(fs) == {"bucket/a/frames.hrkv", "bucket/a/frames.hrkv.hrkx"}
    file = FrameFile("s3://bucket/a/frames.hrkv", fs=fs)
    assert file.tensor(layer_index=1) == tensors[1]
    with file.open(layer_index=2, verify=False) as frame:
        assert np.array_equal(frame.pages([3, 1400, 4]), tensors[2].page_pool[[3, 1400, 4]])
        assert np.array_equal(frame.gather(0), tensors[2].gather(0))
    with open_frame("bucket/a/frames.hrkv", file[1].offset, fs=fs) as frame:
        assert frame.tensor() == tensors[1]
    index = fs.cat_file("bucket/a/frames.hrkv.hrkx")
    fs.rm_file("bucket/a/frames.hrkv.hrkx")
    assert build_index("bucket/a/frames.hrkv", fs=fs) == 3
    assert fs.cat_file("bucket/a/frames.hrkv.hrkx") == index


def test_an_upload_that_is_given_up_is_dropped(fs: Any) -> None:
    before = names(fs)

    def broken() -> None:
        with FrameFileWriter("bucket/b.hrkv", fs=fs) as writer:
            writer.write(large(0, pages=1500, noise=True))
            assert uploads(fs)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert names(fs) == before
    assert not uploads(fs)


def test_small_files_and_writing_anew(fs: Any) -> None:
    for n in range(2):
        with FrameFileWriter("bucket/small.hrkv", fs=fs) as writer:
            writer.write(large(n, pages=2))
        fs.invalidate_cache()
        assert FrameFile("bucket/small.hrkv", fs=fs).tensor() == large(n, pages=2)
