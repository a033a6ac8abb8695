"""The world of a job: this process's rank and the number of ranks, from the environment. Pure Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from trainer.errors import UserError

_DIGITS = 9  # of a number of ranks, or of seconds
_JOIN_SECONDS = 1800  # as MindSpore waits

SHARED_PORT = 8118
"""The port where the ranks meet if several nodes must agree on one and none is given: msrun's own default."""

LOCAL_SIZE_VARIABLE = "RUN_TRAINER_LOCAL_SIZE"
"""Number of workers on this host, which msrun does not set for its workers."""

RENDEZVOUS_VARIABLE = "RUN_TRAINER_RENDEZVOUS"
"""Path of the Unix socket at which the ranks of a job on one node meet; the launcher sets it."""


class World(NamedTuple):
    """This process's rank, and the numbers of ranks of its job."""

    rank: int = 0  # of this process, over all hosts
    size: int = 1  # ranks on all hosts together
    local_rank: int = 0  # of this process among the ranks of its host
    local_size: int = 1  # ranks of this host


SINGLE_PROCESS = World()


def world_of(ranks: int, local_ranks: int | None = None) -> World:
    """Returns the world of rank 0 of a job, by default with all ranks on one host; for plans and tests."""
    return World(rank=0, size=ranks, local_rank=0, local_size=local_ranks or ranks)


def planned_world(ranks: int | None, local_ranks: int | None) -> World:
    """Returns the job that a plan describes: the one of the flags, or the one that this process belongs to.

    Raises:
        UserError: A number is below 1, or local_ranks does not divide ranks.
    """
    if ranks is None and local_ranks is None:
        return world_from_environment()
    for key, value in (("--ranks", ranks), ("--local_ranks", local_ranks)):
        if value is not None and value < 1:
            raise UserError("must be at least 1", where=f"flag {key}", key=key, value=value, fix="write for example 8")
    if ranks is None or local_ranks is None:
        return world_of(ranks or local_ranks or 1)
    if local_ranks > ranks:
        fix = f"write --local_ranks {ranks} or less"
        raise UserError(f"exceeds the {ranks} ranks of the job", key="--local_ranks", value=local_ranks, fix=fix)
    if ranks % local_ranks:
        rule = f"must divide --ranks {ranks}: every host has the same number of ranks"
        below = next(number for number in range(local_ranks, 0, -1) if ranks % number == 0)
        raise UserError(rule, key="--local_ranks", value=local_ranks, fix=f"write --local_ranks {below}")
    return world_of(ranks, local_ranks)


def world_from_environment(environment: Mapping[str, str] | None = None) -> World:
    """Reads the variables that msrun sets for its workers: MS_WORKER_NUM, RANK_ID and DEVICE_ID.

    Returns `SINGLE_PROCESS` without a job.

    Raises:
        UserError: The variables contradict each other, as when a job was started by hand.
    """
    variables: Mapping[str, str] = os.environ
    if environment is not None:
        variables = environment
    if "MS_WORKER_NUM" not in variables:
        return SINGLE_PROCESS
    size = _number(variables, "MS_WORKER_NUM", 1)
    if "RANK_ID" not in variables:
        rule = f"is not set, but MS_WORKER_NUM says that {size} workers run"
        fix = "start the job with `run_trainer.py launch`, or unset MS_WORKER_NUM for a single process"
        raise UserError(rule, where="environment", key="RANK_ID", fix=fix)
    rank = _number(variables, "RANK_ID", 0, size)
    local_size = size
    if LOCAL_SIZE_VARIABLE in variables:
        local_size = _number(variables, LOCAL_SIZE_VARIABLE, 1, size + 1)
    if "DEVICE_ID" in variables:
        local_rank = _number(variables, "DEVICE_ID", 0)
    else:
        local_rank = rank % local_size
    return World(rank, size, local_rank, local_size)


def longest_join_seconds() -> int:
    """Returns how long the ranks of a job wait for each other at the start: MS_TOPO_TIMEOUT, which msrun sets.

    Raises:
        UserError: It is not a positive integer.
    """
    if "MS_TOPO_TIMEOUT" not in os.environ:
        return _JOIN_SECONDS
    return _number(os.environ, "MS_TOPO_TIMEOUT", 1)


def rendezvous_address() -> str:
    """Returns the address of the rendezvous of this process's job: the launcher's, or where msrun's scheduler would be.

    Raises:
        UserError: MS_SCHED_PORT is no port.
    """
    if path := os.environ.get(RENDEZVOUS_VARIABLE):
        return path
    port = SHARED_PORT
    if "MS_SCHED_PORT" in os.environ:
        port = _number(os.environ, "MS_SCHED_PORT", 1, 1 << 16)
    return f"{address_of_node_0()}:{port}"


def address_of_node_0() -> str:
    """Returns the address of the first node of this process's job, as msrun gives it to the ranks."""
    return os.environ.get("MS_SCHED_HOST", "127.0.0.1")


def is_scheduler() -> bool:
    """Returns whether this process is the scheduler that msrun starts beside the ranks, with the same command."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def _number(variables: Mapping[str, str], name: str, least: int, end: int | None = None) -> int:
    """Reads an integer that must be at least `least` and below `end`."""
    text = variables[name]
    if end is None:
        bounds = f"at least {least}"
    else:
        bounds = f"from {least} to {end - 1}"
    is_number = text.isdecimal() and len(text) <= _DIGITS  # Python refuses to convert thousands of them
    if not is_number or not least <= int(text) or (end is not None and int(text) >= end):
        fix = "start the job with `run_trainer.py launch`, which sets it"
        raise UserError(f"must be an integer, {bounds}", where="environment", key=name, value=text, fix=fix)
    return int(text)
