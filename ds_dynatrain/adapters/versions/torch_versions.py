"""Differences between the versions of torch with which this package runs. No other file asks for torch's version.

The private names that the adapters need are looked up one by one, so a newer torch is accepted as long as it has them.
`check_torch` reports missing names at import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as td
from packaging.version import Version
from torch._C._distributed_c10d import Backend, FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

OLDEST = "2.11"
TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.15.0")
"""The versions with which the tests ran, fully or in part; docs/versions.md says more."""

NAMES: Mapping[str, str] = {
    "torch._C": "_AutoDispatchBelowAutograd",
    "torch._C._distributed_c10d": """
        Backend Backend.eager_connect_single_device Backend.supports_splitting FakeProcessGroup
        FakeProcessGroup.Options.error_on_collective FakeProcessGroup._create_internal HashStore PrefixStore Store
        Store.clone Work _DistributedBackendOptions _unregister_process_group
    """,
    "torch.cpu": "_is_amx_fp16_supported _is_amx_tile_supported _is_avx512_bf16_supported",
    "torch._dynamo": "reset",
    "torch._dynamo.callback": "callback_handler",
    "torch._dynamo.eval_frame": "OptimizedModule",
    "torch.distributed": """
        Backend._plugins ProcessGroup._allgather_base ProcessGroup._device_types ProcessGroup._end_coalescing
        ProcessGroup._get_backend ProcessGroup._reduce_scatter_base ProcessGroup._register_backend
        ProcessGroup._set_default_backend ProcessGroup._set_group_name ProcessGroup._start_coalescing
        ProcessGroup.bound_device_id ProcessGroupGloo
    """,
    "torch.distributed.distributed_c10d": """
        GroupName _get_default_group _get_default_store _update_default_pg _world.group_count _world.pg_backend_config
        _world.pg_group_ranks _world.pg_map _world.pg_names _world.pg_to_tag _world.tags_to_pg
    """,
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils.file_baton": "FileBaton.wait",
}
"""A map from each module of torch to the names in it, most of them private, on which the adapters rely."""

REGISTERING = ("_register_pg_in_world", "_update_process_group_global_state")
"""Names of the function that makes a group known to `torch.distributed`: first the name since torch 2.13, then the
earlier one."""

NO_COLLECTIVES = frozenset(
    {
        *("BackendType", "name", "rank", "size", "set_timeout", "get_group_store", "boxed", "unbox", "get_backend"),
        *("abort", "shutdown", "split_group", "merge_remote_group", "reconfigure", "get_reconfigure_handle"),
        *("register_abort_hook", "register_pre_hook", "register_post_hook"),
        *("unregister_abort_hook", "unregister_pre_hook", "unregister_post_hook"),
    }
)
"""Methods of torch's process groups that are not collectives: they send nothing to peers, or they make, change or end a
group."""
HIDDEN_COLLECTIVES = ("_allgather_base", "_reduce_scatter_base")
COLLECTIVES = tuple(
    name
    for name in dir(td.ProcessGroup)
    if callable(getattr(td.ProcessGroup, name))
    and (name in HIDDEN_COLLECTIVES if name.startswith("_") else name not in NO_COLLECTIVES)
)
"""Names of the collectives of process groups in the installed version of torch: all methods that are not in
`NO_COLLECTIVES`. The names change from time to time."""


def tested_torches() -> str:
    """Return the versions with which the tests ran, for messages."""
    return f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"


def check_torch(version: str | None = None, names: Mapping[str, str] = NAMES) -> None:
    """Raise ImportError, naming this version and the tested ones, if torch is too old or lacks a name."""
    version = version or torch.__version__
    if Version(version).release < Version(OLDEST).release:
        raise ImportError(
            f"torch {version} is installed; ds_dynatrain needs {OLDEST} or newer and is tested with "
            f"{tested_torches()}: install one of these"
        )
    missing = [f"{module}.{name}" for module, row in names.items() for name in row.split() if not has(module, name)]
    if not any(hasattr(c10d, name) for name in REGISTERING):
        missing.append(f"{c10d.__name__}.{REGISTERING[0]}")
    if missing:
        raise ImportError(
            f"ds_dynatrain relies on names that torch {version} does not have: {', '.join(missing)}. It is tested with "
            f"torch {tested_torches()}: install one of these, or a newer ds_dynatrain"
        )


def has(module: str, name: str) -> bool:
    """Return whether the given module can be imported and has the given name, which may be dotted."""
    try:
        held: object = importlib.import_module(module)
        for part in name.split("."):
            held = getattr(held, part)
    except (ImportError, AttributeError):
        return False
    return True


def register_in_world() -> Callable[..., None]:
    """Return the function that makes a group known to `torch.distributed`. It takes the same arguments in all
    versions."""
    found: Any = next(getattr(c10d, name) for name in REGISTERING if hasattr(c10d, name))
    return found  # type: ignore[no-any-return]


def attends_without_heads() -> bool:
    """Return whether attention works on a rank without heads. On a CPU it crashes before torch 2.12 (SIGFPE)."""
    return Version(torch.__version__).release >= Version("2.12").release


def fake_backend(rank: int, size: int) -> Backend:
    """Return torch's back-end without peers. Its collectives return at once; their results differ between versions."""
    made: Backend = FakeProcessGroup._create_internal(rank, size)
    return made


def failing_backend(rank: int, size: int) -> Backend:
    """Return a back-end whose collectives raise RuntimeError, for groups whose collectives must not reach it."""
    kind: Any = FakeProcessGroup
    options = kind.Options()
    options.error_on_collective = True
    made: Backend = kind._create_internal(rank, size, options)
    return made
