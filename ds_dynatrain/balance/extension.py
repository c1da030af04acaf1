"""The extension that times layers and members, and says or does what would be faster."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.pipeline import PROFILE, Cut
from ds_dynatrain.balance.balancer import Balancer
from ds_dynatrain.balance.partition import Problem, partition
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.suggesting import best, profile_for, step_ms
from ds_dynatrain.config import BalanceConfig, DynatrainConfig
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import ConfigError, LayoutError, ProfileError
from ds_dynatrain.extension import Extension
from ds_dynatrain.space import Layout

KEY = "dynatrain.balance.profile"


class Balance(Extension):
    """The `balance` block of a job. balancer: what `engine.balancer` gives; None in mode "off"."""

    name = "balance"
    balancer: Balancer | None = None

    def __init__(self, settings: DynatrainConfig) -> None:
        self._settings = settings.balance or BalanceConfig()
        self._configured: Profile | None = None
        self._described: dict[str, str] = {}

    @property
    def profile(self) -> Profile | None:
        """What was measured, or else the profile of the configuration."""
        measured = None if self.balancer is None else self.balancer.profile
        return measured or self._configured

    # ---- when an engine is made --------------------------------------------------------------------------------------

    def stage_cut(self, config: Mapping[str, Any], exchange: Callable[[str, Any], Mapping[int, Any]]) -> Cut | None:
        """Cut layers where the configured profile says, for `pipeline.partition: "profile"`.

        DeepSpeed has the name, and raises. ConfigError for a profile that cannot be read or is not the same on all
        processes.
        """
        file = self._settings.profile
        if file is None or str((config.get("pipeline") or {}).get("partition", "")).lower() != PROFILE:
            return None
        try:
            profile = Profile.load(Path(file))
        except (OSError, ProfileError) as error:
            raise ConfigError(f"{KEY}: {error}") from error
        seconds = profile.seconds("forward_seconds") + profile.seconds("backward_seconds")
        digest = hashlib.blake2b(seconds.tobytes(), digest_size=16).hexdigest()
        self._described = {f"{KEY}: digest of its layers": digest}
        for member, other in sorted(exchange("partition", digest).items()):
            if other != digest:
                raise ConfigError(
                    f"{KEY}: {file} has other layers here than on member {member}; give all processes the same file"
                )

        def cut(layers: int, stages: int) -> tuple[int, ...]:
            if layers != len(seconds):
                raise LayoutError(
                    f"{KEY}: {file} is of another model: it has {len(seconds)} layers, and this one has {layers}; "
                    "write one of this model with engine.balancer.profile.save(FILE)"
                )
            return partition(Problem.of(seconds, stages)).boundaries

        return cut

    def described(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return a digest of the profile by which layers are dealt to stages; {} where none is used."""
        return self._described

    def attach(self, engine: Any) -> None:
        """Read the configured profile, whose file may be gone later, and begin to measure."""
        super().attach(engine)
        parts: EngineParts = engine._parts
        if self._settings.profile is not None:
            try:
                self._configured = profile_for(parts, self._settings.profile)
            except (OSError, ProfileError) as error:
                raise ConfigError(f"{KEY}: {error}") from error
        if self._settings.measures:
            self.balancer = Balancer(parts, self._settings)

    # ---- which layout ------------------------------------------------------------------------------------------------

    def step_ms(self, layout: Layout, members: Sequence[int]) -> dict[str, float]:
        """Return predicted milliseconds of a step, term by term, and their `total`; nothing without a profile."""
        return {} if self.profile is None else step_ms(self.engine._parts, self.profile, layout, members)

    def best_layouts(self, members: int) -> Iterator[Layout] | None:
        """Return the fastest layouts by the profile; None as long as there is none."""
        return None if self.profile is None else best(self.engine._parts, self.profile, members)

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def around_forward(self) -> AbstractContextManager[None]:
        """Time a forward pass of training if its step is in a window."""
        return self._around_pass(is_backward=False)

    def around_backward(self) -> AbstractContextManager[None]:
        """Time a backward pass if its step is in a window."""
        return self._around_pass(is_backward=True)

    def _around_pass(self, is_backward: bool) -> AbstractContextManager[None]:
        if self.balancer is None or not self.engine.module.training:
            return nullcontext()
        return self.balancer.timed_pass(is_backward)

    def around_batch(self) -> AbstractContextManager[None]:
        """Time the layers of a stage if the step is in a window."""
        return nullcontext() if self.balancer is None else self.balancer.timed_step()

    def around_update(self) -> AbstractContextManager[None]:
        """Time the optimizer's step if it is in a window."""
        return nullcontext() if self.balancer is None else self.balancer.timed_update()

    def after_step(self) -> None:
        """End the window that is over; a collective of the world then."""
        if self.balancer is not None:
            self.balancer.finish_step()
