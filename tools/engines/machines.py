"""A second machine for a cluster, as far as networks go: a Linux network namespace with a cable to this one."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from tools.engines.pieces import Missing

_NAME = f"shards{os.getpid()}"
# 198.18.0.0/15 is reserved for tests between machines (RFC 2544): four addresses for each process that may run this.
_OCTETS = divmod(os.getpid() % (1 << 14) * 4, 256)


class Machines(NamedTuple):
    """This machine and a second one, each with a localhost of its own.

    Attributes:
        here: address of this one.
        there: address of the second one.
        on_second: begin a command with it, and it runs there.
    """

    here: str
    there: str
    on_second: Sequence[str]


@functools.cache
def two_machines() -> Machines:
    """Connect a second machine, which is gone when this process ends.

    Raises:
        Missing: only root may, with Linux' `ip`.
    """
    how = (
        "run it as root on Linux with ip (Debian: apt-get install iproute2); a network namespace is the second machine"
    )
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise Missing(how)
    here, there = (f"198.18.{_OCTETS[0]}.{_OCTETS[1] + number}" for number in (1, 2))
    atexit.register(_remove)
    for command in (
        f"netns add {_NAME}",
        f"link add {_NAME} type veth peer name cable netns {_NAME}",
        f"addr add {here}/30 dev {_NAME}",
        f"link set {_NAME} up",
        f"-n {_NAME} addr add {there}/30 dev cable",
        f"-n {_NAME} link set cable up",
        f"-n {_NAME} link set lo up",
    ):
        done = subprocess.run(["ip", *command.split(" ")], capture_output=True, text=True)
        if done.returncode != 0:
            raise Missing(f"{how} (ip {command} failed: {' '.join(done.stderr.split())})")
    return Machines(here, there, ("ip", "netns", "exec", _NAME))


def _remove() -> None:
    for command in (("link", "del", _NAME), ("netns", "del", _NAME)):
        subprocess.run(["ip", *command], capture_output=True)
