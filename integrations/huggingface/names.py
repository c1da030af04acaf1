"""Names of transformers and Accelerate that are not public API, and on which this integration relies."""

from __future__ import annotations

TRAINER = {
    "transformers.trainer": "Trainer _is_peft_model",
    "transformers.trainer.Trainer": (
        "get_train_dataloader _init_training_state _prepare_for_training get_batch_samples _get_num_items_in_batch "
        "training_step _maybe_log_save_evaluate _save_checkpoint _save_optimizer_and_scheduler _save_rng_state "
        "_load_rng_state _load_optimizer_and_scheduler floating_point_ops _track_num_input_tokens "
        "get_total_train_batch_size create_scheduler save_model _load_best_model _evaluate log"
    ),
    "transformers.trainer_callback": "ExportableState ProgressCallback TrainerCallback TrainerState",
    "transformers.integrations.deepspeed": "HfTrainerDeepSpeedConfig deepspeed_load_checkpoint",
}
ACCELERATE = {
    "accelerate.state.PartialState": "_shared_state",
    "accelerate.state.AcceleratorState": "_shared_state",
    "accelerate.state.GradientState": "_set_sync_gradients",
    "accelerate.accelerator.Accelerator": "_prepare_deepspeed backward free_memory",
    "accelerate.utils.deepspeed": "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper",
}
PROMPTS = {
    "trl.GRPOTrainer": (
        "_get_train_sampler _generate_and_score_completions _prepare_inputs compute_loss training_step log"
    ),
}
"""Further names for trainers of TRL that generate completions."""
LOOPS = {
    "accelerate.accelerator": (
        "save_accelerator_state load_accelerator_state load_custom_state AcceleratedScheduler DeepSpeedEngineWrapper"
    ),
    "accelerate.accelerator.Accelerator": (
        "_do_sync prepare_data_loader prepare_scheduler gather gather_for_metrics reduce pad_across_processes "
        "wait_for_everyone init_trackers register_for_checkpointing save_state load_state skip_first_batches"
    ),
    "accelerate.state.GradientState": "_add_dataloader _remove_dataloader active_dataloader",
    "accelerate.utils": "MODEL_NAME gather_object send_to_device",
}
"""Further names, needed for loops of Accelerate."""
