"""`pipeline.partition: "profile"`: stages begin where a profile says. DeepSpeed has the name, and raises.

`balance` is imported where it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.pipeline import PROFILE, Cut
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.members.entry import Entry
from ds_dynatrain.errors import ConfigError, LayoutError, ProfileError

LAYERS = "layers in dynatrain.balance.profile"
"""What they are called among that in which processes must agree."""


def cut_by_profile(own: Mapping[str, Any], settings: DynatrainConfig, entry: Entry, said: dict[str, str]) -> Cut | None:
    """What cuts so many layers into so many stages by the profile of the configuration; None if nobody asks for it.

    said: what a process that joins has in common with the job; gets a word on the profile. ConfigError without a
    profile, and for one that cannot be read or is not the same on all processes.
    """
    if str((own.get("pipeline") or {}).get("partition", "")).lower() != PROFILE:
        return None
    file = None if settings.balance is None else settings.balance.profile
    if file is None:
        raise ConfigError(
            f'pipeline.partition "{PROFILE}" cuts stages by a profile: name its file in dynatrain.balance.profile '
            '("mode": "off" beside it measures nothing), or give "parameters" until `engine.balancer.profile.save` has '
            "written one"
        )
    from ds_dynatrain.balance.partition import Problem, partition
    from ds_dynatrain.balance.profile import Profile

    try:
        profile = Profile.load(Path(file))
    except (OSError, ProfileError) as error:
        raise ConfigError(f"dynatrain.balance.profile: {error}") from error
    seconds = profile.seconds("forward_seconds") + profile.seconds("backward_seconds")
    said[LAYERS] = hashlib.blake2b(seconds.tobytes(), digest_size=16).hexdigest()
    for member, other in sorted(entry.exchange("partition", said[LAYERS]).items()):
        if other != said[LAYERS]:
            raise ConfigError(
                f"dynatrain.balance.profile: {file} has other layers here than on member {member}; give all processes "
                "the same file"
            )

    def cut(layers: int, stages: int) -> tuple[int, ...]:
        if layers != len(seconds):
            raise LayoutError(
                f"dynatrain.balance.profile: {file} is of another model: it has {len(seconds)} layers, and this one "
                f"has {layers}; write one of this model with engine.balancer.profile.save(FILE)"
            )
        return partition(Problem.of(seconds, stages)).boundaries

    return cut
