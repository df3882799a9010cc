"""`python -m fusepatch bench grpo` on the CPU with tiny shapes: real peers, and peers that are wrong, given by
`--peer`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fusepatch.bench.grpo.cases import CASES, PEERS, TOLERANCES, Case
from fusepatch.bench.processes import PeerError, Worker, read_peer
from kits.benchmarks import refusal
from kits.helpers import Completed, fresh, run

REPOSITORY = Path(__file__).parents[2]
SHAPE = ["--batch", "5", "--length", "13", "--hidden", "24", "--vocabulary", "101"]

RIGHT = """
import torch

def linear_cross_entropy(hidden, weight, targets, reduction):
    return torch.nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction=reduction)
"""
# The loss is right; the softmax has no part in the gradients.
WRONG = """
def linear_cross_entropy(hidden, weight, targets, reduction):
    logits = hidden @ weight.t()
    return logits.detach().logsumexp(1) - logits.gather(1, targets[:, None]).squeeze(1)
"""
NOT_A_NUMBER = WRONG.replace("return ", "return float('nan') * ")
DIES = """
import os

def linear_cross_entropy(hidden, weight, targets, reduction):
    print("the last words", file=__import__("sys").stderr, flush=True)
    os._exit(3)
"""
RAISES = """
def linear_cross_entropy(hidden, weight, targets, reduction):
    raise TypeError("no such thing")
"""


def bench(*arguments: str | Path) -> Completed:
    return run(
        [sys.executable, "-m", "fusepatch", "bench", *arguments],
        env={"TORCH_COMPILE_DISABLE": "1"},
        cwd=REPOSITORY,
        timeout=900,
    )


def folder(where: Path, name: str, text: str) -> Path:
    package = where / name / "cut_cross_entropy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return package.parent


def wheel(where: Path, text: str) -> Path:
    path = where / "cut_cross_entropy-99.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cut_cross_entropy/__init__.py", text)
        archive.writestr(
            "cut_cross_entropy-99.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: cut-cross-entropy\nVersion: 99.0\n",
        )
    return path


def peers_of(document: dict[str, Any], case: str) -> dict[str, dict[str, Any]]:
    section = next(section for section in document["cases"] if section["case"] == case)
    return {peer["peer"]: peer for peer in section["peers"]}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Completed, dict[str, Any], str]:
    """One run over every case and peer, with stand-ins for cut-cross-entropy: right, wrong, NaN, and one that
    raises."""
    where = tmp_path_factory.mktemp("bench")
    done = bench(
        "grpo",
        *SHAPE,
        "--peer",
        f"cut-cross-entropy={wheel(where, RIGHT)}",
        "--peer",
        f"cut-cross-entropy-wrong={folder(where, 'wrong', WRONG)}",
        "--peer",
        f"cut-cross-entropy-nan={folder(where, 'nan', NOT_A_NUMBER)}",
        "--peer",
        f"cut-cross-entropy-raises={folder(where, 'raises', RAISES)}",
        "--json",
        where / "out.json",
        "--markdown",
        where / "out.md",
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done, json.loads((where / "out.json").read_text()), (where / "out.md").read_text()


def test_the_peers_that_the_help_names_are_those_that_there_are() -> None:
    from fusepatch.bench.grpo.peers import IMPLEMENTATIONS

    assert list(PEERS) == list(IMPLEMENTATIONS)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("peer", ["liger", "fusepatch", "fusepatch-memory", "full-logits", "cut-cross-entropy"])
def test_what_is_right_passes(everything: tuple[Completed, dict[str, Any], str], peer: str, name: str) -> None:
    found = peers_of(everything[1], name)[peer]
    if peer == "fusepatch-memory" and not CASES[name].trainable:
        assert found["problem"] == "does not apply"
        return
    assert (found["problem"], found["reason"]) == (None, "")
    assert found["check"]["passed"]
    # Far inside the tolerance, which leaves room for TF32: so Liger's policy is the reference's.
    assert found["check"]["loss"] < 1e-5
    assert found["check"]["grad_hidden"] < 1e-5
    assert (found["check"]["grad_weight"] is not None) == CASES[name].trainable
    assert (found["check"]["grad_weight"] or 0.0) < 1e-5
    assert [len(repeat) for repeat in found["milliseconds"]] == [3, 3, 3]
    times = sorted(time for repeat in found["milliseconds"] for time in repeat)
    assert (found["minimum"], found["median"]) == (times[0], times[4])
    floor, liger = peers_of(everything[1], name)["floor"], peers_of(everything[1], name)["liger"]
    assert found["times_floor"] == found["median"] / floor["median"]
    assert found["times_baseline"] == {"liger": found["median"] / liger["median"]}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("peer", ["cut-cross-entropy-wrong", "cut-cross-entropy-nan"])
def test_what_is_wrong_has_its_times_and_no_ratio(
    everything: tuple[Completed, dict[str, Any], str], peer: str, name: str
) -> None:
    done, document, markdown = everything
    found = peers_of(document, name)[peer]
    assert found["problem"] is None
    assert not found["check"]["passed"]
    assert (found["check"]["loss"] == "nan") == (peer == "cut-cross-entropy-nan")
    assert found["median"] > 0
    assert found["times_floor"] is None
    assert set(found["times_baseline"].values()) <= {None}
    assert done.returncode == 1
    section = markdown.split(f"### {name}: ")[1].split("###")[0]
    cells = next(line for line in section.splitlines() if line.startswith(f"| {peer} |")).strip("| ").split(" | ")
    assert cells[3:5] == ["-", "-"]
    assert cells[-1].startswith("FAILED CHECK: ")
    assert f"{peer} in {name}" in done.stdout


def test_a_process_that_dies_is_said_and_is_started_again(tmp_path: Path) -> None:
    done = bench(
        "grpo",
        *SHAPE,
        "--peers",
        "floor,full-logits",
        "--peer",
        f"cut-cross-entropy={folder(tmp_path, 'dies', DIES)}",
        "--cases",
        "frozen,trainable",
        "--json",
        tmp_path / "out.json",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    for name in ("frozen", "trainable"):
        peers = peers_of(document, name)
        found = peers["cut-cross-entropy"]
        assert found["problem"] == "error"
        assert found["reason"].startswith("its process ended with status 3: ")
        assert found["reason"].endswith("the last words")
        assert found["times_floor"] is None
        assert peers["full-logits"]["check"]["passed"]


def test_an_error_of_a_peer_is_its_own(everything: tuple[Completed, dict[str, Any], str]) -> None:
    found = peers_of(everything[1], "frozen")["cut-cross-entropy-raises"]
    assert (found["problem"], found["reason"]) == ("error", "TypeError: no such thing")


def test_a_wheel_comes_with_its_version(everything: tuple[Completed, dict[str, Any], str]) -> None:
    assert peers_of(everything[1], "frozen")["cut-cross-entropy"]["version"] == "cut-cross-entropy 99.0"


def test_what_is_not_installed_is_listed(everything: tuple[Completed, dict[str, Any], str]) -> None:
    done, document, _ = everything
    if importlib.util.find_spec("verl") is None:
        found = peers_of(document, "frozen")["verl"]
        assert (found["problem"], found["reason"]) == ("not installed", "verl is not installed")
        assert "not installed" in done.stdout
    if importlib.util.find_spec("trl") is not None:
        major, minor = map(int, importlib.metadata.version("trl").split(".")[:2])
        found = peers_of(document, "frozen")["trl"]
        if (major, minor) < (1, 15):
            assert found["problem"] == "not installed"
            assert "1.15" in found["reason"]
        else:
            assert found["check"]["passed"]


def test_the_machine_and_the_command_are_in_what_is_written(
    everything: tuple[Completed, dict[str, Any], str],
) -> None:
    done, document, markdown = everything
    assert document["command"].startswith("python -m fusepatch bench grpo --batch 5 ")
    assert document["command"] in markdown
    assert document["shape"] == {"batch": 5, "length": 13, "hidden": 24, "dtype": "float32"}
    assert {section["vocabulary"] for section in document["cases"]} == {101}
    assert "no CUDA GPU" in done.stdout


def test_several_vocabularies_and_bfloat16() -> None:
    done = bench(
        "grpo",
        "--peers",
        "full-logits",
        "--dtype",
        "bfloat16",
        "--vocabulary",
        "64",
        "96",
        "--cases",
        "frozen,frozen-old",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    titles = [line for line in done.stdout.splitlines() if "; V = " in line]
    assert [(title.split(":")[0], title.split("V = ")[1]) for title in titles] == [
        ("frozen", "64"),
        ("frozen-old", "64"),
        ("frozen", "96"),
    ]
    assert f"(at most {TOLERANCES['bfloat16']:g})" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeats", "2"], "must be at least 3"),
        (["--peer", "ligger=."], "'ligger' is not an implementation"),
        (["--peer", "liger-0.8.3=nowhere"], "'nowhere' is neither a folder nor a wheel"),
        (["--peer", "liger-a=.", "--peer", "liger-a=."], "given twice"),
        (["--cases", "frosen"], "found frosen; wanted some of frozen,"),
        (["--peers", ""], "found none; wanted some of floor,"),
        (["--json", "nowhere/out.json"], "--json 'nowhere/out.json' cannot be written: there is no folder"),
        (["--json", "."], "--json '.' cannot be written: it exists and is not a regular file"),
        (["--json", "-"], "--json '-' cannot be written: it needs the name of a file"),
        (["--markdown", ""], "--markdown '' cannot be written: it needs the name of a file"),
        (["--plot", "plot.txt"], "a plot's name ends in one of .png, .pdf, .svg"),
        (["--peer", "liger-a=/dev/stdin"], "'/dev/stdin' is neither a folder nor a wheel"),
        (["--batch", "0"], "must be at least 1"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, "grpo", *arguments)


def test_a_refusal_is_an_exit_status_and_nothing_on_stdout() -> None:
    done = bench("grpo", "--json", "nowhere/out.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json 'nowhere/out.json' cannot be written: there is no folder" in " ".join(done.stderr.split())


def test_a_fifo_is_no_wheel_and_a_damaged_wheel_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PeerError, match="neither a folder nor a wheel"):  # and does not wait for a writer
        read_peer(f"liger={tmp_path / 'fifo'}", PEERS)
    with zipfile.ZipFile(tmp_path / "whole.whl", "w") as wheel:
        wheel.writestr("liger_kernel/__init__.py", "x = 1\n" * 100)
    damaged = (tmp_path / "whole.whl").read_bytes().replace(b"x = 1", b"y = 2", 1)
    (tmp_path / "damaged.whl").write_bytes(damaged)
    peer = read_peer(f"liger={tmp_path / 'damaged.whl'}", PEERS)
    with pytest.raises(PeerError, match="Bad CRC-32"):
        Worker(peer, str(tmp_path), "fusepatch.bench.grpo.worker")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    done = bench("grpo", "--plot", tmp_path / "out.png")
    assert done.returncode == 2
    assert "--plot needs matplotlib" in done.stderr
    assert done.stdout == ""


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = bench("grpo", *SHAPE, "--peers", "floor,full-logits", "--cases", "frozen", "--plot", tmp_path / "out.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_package_does_not_import_its_benchmark() -> None:
    fresh("import sys, fusepatch; assert not [name for name in sys.modules if 'bench' in name]", check=True)


def test_the_plain_cases_are_those_of_every_vocabulary() -> None:
    assert [case.name for case in CASES.values() if case.on_policy] == ["frozen", "trainable"]
    assert CASES["trainable-old"] == Case("trainable-old", trainable=True, old=True)
