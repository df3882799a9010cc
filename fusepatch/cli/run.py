"""`run`: becomes `python ARGUMENTS` with the patches switched on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from fusepatch import activation, settings, terminal
from fusepatch.errors import SettingError

REFUSED = 125
"""Exit status of `run` where the program was not started; the usual one of commands that start others."""

HELP = """\
Starts a program with the patches switched on, in it and in its child
processes, without an import in its code: sets FUSEPATCH=1 and becomes
`python ARGUMENTS`. Everything after `run` is the interpreter's own: options
(-u, -W error, -X dev), then a script, -m MODULE or -c CODE, then arguments.
With FUSEPATCH=0 in the environment the program runs unpatched.

exit status: the program's own; 125 where it was not started (the start-up
file is not installed in this interpreter, or a FUSEPATCH_* value cannot be
read)
"""


def become(arguments: list[str]) -> int:
    """Become `python ARGUMENTS` with the patches switched on; returns only where that is refused."""
    try:
        refusal = problem(os.environ) or _started(arguments)
    except OSError as error:
        refusal = f"{sys.executable} could not be started: {type(error).__name__}: {error}."
    terminal.complain(f"{refusal} The program was not started.")
    return REFUSED


def _started(arguments: list[str]) -> str:
    """Start the program, or return why that would be in vain."""
    own = _own_interpreter_options()
    if settings.read(os.environ).switch is False:
        terminal.complain("FUSEPATCH=0 is set, so the program runs unpatched; unset it to use the patches")
        _become_python([*own, *arguments], dict(os.environ))
    options = [*own, *interpreter_options(arguments)]
    if _startup_is_installed(options):
        _become_python([*own, *arguments], {**os.environ, settings.SWITCH: "1"})
    return (
        f"{' '.join([sys.executable, *options])} does not read fusepatch's start-up file, so `run` would have no "
        "effect: fusepatch.pth and fusepatch_startup.py must be in its site-packages (a checkout on PYTHONPATH does "
        "not put them there, and -S skips them). Install fusepatch there with pip, or write `import fusepatch` at the "
        "top of the program."
    )


def _become_python(arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    terminal.finish()
    os.execve(sys.executable, [sys.executable, *arguments], environ)


def _own_interpreter_options() -> list[str]:
    """The options that this interpreter was started with: `-u` of `python -u -m fusepatch run ...`."""
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return interpreter_options(words)


def interpreter_options(words: Sequence[str]) -> list[str]:
    """The interpreter's options at the head of its command line, up to the script, `-m`, `-c` or `-`."""
    options: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            break
        letters = word[1:]
        ends = min((letters.find(letter) for letter in "cm" if letter in letters), default=-1)
        takes_value = min((letters.find(letter) for letter in "WX" if letter in letters), default=-1)
        if not word.startswith("--") and ends >= 0 and not 0 <= takes_value < ends:
            options.extend([f"-{letters[:ends]}"] if ends else [])
            break
        options.append(word)
        if word == "--check-hash-based-pycs" or (takes_value >= 0 and takes_value == len(letters) - 1):
            options.extend([value] if (value := next(rest, None)) is not None else [])
    return options


def _startup_is_installed(options: Sequence[str]) -> bool:
    """Ask an interpreter with these options whether it has read the start-up file and would find the package."""
    probe = (
        "import sys, importlib.util as u; sys.exit('fusepatch_startup' not in sys.modules or not "
        "u.find_spec('fusepatch'))"
    )
    asked = subprocess.run(
        [sys.executable, *options, "-c", probe],
        env={**os.environ, settings.SWITCH: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return asked.returncode == 0


def problem(environ: Mapping[str, str]) -> str | None:
    """Why fusepatch could not be activated with this environment; None where it could."""
    try:
        activation.read_settings(environ)
    except SettingError as error:
        return str(error)
    return None
