"""Transfer of bytes from shard to shard, and the digests that prove that they arrived.

`execute` carries out a member's plan over a `Transport`. `digest` and `digest_pieces` compute the numbers that are
compared before and after a switch. `allocate` and `prefault` prepare memory before it is needed.

May import `plan`; start with `executor`.
"""

from ds_dynatrain.transfer.batched import Batching, DeviceLink
from ds_dynatrain.transfer.device_memory import device_memory
from ds_dynatrain.transfer.digests import Form, ReadyDigest, digest, digest_on_device, digest_pieces
from ds_dynatrain.transfer.executor import ReadyPlan, TransferStats, execute, execute_standing_in
from ds_dynatrain.transfer.neighbors import Neighbors, RoutedTransport
from ds_dynatrain.transfer.prefault import allocate, prefault
from ds_dynatrain.transfer.pulling import Sharing
from ds_dynatrain.transfer.regions import Buffers
from ds_dynatrain.transfer.transport import GroupTransport, Handle, Transport, send_down
from ds_dynatrain.transfer.weighing import is_compiled

__all__ = [
    "Batching",
    "Buffers",
    "DeviceLink",
    "Form",
    "GroupTransport",
    "Handle",
    "Neighbors",
    "ReadyDigest",
    "ReadyPlan",
    "RoutedTransport",
    "Sharing",
    "TransferStats",
    "Transport",
    "allocate",
    "device_memory",
    "digest",
    "digest_on_device",
    "digest_pieces",
    "execute",
    "execute_standing_in",
    "is_compiled",
    "prefault",
    "send_down",
]
