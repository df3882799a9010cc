"""What `FUSEPATCH_*` variables mean, as read from an environment: every odd value is one error that says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusepatch import settings
from fusepatch.errors import SettingError
from kits.helpers import fresh

KWARGS = "FUSEPATCH_OPTIMIZER_KWARGS"
DIGITS = "\N{FULLWIDTH DIGIT ONE}"
UNDECODABLE = os.fsdecode(b"\xff")


def refusal(**environ: str) -> str:
    with pytest.raises(SettingError) as raised:
        settings.read(environ)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 3000, "it is nested too deeply"),
        ('{"a":' * 3000, "it is nested too deeply"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": [-Infinity]}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "1e999 is more than a float can hold"),
        ('{"a": -1e999}', "-1e999 is more than a float can hold"),
        ('{"a": ' + "1" * 5000 + "}", "it has an integer of 5000 digits"),
        ('{"lr": 1, "lr": 2}', "it has 'lr' more than once"),
        ('{"a": {"b": 1, "b": 1}}', "it has 'b' more than once"),
        ('{"a": "' + UNDECODABLE + '"}', "it is not UTF-8"),
        ('"' + "x" * 100_000 + '"', "it is a JSON string"),
        ("null", "it is a JSON null"),
        ("3", "it is a JSON number"),
    ],
    ids=lambda value: value[:20] if len(value) < 100 else f"{len(value)} characters",
)
def test_what_is_not_a_json_object_of_ordinary_values_is_refused(text: str, why: str) -> None:
    message = refusal(FUSEPATCH_OPTIMIZER_CLASS="torch.optim.AdamW", **{KWARGS: text})
    assert message.startswith(f"{KWARGS}=")
    assert f"cannot be read ({why}): wanted a JSON object" in message
    assert "correct the value or unset the variable" in message
    assert len(message) < 1000, "a message shows a long value's beginning"
    message.encode()


def test_an_ordinary_object_is_read() -> None:
    read = settings.read(
        {"FUSEPATCH_OPTIMIZER_CLASS": "torch.optim.AdamW", KWARGS: '{"a": 1e-8, "b": [2, {"c": null}]}'}
    )
    assert dict(read.optimizer_kwargs) == {"a": 1e-8, "b": [2, {"c": None}]}


@pytest.mark.parametrize(
    "text", [f"{DIGITS}e-6", "1_0", "nan", "inf", "-1", "0", "1e-400", "1e400", "0x1", UNDECODABLE]
)
@pytest.mark.parametrize("name", ["FUSEPATCH_OPTIMIZER_EPS", "FUSEPATCH_HEAD_CHUNK_MIB"])
def test_a_number_is_finite_positive_and_written_in_ascii(name: str, text: str) -> None:
    message = refusal(**{name: text})
    assert f"{name}={text!r} cannot be read: wanted a finite number > 0" in message
    message.encode()


def test_a_chunk_has_a_size_that_can_be_counted() -> None:
    assert "more memory than any machine has" in refusal(FUSEPATCH_HEAD_CHUNK_MIB="1e308")
    assert settings.read({"FUSEPATCH_HEAD_CHUNK_MIB": "0.5"}).head_chunk_mib == 0.5


@pytest.mark.parametrize(
    "name", ["FUSEPATCH", "FUSEPATCH_STRICT", "FUSEPATCH_LIGER_ROPE", "FUSEPATCH_OPTIMIZER_IN_BACKWARD"]
)
def test_a_switch_takes_no_other_scripts_digit(name: str) -> None:
    assert f"{name}={DIGITS!r} cannot be read: wanted 0, 1" in refusal(**{name: DIGITS})


TAKES_ANY_TEXT = ("FUSEPATCH_DISABLE", "FUSEPATCH_REPORT")


@pytest.mark.parametrize("variable", settings.TABLE, ids=lambda variable: variable.name)
def test_no_message_repeats_a_long_value_whole(variable: settings.Variable) -> None:
    name = f"{variable.name}ROPE" if variable.is_family else variable.name
    if name in TAKES_ANY_TEXT:
        assert name in settings.read({name: "9" * 50_000}).set_by_user
    else:
        assert len(refusal(**{name: "9" * 50_000})) < 1000


def test_a_flag_in_either_case_is_the_same_flag() -> None:
    assert settings.read({"FUSEPATCH_LIGER_rope": "0"}).liger_flags == {"rope": False}
    both = settings.read({"FUSEPATCH_LIGER_ROPE": "1", "FUSEPATCH_LIGER_rope": "1"})
    assert both.liger_flags == {"rope": True}
    assert "FUSEPATCH_LIGER_ROPE=1 and FUSEPATCH_LIGER_rope=0 contradict each other" in refusal(
        FUSEPATCH_LIGER_ROPE="1", FUSEPATCH_LIGER_rope="0"
    )
    assert "FUSEPATCH_LIGER_Rope=0 and FUSEPATCH_LIGER_rope=1 contradict" in refusal(
        FUSEPATCH_LIGER_Rope="0", FUSEPATCH_LIGER_rope="1"
    )


def test_a_familys_prefix_alone_names_nothing() -> None:
    read = settings.read({"FUSEPATCH_LIGER_": "1"})
    assert read.unknown == ("FUSEPATCH_LIGER_",)
    assert read.liger_flags == {}
    assert "the nearest known one is FUSEPATCH_LIGER_<FLAG>" in settings.unknown_name("FUSEPATCH_LIGER_")
    done = fresh("import fusepatch", env={"FUSEPATCH_LIGER_": "1"}, check=True)
    assert "the variable FUSEPATCH_LIGER_ is set but fusepatch has no such variable" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("GRPO_LOSS", "HEAD"),
        ("GRPO_PREFER", "HEAD_PREFER"),
        ("GRPO_CHUNK_MIB", "HEAD_CHUNK_MIB"),
        ("LIGER_", "LIGER_<FLAG>"),
        ("OPTIMISER_FUSED", "OPTIMIZER_FUSED"),
    ],
)
def test_the_nearest_known_name_is_the_one_that_was_looked_for(wrong: str, right: str) -> None:
    read = settings.read({f"FUSEPATCH_{wrong}": "1"})
    (unknown,) = read.unknown
    assert settings.unknown_name(unknown).endswith(f"; the nearest known one is FUSEPATCH_{right}")


def test_env_shows_a_familys_prefix_as_unknown() -> None:
    done = fresh("from fusepatch import cli; cli.main(['env'])", env={"FUSEPATCH_LIGER_": "1"})
    assert "the variable FUSEPATCH_LIGER_ is set but fusepatch has no such variable" in " ".join(done.stdout.split())
    assert "FUSEPATCH_LIGER_=1" not in done.stdout


def test_a_name_that_cannot_be_printed_is_shown_escaped() -> None:
    (name,) = settings.read({f"FUSEPATCH_{UNDECODABLE}": "1"}).unknown
    assert r"the variable FUSEPATCH_\udcff is set" in settings.unknown_name(name)


def test_a_relative_folder_where_the_current_one_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert settings.read({"FUSEPATCH_REPORT": "reports"}).report == "reports"  # whose writer says that it cannot write
    assert settings.read({"FUSEPATCH_REPORT": "/reports"}).report == "/reports"
