"""The exceptions of ds_dynatrain: one tree, each with what failed and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


class DynatrainError(Exception):
    """Base of every exception that ds_dynatrain raises on purpose."""


class ConfigError(DynatrainError):
    """The `dynatrain` block or a call's arguments cannot be used as they stand."""


class UnsupportedError(ConfigError):
    """A feature of DeepSpeed, torch or the model that a live switch would handle wrongly today; refused by name."""


class LayoutError(DynatrainError):
    """A layout is impossible in itself or in this world; the message has the arithmetic."""


class ProfileError(DynatrainError):
    """A profile cannot be used: it belongs to another model or version, is truncated, or has an impossible number."""


class DataError(DynatrainError):
    """A data set, sampler or batch size cannot be divided exactly over the ranks of the requested layouts."""


class SwitchRefused(DynatrainError):  # noqa: N818 - a refusal is an answer, not a failure
    """A switch was asked for and cannot be done; nothing has changed.

    reason: why, with the numbers that failed.
    way_out: what to do instead, such as the nearest valid layout or a setting.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}; {way_out}" if way_out else reason)
        self.reason = reason
        self.way_out = way_out


class SwitchFailed(DynatrainError):  # noqa: N818
    """A switch failed before its commit and is rolled back; the cause is chained."""


class OutcomeUnknown(DynatrainError, RuntimeError):  # noqa: N818
    """The record that decides could not be read: other members may have committed, so this one must not continue
    training.

    Its state is that from before the call. End the process; in an elastic job, another one takes its place.
    """

    def __init__(self, what: str, seconds: float, reason: str) -> None:
        super().__init__(
            f"{what}: the record of its outcome could not be read for {seconds:g} s ({reason}). Other members may have "
            "committed, so this one trains no further: end this process, and start the job again from a checkpoint if "
            "all of its processes have ended"
        )


class CensusError(SwitchFailed):
    """The live buffers of DeepSpeed are not where the layout says; the message names tensor, state kind and numbers."""


class CertificateError(SwitchFailed):
    """A digest, a replica or extra state differs between the two sides of a switch; the message names what."""


class TransferError(SwitchFailed):
    """A send, a receive or a wait failed; the message names the peer."""


class MemberMissing(TransferError):  # noqa: N818
    """A wait for `what` timed out after `seconds`; `members` are those that did not answer."""

    def __init__(self, what: str, members: Iterable[int], seconds: float) -> None:
        self.what, self.members, self.seconds = what, tuple(sorted(members)), seconds
        names = ", ".join(str(member) for member in self.members)
        super().__init__(f"{what}: no answer from member {names} within {seconds:g} s")


class CheckpointError(DynatrainError):
    """A checkpoint could not be saved or loaded; training goes on as before."""


class CheckpointDamaged(CheckpointError):  # noqa: N818
    """A checkpoint on disk is not as it was saved, or is of another format; the message names the file, or tensor and
    kind.
    """


class WeightsError(DynatrainError):
    """Weights could not be read or loaded by `ds_dynatrain.weights`; the engine is as before the call."""


class ElasticError(DynatrainError):
    """A setting, a message or an answer about membership cannot be used; nothing was joined."""


class MessageError(ElasticError):
    """Bytes that are no message of the protocol; the error says which field is wrong and why."""


class PeerRefused(ElasticError):  # noqa: N818
    """The coordinator does not admit this process, or no longer does; the message is its reason."""


class CoordinatorUnproved(PeerRefused):
    """The server at the coordinator's address has not proved that it is the job's coordinator.

    A process that was admitted before goes on looking for the coordinator; one that starts ends with this error.
    """


class JobFinished(ElasticError):  # noqa: N818 - an end, not a failure
    """The scripts of the working members have ended, so processes that wait for work can go."""


class WorldChanged(ElasticError, RuntimeError):  # noqa: N818 - not a failure of the caller's
    """The world for which a call was meant is over: a member is gone, or another generation was published.

    Collectives of the user's script raise it; the script goes on with the loader's next batch.
    """
