"""Names of Lightning that are not public API, and on which this integration relies."""

from __future__ import annotations

_LOOPS = "lightning.pytorch.loops"
_CONNECTORS = "lightning.pytorch.trainer.connectors"

NAMES = {
    "lightning.pytorch.strategies.deepspeed.DeepSpeedStrategy": (
        "_auto_select_batch_size _format_batch_size_and_grad_accum_config _init_config_if_needed "
        "_init_deepspeed_distributed _init_optimizers _initialize_deepspeed_train _load_config "
        "_setup_model_and_optimizer deepspeed_engine handles_gradient_accumulation restore_checkpoint_after_setup"
    ),
    "lightning.fabric.strategies.deepspeed": "_validate_device_index_selection",
    "lightning.fabric.utilities.seed": "reset_seed",
    "lightning.pytorch.strategies.ddp.DDPStrategy": "set_world_ranks setup_environment",
    "lightning.pytorch.core.module.LightningModule": "_on_before_batch_transfer",
    f"{_LOOPS}.loop": "_Loop",
    f"{_LOOPS}.loop._Loop": "_load_from_state_dict state_dict",
    f"{_LOOPS}.fit_loop._FitLoop": "setup_data _should_reload_train_dl",
    f"{_LOOPS}.evaluation_loop._EvaluationLoop": "_on_evaluation_model_train",
    f"{_LOOPS}.fetchers": "_DataLoaderIterDataFetcher _PrefetchDataFetcher",
    f"{_LOOPS}.optimization.automatic": "_AutomaticOptimization",
    f"{_LOOPS}.optimization.automatic._AutomaticOptimization": "run _make_zero_grad_fn _optimizer_step",
    f"{_CONNECTORS}.logger_connector.result": "_ResultCollection",
    f"{_CONNECTORS}.logger_connector.logger_connector._LoggerConnector": "on_batch_start reset_metrics reset_results",
    f"{_CONNECTORS}.signal_connector._SignalConnector": "register_signal_handlers",
    "lightning.pytorch.trainer.call": (
        "_call_callbacks_load_state_dict _call_callbacks_state_dict _call_lightning_module_hook _call_strategy_hook"
    ),
}
