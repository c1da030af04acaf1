"""What `examples/slurm`, `examples/kubernetes` and `docs/launchers.md` say can be said: to bash, to torchrun, to
Kubernetes. No cluster is asked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from torch.distributed.run import parse_args

from ds_dynatrain.cli.jobs import nodes
from ds_dynatrain.cli.main import app
from ds_dynatrain.elastic.address import read_endpoint

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
PAGES = [ROOT / "docs" / "launchers.md"]
KUBERNETES = ("1.31", "1.37")
"""The oldest and the newest that manifests are held against; in the older one all fields are stable."""

PYTORCHJOB = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
ELASTIC = {
    "maxReplicas": int,
    "maxRestarts": int,
    "minReplicas": int,
    "rdzvBackend": str,
    "rdzvConf": list,
    "rdzvHost": str,
    "rdzvId": str,
    "rdzvPort": int,
}
"""Of the CRD of Kubeflow's training operator 1.9, which no package has: fields, and in `elasticPolicy` their types."""


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in MANIFESTS:
        for manifest in yaml.safe_load_all(file.read_text()):
            yield f"{file.stem}-{manifest['kind']}", manifest


def pods(manifest: Any) -> Iterator[dict[str, Any]]:
    """What says how a pod is, wherever it stands."""
    if isinstance(manifest, dict):
        if "containers" in manifest:
            yield manifest
        for inner in manifest.values():
            yield from pods(inner)
    elif isinstance(manifest, list):
        for inner in manifest:
            yield from pods(inner)


def by_kind(kind: str) -> dict[str, Any]:
    """The one manifest of a kind, or the job of nodes."""
    found = [each for _, each in manifests() if each["kind"] == kind]
    assert len(found) == 1
    return found[0]


def torchrun(words: list[str], variables: dict[str, str] | None = None) -> Namespace:
    """What torchrun takes from its command line, and from variables as operators set them. SystemExit for nonsense."""
    before = dict(os.environ)
    os.environ.update(variables or {})
    try:
        return parse_args(words)
    finally:
        os.environ.clear()
        os.environ.update(before)


def coordinator(words: list[str]) -> dict[str, Any]:
    """What `ds-dynatrain coordinator` takes from its command line; an error of click's for nonsense."""
    command = typer.main.get_command(app).commands["coordinator"]  # type: ignore[attr-defined]
    return dict(command.make_context("coordinator", list(words)).params)


class TestSlurm:
    @pytest.fixture
    def stand_ins(self, tmp_path: Path) -> dict[str, str]:
        """The environment of a batch script, in which programs note what they are called with. `$CODE` is torchrun's
        exit code; with `$TOLD` it gets SIGTERM, as all processes of a step do."""
        programs = {
            "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
            "scontrol": 'echo "$@" >> "$OUT/said"',
            "ds-dynatrain": 'printf "%s\\n" "$@" > "$OUT/words"',
            "torchrun": 'printf "%s\\n" "$@" > "$OUT/words"; [[ $TOLD ]] && kill -TERM $PPID; exit $CODE',
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        slurm = {"SLURM_NNODES": "4", "SLURM_JOB_ID": "17", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        return {**os.environ, **slurm, "PATH": path, "OUT": str(tmp_path), "CODE": "0", "TOLD": ""}

    @staticmethod
    def run(script: str, variables: dict[str, str]) -> int:
        return subprocess.run(["bash", str(ROOT / "examples" / "slurm" / script)], env=variables, cwd=ROOT).returncode

    @pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
    def test_bash_reads_it(self, script: Path) -> None:
        subprocess.run(["bash", "-n", str(script)], check=True)
        directives = re.findall(r"^#SBATCH (.*)$", script.read_text(), re.MULTILINE)
        assert directives and all(re.fullmatch(r"--[a-z-]+(=\S+)?", each) for each in directives)

    @pytest.mark.parametrize(("script", "backend"), [("fixed.sbatch", "c10d"), ("elements.sbatch", "dynatrain")])
    def test_torchrun_takes_what_it_is_given(self, stand_ins: dict[str, str], script: str, backend: str) -> None:
        assert self.run(script, stand_ins) == 0
        asked = torchrun((Path(stand_ins["OUT"]) / "words").read_text().splitlines())
        assert asked.rdzv_backend == backend and (ROOT / asked.training_script).exists()
        text = (ROOT / "examples" / "slurm" / script).read_text()
        assert f"#SBATCH --gpus-per-node={asked.nproc_per_node}\n" in text
        signal = re.search(r"--signal=TERM@(\d+)", text)
        assert signal and asked.shutdown_timeout < int(signal[1])
        read_endpoint(asked.rdzv_endpoint)

    def test_the_coordinator_takes_what_it_is_given(self, stand_ins: dict[str, str]) -> None:
        assert self.run("coordinator.sbatch", stand_ins) == 0
        word, *rest = (Path(stand_ins["OUT"]) / "words").read_text().splitlines()
        told = coordinator(rest)
        assert word == "coordinator" and told["announce"] == Path(stand_ins["OUT"]) / "coordinator"
        self.run("elements.sbatch", stand_ins)
        asked = torchrun((Path(stand_ins["OUT"]) / "words").read_text().splitlines())
        assert asked.rdzv_endpoint == f"file:{told['announce']}" and asked.rdzv_id == told["job"]
        assert asked.nnodes == told["nnodes"]

    @pytest.mark.parametrize("script", ["fixed.sbatch", "elements.sbatch"])
    def test_who_was_told_to_go_is_queued_again(self, stand_ins: dict[str, str], script: str) -> None:
        requeued = Path(stand_ins["OUT"]) / "said"
        assert self.run(script, {**stand_ins, "CODE": "1"}) == 1
        assert not requeued.exists(), "after an error it is not: it would come again"
        assert self.run(script, {**stand_ins, "CODE": "1", "TOLD": "1"}) == 143
        assert requeued.read_text() == "requeue 17\n"


class TestKubernetes:
    @pytest.mark.parametrize("version", KUBERNETES)
    @pytest.mark.parametrize("manifest", [pytest.param(each, id=name) for name, each in manifests()])
    def test_kubernetes_takes_it(self, manifest: dict[str, Any], version: str) -> None:
        if "kubeflow" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, version, strict=True)
        for pod in pods(manifest):  # in kinds that are not Kubernetes' own they are, too
            job = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
            kubernetes_validate.validate(job, version, strict=True)

    @pytest.mark.parametrize("kind", ["TrainingRuntime", "TrainJob"])
    def test_the_trainer_takes_it(self, kind: str) -> None:
        models = pytest.importorskip("kubeflow_trainer_api.models")
        manifest = by_kind(kind)
        read = getattr(models, f"TrainerV1alpha1{kind}").from_dict(manifest)
        assert read.to_dict() == manifest, "it leaves out what it does not know"

    def test_the_training_operator_takes_it(self) -> None:
        spec = by_kind("PyTorchJob")["spec"]
        assert set(spec) <= PYTORCHJOB
        policy = spec["elasticPolicy"]
        assert all(type(value) is ELASTIC[name] for name, value in policy.items())
        assert all(set(one) == {"key", "value"} and type(one["value"]) is str for one in policy["rdzvConf"])
        (worker,) = spec["pytorchReplicaSpecs"].values()
        assert set(worker) == {"replicas", "restartPolicy", "template"}
        assert worker["template"]["spec"]["containers"][0]["name"] == "pytorch", "its webhook wants that name"

    @pytest.mark.parametrize("name", ["nodes-Job", "trainjob-TrainJob", "pytorchjob-PyTorchJob"])
    def test_nodes_find_the_coordinator(self, name: str) -> None:
        manifest = dict(manifests())[name]
        spec = manifest["spec"]
        container = spec["trainer"] if "trainer" in spec else next(pods(manifest))["containers"][0]
        word, *rest = container["command"]
        asked = torchrun(rest, variables_of(spec))
        (serving,) = pods(by_kind("Deployment"))
        program, command, *words = serving["containers"][0]["command"]
        told, service = coordinator(words), by_kind("Service")
        assert (word, program, command) == ("torchrun", "ds-dynatrain", "coordinator")
        ports = [port["port"] for port in service["spec"]["ports"]]
        assert ports == [int(told["address"].rpartition(":")[2]), told["store_port"]]
        assert asked.rdzv_endpoint == f"{service['metadata']['name']}:{ports[0]}"
        assert asked.rdzv_backend == "dynatrain" and asked.rdzv_id == told["job"] and asked.rdzv_conf == "is_host=0"
        assert nodes(asked.nnodes)[0] == nodes(told["nnodes"])[0] and asked.nproc_per_node == "8"
        assert asked.training_script == "train.py" and asked.max_restarts == 3
        asks = container["resources"] if "resources" in container else spec["trainer"]["resourcesPerNode"]
        assert asks == {"limits": {"nvidia.com/gpu": int(asked.nproc_per_node)}}
        graces = [pod["terminationGracePeriodSeconds"] for _, each in manifests() for pod in pods(each) if is_node(pod)]
        assert len(graces) == 3 and asked.shutdown_timeout < min(graces)


def variables_of(spec: dict[str, Any]) -> dict[str, str]:
    """What the training operator makes of `elasticPolicy` (its controller.v1/pytorch/elastic.go), for torchrun."""
    policy = spec.get("elasticPolicy")
    if policy is None:
        return {}
    return {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{policy['rdzvHost']}:{policy['rdzvPort']}",
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{one['key']}={one['value']}" for one in policy["rdzvConf"]),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
    }


def is_node(pod: dict[str, Any]) -> bool:
    return pod["containers"][0]["name"] in ("node", "pytorch")


def test_torchrun_has_the_options_that_the_page_names() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    lines = [line for block in re.findall(r"```(?:bash|text)\n(.*?)```", text, re.DOTALL) for line in joined(block)]
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("torchrun ")]
    assert found
    for words in found:
        torchrun(words[1:])
    for option in re.findall(r"`(--[a-z_-]+)[^`]*`", text):
        assert option in known_options(), option


def joined(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def known_options() -> set[str]:
    """Of torchrun, of our commands, and of the other launchers that the page speaks of."""
    from torch.distributed.run import get_args_parser

    ours = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    others = {
        "--continuous",
        "--ntasks-per-node",
        "--cpus-per-task",
        "--exclusive",
        "--gpus-per-node",
        "--no_ssh",
        "--nodes",
        "--open-mode",
        "--replicas",
        "--signal",
    }
    return {
        *get_args_parser()._option_string_actions,
        *(option for command in ours for given in command.params for option in given.opts),
        *others,
    }
