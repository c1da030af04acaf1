"""A group that serves two devices, by one back-end each, of which other groups may have one as well.

torch's own asks one of its back-ends what it is called, so of two that share one the first has the name of the second.
This one is in front of such a group, has its own name, and hands every collective on. (A class of Python that leaves
collectives to its base would keep Python's lock while these start.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as td
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName

from ds_dynatrain.adapters.device import HOST
from ds_dynatrain.adapters.torch_versions import COLLECTIVES


class Pair(td.ProcessGroup):
    """In front of `group`, which it keeps, and named as that is now."""

    def __init__(self, group: td.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # the one for classes of Python
        self._group, self._name = group, group.group_name
        self._set_default_backend(td.ProcessGroup.BackendType.GLOO)
        for device in group._device_types:
            super()._register_backend(device, td.ProcessGroup.BackendType.GLOO, group._get_backend(device))
        self._set_group_name(GroupName(self._name))

    @property
    def group_name(self) -> GroupName:
        """Its own, whatever its back-ends are called by now."""
        return GroupName(self._name)

    def renew(self, store: Store, device: torch.device, kind: td.ProcessGroup.BackendType, backend: Any) -> None:
        """Serve a device by another back-end from here on: torch's groups keep the first one of a kind. store: of a
        prefix that nobody has used.
        """
        behind = td.ProcessGroup(store, self.rank(), self.size())
        behind._set_default_backend(td.ProcessGroup.BackendType.GLOO)
        behind._register_backend(HOST, td.ProcessGroup.BackendType.GLOO, self._group._get_backend(HOST))
        behind.bound_device_id = self.bound_device_id
        behind._register_backend(device, kind, backend)
        behind._set_group_name(GroupName(self._name))
        self._group = behind

    def _get_backend(self, device: torch.device) -> Any:
        """The one that serves a device now."""
        return self._group._get_backend(device)

    def _register_backend(self, device: torch.device, kind: td.ProcessGroup.BackendType, backend: Any) -> None:
        """For another device, which the group behind it has to serve, too."""
        self._group.bound_device_id = self.bound_device_id
        self._group._register_backend(device, kind, backend)
        super()._register_backend(device, kind, backend)


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: Pair, *arguments: Any, **named: Any) -> Any:
        return getattr(self._group, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name in COLLECTIVES:
    setattr(Pair, _name, _handed_on(_name))
