"""Which stage holds which tensor: predicted, and held by real pipeline modules; layers made anew."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as td
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynatrain.adapters.groups.world import peers
from ds_dynatrain.adapters.model.pipeline_layers import PipelineTemplate
from ds_dynatrain.adapters.model.shaping import Children
from ds_dynatrain.adapters.model.stage_module import PipelineShaper, StageGrid, place, reshape
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import Layout
from tests.engine.models import Block
from tests.engine.pipelines import LAYERS, WIDTH, Words, loss, pipeline
from tests.engine.pool import RankPool

METHODS = ("parameters", "uniform", "type:block|linear")
FIELDS = ("num_stages", "stage_id", "parts", "_local_start", "_local_stop", "fwd_map", "tied_weight_attrs")


def layout(pipe: int, data: int = 1, boundaries: tuple[int, ...] | None = None) -> Layout:
    """A layout of stage 1."""
    return Layout(zero_stage=1, pipe=pipe, data=data, boundaries=boundaries)


# ---- prediction -----------------------------------------------------------------------------------------------------


def predicted_and_real(stages: int) -> None:
    """Every tensor of a module that DeepSpeed cut is where `stages` says, and every tie joins the ranks of `ties`."""
    for name in LAYERS:
        for method in METHODS:
            template = PipelineTemplate.of(pipeline(name), method)
            real = pipeline(name, stages, partition_method=method)
            wanted = layout(stages, td.get_world_size() // stages)
            mine, data = real.stage_id, real._grid.data_parallel_id
            assert template.boundaries(wanted) == tuple(real.parts)
            assert template.boundaries(layout(stages, 1, tuple(map(int, real.parts)))) == tuple(real.parts)
            held = {tensor for tensor, found in template.stages(wanted).items() if mine in found}
            assert held == {tensor for tensor, _ in real.named_parameters()}
            ties = {key: found for key, found in template.ties(wanted).items() if mine in found}
            ranks = {key: [wanted.rank(pipe=stage, data=data) for stage in found] for key, found in ties.items()}
            assert ranks == {key: tie["ranks"] for key, tie in real.tied_comms.items()}
            assert list(ranks) == list(real.tied_comms), "DeepSpeed adds ties up in this order"


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_stages_are_those_of_real_modules(pool: RankPool, stages: int) -> None:
    pool.run(predicted_and_real, stages=stages)


def errors() -> None:
    """Layouts and modules that cannot be, with the numbers and the way out."""
    with pytest.raises(LayoutError, match=r"tensor=2 .*: DeepSpeed's PipelineEngine has no tensor axis"):
        PipelineShaper(pipeline("tied"), {}).cuts(Layout(zero_stage=1, pipe=2, tensor=2))
    parts = {
        method: PipelineShaper(pipeline("tied"), {"pipeline": {"partition": method}}).template.boundaries(layout(2))
        for method in ("best", "uniform")
    }
    assert parts == {"best": (0, 3, 7), "uniform": (0, 4, 7)}
    template = PipelineTemplate.of(_of(LayerSpec(nn.Linear, 2, 2), nn.GELU(), nn.Tanh(), LayerSpec(nn.Linear, 2, 2)))
    cannot = [
        (layout(5), "pipe=5 stages share 4 layers, and each needs one; nearest: pipe=4"),
        (layout(2, 1, (0, 3, 8)), "end with layer 8, and the model has 4"),
    ]
    for impossible, words in cannot:
        with pytest.raises(LayoutError, match=words):
            template.boundaries(impossible)
    for method, words in (
        ("profile", "no partition method 'profile'"),
        ("type:Conv", "is of a class with such a name"),
    ):
        with pytest.raises(LayoutError, match=words):
            PipelineTemplate.of(pipeline("tied"), method).boundaries(layout(2))
    assert template.boundaries(layout(1)) == (0, 4)
    _errors_of_modules()


def _errors_of_modules() -> None:
    class Own(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: str = "uniform") -> None:
            super()._partition_layers(method)

    shared = nn.Linear(2, 2)
    strayed = _of(shared)
    strayed.temperature = nn.Parameter(torch.ones(1))
    refused = [
        (_of(shared, nn.Tanh(), shared), "'2.weight' also belongs to layer 0.*use TiedLayerSpec"),
        (strayed, "'temperature' is in no layer"),
        (Own([shared], num_stages=1), "Own has a _partition_layers of its own"),
    ]
    for module, words in refused:
        with pytest.raises(UnsupportedError, match=words):
            PipelineTemplate.of(module)
    half_tied = [
        TiedLayerSpec("linear", nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("linear", nn.Linear, WIDTH, WIDTH),
    ]
    template = PipelineTemplate.of(_of(*half_tied))
    with pytest.raises(UnsupportedError, match=r"tied_modules\.linear\.bias is on stages 0, 1 and not in"):
        template.stages(layout(2))
    assert template.stages(layout(1))["tied_modules.linear.bias"] == (0,)


def _of(*layers: Any) -> PipelineModule:
    return PipelineModule(list(layers), num_stages=1, loss_fn=loss)


def test_what_cannot_be_is_named(pool: RankPool) -> None:
    pool.run(errors)


# ---- layers made anew -----------------------------------------------------------------------------------------------


def _fields(module: PipelineModule) -> dict[str, Any]:
    kinds = [getattr(layer, "func", type(layer)) for layer in module.forward_funcs]
    tensors = {name: (tuple(held.shape), held.requires_grad) for name, held in module.named_parameters()}
    flags = {name: held.ds_pipe_replicated for name, held in module.named_parameters()}
    return {
        **{name: getattr(module, name) for name in FIELDS},
        "tensors": tensors,
        "order": list(tensors),
        "flags": flags,
        "kinds": kinds,
    }


def reshaped_as_real(stages: int) -> None:
    """A module that was reshaped has all that one has which DeepSpeed cut."""
    rank = td.get_rank()
    wanted = layout(stages, td.get_world_size() // stages)
    stage = wanted.coordinate(rank)["pipe"]
    for name in LAYERS:
        module, real = pipeline(name), pipeline(name, stages)
        template = PipelineTemplate.of(module)
        groups: Any = _Groups(wanted)
        place_of = StageGrid(groups, rank)
        reshape(module, template, wanted, stage)
        place(module, template, wanted, place_of)
        assert _fields(module) == {**_fields(real), "parts": list(map(int, real.parts))}
        assert list(module.tied_comms) == list(real.tied_comms)
        for field in ("global_rank", "world_size", "stage_id", "dp_group", "pp_group", "ds_model_rank", "p2p_groups"):
            assert getattr(place_of, field) == getattr(real._grid, field), field


class _Groups:
    """A world without groups: who asks for one gets its name."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def group(self, kind: str) -> Any:
        return kind

    def ranks(self, kind: str) -> tuple[int, ...]:
        return peers(self.layout, td.get_rank())[kind]

    def tie(self, stages: tuple[int, ...]) -> Any:
        return stages


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_reshaped_module_is_like_a_real_one(pool: RankPool, stages: int) -> None:
    pool.run(reshaped_as_real, stages=stages)


def in_place() -> None:
    """Old layers go with the reshape, and come back; draws, buffers, modes and types are right."""
    module = pipeline(
        "uneven", seed_layers=True, activation_checkpoint_interval=2, partition_method="uniform"
    )  # DeepSpeed cannot seed layers that it has partitioned by parameters
    template = PipelineTemplate.of(module)
    before = Children.of(module)
    old = weakref.ref(module.forward_funcs[3])
    kept = module.forward_funcs[2].slope
    module.eval()
    draws = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    reshape(module, template, layout(4), 1, torch.bfloat16)
    before.pass_on(module, is_resized=False)
    assert torch.equal(torch.get_rng_state(), draws[0]) and random.getstate() == draws[2]
    assert np.random.get_state()[1].tolist() == draws[1]
    assert module.seed_layers and not any(part.training for part in module.modules())
    names = [f"2.{name}.{kind}" for name in ("up", "down") for kind in ("weight", "bias")]
    assert [name for name, _ in module.named_parameters()] == names
    assert {held.dtype for held in module.parameters()} == {torch.bfloat16}
    assert not any(held.is_meta for held in module.parameters())
    assert module.forward_funcs[0].slope is kept, "a layer that stays keeps its buffers"
    assert module.is_checkpointable_results == [True]
    reshape(module, template, layout(4), 2)
    assert all(held.dtype == torch.float32 for held in module.parameters())
    before.put_back(module)
    assert module.forward_funcs[3] is old() and len(list(module.named_parameters())) == 24 and module.num_stages == 1
    del before, kept
    reshape(module, template, layout(4), 1)
    gc.collect()
    assert old() is None, "nothing holds the layers of before"
    assert torch.equal(module.forward_funcs[0].slope, torch.linspace(0.5, 1.5, WIDTH)), "the template's own"


def test_layers_come_and_go_in_place(pool: RankPool) -> None:
    pool.run(in_place)


def user_parts() -> None:
    """Attributes, frozen parameters, a loss that is a module, and ready modules are as the user left them."""
    module = PipelineModule([LayerSpec(Words), Block(WIDTH, 9, 0.0)], num_stages=1, loss_fn=nn.CrossEntropyLoss())
    module.note = SimpleNamespace(text="mine")
    for held in module.forward_funcs[1].norm.parameters():
        held.requires_grad = False
    module.forward_funcs[1].up.weight.flag = "special"
    template = PipelineTemplate.of(module)
    specs = [type(spec) for spec in module._layer_specs]
    assert specs == [LayerSpec, LayerSpec], "no layer of the user's is held by the description"
    reshape(module, template, layout(2), 1)
    block = module.forward_funcs[0]
    assert not block.norm.weight.requires_grad and block.up.weight.requires_grad
    assert block.up.weight.flag == "special" and module.note.text == "mine"
    assert isinstance(module.loss_fn, nn.CrossEntropyLoss) and "loss_fn" in module._modules


def test_what_a_user_set_stays(pool: RankPool) -> None:
    pool.run(user_parts)
