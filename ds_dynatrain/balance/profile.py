"""The profile of a model: measurements of each layer and of the members, kept as a JSON file.

All predictions take their seconds and bytes from a profile.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynatrain.errors import ProfileError
from ds_dynatrain.space.kind import WEIGHT

VERSION = 1
"""Version of the file format. Other versions are refused."""

SECONDS = ("forward_seconds", "backward_seconds", "optimizer_seconds")
ERRORS = ("forward_error", "backward_error", "optimizer_error")
BYTES = ("activation_bytes", "output_bytes")
BESIDE = ("load_seconds", "message_seconds", "beside_seconds")
"""Fields of `Profile` that hold times of a pipeline outside its layers."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer, as measured on a member of speed 1.

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
    forward_seconds: float
    backward_seconds: float
    kind_bytes: Mapping[str, int]
    optimizer_seconds: float = 0.0
    forward_error: float = 0.0
    backward_error: float = 0.0
    optimizer_error: float = 0.0
    activation_bytes: int = 0
    output_bytes: int = 0
    trained: bool = True

    def __post_init__(self) -> None:
        """Raise ProfileError if a field has the wrong type, or is negative or not finite."""
        where = f"layer {self.name!r}"
        _check(isinstance(self.name, str), f"layer {self.name!r}: its name is no string")
        for name in (*SECONDS, *ERRORS):
            _check_seconds(where, name, getattr(self, name))
        _check(isinstance(self.kind_bytes, Mapping), f"{where}: kind_bytes is no object of bytes by state kind")
        _check(
            WEIGHT in self.kind_bytes, f"{where}: kind_bytes has no {WEIGHT!r}; give 0 if the layer has no parameters"
        )
        _check(isinstance(self.trained, bool), f"{where}: trained is {self.trained!r}; give true or false")
        counts = {f"kind_bytes[{kind!r}]": value for kind, value in self.kind_bytes.items()}
        for name, value in {**counts, **{name: getattr(self, name) for name in BYTES}}.items():
            _check_whole(where, name, value, 0)

    @property
    def total_bytes(self) -> int:
        """Total bytes of all state kinds: the most that moves with the layer."""
        return sum(self.kind_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measured layers of a model, in order, with the members and the batch.

    speeds: the relative speed of each member, by which the seconds of a layer are divided.
    train_batch_size: the samples of one optimizer step on all members together.
    micro_batch_size: the samples of a timed micro-batch.
    source: a description of where the numbers come from.

    These times of a pipeline are 0 if they were not measured:

    load_seconds: loading the samples of a micro-batch, on the first and on the last stage.
    message_seconds: one message between two stages, on each of them, whatever its size.
    beside_seconds: the rest of a step, outside of layers, optimizer step, loading and messages.
    """

    layers: tuple[LayerCost, ...]
    train_batch_size: int
    micro_batch_size: int
    speeds: tuple[float, ...] = (1.0,)
    load_seconds: float = 0.0
    message_seconds: float = 0.0
    beside_seconds: float = 0.0
    source: str = ""
    version: int = field(default=VERSION)

    def __post_init__(self) -> None:
        """Raise ProfileError for another version, for a profile without layers or members, and for invalid numbers."""
        _check(self.version == VERSION, f"version {self.version!r}: this is made for version {VERSION}")
        _check(len(self.layers) > 0, "there is no layer")
        _check(len(self.speeds) > 0, "speeds: there is no member")
        for member, speed in enumerate(self.speeds):
            _check_seconds(f"member {member}", "speed", speed)
            _check(speed > 0, f"member {member}: speed is 0; leave out a member that does nothing")
        for name in BESIDE:
            _check_seconds("the step", name, getattr(self, name))
        for name in ("train_batch_size", "micro_batch_size"):
            _check_whole("the batch", name, getattr(self, name), 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Array [layers]: whether any part of each layer is trained."""
        return np.array([layer.trained for layer in self.layers])

    def seconds(self, name: str) -> Floats:
        """Return [layers]: the field `name` of `LayerCost`, which holds seconds or standard errors."""
        return np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64)

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
        """Return the profile as JSON text, from which `from_json` restores every digit."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile from the text of `to_json`.

        Raises ProfileError if the text is cut off, belongs to another version, or has wrong names.
        """
        try:
            said = json.loads(text)
        except ValueError as error:
            raise ProfileError(f"no JSON, or the end is missing: {error}") from None
        _check(isinstance(said, dict), "no JSON object")
        version = said.get("version")
        _check(version == VERSION, f"version {version!r}: this is made for version {VERSION}")
        given = _fields(cls, said, "the profile")
        for name in ("layers", "speeds"):
            _check(isinstance(given.get(name, []), list), f"{name} is no list")
        layers = [LayerCost(**_fields(LayerCost, each, f"layer {place}")) for place, each in enumerate(given["layers"])]
        lists = {"layers": tuple(layers), **({"speeds": tuple(given["speeds"])} if "speeds" in given else {})}
        return cls(**{**given, **lists})

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


def _fields(kind: type[Any], said: Any, where: str) -> dict[str, Any]:
    """Return the fields of a JSON object as arguments of a dataclass.

    Raises ProfileError if names are missing or unknown.
    """
    _check(isinstance(said, dict), f"{where} is no object")
    known = dataclasses.fields(kind)
    unknown = sorted(set(said) - {each.name for each in known})
    _check(not unknown, f"{where}: no field {', '.join(map(repr, unknown))}")
    missing = [each.name for each in known if each.default is dataclasses.MISSING and each.name not in said]
    _check(not missing, f"{where}: {', '.join(missing)} missing")
    return dict(said)


def _check_seconds(where: str, name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _check(number and math.isfinite(value), f"{where}: {name} is {value!r}; give a finite number")
    _check(value >= 0, f"{where}: {name} is {value!r}, below 0")


def _check_whole(where: str, name: str, value: Any, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _check(whole and least <= value < 2**53, f"{where}: {name} is {value!r}; give a whole number from {least} on")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ProfileError(what)
