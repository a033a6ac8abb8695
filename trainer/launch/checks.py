"""Checks a job before any process of it starts: an error ends it with exit code 2 within a second.

Without these checks a worker that cannot start, a port that is in use, or too little memory would show only
minutes later, in one of many logs.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import resource
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.cli.flags import split_arguments
from trainer.config import Config, load_config
from trainer.device.doctor import available_memory_bytes
from trainer.errors import UserError
from trainer.input_files import require_new, user_path
from trainer.launch.arguments import OPTION_NAMES, LaunchOptions, visible_devices
from trainer.launch.job import RestartPlan
from trainer.launch.msrun import listen_error
from trainer.launch.restart import make_restart_plan
from trainer.parallel.world import World
from trainer.plan.plan import Plan

TRACE_VALUES = ("--output", "--steps", "--full", "--against")
TRACE_SWITCHES = ("--help", "--force")
"""The flags of the command `trace`, with and without a value."""
_LAST_PORT = 65_535
_OWN_FILES = 32  # that the launcher has open beside one for each worker of its host and each other node
_MIB = 1 << 20
# RFC 1123: labels of letters, digits and dashes; underscores occur in the names of containers.
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?\Z")


def check_launch(
    options: LaunchOptions, plan_of: Callable[[Config, World], Plan], *, left_bytes: int | None = None
) -> tuple[RestartPlan, str]:
    """Checks the options of `launch` and msrun_launcher.sh on the machine of this node.

    Args:
        plan_of: Plans what a worker will run, and tokenizes its text, which all workers then find in the cache.
        left_bytes: Memory that is available on this host; None asks the system.

    Returns:
        How the job goes on where it fails, and the device of its workers; empty for a script, which may use any.

    Raises:
        UserError: The job could not run, or would need more memory than there is (`force` starts anyway).
    """
    _check_counts(options)
    if options.script is not None and not options.script.is_file():
        raise _error("script", str(options.script), "there is no such file", "give the path of a Python file")
    if options.cluster_time_out < 1:
        fix = "write 7200 for two hours"
        raise _error("cluster_time_out", options.cluster_time_out, "must be at least 1 second", fix)
    _check_restarts(options)
    addresses = _resolve(options.master_addr)
    _check_port(options, addresses)
    try:  # permissions, file systems and quotas show only when something is written
        options.log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.log_dir):
            pass
    except OSError as error:
        rule = f"cannot be written to ({error.strerror})"
        raise _error("log_dir", str(options.log_dir), rule, "give another --log_dir, or make room there") from None
    if options.script is not None:
        return make_restart_plan(options, None, plan_of), ""
    config, world = _work(options)
    plan = plan_of(config, world)
    _check_memory(options, plan, left_bytes)
    return make_restart_plan(options, config, plan_of), plan.device


def _error(key: str, value: object, rule: str, fix: str) -> UserError:
    return UserError(rule, where="launch", key=key, value=value, fix=fix)


def _check_counts(options: LaunchOptions) -> None:
    workers = options.worker_num
    local = options.local_worker_num
    node = options.node_rank
    if workers < 1:
        raise _error("worker_num", workers, "must be at least 1", "write --nproc 8 for eight workers")
    if not 1 <= local <= workers:
        rule = f"must be from 1 to the number of all workers, {workers}"
        raise _error("local_worker_num", local, rule, "leave it out with one node")
    if workers % local:
        rule = f"every node has equally many workers, and {workers} is not a multiple of {local}"
        divisors = [each for each in range(1, workers + 1) if workers % each == 0]
        near = sorted(divisors, key=lambda each: abs(each - local))[:2]
        fix = f"set it to {' or '.join(map(str, sorted(near)))}, or change worker_num"
        raise _error("local_worker_num", local, rule, fix)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = local + options.nodes + _OWN_FILES
    if files > most != resource.RLIM_INFINITY:
        rule = f"the launcher of so many workers has {files} files and sockets open, and this system allows {most}"
        fix = f"start {max(1, most - options.nodes - _OWN_FILES)} workers or fewer on a node, or raise `ulimit -Hn`"
        raise _error("local_worker_num", local, rule, fix)
    if not 0 <= node < options.nodes:
        rule = "with all workers on one node it is 0"
        if options.nodes > 1:
            rule = f"the nodes are 0 to {options.nodes - 1}"
        raise _error("node_rank", node, rule, "number the nodes from 0, or lower local_worker_num")


def _check_restarts(options: LaunchOptions) -> None:
    if options.max_restarts < 0:
        raise _error("max_restarts", options.max_restarts, "must be at least 0", "write --max_restarts 3")
    if not options.elastic:
        return
    if options.max_restarts < 2:
        rule = "a rank is lost for good when it fails again right after a restart, so two of them are needed"
        raise _error("elastic", True, rule, "add --max_restarts 2 or more")
    if options.nodes > 1:
        fix = "leave it out: --max_restarts alone starts the job again with all ranks of all nodes"
        raise _error("elastic", True, "works on one node: all nodes of a job have the same number of ranks", fix)
    if options.script is not None:
        raise _error("elastic", True, "the batch of a script is not known", "leave it out, or run run_trainer.py")
    visible_devices()


def _resolve(host: str) -> list[str]:
    """Returns the addresses of a host.

    An address that means every address of a machine is refused: it would open the ports to all its networks.
    """
    addresses = _addresses(host)
    for string in addresses:
        address = ipaddress.ip_address(string)
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
            rule = "is not the address of one machine"
            if str(address) != host:
                rule += f" ({address})"
            raise _error("master_addr", host, rule, "write the address at which the other nodes reach node 0")
    return addresses


def _addresses(host: str) -> list[str]:
    key = "master_addr"
    bare = host
    if host.startswith("[") and host.endswith("]"):
        bare = host[1:-1]
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(bare))]
    if re.fullmatch(r"[\d.]+", bare) or not _HOST_NAME.match(bare):
        fix = "write the name or the address of node 0 alone, such as 10.0.0.1; the port is master_port"
        raise _error(key, host, "is neither an IP address nor the name of a host", fix)
    try:
        entries = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        rule = f"no such host is known ({getattr(error, 'strerror', None) or error})"
        raise _error(key, host, rule, "write its IP address, or make its name known to this machine") from None
    return [str(entry[4][0]) for entry in entries]


def _check_port(options: LaunchOptions, addresses: list[str]) -> None:
    """Checks the port where the ranks meet: node 0 listens on it, and the other nodes only connect to it."""
    port = options.master_port
    if port is not None and not 1 <= port <= _LAST_PORT:
        fix = "leave it out: a free port is then picked, or 8118 with several nodes"
        raise _error("master_port", port, f"must be from 1 to {_LAST_PORT}", fix)
    if options.node_rank != 0:
        return
    reason = listen_error(addresses[0], port or 0)
    if reason == errno.EADDRNOTAVAIL:
        rule = "is no address of this machine, which is node 0, where the ranks meet"
        fix = "give the address of this machine, or the node_rank that it has"
        raise _error("master_addr", options.master_addr, rule, fix)
    if port is None or not reason:
        return
    rule = "is in use on this machine"
    if reason == errno.EACCES:
        rule = "this user may not listen there"
    fix = "give another one; with one node leave it out, and a free one is picked"
    raise _error("master_port", port, rule, fix)


def _work(options: LaunchOptions) -> tuple[Config, World]:
    """Returns the configuration of the first worker of this host, and its place in the job.

    Raises:
        UserError: A mistake in flags or file, or the run would overwrite the launcher's logs.
    """
    values: Sequence[str] = ()
    switches: Sequence[str] = ("--help",)
    if options.arguments[:1] == ("trace",):
        values = TRACE_VALUES
        switches = TRACE_SWITCHES
    arguments = split_arguments(options.arguments, switches, values, OPTION_NAMES)
    command = [word for word in arguments.rest if word != "train"]
    if command and not values:
        rule = "only trainings, evaluations, predictions and traces run on several ranks"
        fix = "leave `launch` out"
        if command[0] == "plan":
            fix = "write `plan --ranks 8` to plan a job"
        if command[0].endswith((".yaml", ".yml")):
            rule = "the YAML file comes after --config"
            fix = f"write --config {command[0]}"
        raise UserError(rule, where="launch", key=command[0], fix=fix)
    if arguments.config is None:
        raise UserError("a run needs its YAML file", key="--config", fix="write --config configs/quickstart.yaml")
    if "--output" in arguments.rest and options.node_rank == 0:
        output = user_path(arguments.rest[arguments.rest.index("--output") + 1], "flag --output")
        require_new(output, "--output", "--force" in arguments.rest)
    config = load_config(arguments.config, arguments.overrides)
    world = World(rank=options.ranks.start, size=options.worker_num, local_rank=0, local_size=options.local_worker_num)
    logs = Path(config.output_dir).expanduser() / "logs"
    if options.log_dir.expanduser().resolve() == logs.resolve():
        rule = "is where the run itself keeps its logs (output_dir/logs), under the same names"
        raise _error("log_dir", str(options.log_dir), rule, "use another one, or leave it out")
    return config, world


def _check_memory(options: LaunchOptions, plan: Plan, left_bytes: int | None) -> None:
    if options.force or plan.device != "CPU":  # other devices have memory of their own
        return
    worker_bytes = plan.memory_bytes["total"]
    if left_bytes is None:
        left_bytes = available_memory_bytes()
    workers = options.local_worker_num
    if worker_bytes * workers <= left_bytes:
        return
    rule = (
        f"{workers} workers on this host need about {workers * worker_bytes / _MIB:,.0f} MiB of memory"
        f" ({worker_bytes / _MIB:,.0f} MiB each, as `plan --ranks {options.worker_num}` shows),"
        f" and {left_bytes / _MIB:,.0f} MiB are left"
    )
    fitting = left_bytes // worker_bytes
    fewer = ""
    if fitting:
        fewer = f"start {fitting}, or spread them over more nodes; "
    fix = f"{fewer}a smaller runner_config.batch_size and recompute_config need less; --force starts anyway"
    raise _error("nproc", options.worker_num, rule, fix)
