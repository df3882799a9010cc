"""`python tests/tools/new_patch.py NAME`: the files of a new patch in a checkout, with what its author has to say left
open.

Every open place says `FILL IN` (or `FILL_IN`, where only a name can stand). A test rejects a checkout in which one is
left.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template


class NewPatchError(Exception):
    """The files cannot be written; the text says why, and what to do."""


OPEN = re.compile(r"FILL[ _]IN")
"""What stands in every place that the author has to fill."""

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\.[a-z][a-z0-9]*(_[a-z0-9]+)*")

PATCH_FILE = Template('''\
"""`$id`: FILL IN: the promise in a few words."""

from __future__ import annotations

from typing import Any

from fusepatch.engine import ledger
from fusepatch.engine.patch import Contract, Patch, Proceed, Site, Slot
from fusepatch.patches.upstreams import $upstream

ID = "$id"


def handle(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of FILL IN: the function; give the handler that name's verb and the parameters that it reads."""
    ledger.count_call(ID)
    # FILL IN: what changes, before or after the original runs; import torch and upstreams here, not above.
    return proceed(*args, **kwargs)


PATCH = Patch(
    id=ID,
    promise="FILL IN: one sentence, what the user gets.",
    why="FILL IN: what happens without it, and what that costs.",
    upstream=("FILL IN: the address of the upstream issue or pull request, or the upstream file that shows it",),
    fixed_in="FILL IN: the first release that needs no patch, or: no release",
    remove_when="FILL IN: when this file can be deleted",
    variables=(),  # FILL IN: the FUSEPATCH_* names that it reads, each a row of settings.TABLE; () for none
    requested_by="",  # FILL IN: that one of them without which it changes nothing; "" where it acts by itself
    changes=("FILL IN: one line per change that a user could notice",),
    limits=("FILL IN: one line per case that is not covered; () for none",),
    sites=(
        Site(
            upstream=$upstream,$doubt
            module="$import_name.FILL_IN",  # the module that defines the target, not one that imports it
            supported=">=0",  # FILL IN: the releases in which the target has this shape and needs the patch
            slots=(Slot("FILL_IN", handle, Contract(parameters=("FILL_IN",))),),  # Class.method, or a function's name
        ),
    ),
)
''')

TEST_FILE = Template('''\
"""`$id` on the installed $import_name."""

from __future__ import annotations

from kits.helpers import fresh

# FILL IN: pytest.importorskip("...") for each library that CALL imports.

ID = "$id"
MODULE = "$import_name.FILL_IN"
ASKED: dict[str, str] = {}  # FILL IN: the variables that ask for it, where it does not act by itself

CALL = """
raise NotImplementedError("FILL IN: the smallest real call that shows the fault, and a print of what shows it")
"""
FAULT = "FILL IN: what CALL prints where the fault is there"
CURED = "FILL IN: what CALL prints where it is not"


def test_without_the_patch_the_fault_is_there() -> None:
    assert FAULT in fresh("import fusepatch\\n" + CALL, env={**ASKED, "FUSEPATCH_DISABLE": ID}, check=True).stdout


def test_with_the_patch_it_is_gone() -> None:
    assert CURED in fresh("import fusepatch\\n" + CALL, env=ASKED, check=True).stdout


def test_an_import_of_fusepatch_that_comes_late_is_no_different() -> None:
    assert CURED in fresh(f"import {MODULE}\\nimport fusepatch\\n" + CALL, env=ASKED, check=True).stdout


def test_deactivated_the_fault_is_back() -> None:
    undone = f"import fusepatch, {MODULE}\\nfusepatch.deactivate({ID!r})\\n"
    assert FAULT in fresh(undone + CALL, env=ASKED, check=True).stdout
''')

MISSING = Template("""
0. Choose the library. None in fusepatch/patches/upstreams.py is called
   $subject, so the patch and its test name $upstream. If that is right,
   delete the mark; if not, name the right one in both. (section 3)
""")

NEXT = Template("""\
What is left. The sections are those of docs/adding-a-patch.md.
$missing
1. See the fault in the installed release. Fill CALL and FAULT in the test,
   and MODULE, the module that defines the target. (sections 1 and 7)
     pytest $test -k without
2. If the patch reads a variable, or raises an error of its own, add that
   first. (sections 4 and 5)
3. Fill the patch, then CURED. (sections 4 to 7)
     python -m fusepatch status
     pytest $test
     pytest tests/test_faults.py tests/test_orders.py -k $id
   What is still open:
     grep -rnE 'FILL[ _]IN' fusepatch/patches tests/patches
4. Say what must become of each site in each release: a table
     [expected."$id".$import_name]
   in tests/tools/matrix.toml. The first command tries it, the second records
   it. (section 7)
     tox -e matrix -- --patch $id --rows latest
     tox -e matrix -- --patch $id --all --write
5. Write the pages anew, then add the patch to the table in README.md, to
   docs/index.md and to CHANGELOG.md. (section 8)
     python -m docs.generate
     pytest tests/test_docs.py tests/test_readme.py tests/test_structure.py
     pytest tests/tools
6. tox, and tox -e lint
""")


def create(name: str, here: Path) -> str:
    """Write the files of the patch `name` into the checkout that `here` lies in; returns what to tell the user.

    Raises:
        NewPatchError: the name is malformed or taken, or `here` lies in no checkout. Nothing has been written then.
    """
    if NAME.fullmatch(name) is None:
        raise NewPatchError(
            f"{name!r} is no name of a patch: wanted are two words in lower case with a dot between them, the library "
            "or the subject and then the promise, such as trl.sft_packing. Nothing was written; choose such a name."
        )
    root = _checkout(here)
    module = name.replace(".", "_")
    patch, test = Path("fusepatch/patches", f"{module}.py"), Path("tests/patches", f"test_{module}.py")
    taken = [path.relative_to(root) for path in (root / patch, (root / patch).with_suffix("")) if path.exists()]
    taken += [path.relative_to(root) for path in (root / "tests").rglob(test.name)]
    if taken:
        raise NewPatchError(
            f"there is a patch {name} or one whose files have the same names: {', '.join(map(str, taken))} in {root}. "
            "Nothing was written; choose another name, or delete that patch first, also from "
            "fusepatch/patches/__init__.py."
        )
    register = root / "fusepatch" / "patches" / "__init__.py"
    registered = _registered(register.read_text(encoding="utf-8"), module)
    subject = name.partition(".")[0]
    known = _upstreams(root)
    named = next((constant for constant, other in known.items() if subject in (constant.lower(), other)), None)
    constant = named or "TRANSFORMERS"
    words = {
        "id": name,
        "upstream": constant,
        "import_name": known[constant],
        "doubt": "" if named else f"  # FILL IN: the library, of those in upstreams.py; none is called {subject}",
        "missing": "" if named else MISSING.substitute(subject=subject, upstream=constant),
        "test": str(test),
    }
    (root / patch).write_text(PATCH_FILE.substitute(words), encoding="utf-8")
    (root / test).write_text(TEST_FILE.substitute(words), encoding="utf-8")
    register.write_text(registered, encoding="utf-8")
    _write_pages(root)
    return "\n".join(
        (
            f"wrote    {patch}",
            f"         {test}",
            f"         docs/patches/{name}.md",
            "changed  fusepatch/patches/__init__.py: the patch runs last; the order is yours",
            "         docs/patches.md",
            f"in       {root}",
            "",
            NEXT.substitute(words),
        )
    )


def _checkout(here: Path) -> Path:
    for folder in (here, *here.parents):
        project = folder / "pyproject.toml"
        if project.is_file() and '\nname = "fusepatch"\n' in project.read_text(encoding="utf-8"):
            return folder
    raise NewPatchError(
        f"{here} lies in no checkout of fusepatch: wanted is a folder, this one or one above it, with fusepatch's own "
        "pyproject.toml. Patches are added to the sources, not to an installed package. Nothing was written; change "
        "into a checkout first."
    )


def _upstreams(root: Path) -> dict[str, str]:
    """The libraries that patches can name: constant to import name."""
    text = (root / "fusepatch" / "patches" / "upstreams.py").read_text(encoding="utf-8")
    return dict(re.findall(r'^([A-Z]\w*) = Upstream\("(\w+)"', text, re.MULTILINE))


def _registered(text: str, module: str) -> str:
    """The text of `patches/__init__.py` with one more module, imported in the order of names and run last."""
    imports = re.search(r"^from fusepatch\.patches import \(\n((?:    \w+,\n)+)\)$", text, re.MULTILINE)
    table = re.search(r"^PATCHES: .* = \(\n(?:    \w+\.PATCH,\n)+(?=\)$)", text, re.MULTILINE)
    if imports is None or table is None:
        raise NewPatchError(
            "fusepatch/patches/__init__.py has another shape than this program can add to: wanted are one "
            "parenthesised import of the patches and the tuple PATCHES, one name a line. Nothing was written; bring it "
            "into that shape."
        )
    lines: Sequence[str] = sorted([*imports[1].splitlines(keepends=True), f"    {module},\n"])
    start, end = imports.span(1)
    return text[:start] + "".join(lines) + text[end : table.end()] + f"    {module}.PATCH,\n" + text[table.end() :]


def _write_pages(root: Path) -> None:
    # In a process of its own: this one has imported the patches without the new one, and perhaps from elsewhere.
    done = subprocess.run([sys.executable, "-m", "docs.generate"], cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise NewPatchError(
            f"the patch was written, its page was not: `python -m docs.generate` in {root} ended with exit status "
            f"{done.returncode}: {done.stderr.strip()}"
        )


def main(names: Sequence[str]) -> int:
    """The exit status: 0; 2 where the name is malformed or taken, or this is no checkout."""
    if len(names) != 1 or names[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(create(names[0], Path.cwd()))
    except NewPatchError as error:
        print(f"new_patch.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
