"""These tests compute with the threads that a run sets up; see tests/parity/conftest.py."""

from trainer.device.threads import set_up_cpu_threads

set_up_cpu_threads()
