"""Small files of images that take much time or memory to decode."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

SIDE = 7071
"""Of a square of 50 million pixels."""


def jpeg_of_scans(count: int = 80_000, side: int = SIDE) -> bytes:
    """A grey progressive JPEG with so many scans, each of which refines nothing: one run of ends of bands."""
    from PIL import Image

    file = BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    # coefficients 1 to 63 of component 1, by Huffman table 0, all bits; of no data, which the decoder takes for zeros
    scan = b"\xff\xda" + struct.pack(">HBBBBBB", 8, 1, 1, 0x00, 1, 63, 0x00)
    tables = whole.rindex(b"\xff\xda")
    return whole[:tables] + scan * count + whole[tables:]


def _tiff(width: int, height: int, tile: tuple[int, int], blobs: list[bytes], places: list[int]) -> bytes:
    """A grey TIFF of deflated tiles; places: which blob each tile is."""
    data, offsets = b"II*\0" + bytes(4), []
    for blob in blobs:
        offsets.append(len(data))
        data += blob + bytes(len(blob) % 2)
    at = [offsets[each] for each in places]
    counts = [len(blobs[each]) for each in places]

    def array(values: list[int]) -> int:
        nonlocal data
        if len(values) == 1:
            return values[0]
        begin = len(data)
        data += struct.pack(f"<{len(values)}I", *values)
        return begin

    tags = {
        256: (1, width),
        257: (1, height),
        258: (1, 8),
        259: (1, 8),
        262: (1, 1),
        277: (1, 1),
        322: (1, tile[0]),
        323: (1, tile[1]),
        324: (len(at), array(at)),
        325: (len(counts), array(counts)),
    }
    begin = len(data)
    data += struct.pack("<H", len(tags))
    for tag, (count, value) in tags.items():
        data += struct.pack("<HHII", tag, 4, count, value)
    data += bytes(4)
    return data[:4] + struct.pack("<I", begin) + data[8:]


def deflated_zeros(size: int) -> bytes:
    """A zlib stream of zeros, made of one block again and again."""
    block = 1 << 20
    whole, rest = divmod(size, block)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    part = packer.compress(bytes(block)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    checksum, zeros = 1, bytes(block)
    for _ in range(whole):
        checksum = zlib.adler32(zeros, checksum)
    checksum = zlib.adler32(bytes(rest), checksum)
    return b"\x78\xda" + part * whole + last.compress(bytes(rest)) + last.flush() + struct.pack(">I", checksum)


def tiff_of_one_tile(tile: int = 46_000, side: int = 16) -> bytes:
    """A small image that is the corner of one huge tile."""
    return _tiff(side, side, (tile, tile), [deflated_zeros(tile * tile)], [0])


def tiff_of_one_blob(tiles: int = 64, length: int = 4_000_000) -> bytes:
    """An image of one row whose tiles are all the same bytes of the file, 64 MB each."""
    return _tiff(16 * tiles, 1, (16, length), [deflated_zeros(16 * length)], [0] * tiles)


def large_webp(seed: int, side: int = SIDE) -> bytes:
    """50 million pixels of one colour."""
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (side, side), (seed % 256, seed // 256 % 256, 77)).save(file, "WEBP", quality=20, method=0)
    return file.getvalue()


def bitmap_of_runs(side: int = 3000) -> bytes:
    """A BMP of 9 million pixels in runs of one: Pillow reads each in Python."""
    pixels = b"\x01\x05" * (side * side)
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(pixels), 0, 0, 256, 0)
    palette = b"".join(struct.pack("<BBBB", each, each, each, 0) for each in range(256))
    offset = 14 + len(header) + len(palette)
    return struct.pack("<2sIHHI", b"BM", offset + len(pixels), 0, 0, offset) + header + palette + pixels
