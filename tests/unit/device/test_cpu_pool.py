"""MindSpore's memory pool on a CPU takes freed pages again before it touches new ones."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from trainer.device.pool import _can_reserve

# The first array leaves 24 MiB of the first block of 1 GiB, so that the second array needs another block as MindSpore
# is installed. The third fits into both.
SCRIPT = """
import sys
import mindspore
from mindspore import mint

from trainer.device.pool import set_up_cpu_pool

def resident_pages():
    return int(open("/proc/self/statm").read().split()[1])

if sys.argv[1] == "set up":
    set_up_cpu_pool()
elements = 1 << 18  # of float32: 1 MiB
first = mint.empty(1000 * elements, dtype=mindspore.float32)
second = mint.ones(100 * elements, dtype=mindspore.float32)
second.asnumpy()
before = resident_pages()
del second
third = mint.ones(20 * elements, dtype=mindspore.float32)
third.asnumpy()
print((resident_pages() - before) * 4 >> 10)
"""


@pytest.mark.parametrize(("name", "least_mib", "most_mib"), [("as installed", 19, 21), ("set up", 0, 1)])
def test_a_freed_range_is_used_again(name: str, least_mib: int, most_mib: int) -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, check=True)
    assert least_mib <= int(found.stdout.split()[-1]) <= most_mib


def test_it_reserves_only_what_the_system_gives() -> None:
    assert _can_reserve(1 << 30)
    assert not _can_reserve(0)
    assert not _can_reserve(1 << 62)


def test_it_reserves_nothing_below_a_limit_of_address_space() -> None:
    script = (
        "import resource; from trainer.device.pool import _can_reserve;"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 36, resource.RLIM_INFINITY)); print(_can_reserve(1 << 20))"
    )
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "False"
