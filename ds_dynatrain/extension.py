"""Extensions of an engine: hooks around its steps, boundaries and worlds. The engine calls the hooks without knowing
the extensions.

A boundary is the point between two optimizer steps. An engine calls every hook of every extension in the same order on
all working members, so a hook may use collectives of the engine's world. Users pass their own extensions to
`initialize(extensions=...)`, in the same order on every process. The package's own extensions are imported only if
their key is in the `dynatrain` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from ds_dynatrain.errors import ConfigError

BUILT_IN: Mapping[str, str] = {
    "balance": "ds_dynatrain.balance.extension:Balance",
    "clocks": "ds_dynatrain.clocks.extension:Clocks",
    "exact": "ds_dynatrain.exact.extension:Exact",
    "buddies": "ds_dynatrain.buddies.extension:Buddies",
    "fallback": "ds_dynatrain.fallback.extension:Fallback",
}
"""Map from a key of the `dynatrain` block to the class of its extension, in the order in which hooks are called."""
BLOCKS: Mapping[str, str] = {
    "balance": "ds_dynatrain.balance.config:BalanceConfig",
    "clocks": "ds_dynatrain.clocks.config:ClocksConfig",
    "exact": "ds_dynatrain.exact.config:ExactConfig",
    "buddies": "ds_dynatrain.buddies.config:BuddiesConfig",
    "fallback": "ds_dynatrain.fallback.config:FallbackConfig",
}
"""Map from a key of the `dynatrain` block to the class of the block under this key."""
COMMANDS: Mapping[str, str] = {
    "compare": "ds_dynatrain.comparison.command:compare",
    "compare-exact": "ds_dynatrain.exact.command:compare_exact",
    "balance": "ds_dynatrain.balance.command:balance",
    "plan": "ds_dynatrain.dry_run.command:plan",
    "estimate": "ds_dynatrain.dry_run.command:estimate",
    "simulate": "ds_dynatrain.simulate.command:simulate",
}
"""Map from a command of `ds-dynatrain` to the function that typer calls for it."""
ROWS: Mapping[str, str] = {
    "balance": "ds_dynatrain.balance.balance_rows:ROWS",
    "clocks": "ds_dynatrain.clocks.rows:ROWS",
    "buddies": "ds_dynatrain.buddies.rows:ROWS",
    "exact": "ds_dynatrain.exact.bits.rows:ROWS",
    "fallback": "ds_dynatrain.fallback.rows:ROWS",
}
"""Map from the name of a support table to the rows that an extension adds to the tables of `support`."""
BACKUP_KEY = "dynatrain.fallback.path"
"""Configuration key that errors and warnings recommend when state is lost, or could be, because nothing was saved."""


@dataclass(frozen=True)
class Backups:
    """Checkpoints that an extension saves automatically, and from which lost state is restored.

    what: a name for one such checkpoint, for example "fallback checkpoint".
    path: the folder of the checkpoints.
    keep: how many of the newest checkpoints stay in the folder.
    """

    what: str
    path: Path
    keep: int


class Extension:
    """Base class of all extensions. A hook does nothing unless a subclass overrides it.

    The state of an extension with `state_dict` and `load_state_dict` is saved and moved with the job's state under
    `name`, like that of an object given to `engine.register_for_checkpointing`: a member that joins training receives
    rank 0's state, and `engine.load` restores the saved state.
    """

    name: ClassVar[str] = ""
    """Name of the extension, unique in a job. It is the key of the extension's block and of its state."""
    has_leaves: ClassVar[bool] = False
    """Whether micro-batches hold the same samples in every world."""
    group: ClassVar[str] = ""
    """Name of the extension's own process group over all ranks of each world; "" if it has none."""
    engine: Any = None
    """The engine that calls the hooks; None before `attach`."""

    # ---- when an engine is made --------------------------------------------------------------------------------------

    def check_job(self, config: Mapping[str, Any], model: Any, mpu: Any) -> None:
        """Raise UnsupportedError for a job that the extension does not support. Called before the process joins the
        job."""

    def check_launch(self, is_elastic: bool) -> None:
        """Raise DynatrainError for a launch that the extension does not support. Called before the process joins the
        job.

        is_elastic: whether members come and go.
        """

    def check_beside(self, here: Any, there: Any, number: int) -> None:
        """Raise DynatrainError if the extension does not support a second engine in the process.

        Called before the second engine is made, on the extensions of both engines.

        here: the settings of the new engine.
        there: the settings of the process's engine `number`.
        """

    def check_model(self, config: Mapping[str, Any], model: Any, mpu: Any) -> None:
        """Raise UnsupportedError for a model that the extension cannot train. Called when the model has all its
        layers."""

    def stage_cut(
        self, config: Mapping[str, Any], exchange: Callable[[str, Any], Mapping[int, Any]]
    ) -> Callable[[int, int], tuple[int, ...]] | None:
        """Return a function from (layers, stages) to the division of a PipelineModule into stages; None leaves it to
        DeepSpeed.

        exchange: posts a value of this process under a key, and returns a map from member to value for all starting
        processes.
        """
        return None

    def deepspeed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration to pass to DeepSpeed."""
        return config

    def described(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return a map from name to value for values that must be equal on all processes of the job."""
        return {}

    def engine_class(self, kind: type[Any]) -> type[Any]:
        """Return the engine class to use: `kind`, or a subclass of it."""
        return kind

    def check_layout(self, layout: Any, batch: Any, has_stages: bool) -> None:
        """Raise SwitchRefused for a layout that the extension does not support. Also called for the first layout.

        batch: the `BatchSizes` of the job.
        has_stages: whether the model is a PipelineModule.
        """

    def attach(self, engine: Any) -> None:
        """Attach to the engine before the engine's state exists. Called once."""
        self.engine = engine

    def on_start(self) -> None:
        """Act on the finished engine. Called at the end of `initialize` on working members; `initialize` passes on an
        error raised here."""

    # ---- when a layout is chosen -------------------------------------------------------------------------------------

    def step_ms(self, layout: Any, members: Sequence[int]) -> dict[str, float]:
        """Return the predicted milliseconds of a step in a layout, keyed by part, with their sum under `total`.

        The result is empty if there is no prediction.

        members: the member at each rank.
        """
        return {}

    def best_layouts(self, members: int) -> Iterable[Any] | None:
        """Return the best layouts for a number of members, best first; None to leave the choice to others. Called if
        `layouts` is "best"."""
        return None

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def around_forward(self) -> AbstractContextManager[None]:
        """Return a context manager for a forward pass, in training or not. Not called by pipelines."""
        return nullcontext()

    def after_forward(self, output: Any) -> None:
        """Inspect the output of a forward pass. Not called by pipelines."""

    def around_backward(self) -> AbstractContextManager[None]:
        """Return a context manager for a backward pass. Not called by pipelines."""
        return nullcontext()

    def after_backward(self, loss: Any) -> None:
        """Inspect a loss after its backward pass. Not called by pipelines."""

    def around_batch(self) -> AbstractContextManager[None]:
        """Return a context manager for all passes of a global batch and the optimizer's step. Called only by
        pipelines."""
        return nullcontext()

    def around_update(self) -> AbstractContextManager[None]:
        """Return a context manager for the optimizer's step."""
        return nullcontext()

    def after_batch(self) -> None:
        """Act after the optimizer's step, while the finished global batch is still known."""

    def after_step(self) -> None:
        """Act at the end of the `engine.step()` or `train_batch()` that finishes a global batch.

        `engine.global_steps` already counts the step. An idle member takes no step.
        """

    def on_batch_forgotten(self) -> None:
        """Act when a global batch has ended, because it was trained or discarded."""

    # ---- between two steps -------------------------------------------------------------------------------------------

    def waiting(self, steps: int) -> Iterator[str]:
        """Yield a description of each thing that waits for a boundary. Called after every optimizer step; must not
        communicate.

        steps: number of steps since the last boundary.
        """
        yield from ()

    def save_if_due(self) -> None:
        """Save the state outside the job if a save is due now. Its duration is reported as time for saving.

        Called on working members at a boundary, before the changes that are due. In elastic launches only the process's
        first engine calls it.
        """

    def save_now(self) -> None:
        """Save the state outside the job, because training pauses or ends here. Called in elastic launches on working
        members."""

    def at_boundary(self) -> None:
        """Act between two global batches of the process's first engine, after all changes that were due.

        Called only in elastic launches, on working members.
        """

    def before_leaving_world(self) -> None:
        """Finish all work in the current world, before its process groups are destroyed."""

    def before_load(self) -> None:
        """Act before another state is loaded into the current world. If the load fails, the state stays unchanged."""

    def backups(self) -> Backups | None:
        """Return the checkpoints from which lost state can be restored; None if the extension saves none."""
        return None

    def memory_in(self, layout: Any, members: tuple[int, ...]) -> int:
        """Return the bytes of host memory that the extension would need in a layout, on the member that needs the
        most."""
        return 0

    def saved_member_seconds(self) -> float:
        """Return how many member-seconds the extension has saved so far by leaving members idle."""
        return 0.0

    def protects(self) -> Literal["", "no", "yes"]:
        """Return "yes" or "no" if the extension knows whether the job survives a death; else ""."""
        return ""

    def on_change(self, change: Any) -> None:
        """React to a change of the rank, the members or the layout, before the next batch. See `engine.on_change`."""

    def on_end(self) -> None:
        """Release everything that the extension holds in the process.

        Called when the engine ends, even if it was never completed. It may be called twice.
        """


def check(extensions: Sequence[Any]) -> None:
    """Raise ConfigError for invalid user extensions: of another class, without a name, or with a name that is taken.
    Called by `initialize`."""
    for place, extension in enumerate(extensions):
        kind = type(extension).__name__
        if not isinstance(extension, Extension):
            raise ConfigError(f"extensions[{place}] is a {kind}; derive its class from ds_dynatrain.Extension")
        if hasattr(extension, "state_dict") and not extension.name:
            raise ConfigError(f"extensions[{place}], a {kind}, has a state_dict and no name for it; set `name`")
        if extension.name and extension.name in (*BUILT_IN, *(other.name for other in extensions[:place])):
            raise ConfigError(f"extensions[{place}], a {kind}: the name {extension.name!r} is taken; give another one")


def made(settings: Any) -> list[Extension]:
    """Return the package's extensions that a `dynatrain` block requests, in their order. Called by `initialize`."""
    return [named(path)(settings) for key, path in BUILT_IN.items() if getattr(settings, key) is not None]


def backups_of(extensions: Iterable[Extension]) -> Backups | None:
    """Return the backups of the first extension that has any; None if no extension has any."""
    return next((found for each in extensions if (found := each.backups()) is not None), None)


def rows() -> dict[str, tuple[Any, ...]]:
    """Return the support rows of all extensions of the package, keyed by the name of their table; for documentation."""
    return {name: named(path) for name, path in ROWS.items()}


def named(path: str) -> Any:
    """Import and return the object that a path names, such as "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@contextmanager
def around(blocks: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager that enters all given context managers, each inside the previous one."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield
