"""The line of a patch, for every outcome and for what its sites say, without the installed upstreams."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from fusepatch import terminal
from fusepatch.cli import show
from fusepatch.cli.show import Line, Place
from fusepatch.engine.patch import Outcome, PatchRecord, Reason, SiteRecord
from fusepatch.patches import PATCHES

FULL = Reason(
    "lib 1.0", "lib >=2,<3", "upstream is left as it is", "install a version in that range to have this patch"
)


def site(outcome: Outcome, upstream: str = "lib", version: str | None = "1.0", *flags: str) -> SiteRecord:
    return SiteRecord("a.patch", upstream, f"{upstream}.core", outcome, FULL, version, flags)


def line(*sites: SiteRecord, outcome: Outcome, planned: bool = True, id: str = "a.patch", **environ: str) -> Line:
    record = PatchRecord(id, outcome, "the patch's own reason", sites, 0, (), ())
    return show.of_records([record], environ, planned)[0]


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("planned", [True, False])
def test_each_outcome_has_its_mark_and_only_what_is_well_shows_versions(outcome: Outcome, planned: bool) -> None:
    well = outcome is Outcome.APPLIED or (planned and outcome is Outcome.PENDING)
    quiet = outcome in (Outcome.ABSENT, Outcome.DISABLED, Outcome.REMOVED)
    found = line(site(outcome), outcome=outcome, planned=planned)
    assert found.mark == ("+" if well else "-" if quiet else "!")
    assert found.outcome == ("would apply" if planned and outcome is Outcome.PENDING else outcome.value)
    assert found.detail == ("lib 1.0; wanted lib >=2,<3" if outcome is Outcome.GATED else "lib 1.0")
    assert found.places == (Place("lib.core", found.outcome, str(FULL)),)


def test_the_versions_are_those_of_the_sites_that_decide_each_once_with_its_flags() -> None:
    found = line(
        site(Outcome.APPLIED, "torch", "2.13.0+cpu"),
        site(Outcome.APPLIED, "torch", "2.13.0+cpu", "late"),
        site(Outcome.APPLIED, "torch", "2.13.0+cpu", "untested", "late"),
        site(Outcome.ABSENT, "verl", None),
        site(Outcome.APPLIED, "trl", None),
        outcome=Outcome.APPLIED,
    )
    assert found.detail == "torch 2.13.0+cpu (late, untested), trl of unknown version"


def test_what_waits_is_named_beside_what_is_applied() -> None:
    sites = (site(Outcome.APPLIED), site(Outcome.PENDING, "trl"), site(Outcome.ABSENT, "verl"))
    assert line(*sites, outcome=Outcome.APPLIED, planned=False).detail == "lib 1.0; waiting: trl.core"
    assert line(*sites, outcome=Outcome.PENDING, planned=True).detail == "trl 1.0"


def test_an_outcome_that_no_site_has_is_explained_by_the_patch() -> None:
    assert line(site(Outcome.APPLIED), outcome=Outcome.DRIFTED).detail == "the patch's own reason"


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        ({"FUSEPATCH_OPTIMIZER_CLASS": "keep"}, False),
        ({"FUSEPATCH_OPTIMIZER_CLASS": "torch.optim.SGD"}, True),
        ({"FUSEPATCH_OPTIMIZER_CLASS": "what another version of fusepatch could read"}, True),
    ],
)
def test_what_nobody_asked_for_is_on_request_unless_it_would_not_work(environ: Mapping[str, str], asked: bool) -> None:
    for outcome in Outcome:
        found = line(site(outcome), outcome=outcome, planned=False, id="optimizer.class", **environ)
        if outcome in (Outcome.APPLIED, Outcome.PENDING) and not asked:
            assert found[:4] == ("-", "optimizer.class", "on request", "set FUSEPATCH_OPTIMIZER_CLASS")
        else:
            assert found.outcome == outcome.value


def test_a_patch_that_cannot_be_applied_takes_two_lines_of_a_screen_at_most() -> None:
    lines = [line(site(Outcome.GATED, "liger_kernel"), outcome=Outcome.GATED, id=patch.id) for patch in PATCHES]
    detail = "liger_kernel 0.8.5.dev20261027042432; wanted liger_kernel !=0.5.0,<0.9,>=0.4.2"
    text = show.text([line._replace(detail=detail) for line in lines], 80, verbose=False)
    assert len(text.splitlines()) <= 2 * len(PATCHES)
    assert max(map(len, text.splitlines())) <= 80
    for patch in PATCHES:
        assert re.search(rf"^! {re.escape(patch.id)} +GATED +liger_kernel ", text, re.M)


def test_modules_that_fare_alike_share_a_line() -> None:
    assert show.listed(["torch.optim.adam"]) == "torch.optim.adam"
    assert show.listed(["a.b.x", "c", "a.b.y", "a.z"]) == "a.b: x, y; c; a.z"
    places = tuple(Place(f"a.{name}", outcome, "why") for name, outcome in zip("xyz", ["IN", "OUT", "IN"], strict=True))
    text = show.text([Line("+", "a.patch", "APPLIED", "a 1", places)], 80, verbose=True)
    assert text.splitlines()[1:] == ["    a: x, z: IN: why", "    a.y: OUT: why"]
    assert show.text([], 80, verbose=True) == ""


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    assert terminal.printable("a\x1b[2Jb\r\n\tc\ud800\u00e9 d") == "a\\x1b[2Jb c\\ud800\u00e9 d"
