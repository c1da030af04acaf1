"""PyTorch Lightning over a world that changes: `Trainer(strategy="dynatrain", ...)`, or a `DynatrainStrategy`.

    import ds_dynatrain.integrations.lightning  # registers the name

`strategy` is Lightning's DeepSpeedStrategy over our engine, with its own view of the world, of data and of models.
`steps` trains the micro-batches of a global batch with a user's `training_step`. `carried` is the state that a process
takes over when it begins to work, and that a checkpoint holds. `collectives` are those of a world that may be lost.
`checkpoints` writes and reads checkpoints. `settings`
reads the DeepSpeed configuration, `refusals` lists unsupported features, and `callbacks` requests switches. Private
names of Lightning are listed in `names` and checked at import.
"""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from ds_dynatrain.integrations.lightning import names
from ds_dynatrain.integrations.lightning.callbacks import SwitchCallback
from ds_dynatrain.integrations.lightning.strategy import DynatrainStrategy
from ds_dynatrain.integrations.shared.names import check

__all__ = ["DynatrainStrategy", "SwitchCallback"]

check(names.NAMES, "lightning", "lightning")
if DynatrainStrategy.strategy_name not in StrategyRegistry:
    DynatrainStrategy.register_strategies(StrategyRegistry)
