"""The profile of a model: measurements of each layer and of the members, kept as a JSON file.

All predictions take their seconds and bytes from a profile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from ds_dynatrain.errors import ProfileError
from ds_dynatrain.space.kind import WEIGHT

SECONDS = ("forward_seconds", "backward_seconds", "optimizer_seconds")
ERRORS = ("forward_error", "backward_error", "optimizer_error")
BYTES = ("activation_bytes", "output_bytes")
BESIDE = ("load_seconds", "message_seconds", "beside_seconds")
"""Fields of `Profile` with the times that a pipeline spends outside its layers."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, lt=2**53)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0)]
ExpertRows = tuple[tuple[int, ...], ...]
"""For each index of the expert axis in one layer: the numbers of the experts at this index."""
_STRICT = ConfigDict(strict=True, extra="forbid")


def _with_weight(sizes: Mapping[str, int]) -> Mapping[str, int]:
    if WEIGHT not in sizes:
        raise ProfileError(f"kind_bytes has no {WEIGHT!r}; give 0 if the layer has no parameters")
    return sizes


def _naming_field(cls: type[Any], values: Any, handler: Callable[[Any], Any]) -> Any:
    """Check the fields of a dataclass. Raises a ProfileError that names the layer and the field."""
    given = values.kwargs if isinstance(values, ArgsKwargs) else values
    name = given.get("name") if isinstance(given, Mapping) else given
    where = "the profile" if cls is Profile else f"{'layer' if cls is LayerCost else 'experts of'} {name!r}"
    try:
        return handler(values)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda each: each["loc"] != ("version",))
        at = ".".join(map(str, first["loc"])) or "it"
        said = "missing" if first["type"] == "missing" else f"{first['input']!r}: {first['msg']}"
        raise ProfileError(f"{where}: {at} is {said}") from None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LayerCost:
    """One layer, as measured on a member of speed 1. Raises ProfileError for an impossible value.

    forward_seconds: the forward pass of one micro-batch of `Profile.micro_batch_size` samples.
    backward_seconds: the backward pass of such a micro-batch.
    kind_bytes: the bytes of the whole layer, keyed by state kind. `weight` is always given, and is the only kind of a
        frozen layer.
    optimizer_seconds: one optimizer step over all elements of the layer.
    forward_error: the standard error of `forward_seconds`.
    backward_error: the standard error of `backward_seconds`.
    optimizer_error: the standard error of `optimizer_seconds`.
    activation_bytes: the bytes kept for one micro-batch from its forward pass to its backward pass.
    output_bytes: the bytes sent to the next layer for one micro-batch, and sent back as its gradient.
    trained: whether the optimizer steps any part of the layer.
    """

    name: str
    forward_seconds: Seconds
    backward_seconds: Seconds
    kind_bytes: Annotated[Mapping[str, Bytes], AfterValidator(_with_weight)]
    optimizer_seconds: Seconds = 0.0
    forward_error: Seconds = 0.0
    backward_error: Seconds = 0.0
    optimizer_error: Seconds = 0.0
    activation_bytes: Bytes = 0
    output_bytes: Bytes = 0
    trained: bool = True

    _check = model_validator(mode="wrap")(_naming_field)

    @property
    def total_bytes(self) -> int:
        """Total bytes of all state kinds, an upper bound on what is sent if the layer moves."""
        return sum(self.kind_bytes.values())


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ExpertCost:
    """The measured experts of one layer. Raises ProfileError for an impossible value.

    layer: the number, in the profile, of the layer that contains the experts. The layer's seconds include those of a
        rank's experts with the mean number of tokens.
    forward_seconds: the forward pass of such a rank's experts, for one micro-batch.
    backward_seconds: the backward pass of such a rank's experts, for one micro-batch.
    tokens: each expert's share of the tokens.
    rows: the experts of each index of the expert axis when they were measured.
    """

    name: str
    layer: Index
    forward_seconds: Seconds
    backward_seconds: Seconds
    tokens: Annotated[tuple[Seconds, ...], Field(min_length=1), Strict(False)]
    rows: Annotated[tuple[Annotated[tuple[Index, ...], Strict(False)], ...], Field(min_length=1), Strict(False)]

    _check = model_validator(mode="wrap")(_naming_field)

    def __post_init__(self) -> None:
        """Raise ProfileError unless each expert is in exactly one row, and all rows have the same length."""
        if len({*map(len, self.rows)}) > 1 or sorted(sum(self.rows, ())) != [*range(len(self.tokens))]:
            raise ProfileError(
                f"rows {self.rows} do not deal {len(self.tokens)} experts evenly; give equally long rows that name "
                "each expert once"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Profile:
    """The measured layers of a model, in order, with the members and the batch.

    Raises ProfileError for an impossible value.

    speeds: the relative speed of each member, by which the seconds of a layer are divided.
    train_batch_size: the samples of one optimizer step on all members together.
    micro_batch_size: the samples of a timed micro-batch.
    source: a description of where the numbers come from.
    experts: the layers' experts, in the order of the model, if `balance.experts` has them measured.

    These times of a pipeline are 0 if they were not measured:

    load_seconds: loading the samples of a micro-batch, on the first and on the last stage.
    message_seconds: the time that one message takes on each of the two stages, whatever its size.
    beside_seconds: the rest of a step, outside of layers, optimizer step, loading and messages.
    """

    layers: Annotated[tuple[LayerCost, ...], Field(min_length=1), Strict(False)]
    train_batch_size: Annotated[int, Field(ge=1, lt=2**53)]
    micro_batch_size: Annotated[int, Field(ge=1, lt=2**53)]
    speeds: Annotated[tuple[Speed, ...], Field(min_length=1), Strict(False)] = (1.0,)
    load_seconds: Seconds = 0.0
    message_seconds: Seconds = 0.0
    beside_seconds: Seconds = 0.0
    source: str = ""
    experts: Annotated[tuple[ExpertCost, ...], Strict(False)] = ()
    version: Literal[1] = 1

    _check = model_validator(mode="wrap")(_naming_field)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def trained(self) -> Bools:
        """Array [layers]: whether any part of each layer is trained."""
        return np.array([layer.trained for layer in self.layers])

    def seconds(self, name: str) -> Floats:
        """Return [layers]: the field `name` of `LayerCost`, which holds seconds or standard errors."""
        return np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64)

    @property
    def passes(self) -> Floats:
        """Array [layers]: the seconds of both passes of a micro-batch."""
        return self.seconds("forward_seconds") + self.seconds("backward_seconds")

    def forward_with_loading(self, stages: int) -> Floats:
        """Return [layers]: the seconds of a forward pass with this many stages.

        They include loading samples, which the first and the last stage do.
        """
        seconds = self.seconds("forward_seconds")
        seconds[0] += self.load_seconds
        if stages > 1:
            seconds[-1] += self.load_seconds
        return seconds

    def counts(self, name: str) -> Ints:
        """Return [layers]: the field or property `name` of `LayerCost`, which holds bytes."""
        return np.array([getattr(layer, name) for layer in self.layers], dtype=np.int64)

    def kind_bytes(self, kind: str) -> Ints:
        """Return [layers]: the bytes of one state kind; 0 for layers without that kind."""
        return np.array([layer.kind_bytes.get(kind, 0) for layer in self.layers], dtype=np.int64)

    def to_json(self) -> str:
        """Return the profile as JSON text, from which `from_json` restores it exactly."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile from the text of `to_json`.

        Raises ProfileError if the text is cut off, belongs to another version, or has wrong names.
        """
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ProfileError(f"no JSON, or the end is missing: {error.errors()[0]['msg']}") from None

    def save(self, file: str | Path) -> None:
        """Write the profile to a JSON file. Raises OSError if it cannot be written."""
        Path(file).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: str | Path) -> Profile:
        """Return the profile from a file that `save` wrote.

        Raises OSError if the file cannot be read, and ProfileError, naming the file, if the file is not a profile.
        """
        try:
            return cls.from_json(Path(file).read_text(encoding="utf-8"))
        except (ProfileError, UnicodeDecodeError) as error:
            raise ProfileError(f"{file}: {error}; save it anew with engine.balancer.profile.save(FILE)") from None
