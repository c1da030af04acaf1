"""Tied weights in an exact job: their gradients are first summed over leaves, then over the layers that use them.

A leaf is a micro-batch of fixed size. With several stages, each stage has the gradients from its own layers. On one
stage, autograd would add them for every leaf. Because the order of sums matters in floating point, the sum over leaves
comes first in every layout. If a stage has several layers that share a parameter, all but the first therefore use a
substitute, a second parameter with the same data, which receives their gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynatrain.adapters.model.pipeline_layers import PipelineTemplate
from ds_dynatrain.exact.adapters.lines import FlatLines, Run, overlap


@dataclass(frozen=True, eq=False)
class Tied:
    """A trained parameter of a tied module on this stage.

    key: the name under which the pipeline ties the module.
    parameter: the tied parameter.
    places: all positions of the parameter, as (module, attribute).
    layers: the numbers of the layers of the whole model that use the parameter.
    grads: a map from each of these layers on this stage to the parameter that receives its gradient: the tied parameter
        for the first layer, and a substitute with the same data for each of the others.
    """

    key: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]
    layers: tuple[int, ...]
    grads: Mapping[int, nn.Parameter]


@dataclass(frozen=True, eq=False)
class Uses:
    """The tied parameters on a pipeline stage, and the layers that use them."""

    tied: tuple[Tied, ...]

    @staticmethod
    def of(module: PipelineModule, template: PipelineTemplate, trained: Collection[int]) -> Uses:
        """Return the tied parameters of a module that has the layers of its stage.

        template: the template of the whole pipeline.
        trained: the ids of the trained parameters.
        """
        found = []
        for key in sorted(module.tied_modules):
            layers = tuple(number for number, each in enumerate(template.keys) if each == key)
            here = [number for number in layers if module._local_start <= number < module._local_stop]
            for parameter, places in _places(module.tied_modules[key]).items():
                if len(layers) > 1 and id(parameter) in trained:
                    others = {number: nn.Parameter(parameter.detach()) for number in here[1:]}
                    found.append(Tied(key, parameter, places, layers, {here[0]: parameter, **others}))
        return Uses(tuple(found))

    @property
    def stand_ins(self) -> list[nn.Parameter]:
        """The substitutes for tied parameters, which receive the gradients of all layers except the first.

        Their order is the same on all ranks of a stage.
        """
        return [grad for each in self.tied for grad in each.grads.values() if grad is not each.parameter]

    def renew(self) -> None:
        """Point the substitutes for tied parameters to the current memory of these parameters."""
        for each in self.tied:
            for grad in each.grads.values():
                grad.data = each.parameter.data

    @contextmanager
    def of_layer(self, layer: int) -> Iterator[None]:
        """Context manager in which modules hold the parameters that receive this layer's gradient."""
        used = [each for each in self.tied if layer in each.grads]
        for each in used:
            _put(each.places, each.grads[layer])
        try:
            yield
        finally:
            for each in used:
                _put(each.places, each.parameter)


class StageLines(FlatLines):
    """The lines (gradients that are reduced together) of a pipeline stage in ZeRO stage 1.

    Each substitute for a tied parameter has one more line.

    numel: the number of trained elements of the whole model.
    """

    def __init__(self, zero: Any, order: Mapping[int, int], uses: Uses, numel: int, module: PipelineModule) -> None:
        super().__init__(zero, order, uses.stand_ins)
        self.numel, self._uses, self._module = numel, uses, module
        self._totals: dict[int, torch.Tensor] = {}

    @property
    def sharing(self) -> list[Any]:
        """Process groups over which the tensors in `held` together contain the whole gradient, each element once.

        If there are several stages, the group of all stages is one of them.
        """
        zero = self._zero
        return [*super().sharing, *([zero.model_parallel_group] if zero.model_parallel_world_size > 1 else [])]

    def take(self, line: int, total: torch.Tensor) -> None:
        """Keep the sum of a line. After the last line, sum the gradients of layers that share a parameter.

        line: the number of the line (gradients that are reduced together).
        total: this rank's part of the line, summed over the whole global batch.
        """
        self._totals[line] = total
        if line < len(self._zero.partition_size):
            super().take(line, total)
        if line + 1 == len(self.lengths):
            for tied in self._uses.tied:
                self._add_layers(tied)
            self._totals.clear()

    def held(self) -> list[torch.Tensor]:
        """Return the gradient sums that DeepSpeed holds, without the parameters that are counted on another stage."""
        found = []
        for line, part in enumerate(super().held()):
            begin = dist.get_rank(group=self.group(line)) * len(part)
            for start, stop in _counted(begin, begin + len(part), self.spans[line]):
                found.append(part[start - begin : stop - begin])
        return found

    def _add_layers(self, tied: Tied) -> None:
        """Sum the gradients of the layers that share a parameter, in the order of the layers.

        For each layer, only one rank has a given element, so adding the zeros of other ranks does not change it.
        """
        rows = torch.zeros(len(tied.layers), tied.parameter.numel(), dtype=torch.float32, device="cpu")
        for layer, grad in tied.grads.items():
            for total, within, part in self._parts(grad):
                rows[tied.layers.index(layer), within[0] : within[1]] = self._totals[total][part[0] : part[1]]
        dist.all_reduce(rows, group=self._zero.dp_process_group)
        if tied.key in self._module.tied_comms:
            dist.all_reduce(rows, group=self._module.tied_comms[tied.key]["group"])
        for row in rows[1:]:
            rows[0] += row
        for total, within, part in self._parts(tied.parameter):
            self._totals[total][part[0] : part[1]] = rows[0, within[0] : within[1]]

    def _parts(self, parameter: nn.Parameter) -> Iterator[tuple[int, Run, Run]]:
        """Yield this rank's parts of a gradient, each as (line, range in the parameter, range in the rank's part).

        A line is an array of gradients that are reduced together.
        """
        for line, spans in enumerate(self.spans):
            begin = dist.get_rank(group=self.group(line)) * self.lengths[line]
            for held, low, high in spans:
                start, stop = overlap((low, high), (begin, begin + self.lengths[line]))
                if held is parameter and start < stop:
                    yield line, (start - low, stop - low), (start - begin, stop - begin)


def _counted(begin: int, end: int, spans: list[tuple[nn.Parameter, int, int]]) -> Iterator[Run]:
    """Yield the parts of a range that lie outside the parameters that another stage counts.

    begin: the start of the range.
    end: the end of the range.
    spans: the parameters, and the range in which each lies.
    """
    for held, low, high in spans:
        if getattr(held, "ds_pipe_replicated", False) and begin < high and low < end:
            if begin < low:
                yield begin, low
            begin = high
    if begin < end:
        yield begin, end


def _places(module: nn.Module) -> dict[nn.Parameter, tuple[tuple[nn.Module, str], ...]]:
    """Return a map from each parameter in the module to all its positions, as (module, attribute)."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(parameter, []).append((part, name))
    return {parameter: tuple(places) for parameter, places in found.items()}


def _put(places: tuple[tuple[nn.Module, str], ...], parameter: nn.Parameter) -> None:
    for module, name in places:
        module._parameters[name] = parameter
