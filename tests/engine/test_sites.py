"""A site's life: the verdict on a module that is loaded and on its source, installation, the second look, removal."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusepatch.engine import contract, hooks, install, ledger, sites
from fusepatch.engine.patch import Contract, Outcome, Reason, Site, SiteRecord, Slot
from fusepatch.engine.sites import Kind
from fusepatch.errors import StrictError
from kits.declarations import adding_hundred, passing, site


@pytest.fixture(autouse=True)
def _no_watchers_left() -> Iterator[None]:
    yield
    hooks._watchers.pop("toylib.core", None)


def watched(declared: Site, late: bool = False) -> SiteRecord:
    """The record of a site whose module is imported after it was watched, or before."""
    if late:
        importlib.import_module(declared.module)
    sites.watch("p", declared, 0, lambda: True)
    importlib.import_module(declared.module)
    record = ledger.site("p", declared.module)
    assert record is not None
    return record


# The verdict

PATHS = ("scale", "Model.forward", "Model.Inner.forward", "scale_*")
CONTRACTS = (Contract(), Contract(("value",)), Contract(("value", "factor")), Contract(("value",), keywords=True))

SHOWN = {
    "nothing": "",
    "functions": "def scale(value, factor=2): ...\ndef scale_more(value, **rest): ...",
    "async": "async def scale(value): ...\nasync def scale_more(value): ...",
    "defined twice": "def scale(): ...\ndef scale(value, factor): ...",
    "positional": "def scale(value, /, factor): ...\ndef scale_more(value, /): ...",
    "methods": """
class Model:
    def forward(self, value): ...
    class Inner:
        def forward(self, value, **rest): ...
""",
    "static and class methods": """
class Model:
    @staticmethod
    def forward(value): ...
    class Inner:
        @classmethod
        def forward(cls, value): ...
""",
    "a class without the method": "class Model:\n    class Inner: pass",
    "a function where a class was": "def Model(): ...",
    "imported, then defined": "from os.path import join as scale\ndef scale(value): ...",
}
"""Sources that show all that an import would."""

NOT_SHOWN = {
    "a class where a function was": "class scale:\n    def forward(self, value): ...",
    "assigned": "scale = 3\nscale_more = lambda value: value",
    "imported": "from shutil import copy as scale, copy2 as scale_more\nfrom ast import NodeVisitor as Model",
    "imported by a star": "from string import *",
    "in a branch": """
if True:
    def scale(value): ...
    def scale_more(value): ...
    class Model:
        def forward(self): ...
""",
    "tried": "try:\n    from no_such_module import scale\nexcept ImportError:\n    def scale(value, factor): ...",
    "removed": "def scale(value): ...\ndel scale\nclass Model: ...\ndel Model",
    "inherited": "from ast import NodeVisitor\nclass Model(NodeVisitor):\n    class Inner(NodeVisitor): ...",
    "assigned in a class": """
class Model:
    forward = len
    class Inner:
        forward = staticmethod(lambda value: value)
""",
}
"""Sources of which only an import shows what some names are."""


@pytest.mark.parametrize("source", [*SHOWN, *NOT_SHOWN])
def test_the_preview_of_a_source_is_the_verdict_on_the_module(library: Callable[..., str], source: str) -> None:
    name = library({**SHOWN, **NOT_SHOWN}[source])
    declared = [
        site(*(Slot(path, passing, wanted) for path in paths))
        for length in (1, 2)
        for paths in itertools.combinations(PATHS, length)
        for wanted in CONTRACTS
    ]
    previews = [sites.judge(each) for each in declared]
    assert "toylib" not in sys.modules, "the source is read without importing"
    module = importlib.import_module(name)
    for each, preview in zip(declared, previews, strict=True):
        loaded = sites.judge(each, module)
        assert loaded.unclear == ()
        if preview.unclear:
            assert source in NOT_SHOWN
        elif source in SHOWN or len(each.slots) == 1:
            assert preview == loaded, each.slots
        else:
            assert (preview.kind is Kind.FITS) == (loaded.kind is Kind.FITS), each.slots


def test_each_kind_of_verdict(library: Callable[..., str]) -> None:
    name = library()
    gone = Slot("gone", passing), Slot("Gone.forward", passing)
    cases = [
        (site(), Kind.FITS, "toylib 1.2.0"),
        (site(*gone), Kind.TARGET_ABSENT, "toylib 1.2.0: toylib.core has no gone, Gone.forward"),
        (site(gone[0], Slot("scale", passing)), Kind.CONTRACT_BROKEN, "toylib 1.2.0: toylib.core has no gone"),
        (
            site(Slot("scale", passing, Contract(("value", "weight")))),
            Kind.CONTRACT_BROKEN,
            "toylib 1.2.0: toylib.core.scale no longer takes weight",
        ),
        (site(supported=">=2"), Kind.GATED, "toylib 1.2.0"),
    ]
    for declared, kind, found in cases:
        verdict = sites.judge(declared)
        assert (verdict.kind, verdict.reason.found, verdict.version) == (kind, found, "1.2.0")
    module = importlib.import_module(name)
    assert [sites.judge(declared, module) for declared, *_ in cases] == [sites.judge(case[0]) for case in cases]
    verdict = sites.judge(site(Slot("TABLE", passing)), module)
    assert (verdict.kind, verdict.reason.wanted) == (Kind.CONTRACT_BROKEN, "TABLE")
    assert verdict.reason.found == "toylib 1.2.0: toylib.core.TABLE is a dict, not a function"


def test_what_is_not_there_has_no_module(library: Callable[..., str]) -> None:
    library()
    verdict = sites.judge(site(module="toylib.gone"))
    assert (verdict.kind, verdict.reason.found) == (Kind.NO_MODULE, "toylib 1.2.0: there is no module toylib.gone")
    none = site()._replace(upstream=site().upstream._replace(import_name="no_such", distributions=("no-such", "other")))
    verdict = sites.judge(none)
    assert (verdict.kind, verdict.reason.found) == (Kind.NO_MODULE, "no-such or other is not installed")


def test_an_untested_version_fits_and_is_flagged(library: Callable[..., str]) -> None:
    library(version="2.1")
    verdict = sites.judge(site())
    assert (verdict.kind, verdict.flags) == (Kind.FITS, ("untested",))
    assert verdict.reason.found == "toylib 2.1; not tested (tested: <=1.9), but the targets have the known shape"


def test_a_module_that_someone_made_without_its_package_is_judged_too() -> None:
    module = type(sys)("toylib.core")
    exec("def scale(value, factor): ...", vars(module))
    assert sites.judge(site(), module)[0] is Kind.FITS


# Preview and installation


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("", Outcome.ABSENT),
        ("def scale(value): ...", Outcome.DRIFTED),
        ("def scale(value, factor): ...", Outcome.APPLIED),
    ],
)
def test_the_preview_and_the_import_agree(library: Callable[..., str], source: str, outcome: Outcome) -> None:
    library(source)
    before = sites.preview("p", site())
    after = watched(site())
    assert after.outcome is outcome
    if outcome is Outcome.APPLIED:
        assert (before.outcome, before.reason.consequence) == (
            Outcome.PENDING,
            "it is applied when the module is imported",
        )
    else:
        assert before == after


def test_what_only_the_import_can_show_is_named_in_the_preview(library: Callable[..., str]) -> None:
    library()
    record = sites.preview("p", site(Slot("Model.forward", passing), Slot("Model.__init__", passing)))
    assert record.outcome is Outcome.PENDING
    assert "Model.__init__" in record.reason.consequence
    assert "Model.forward" not in record.reason.consequence


def test_a_source_is_read_once_as_long_as_it_stays(
    library: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    read: list[int] = []
    scope = contract._scope
    monkeypatch.setattr(contract, "_scope", lambda body, derived=False: read.append(len(body)) or scope(body, derived))
    assert sites.judge(site()).kind is Kind.FITS
    once = len(read)
    for _ in range(3):
        assert sites.judge(site()).kind is Kind.FITS
        assert sites.judge(site(Slot("gone", passing))).kind is Kind.TARGET_ABSENT
    assert len(read) == once > 0
    path = Path(next(path for path in sys.path if (Path(path) / "toylib").is_dir()), "toylib", "core.py")
    path.write_text("def scale(value): ...  # shorter")
    assert sites.judge(site()).kind is Kind.CONTRACT_BROKEN


def test_a_site_that_nobody_wants_any_more_is_left(library: Callable[..., str]) -> None:
    wanted = [False]
    sites.watch("p", site(), 0, lambda: wanted[0])
    module = importlib.import_module(library())
    assert module.scale(1) == 2
    assert ledger.site("p", "toylib.core") is None
    wanted[0] = True
    sites.watch("p", site(), 0, lambda: wanted[0])
    assert module.scale(1) == 102


def test_a_gate_leaves_the_module_alone(library: Callable[..., str]) -> None:
    library(version="3.0")
    record = watched(site())
    assert (record.outcome, record.version) == (Outcome.GATED, "3.0")
    assert sys.modules["toylib.core"].scale(1) == 2


def test_strict_mode_answers_where_a_drifted_target_is_used(library: Callable[..., str]) -> None:
    library("def scale(value): return value")
    ledger.reset(strict=True, first_use=lambda: "")
    assert watched(site()).outcome is Outcome.DRIFTED
    with pytest.raises(StrictError, match=r"^p: DRIFTED: toylib 1\.2\.0: toylib\.core\.scale no longer takes factor"):
        sys.modules["toylib.core"].scale(1)
    assert sites.remove("p", site()) is None
    assert sys.modules["toylib.core"].scale(1) == 1


def test_what_raises_after_the_wrapping_undoes_it(library: Callable[..., str]) -> None:
    library()

    def raises(module: object) -> None:
        raise OSError("no look at what is there")

    record = watched(site(when_late=raises), late=True)
    assert record.outcome is Outcome.FAILED
    assert "OSError: no look at what is there" in record.reason.found
    assert record.traceback is not None
    assert "in raises" in record.traceback
    assert sys.modules["toylib.core"].scale(1) == 2, "as the record says"


# The second look


def test_the_second_look_at_a_site(library: Callable[..., str]) -> None:
    library()
    assert sites.look_again("p", site()) is None
    record = watched(site())
    assert sites.look_again("p", site()) == record
    module = sys.modules["toylib.core"]
    wrapper, module.scale = module.scale, len
    found = sites.look_again("p", site())
    assert found is not None
    assert (found.outcome, found.version) == (Outcome.SHADOWED, "1.2.0")
    module.scale = wrapper
    del sys.modules["toylib.core"]
    found = sites.look_again("p", site())
    assert found is not None
    assert found.outcome is Outcome.PENDING
    sys.modules["toylib.core"] = module
    sites.remove("p", site())
    assert module.scale(1) == 2
    found = sites.look_again("p", site())
    assert found is not None
    assert found.outcome is Outcome.REMOVED


def test_what_someone_replaced_is_named_when_the_site_is_removed(library: Callable[..., str]) -> None:
    library()
    watched(site())
    sys.modules["toylib.core"].scale = len
    sites.remove("p", site())
    record = ledger.site("p", "toylib.core")
    assert record is not None
    assert record.outcome is Outcome.REMOVED
    assert "toylib.core.scale" in record.reason.found
    assert sys.modules["toylib.core"].scale is len


# What the sites say together

RANKED = (
    Outcome.FAILED,
    Outcome.DRIFTED,
    Outcome.SHADOWED,
    Outcome.REMOVED,
    Outcome.DISABLED,
    Outcome.APPLIED,
    Outcome.GATED,
    Outcome.PENDING,
    Outcome.ABSENT,
)


def of(outcome: Outcome, module: str = "no_such.module") -> SiteRecord:
    return SiteRecord("p", "lib", module, outcome, Reason(f"{module} is {outcome.value}"))


def test_one_site_that_is_in_makes_a_patch_applied_and_a_broken_one_outranks_it() -> None:
    for first, second in itertools.product(RANKED, repeat=2):
        outcome, reason = sites.together((of(first), of(second)))
        assert outcome is min(first, second, key=RANKED.index), (first, second)
        if {first, second} != {Outcome.APPLIED, Outcome.PENDING}:
            assert reason == f"no_such.module is {outcome.value}"


def test_the_waiting_places_are_named_beside_what_is_applied() -> None:
    records = (
        of(Outcome.APPLIED),
        of(Outcome.ABSENT),
        of(Outcome.PENDING, "no_such.other"),
        of(Outcome.PENDING, "a.b"),
    )
    assert sites.together(records) == (
        Outcome.APPLIED,
        "applied in 1 of 3 places; waiting: no_such.other, a.b",
    )


def test_a_place_that_is_used_and_not_patched_keeps_the_patch_from_being_applied() -> None:
    used = of(Outcome.PENDING, "json")  # loaded here, and nothing will be called back
    importlib.import_module("json")
    assert sites.together((of(Outcome.APPLIED), used)) == (Outcome.PENDING, "json is PENDING")
    assert sites.together((of(Outcome.PENDING), used)) == (Outcome.PENDING, "json is PENDING")
    assert sites.together((of(Outcome.DRIFTED), used))[0] is Outcome.DRIFTED


def test_an_unsupported_version_counts_where_it_is_used() -> None:
    importlib.import_module("json")
    assert sites.together((of(Outcome.APPLIED), of(Outcome.GATED, "json"))) == (Outcome.GATED, "json is GATED")
    records = (of(Outcome.APPLIED), of(Outcome.GATED, "no_such.other"), of(Outcome.PENDING, "a.b"))
    assert sites.together(records) == (Outcome.APPLIED, "applied in 1 of 2 places; waiting: a.b")


def test_a_module_that_is_being_imported_still_waits(library: Callable[..., str]) -> None:
    library(
        """
        from fusepatch.engine import sites
        from fusepatch.engine.patch import Outcome, Reason, SiteRecord
        of = lambda outcome, module: SiteRecord("p", "lib", module, outcome, Reason(""))
        SEEN = sites.together((of(Outcome.APPLIED, "json"), of(Outcome.PENDING, __name__)))
        """
    )
    assert importlib.import_module("toylib.core").SEEN[0] is Outcome.APPLIED


def test_the_engine_keeps_the_order_of_the_patches(library: Callable[..., str]) -> None:
    library()

    def doubling(proceed, *args, **kwargs):
        return proceed(*args, **kwargs) * 2

    sites.watch("later", site(Slot("scale", adding_hundred)), 1, lambda: True)
    sites.watch("sooner", site(Slot("scale", doubling)), 0, lambda: True)
    assert importlib.import_module("toylib.core").scale(1) == 204
    assert install.is_installed("later", site())
