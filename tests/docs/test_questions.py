"""Questions of somebody who has never seen this project: each answer is a heading, one link away at most."""

from __future__ import annotations

import pytest

from tests.docs.pages import INDEX, README, ROOT, linked_from, section
from tools import support_pages

QUESTIONS = [
    ("does it run on my GPUs", "docs/fit.md", "Does it run on my GPUs?", support_pages.status()),
    ("what ran on GPUs", "docs/gpu.md", "What was proved", support_pages.status()),
    ("with Trainer", "docs/fit.md", "Does it work with Hugging Face's Trainer?", "elastic(SFTTrainer)"),
    ("how do I install it beside my torch", "docs/install.md", "Beside the torch that you have", "torch from 2.11"),
    ("my own sampler", "docs/data.md", "A sampler of your own", "shuffle=False"),
    ("epochs", "docs/script.md", "Epochs", "engine.epochs("),
    ("resume with other ranks", "docs/checkpoint.md", "Resume", '"resume": {"path"'),
    ("W&B", "docs/monitoring.md", "W&B, TensorBoard, csv", '"monitor": true'),
    ("it was refused, what now", "docs/troubleshoot.md", "A switch was refused", "refusal.way_out"),
    ("it hangs, what now", "docs/troubleshoot.md", "The job hangs", "py-spy"),
    ("what is refused", "docs/support.md", "At a glance", "refused"),
    ("a node dies, what now", "docs/elastic.md", "A death", "checkpoint"),
    ("back to stock DeepSpeed", "docs/fit.md", "Can I go back?", "engine.save_checkpoint"),
    ("how do I watch it", "docs/monitoring.md", "A page in the browser", "--http"),
    ("what does it cost in memory", "docs/how-a-switch-works.md", "Memory", "peak_memory_bytes"),
    ("what does it cost in time", "docs/how-a-switch-works.md", "What it costs to leave it on", "%"),
]


@pytest.mark.parametrize(("page", "heading", "key"), [row[1:] for row in QUESTIONS], ids=[row[0] for row in QUESTIONS])
def test_the_answer_is_a_heading_with_the_key(page: str, heading: str, key: str) -> None:
    assert key in section(ROOT / page, heading)
    assert (ROOT / page).resolve() in linked_from(README) | linked_from(INDEX)
