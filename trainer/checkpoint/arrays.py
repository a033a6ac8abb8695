"""Named arrays as a safetensors file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, readable by whom the umask lets; the library alone writes them for their owner only.

    Raises:
        OSError: The disk is full or does not let us write.
    """
    # The library takes the address of an array and trusts that its elements lie in order. np.ascontiguousarray would
    # do, but makes a scalar one-dimensional.
    in_order = {name: np.require(array, requirements="C").reshape(array.shape) for name, array in arrays.items()}
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.numpy.save_file(in_order, path, metadata)
    except safetensors.SafetensorError as error:
        # The library gives the system's error as text only.
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(errno.EIO, str(error)) from error
    path.chmod(mode)
