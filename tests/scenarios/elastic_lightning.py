"""A user's script with a Trainer of Lightning, which an elastic launch refuses."""

from __future__ import annotations

import lightning

from ds_dynatrain.integrations.lightning import DynatrainStrategy

lightning.Trainer(devices=1, strategy=DynatrainStrategy(config={"train_batch_size": 12, "dynatrain": {}}), logger=False)
