"""TRL's trainers over a world that changes: texts, packed texts, pairs with a reference model, adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from ds_dynatrain.errors import DynatrainError
from tests.engine.pool import RankPool
from tests.integrations import trainers
from tests.integrations.prompting import GENERATIONS, answered, prompts, reward, tokenizer, words

BLOCK = {"layout": {"data": 2}}
SCHEDULE = {2: {"data": 4, "zero_stage": 2}, 4: {"data": 3, "zero_stage": 1}}


def texts(count: int = 48) -> Dataset:
    """Of different lengths."""
    return Dataset.from_list([{"text": words(number, 4 + number % 9)} for number in range(count)])


def pairs(count: int = 48) -> Dataset:
    """A prompt, and an answer that is better than another."""
    rows = [{"prompt": words(n, 4), "chosen": words(n + 100, 5), "rejected": words(n + 200, 3)} for n in range(count)]
    return Dataset.from_list(rows)


def run(folder: Path, block: Any, kind: type[Trainer], of: type[Any], data: Dataset, **more: Any) -> dict[str, Any]:
    """A job of one of TRL's trainers; of: its configuration, which takes the rest but `peft`, `schedule`, `resume`."""
    peft, schedule, resume = more.pop("peft", None), more.pop("schedule", None), more.pop("resume", None)
    trainers.allow_ranks()
    trainers.forget_ranks()
    args = trainers.arguments(folder, block, kind=of, **{"max_steps": 6, "bf16": False, **more})
    made: Any = kind if block is None else trainers.elastic(kind)
    callbacks = [] if schedule is None else [trainers.SwitchCallback(schedule)]
    given: dict[str, Any] = {} if peft is None else {"peft_config": peft}
    if kind is DPOTrainer:
        given["ref_model"] = trainers.model()
    trainer = made(
        model=trainers.model(),
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
        **given,
    )
    return trainers.carried_out(trainer, resume)


def sft(folder: Path, block: Any, **more: Any) -> dict[str, Any]:
    """SFTTrainer."""
    return run(folder, block, SFTTrainer, SFTConfig, texts(), max_length=16, **more)


def lora(folder: Path, block: Any, **more: Any) -> dict[str, Any]:
    """With adapters."""
    return sft(folder, block, peft=LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"), **more)


def dpo(folder: Path, block: Any, **more: Any) -> dict[str, Any]:
    """DPOTrainer, with the model of the start as reference."""
    return run(folder, block, DPOTrainer, DPOConfig, pairs(), max_length=16, **more)


def losses(answers: Sequence[Any]) -> list[float]:
    """That rank 0 has logged."""
    found = next(answer for answer in answers if answer["rank"] == 0 and "let go" not in answer)
    return [row["loss"] for row in found["log"] if "loss" in row]


def norms(answers: Sequence[Any]) -> list[float]:
    """Return the gradient norms that rank 0 has logged."""
    found = next(answer for answer in answers if answer["rank"] == 0 and "let go" not in answer)
    return [row["grad_norm"] for row in found["log"] if "grad_norm" in row]


@pytest.mark.parametrize(
    "job", [sft, pytest.param(dpo, marks=pytest.mark.full), pytest.param(lora, marks=pytest.mark.full)]
)
def test_they_train_as_stock_does(four: RankPool, alone: RankPool, tmp_path: Path, job: Any) -> None:
    """2 -> 4 -> 3 ranks against one rank of the stock trainer."""
    stock = losses(alone.run(job, folder=tmp_path / "stock", block=None, gradient_accumulation_steps=4, seconds=120))
    answers = four.run(
        job, folder=tmp_path / "ours", block=BLOCK, schedule=SCHEDULE, gradient_accumulation_steps=2, seconds=180
    )
    assert losses(answers) == pytest.approx(stock, rel=2e-5) and len(stock) == 6


@pytest.mark.full
def test_packed_texts(four: RankPool, alone: RankPool, tmp_path: Path) -> None:
    more = {"packing": True, "packing_strategy": "wrapped"}
    stock = losses(
        alone.run(sft, folder=tmp_path / "stock", block=None, gradient_accumulation_steps=4, **more, seconds=120)
    )
    ours = {"block": BLOCK, "schedule": SCHEDULE, "gradient_accumulation_steps": 2}
    assert losses(four.run(sft, folder=tmp_path / "ours", **ours, **more, seconds=180)) == pytest.approx(
        stock, rel=2e-5
    )


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_of_a_stock_trainer_go_on_in_another_world(four: RankPool, tmp_path: Path, stage: int) -> None:
    """Saved on 4 ranks without the frozen weights, which the base model has."""
    saves = {"save_strategy": "steps", "save_steps": 3, "stage": stage}
    whole = four.run(lora, folder=tmp_path, block=None, **saves, seconds=120)
    for file in (tmp_path / "checkpoint-3").glob("global_step3/*model_states.pt"):
        said = torch.load(file, map_location="cpu", weights_only=False)
        assert not said["frozen_param_fragments"]
        assert not any("attn.c_attn.base_layer" in name for name in said["module"])
    resume = {"resume": str(tmp_path / "checkpoint-3"), "config": {"train_batch_size": 12}}
    again = four.run(lora, folder=tmp_path / "again", block=BLOCK, **resume, seconds=180)
    assert losses(again) == pytest.approx(losses(whole), rel=2e-5) and len(losses(again)) == 6


@pytest.mark.full
def test_adapters_alone_are_saved(four: RankPool, tmp_path: Path) -> None:
    """In the files of the model, after a change of world too; and it goes on from there in yet another one."""
    saves = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = four.run(lora, folder=tmp_path, block=BLOCK, schedule={2: {"data": 3}}, **saves, seconds=180)
    for step in (3, 6):
        names = load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors")
        assert names and all("lora_" in name for name in names)
        assert not (tmp_path / f"checkpoint-{step}" / "model.safetensors").exists()
    config = {"config": {"train_batch_size": 12}, "resume": str(tmp_path / "checkpoint-3")}
    again = four.run(lora, folder=tmp_path / "again", block={"layout": {"data": 4}}, **config, seconds=180)
    assert losses(again) == pytest.approx(losses(whole), rel=2e-5)


# ---- trainers that answer prompts ------------------------------------------------------------------------------------

PROMPTED: dict[str, Any] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def grpo(folder: Path, block: Any, schedule: Any = None, resume: Any = None, **more: Any) -> dict[str, Any]:
    """GRPOTrainer, whose completions follow from the prompts unless `generates`."""
    trainers.allow_ranks()
    trainers.forget_ranks()
    path, generates, kind = more.pop("path", None), more.pop("generates", False), PROMPTED[more.pop("kind", "grpo")]
    given = {"max_steps": 6, "bf16": False, "num_generations": GENERATIONS, "max_completion_length": 6, **more}
    args = trainers.arguments(folder, block, kind=kind[1], **given)
    made: Any = kind[0] if block is None else trainers.elastic(kind[0])
    trainer = made(
        model=trainers.model() if path is None else GPT2LMHeadModel.from_pretrained(path),
        args=args,
        train_dataset=prompts(),
        eval_dataset=prompts(12),
        processing_class=tokenizer(),
        reward_funcs=reward,
        callbacks=[] if schedule is None else [trainers.SwitchCallback(schedule)],
        **({} if generates else {"rollout_func": answered}),
    )
    return trainers.carried_out(trainer, resume)


@pytest.mark.parametrize("loss", ["dapo", pytest.param("grpo", marks=pytest.mark.full)])
def test_answers_to_prompts_train_as_stock_does(four: RankPool, alone: RankPool, tmp_path: Path, loss: str) -> None:
    """2 -> 4 -> 3 ranks against one rank of the stock trainer, with the same completions."""
    stock = alone.run(
        grpo, folder=tmp_path / "stock", block=None, gradient_accumulation_steps=4, loss_type=loss, seconds=120
    )
    answers = four.run(
        grpo,
        folder=tmp_path / "ours",
        block=BLOCK,
        schedule=SCHEDULE,
        gradient_accumulation_steps=2,
        loss_type=loss,
        **EVALUATED,
        seconds=180,
    )
    assert norms(answers) == pytest.approx(norms([stock[0]]), rel=2e-4) and len(norms(answers)) == 6


@pytest.mark.full
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_completions_are_generated_at_any_stage(four: RankPool, tmp_path: Path, kind: str) -> None:
    """Generated by the model itself, trained twice each, with a reference model below stage 3."""
    more = {"generates": True, "num_iterations": 2, "beta": 0.1, "gradient_accumulation_steps": 2, "kind": kind}
    schedule = {2: {"data": 4, "zero_stage": 2}, 3: {"data": 3, "zero_stage": 1}, 4: {"zero_stage": 0}}
    trainers.model().save_pretrained(tmp_path / "model")  # a reference model is read from where the model came from
    more["path"] = tmp_path / "model"
    found = losses(four.run(grpo, folder=tmp_path / "low", block=BLOCK, schedule=schedule, **more, seconds=240))
    assert len(found) == 6
    more |= {"beta": 0.0, "stage": 3}
    schedule = {2: {"data": 4}, 3: {"data": 3, "zero_stage": 1}}
    found = losses(four.run(grpo, folder=tmp_path / "three", block=BLOCK, schedule=schedule, **more, seconds=240))
    assert len(found) == 6


@pytest.mark.full
def test_answers_to_prompts_go_on_from_a_checkpoint(four: RankPool, tmp_path: Path) -> None:
    """In another world."""
    saves = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = four.run(grpo, folder=tmp_path, block=BLOCK, **saves, seconds=240)
    config = {"config": {"train_batch_size": 12}, "resume": str(tmp_path / "checkpoint-3")}
    again = four.run(grpo, folder=tmp_path / "again", block={"layout": {"data": 4}}, **saves, **config, seconds=240)
    assert norms(again) == pytest.approx(norms(whole), rel=2e-4) and len(norms(again)) == 6


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3}


def refused(folder: Path, given: Any) -> str:
    """Return the words with which a job of GRPOTrainer is refused."""
    with pytest.raises(DynatrainError) as caught:
        grpo(folder, BLOCK, gradient_accumulation_steps=2, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": {"train_batch_size": 14}}, "no multiple of num_generations 3"),
        ({"steps_per_generation": 4}, "steps_per_generation=4 beside gradient_accumulation_steps=2"),
        ({"config": {"train_batch_size": 9}}, "data=2 does not divide train_batch_size 9"),
        ({**EVALUATED, "num_generations_eval": 4}, "take data= one of 4, 12"),
        ({"use_adaptive_entropy": True}, "set entropy_coef to a constant"),
    ],
)
def test_answers_to_prompts_are_refused(four: RankPool, tmp_path: Path, given: Any, words: str) -> None:
    found = four.run(refused, folder=tmp_path, given=given, seconds=180)
    assert all(words in each for each in found), found
