"""Runs the scripts of docs/examples as their headers say, on a tiny model and a tiny dataset that lie on the disk."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from demo import tiny
from kits.helpers import Completed, run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TEXT = 40

ON_THE_CPU = ["--use_cpu", "--max_steps", "2", "--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true"]
"""What everyone adds who tries a script that uses the Trainer's arguments on a machine without a GPU."""

NEED_A_GPU = {f"FUSEPATCH_LIGER_{kernel}": "0" for kernel in ("ROPE", "RMS_NORM", "FUSED_LINEAR_CROSS_ENTROPY")}
"""Switches off the kernels that need a GPU, beside the one that the headers switch off."""


def save_model(folder: Path) -> Path:
    """A Qwen3 of two layers and its tokenizer, with a chat template, as `from_pretrained` reads them."""
    tokenizer = tiny.tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # transformers 4 adds token types
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    tiny.model().save_pretrained(folder)
    return folder


def save_rows(folder: Path, column: str) -> Path:
    """A folder that `load_dataset` reads, with Python's language reference in one column."""
    folder.mkdir()
    rows = [json.dumps({column: text}) for text in tiny.text(TEXT)]
    (folder / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def header(name: str) -> str:
    """What stands above the code of an example, without the signs of a comment."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        return text.split('"""')[1]
    comments = [line[1:].removeprefix(" ") for line in text.splitlines() if line.startswith("#") and line[1:2] != "!"]
    return "\n".join(comments)


def blocks(name: str) -> list[str]:
    """The indented blocks of the header: the command first, then what is printed."""
    found = re.findall(r"(?:^ {4}.*\n?)+", header(name), re.MULTILINE)
    return [re.sub(r"^ {4}", "", block, flags=re.MULTILINE).rstrip() for block in found]


def said(name: str) -> list[str]:
    """The lines that the example prints at its end, as its header has them."""
    return blocks(name)[1].splitlines()


def command(name: str) -> tuple[dict[str, str], list[str]]:
    """The variables and the arguments of the command in the header."""
    words = shlex.split(blocks(name)[0].replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    return variables, words[len(variables) :]


def run_script(
    name: str, folder: Path, places: Mapping[str, Path], *more: str, env: Mapping[str, str] | None = None
) -> Completed:
    """The command of the header in `folder`, with `places` instead of the values of these options, and more
    arguments."""
    variables, (python, script, *arguments) = command(name)
    assert (python, script) == ("python", name)
    for option, place in places.items():
        arguments[arguments.index(option) + 1] = str(place)
    argv = [sys.executable, EXAMPLES / name, *arguments, *more]
    done = run(argv, env={**variables, **(env or {})}, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


def printed(done: Completed) -> list[str]:
    """The lines of stdout, without what the variables of `NEED_A_GPU` add."""
    added = tuple(f"({name}={value})" for name, value in NEED_A_GPU.items())
    return [line for line in done.stdout.splitlines() if not line.endswith(added)]


def matches(line: str, pattern: str) -> bool:
    """Whether a printed line is the one of the header, where `...` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("..."))), line) is not None
