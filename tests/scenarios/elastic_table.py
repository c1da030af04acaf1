"""The scenarios of elastic launches."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from tests.scenarios.elastic_rows import (
    ADDRESS,
    FOLDER,
    Ask,
    Coordinate,
    End,
    Fixed,
    Hit,
    Kill,
    Play,
    Row,
    Start,
    Terminate,
)

COPIES = r"restored step \d+ from copies that members keep of each other"
HANDED = "its state is handed over, then it goes"
OFF = {"buddies": {"mode": "off"}}
KEPT = f"{FOLDER}/kept"
MANY = 12
"""Most steps that a death undoes with copies: one, and one for each copy that has not arrived on a busy machine."""


def stage(number: int, **block: Any) -> Mapping[str, Any]:
    """Return a configuration with this ZeRO stage, and these keys of the `dynatrain` block."""
    return {"zero_optimization": {"stage": number}, "dynatrain": block}


def began(*rest: Row, nodes: str = "a", members: int = 1, layout: str = "data=") -> tuple[Row, ...]:
    """Return rows that follow on the start of a coordinator and these nodes."""
    return Row("nodes start", Start(nodes, coordinator="coordinator"), members=members, layout=layout), *rest


COMES_AND_GOES = (
    Play(
        "stage 1",
        began(
            Row("a node joins", Start("b"), members=2, layout="data=2 zero_stage=1"),
            Row("another one joins", Start("c"), members=3, layout="data=3 zero_stage=1"),
            Row(
                "the status of a protected job",
                Ask(("status", ADDRESS), ("job 'job': running; ", "3 members", "data=3")),
            ),
            Row(
                "a node gets SIGTERM",
                Terminate("b"),
                members=2,
                layout="data=2",
                status="job 'job': running; ",
                ends={"b": 1},
                says={"b": HANDED},
            ),
            Row("a node dies", Kill("c"), members=1, layout="data=1", redone=MANY, says={"a": COPIES}),
            Row("the status of a node alone", Ask(("status", ADDRESS), ("running, unprotected", "1 members"))),
            Row("a node joins after a death", Start("d"), members=2, layout="data=2", status="job 'job': running; "),
            Row(
                "the coordinator dies", Kill("coordinator"), says={"a": "the coordinator is lost .*; training goes on"}
            ),
            Row("the coordinator is back", Coordinate("again"), says={"a": "a coordinator is there again after"}),
            Row("a node joins at another coordinator", Start("e"), members=3, layout="data=3"),
            Row(
                "a node is told to leave",
                Ask(("leave", ADDRESS, "$NODE(d)")),
                members=2,
                ends={"d": 0},
                says={"d": HANDED},
            ),
            Row("scripts end", End(), ends={"a": 0, "e": 0, "again": 0}, says={"again": "the job has finished"}),
        ),
        config=stage(1),
    ),
    Play(
        "stage 0",
        began(
            Row("two nodes join at once", Start("b c"), members=3, layout="data=3 zero_stage=0"),
            Row("a node dies", Kill("b"), members=2, layout="data=2 zero_stage=0"),
            Row("the node of rank 0 dies", Kill("a"), members=1, layout="data=1 zero_stage=0"),
            Row("a node joins the last one", Start("d"), members=2, layout="data=2 zero_stage=0"),
            Row("scripts end", End(), ends={"c": 0, "d": 0, "coordinator": 0}),
        ),
        config=stage(0),
        full=True,
    ),
    Play(
        "stage 2 with copies",
        began(
            Row("a node joins", Start("b"), members=2, layout="data=2 zero_stage=2", status="running; "),
            Row("a node dies", Kill("b"), members=1, layout="data=1 zero_stage=2", redone=MANY, says={"a": COPIES}),
            Row("scripts end", End(), ends={"a": 0}),
        ),
        config=stage(2, buddies={"mode": "copy"}),
        full=True,
    ),
    Play(
        "stage 3 with two copies",
        began(
            Row("two of three nodes die", Kill("b c"), members=0, status="paused: too few nodes"),
            Row(
                "two nodes come", Start("d e"), members=3, layout="data=3 zero_stage=3", redone=MANY, says={"a": COPIES}
            ),
            Row("scripts end", End(), ends={"a": 0, "d": 0, "e": 0}),
            nodes="a b c",
            members=3,
        ),
        nodes="3:4",
        config=stage(3, buddies={"mode": "copy", "copies": 2}),
    ),
    Play(
        "a late switch",
        began(
            Row("a node joins", Start("b"), members=2, layout="data=2 zero_stage=1"),
            Row("a node above MAX waits", Start("spare"), status="waiting"),
            Row("the spare node steps in", Terminate("b"), members=2, layout="data=2", ends={"b": 1}),
            Row("scripts end", End(), ends={"a": 0, "spare": 0}),
        ),
        nodes="1:2",
        config=stage(1, late=True),
        full=True,
    ),
    Play(
        "an idle member",
        began(
            Row("a node joins", Start("b"), members=2, layout="data=2"),
            Row("a node joins that has no place", Start("c"), says={"any": "1 of 3 members wait"}),
            Row("the idle one takes the place of the dead", Kill("b"), members=2, redone=MANY, says={"a": COPIES}),
            Row("scripts end", End(), ends={"a": 0, "c": 0}),
        ),
        config=stage(1, layouts={"1": {"data": 1}, "2": {"data": 2}}),
        full=True,
    ),
    Play(
        "a worker alone",
        began(
            Row("a node joins", Start("b", ("--max-restarts=3",)), members=2, layout="data=2", status="running; "),
            Row("it dies and is started again", Hit("b", signal.SIGKILL), members=2, redone=MANY, says={"a": COPIES}),
            Row("protected again", Ask(("status", ADDRESS), ("running; ",))),
            Row("it hangs and is started again", Hit("b", signal.SIGSTOP), members=2, redone=MANY),
            Row("scripts end", End(), ends={"a": 0, "b": 0}, says={"coordinator": "given up"}),
        ),
        config=stage(2),
        full=True,
    ),
    Play(
        "a node that hosts the coordinator",
        (
            Row("nodes start", Start("a", conf="is_host=1"), members=1),
            Row("a node joins", Start("b"), members=2, layout="data=2"),
            Row("the host hands over", Terminate("a"), members=1, says={"any": HANDED}),
            Row("scripts end", End(), ends={"b": 0, "a": 1}),
        ),
        full=True,
    ),
)

OTHER_AXES = (
    Play(
        "a pipeline",
        began(
            Row("a node joins", Start("b"), members=4, layout="data=2 pipe=2", status="running; "),
            Row("a node dies", Kill("b"), members=2, layout="pipe=2", redone=MANY, says={"a": COPIES}),
            Row("scripts end", End(), ends={"a": 0}),
            members=2,
            layout="pipe=2",
        ),
        model="pipeline",
        config=stage(1, layout={"data": 1, "pipe": 2}),
        workers=2,
    ),
    Play(
        "tensor ranks",
        began(
            Row("a node joins as a tensor rank", Start("b"), members=2, layout="tensor=2", status="running; "),
            Row("a tensor rank dies", Kill("b"), members=1, layout="data=1", redone=MANY, says={"a": COPIES}),
            Row("scripts end", End(), ends={"a": 0}),
        ),
        model="llama",
        is_held_to_launch=True,  # plain PyTorch is 2e-4 from stock DeepSpeed with this model
        config=stage(1, layouts={"1": {"data": 1}, "2": {"data": 1, "tensor": 2}}),
        full=True,
    ),
)

NOTHING_KEPT = Play(
    "no copies",
    began(
        Row("a node joins", Start("b"), members=2, layout="data=2"),
        Row(
            "another model is refused",
            Start("model", settings={"model": "llama"}),
            ends={"model": 1},
            says={"model": "cannot join the job: parameter 0"},
        ),
        Row(
            "another configuration is refused",
            Start("key", settings={"config": {"gradient_clipping": 1.0}}),
            ends={"key": 1},
            says={"key": "cannot join the job: .*gradient_clipping"},
        ),
        Row(
            "a stranger is refused",
            Ask(("status", ADDRESS), ("token",), code=2, env={"DYNATRAIN_TOKEN": "a token of another job"}),
        ),
        Row("the status of a job without copies", Ask(("status", ADDRESS), ("running, unprotected",))),
        Row(
            "a death loses the state",
            Kill("b"),
            members=0,
            ends={"a": 1},
            says={"a": "parts of the state are lost, and there is no checkpoint to go on from"},
        ),
        Row(
            "the status of a lost job", Ask(("status", ADDRESS), ("lost: no member has its state any more",)), members=0
        ),
    ),
    config=stage(1, **OFF),
)

FALLBACK = Play(
    "a fallback checkpoint",
    began(
        Row("a node joins", Start("c"), members=3, layout="data=3", says={"any": r"saved a checkpoint of step \d+"}),
        Row(
            "a node dies",
            Kill("c"),
            members=2,
            layout="data=2",
            redone=40,
            says={"a": r"restored step \d+ from .*kept"},
        ),
        Row("below MIN training waits", Terminate("b"), members=0, ends={"b": 1}, status="paused: too few nodes"),
        Row("a node comes and it goes on", Start("d"), members=2, layout="data=2"),
        Row("all get SIGTERM", Terminate("a d"), members=0, ends={"a": 1, "d": 1}),
        Row("what they have saved", Ask(("checkpoint", "verify", KEPT)), members=0),
        Row(
            "a fixed launch goes on at that step",
            Fixed("fixed", 3, {"config": {"dynatrain": {"layout": {"data": 3, "zero_stage": 3}}}}),
            members=3,
            layout="data=3 zero_stage=3",
            says={"fixed": r"resume: step \d+ of"},
        ),
        Row("it saves on SIGTERM", Terminate("fixed"), members=0, ends={"fixed": 1}),
        Row("nodes come back and go on", Start("e f", is_anew=True), members=2, layout="data=2 zero_stage=2"),
        Row("scripts end", End(), ends={"e": 0, "f": 0}),
        nodes="a b",
        members=2,
    ),
    nodes="2:3",
    config=stage(
        2,
        **OFF,
        fallback={"path": KEPT, "every_steps": 10, "on_sigterm": True},
        resume={"path": KEPT},
    ),
)

EXACT = Play(
    "an exact job",
    began(
        Row("a node with another seed joins", Start("b", settings={"seed": 9}), members=2, layout="data=2"),
        Row(
            "a node that rounds otherwise is refused",
            Start("c", env={"MKL_CBWR": "AVX2"}),
            ends={"c": 1},
            says={"c": "cannot join the job: dynatrain.exact: MKL_CBWR is COMPATIBLE in the running job and AVX2 here"},
        ),
        Row("a node dies", Kill("b"), members=1, layout="data=1", redone=MANY, says={"a": COPIES}),
        Row("scripts end", End(), ends={"a": 0}),
        Row(
            "one process alone",
            Fixed(
                "alone", 1, {"epochs": 4, "pause": 0, "config": {"dynatrain": {"report": {"jsonl": f"{FOLDER}/alone"}}}}
            ),
            members=0,
            redone=20,
            ends={"alone": 0},
        ),
        Row(
            "all bits are those of one process",
            Ask(("compare-exact", f"{FOLDER}/report", f"{FOLDER}/alone"), ("are bit-identical",)),
            members=0,
        ),
    ),
    config={**stage(2, exact=True, report={"jsonl": f"{FOLDER}/report"}), "train_micro_batch_size_per_gpu": 2},
)

REFUSED = Play(
    "refused at the start",
    (
        Row(
            "no global batch",
            Start("batch", coordinator="coordinator", settings={"config": {"train_batch_size": None}}),
            ends={"batch": 1},
            says={"batch": 'the global batch would change with their number; give "train_batch_size"'},
        ),
        Row(
            "copies in a fixed launch",
            Fixed("copies", 2, {"config": {"dynatrain": {"buddies": {"mode": "copy"}}}}),
            ends={"copies": 1},
            says={"copies": "buddies in a launch of fixed size: no process could take over"},
        ),
    ),
)

TRAINER = Play(
    "a Trainer of Hugging Face",
    began(
        Row("a node joins", Start("b"), members=2, layout="data=2"),
        Row("the node of rank 0 gets SIGTERM", Terminate("a"), members=1, layout="data=1", ends={"a": 1}),
        Row("scripts end", End(), ends={"b": 0}),
    ),
    model="llama",
    script="elastic_trainer.py",
    is_held_to_launch=True,
    full=True,
)

LIGHTNING = Play(
    "a Trainer of Lightning",
    began(
        Row("a node joins", Start("b"), members=2, layout="data=2"),
        Row("another one joins", Start("c"), members=3, layout="data=3"),
        Row("a node dies", Kill("b"), members=2, layout="data=2", redone=MANY, says={"a": COPIES}),
        Row("the node of rank 0 gets SIGTERM", Terminate("a"), members=1, layout="data=1", ends={"a": 1}),
        Row("scripts end", End(), ends={"c": 0}),
    ),
    script="elastic_lightning.py",
    config=stage(1, buddies={"mode": "copy"}),
    is_held_to_launch=True,
)

SLOW = {"evaluation": 0.2, "stream": True}

LIGHTNING_AT_STAGE_3 = Play(
    "a Trainer of Lightning at stage 3 on a stream, mostly in evaluations",
    (
        Row("nodes start", Start("a b c", coordinator="coordinator", settings=SLOW), members=3, layout="data=3"),
        Row("a node dies", Kill("a"), members=2, layout="data=2", redone=MANY, says={"any": COPIES}),
        Row("a node joins", Start("d", settings=SLOW), members=3, layout="data=3"),
        Row("another one dies", Kill("b"), members=2, layout="data=2", redone=MANY),
        Row("scripts end", End(), ends={"c": 0, "d": 0}),
    ),
    script="elastic_lightning.py",
    config=stage(3, buddies={"mode": "copy"}),
    is_held_to_launch=True,
    full=True,
)

PLAYS = (*COMES_AND_GOES, *OTHER_AXES, NOTHING_KEPT, FALLBACK, EXACT, TRAINER, LIGHTNING, LIGHTNING_AT_STAGE_3, REFUSED)
