"""Checks whether this machine can run a job: versions, DeepSpeed's private names, accelerator, compiler, variables."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from ds_dynatrain.cli.trial_switch import tried_switch
from ds_dynatrain.report.check import Check
from ds_dynatrain.support.proved import CPU, PARTS, warning
from ds_dynatrain.version import __version__

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
TESTED_DEEPSPEED = ("0.19.8", "0.19.6", "0.19.2", "0.18.9")
OLDEST_TORCH = (2, 11)
TESTED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.15.0")
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "DS_ACCELERATOR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
)
"""Environment variables that affect a launch."""
LONGEST_COMPILATION_MINUTES = 15
LOOPBACK = "::ffff:127.0.0.1"
"""This machine's address in the form in which torch's stores see a local process. /etc/hosts has no line for it."""
LOOK_UPS, LONGEST_LOOK_UP_SECONDS = 3, 0.5
STATUS = "tested on CPUs over gloo; on GPUs only with a fixed number of processes on one shared card"
"""The package's status. The box at the top of README.md uses the same words."""


@dataclass(frozen=True)
class Environment:
    """The results of examining this machine.

    checks: the results; a job can start unless one is bad.
    variables: the environment variables in `VARIABLES` that are set, with their values.
    """

    checks: tuple[Check, ...]
    variables: dict[str, str]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks whose results prevent a start."""
        return tuple(check.name for check in self.checks if check.is_well is False)

    @property
    def has_deepspeed(self) -> bool:
        """Whether DeepSpeed is installed with all the private names that this package uses."""
        return any(check.name == "names" and check.is_well for check in self.checks)


def examine_environment(tries_switch: bool = False) -> Environment:
    """Examine this machine and this process's environment. Takes seconds, because it imports torch and DeepSpeed.

    tries_switch: whether to try a switch between two processes as well, unless another check already prevents a start.
    """
    status = Check("status", "alpha", note=STATUS)
    checks = (status, *_versions(), *_deepspeed(), _compiler(), *_digests(), _name_server(), *_broken_off())
    environment = Environment(checks, {name: os.environ[name] for name in VARIABLES if name in os.environ})
    if tries_switch and not environment.failed:
        return replace(environment, checks=(*checks, tried_switch()))
    return environment


def _versions() -> Iterator[Check]:
    yield Check("ds_dynatrain", __version__, True)
    python = sys.version_info[:2]
    fits = OLDEST_PYTHON <= python <= NEWEST_PYTHON
    yield Check("Python", platform.python_version(), fits, "" if fits else "use Python 3.10 to 3.13")
    yield _torch()
    yield _deepspeed_version()
    if (transformers := _version("transformers")) is not None:
        yield Check("transformers", transformers)


def _torch() -> Check:
    found, oldest = _version("torch"), ".".join(map(str, OLDEST_TORCH))
    if found is None:
        return Check("torch", "not installed", False, f"pip install 'torch>={oldest}'")
    release = found.split("+")[0]
    if tuple(int(part) for part in release.split(".")[:2]) < OLDEST_TORCH:
        return Check("torch", found, False, f"{oldest} or newer is needed: pip install 'torch>={oldest}'")
    return Check("torch", found, True, "a version that is tested" if release in TESTED_TORCH else "")


def _deepspeed_version() -> Check:
    found = _version("deepspeed")
    if found is None:
        return Check("DeepSpeed", "not installed", False, f"pip install deepspeed=={TESTED_DEEPSPEED[0]}")
    if found.split("+")[0] in TESTED_DEEPSPEED:
        return Check("DeepSpeed", found, True, "a version that is tested")
    tested = " and ".join(TESTED_DEEPSPEED)
    return Check("DeepSpeed", found, None, f"tested with {tested}; the line `names` says if this one may do")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _deepspeed() -> Iterator[Check]:
    """Check DeepSpeed's private names and the accelerator. Anything that DeepSpeed prints on import goes to stderr."""
    with redirect_stdout(sys.stderr):
        try:
            import torch
            from deepspeed.accelerator import get_accelerator

            from ds_dynatrain import adapters  # noqa: F401

            device = str(get_accelerator().device_name())
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
        except Exception as error:  # a broken installation fails in many ways, and each of them is worth showing
            yield Check("names", "not found", False, f"{type(error).__name__}: {error}")
            return
    yield Check("names", "all found", True, "the private names of DeepSpeed's that are relied on")
    harmless = f"torch is built for {built} too, which does no harm" if built else ""
    is_cpu = device == CPU
    yield Check("accelerator", device, is_cpu or None, harmless if is_cpu else warning(device, PARTS))


def _compiler() -> Check:
    """Check for a C++ compiler and ninja, which DeepSpeed needs to compile operators."""
    wanted = os.environ.get("CXX", "c++")
    found = shutil.which(wanted)
    ninja = shutil.which("ninja") or _version("ninja")
    if found is not None and ninja:
        return Check("C++ compiler", found, None, "DeepSpeed compiles operators with it at first use: CPU Adam, Lion")
    lacking = " and ".join(what for what, there in ((wanted, found), ("ninja", ninja)) if not there)
    return Check("C++ compiler", f"no {lacking}", None, "works without, except for DeepSpeed's own CPU optimizers")


def _digests() -> Iterator[Check]:
    """Check whether this installation computes digests with compiled code or with numpy."""
    if _version("torch") is None:
        return
    from ds_dynatrain.transfer import is_compiled

    if is_compiled():
        yield Check("digests", "compiled", True, "by the C compiler that was there at installation")
    else:
        yield Check("digests", "in numpy", None, "right, but slower: install again where a C compiler is")


def _name_server() -> Check:
    """Measure how long reverse look-ups of an address without a name take.

    torch's stores do such a look-up at each connection, and serve no other client in the meantime.
    """
    longest = 0.0
    for _ in range(LOOK_UPS):
        begin = time.monotonic()
        with suppress(OSError):  # "no such name" is also an answer
            socket.getnameinfo((LOOPBACK, 0), 0)
        longest = max(longest, time.monotonic() - begin)
    is_quick = longest < LONGEST_LOOK_UP_SECONDS
    note = "" if is_quick else "torch's stores stand still so long at each connection: set RES_OPTIONS=timeout:1"
    return Check("name server", f"{longest * 1000:.0f} ms", True if is_quick else None, note)


def _broken_off() -> Iterator[Check]:
    """Find lock files of interrupted compilations, for which torch would wait silently and without limit.

    Not needed since torch 2.14, whose locks are held by the kernel and released when a process dies; there, remaining
    files have no effect.
    """
    if _version("torch") is None:
        return
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    for lock in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        try:
            minutes = (time.time() - lock.stat().st_mtime) / 60
            is_left = _is_left(lock)
        except FileNotFoundError:  # the compilation has just finished
            continue
        if is_left or minutes > LONGEST_COMPILATION_MINUTES:
            note = f"a compilation begun {minutes:.0f} minutes ago was broken off"
            if minutes <= LONGEST_COMPILATION_MINUTES:
                note += ", unless another machine shares this folder and compiles now"
            yield Check("lock", str(lock), False, f"{note}, and every start waits for it: delete this file")


def _is_left(lock: Path) -> bool:
    """Return whether a lock file was left behind: no process on this machine has it open.

    The holder of a lock keeps the file open while it compiles. Returns False if this cannot be determined: for another
    user's lock, or without /proc. Raises FileNotFoundError if the file is gone.
    """
    made = lock.stat()
    if os.geteuid() not in (0, made.st_uid) or not Path("/proc/self/fd").is_dir():
        return False
    for held in Path("/proc").glob("[0-9]*/fd/*"):
        # the file was closed, or a process of another user has it open and cannot hold this lock
        with suppress(OSError):
            if os.path.samestat(held.stat(), made):
                return False
    return True
