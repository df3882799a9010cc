from __future__ import annotations

import logging

import pytest

from fusepatch.engine import ledger, notice
from fusepatch.engine.patch import Note
from fusepatch.errors import StrictError


@pytest.fixture(autouse=True)
def fresh_ledger() -> None:
    ledger.reset(strict=False, first_use=lambda: "what is applied")


def test_notes_are_counted_by_text() -> None:
    for text in ("a", "b", "a"):
        ledger.replaced("p", text)
    assert ledger.replacements("p") == (Note("a", 2), Note("b", 1))
    assert ledger.replacements("other") == ()


def test_a_long_run_does_not_grow_the_ledger() -> None:
    for number in range(3 * ledger.MAXIMUM_NOTES):
        ledger.fallback("p", f"shape {number}")
    notes = ledger.fallbacks("p")
    assert len(notes) == ledger.MAXIMUM_NOTES + 1
    assert notes[-1] == Note("(further notes, beyond the first 200 distinct ones)", 2 * ledger.MAXIMUM_NOTES)


def test_the_first_call_tells_the_user_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fusepatch"):
        ledger.count_call("p")
        ledger.count_call("p")
    assert [record.message for record in caplog.records] == ["what is applied"]
    assert ledger.calls("p") == 2


def test_a_refused_request_warns_once_and_is_recorded_each_time(caplog: pytest.LogCaptureFixture) -> None:
    ledger.refused("p", "no such flag")
    ledger.refused("p", "no such flag")
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "p: no such flag")]
    assert ledger.fallbacks("p") == (Note("no such flag", 2),)


def test_a_text_that_varies_is_one_warning_of_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        ledger.refused("p", f"{number} gradients", kind="gradients")
        ledger.refused("q", f"{number} gradients", kind="gradients")
        ledger.warn_once(f"{number} batches", kind="batches")
    assert [record.message for record in caplog.records] == ["p: 0 gradients", "q: 0 gradients", "0 batches"]
    assert len(ledger._warned) == 3
    assert ledger.fallbacks("p")[0] == Note("0 gradients", 1), "the record has each text"


def test_what_was_said_does_not_grow_without_end(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        ledger.warn_once(f"{number} batches")
    assert len(ledger._warned) <= ledger.MAXIMUM_NOTES + 1
    assert len(caplog.records) == ledger.MAXIMUM_NOTES + 1
    assert caplog.records[-1].message == "more than 200 different warnings; `fusepatch.status()` has the rest"


def test_a_summary_that_cannot_be_made_is_said_and_the_call_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> str:
        raise KeyError("METADATA")

    ledger.reset(strict=False, first_use=broken)
    with caplog.at_level(logging.INFO, logger="fusepatch"):
        ledger.count_call("p")
    assert "METADATA" in caplog.records[0].message
    assert ledger.calls("p") == 1


def test_what_is_lost_is_told_by_the_next_call_that_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[tuple[str, str]] = []
    ledger.reset(False, lambda: "", lambda: lost)
    ledger.count_call("q")
    lost.append(("p", "someone replaced it"))
    for _ in range(3):
        ledger.count_call("q")
    assert [record.message for record in caplog.records] == ["p: someone replaced it"]
    assert ledger.fallbacks("p") == (Note("someone replaced it", 3),)
    ledger.reset(True, lambda: "", lambda: lost)
    for _ in range(2):
        with pytest.raises(StrictError, match="p: someone replaced it"):
            ledger.count_call("q")


def test_a_refused_request_is_an_error_under_strict(caplog: pytest.LogCaptureFixture) -> None:
    ledger.reset(strict=True, first_use=lambda: "")
    with pytest.raises(StrictError, match="p: no such flag"):
        ledger.refused("p", "no such flag")
    assert ledger.fallbacks("p") == (Note("no such flag", 1),)
    ledger.fallback("p", "nobody asked")
    assert caplog.records == []


def test_without_any_handler_it_is_one_plain_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In the test's body: pytest gives its own handler to a logger that does not propagate when a test begins.
    monkeypatch.setattr(notice.logger, "propagate", False)
    ledger.count_call("p")
    assert capsys.readouterr().err == "fusepatch: what is applied\n"


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "3"}, False),
        ({"RANK": "0", "LOCAL_RANK": "1"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"SLURM_PROCID": "2", "LOCAL_RANK": "0"}, False),
        ({"RANK": ""}, True),
    ],
)
def test_only_rank_zero_speaks(environ: dict[str, str], speaks: bool) -> None:
    assert notice.speaks(environ) is speaks


def test_a_data_loader_worker_is_silent() -> None:
    torch = pytest.importorskip("torch", reason="a data loader is torch's")

    class Spoken(torch.utils.data.Dataset):  # type: ignore[name-defined]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> bool:
            return notice.speaks({})

    (batch,) = torch.utils.data.DataLoader(Spoken(), num_workers=1)
    assert batch.tolist() == [False]
    assert Spoken()[0] is True
