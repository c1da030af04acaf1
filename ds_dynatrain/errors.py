"""The exceptions of ds_dynatrain: one class tree. Each message says what failed and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


class DynatrainError(Exception):
    """Base class of every exception that ds_dynatrain raises on purpose."""


class ConfigError(DynatrainError):
    """The `dynatrain` block or the arguments of a call cannot be used as given."""


class UnsupportedError(ConfigError):
    """A feature of DeepSpeed, torch or the model is refused, because a live switch would not handle it correctly. The
    message names the feature."""


class LayoutError(DynatrainError):
    """A layout is invalid, by itself or in this world; the message has the arithmetic."""


class ProfileError(DynatrainError):
    """A profile cannot be used, because it belongs to another model or version, is truncated, or contains an invalid
    number."""


class DataError(DynatrainError):
    """A data set, sampler or batch size cannot be divided exactly over the ranks of the requested layouts."""


class SwitchRefused(DynatrainError):  # noqa: N818 - a refusal is an answer, not a failure
    """A requested switch cannot be made; nothing has changed.

    reason: why it cannot be made, with the numbers that failed.
    way_out: what to do instead, such as the nearest valid layout or a setting.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}; {way_out}" if way_out else reason)
        self.reason = reason
        self.way_out = way_out


class SwitchFailed(DynatrainError):  # noqa: N818
    """A switch failed before its commit and was rolled back; the cause is chained."""


class OutcomeUnknown(DynatrainError, RuntimeError):  # noqa: N818
    """The record of a decision could not be read: other members may have committed, so this one must not continue
    training.

    The call has left this member's state unchanged. End the process; in an elastic job, another one takes its place.
    """

    def __init__(self, what: str, seconds: float, reason: str) -> None:
        super().__init__(
            f"{what}: the record of its outcome could not be read for {seconds:g} s ({reason}). Other members may have "
            "committed, so this one trains no further: end this process, and start the job again from a checkpoint if "
            "all of its processes have ended"
        )


class CensusError(SwitchFailed):
    """DeepSpeed's live buffers do not match the layout; the message names the tensor, the state kind and the
    numbers."""


class CertificateError(SwitchFailed):
    """A digest, a replica or extra state differs between the two sides of a switch; the message names the
    difference."""


class TransferError(SwitchFailed):
    """A send, a receive or a wait failed; the message names the peer."""


class MemberMissing(TransferError):  # noqa: N818
    """A wait for `what` timed out after `seconds`; `members` did not answer."""

    def __init__(self, what: str, members: Iterable[int], seconds: float) -> None:
        self.what, self.members, self.seconds = what, tuple(sorted(members)), seconds
        names = ", ".join(str(member) for member in self.members)
        super().__init__(f"{what}: no answer from member {names} within {seconds:g} s")


class CheckpointError(DynatrainError):
    """A checkpoint could not be saved or loaded; training continues as before."""


class CheckpointDamaged(CheckpointError):  # noqa: N818
    """A checkpoint on disk differs from what was saved, or has another format; the message names the file, or the
    tensor and state kind."""


class WeightsError(DynatrainError):
    """Weights could not be read or loaded by `ds_dynatrain.weights`; the engine is left unchanged."""


class ElasticError(DynatrainError):
    """A setting, a message or an answer of an elastic job's membership is invalid; the process has not joined a job."""


class MessageError(ElasticError):
    """Bytes are not a message of the protocol; the error names the wrong field and the reason."""


class PeerRefused(ElasticError):  # noqa: N818
    """The coordinator does not admit this process, or no longer does; the message is the coordinator's reason."""


class CoordinatorUnproved(PeerRefused):
    """The server at the coordinator's address has not proved that it is the job's coordinator.

    A process that was admitted before continues to look for the coordinator; a process that is starting ends with this
    error.
    """


class JobFinished(ElasticError):  # noqa: N818 - an end, not a failure
    """The scripts of the working members have ended, so processes that wait for work can end."""


class WorldChanged(ElasticError, RuntimeError):  # noqa: N818 - not a failure of the caller's
    """The world for which a call was meant is over: a member is gone, or another generation was published.

    Collectives of the user's script raise this error; the script continues with the loader's next batch.
    """
