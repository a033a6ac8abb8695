"""Reads TensorBoard's event files: records of TFRecord (length, masked CRC-32C, content, masked CRC-32C)."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Events(NamedTuple):
    """The content of a file."""

    scalars: dict[str, list[tuple[int, float]]]  # by tag: steps and values in order
    texts: dict[str, str]
    restarts: list[int]  # steps from which TensorBoard leaves out what older files have


def read_events(path: Path) -> Events:
    """Reads one file; checks the checksums."""
    from tensorboardX.proto import event_pb2

    found = Events(defaultdict(list), {}, [])
    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        assert _masked(data[place : place + 8]) == struct.unpack_from("<I", data, place + 8)[0], "of a length"
        content = data[place + 12 : place + 12 + length]
        assert _masked(content) == struct.unpack_from("<I", data, place + 12 + length)[0], "of an event"
        place += length + 16
        _add(found, event_pb2.Event.FromString(content))
    return found


def _add(found: Events, event: Any) -> None:
    if event.HasField("session_log"):
        found.restarts.append(event.step)
    for value in event.summary.value:
        if value.HasField("tensor"):
            found.texts[value.tag] = value.tensor.string_val[0].decode()
        else:
            found.scalars[value.tag].append((event.step, value.simple_value))


def _masked(data: bytes) -> int:
    """Returns the checksum as TFRecord stores it: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table_entry(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    return number


_TABLE = [_table_entry(number) for number in range(256)]
