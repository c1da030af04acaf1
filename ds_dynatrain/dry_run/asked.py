"""Options of `ds-dynatrain plan`, parsed into a job, two layouts and a topology."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ds_dynatrain.dry_run.answer import DryRunAnswer
from ds_dynatrain.dry_run.change import answered
from ds_dynatrain.dry_run.planned_job import PlannedJob, layout_of
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.plan import LinkClass, Topology, held_bytes
from ds_dynatrain.space import Layout

MOST_SUGGESTED, MOST_PLANNED = 8, 48


@dataclass(frozen=True)
class Question:
    """A change of a job's layout in a cluster.

    target: None if layouts are to be suggested.
    topology: None for as many equal nodes as the layouts need.
    """

    job: PlannedJob
    source: Layout
    target: Layout | None
    topology: Topology | None
    members_per_node: int = 8
    bytes_per_second: float | None = None

    @staticmethod
    def read(
        model: str,
        source: str,
        target: str | None,
        config: Path | None,
        cluster: Path | None,
        bytes_per_second: float | None,
        members_per_node: int,
    ) -> Question:
        """Read the options. Raises DynatrainError, which names the option or file, for one that cannot be used."""
        job = PlannedJob.read(model, config)
        stage = None if config is None else int(job.zero.get("stage", 0))
        present = layout_of(source, stage)
        wanted = None if target is None else layout_of(target, present=present)
        topology = None if cluster is None else Topology.read(cluster)
        return Question(job, present, wanted, topology, members_per_node, bytes_per_second)

    def answer(self) -> DryRunAnswer:
        """Return what the change would cost. Raises ConfigError if no target is given."""
        if self.target is None:
            raise ConfigError("--to is missing; give the layout to plan, or --suggest and --gpus")
        most = max(self.source.world_size, self.target.world_size)
        return answered(self.job, self.source, self.target, self.topology or self._assumed(most))

    def held(self) -> list[tuple[Layout, dict[str, int]]]:
        """Return the bytes of each state kind on the rank that holds the most, for each ZeRO stage of the source."""
        found = []
        for stage in range(4):
            layout = self.source.replace(zero_stage=stage)
            if self.job.refusal(layout, layout) is None:
                space = self.job.space(layout, layout, range(layout.world_size))
                kinds = {name: int(held_bytes(space, layout, [name]).max()) for name in space.present_kinds(layout)}
                total = int(held_bytes(space, layout, space.present_kinds(layout)).max())
                found.append((layout, {**kinds, "in all": total}))
        return found

    def suggestions(self, ranks: int) -> list[DryRunAnswer]:
        """Return dry runs of all layouts with `ranks` ranks that fit into memory, cheapest switch first.

        Layouts that differ in the fewest sizes from the present one are planned, and a bounded number of them.
        """
        found = sorted(self._layouts(ranks), key=self._distance)[:MOST_PLANNED]
        answers = [replace(self, target=layout).answer() for layout in found]
        costs = [(each.figures.seconds.expected, each) for each in answers if each.fits and each.figures is not None]
        return [each for _, each in sorted(costs, key=lambda pair: pair[0])[:MOST_SUGGESTED]]

    def _layouts(self, ranks: int) -> Iterator[Layout]:
        """Yield the other layouts of a number of ranks in which the job can train."""
        sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        pipes = [size for size in sizes if size <= self.job.model.blocks]
        experts = sizes if self.job.model.has_experts else [1]
        tensors = [size for size in sizes if size <= max(8, self.members_per_node)]
        for pipe, tensor, expert, stage in product(pipes, tensors, experts, range(1, 4)):
            data = ranks // (pipe * tensor)
            if data * pipe * tensor != ranks or (data * tensor) % expert:
                continue
            layout = Layout(zero_stage=stage, data=data, pipe=pipe, tensor=tensor, expert=expert)
            if layout != self.source and self.job.refusal(self.source, layout) is None:
                yield layout

    def _distance(self, layout: Layout) -> tuple[int, str]:
        was, now = self.source.to_dict(), layout.to_dict()
        return sum(was[name] != now.get(name) for name in was), str(layout)

    def _assumed(self, members: int) -> Topology:
        given = {} if self.bytes_per_second is None else {"network": LinkClass(self.bytes_per_second)}
        return Topology.uniform(-(-members // self.members_per_node), self.members_per_node, **given)
