"""The tables of docs/performance.md are those of the documents that are kept, and two documents compare by case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import Compared, compare, pairs
from benchmarks.report import figures, markdown, tables, write
from tools.goals import Goal, goals
from tools.performance_page import BLOCK, PAGES, RESULTS, PageError, render, take, with_sections


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_made_from_what_is_kept(page: Path) -> None:
    assert render(page.read_text()) == page.read_text(), "run python tools/performance_page.py"


def test_every_kept_document_has_a_table_on_a_page() -> None:
    shown = {found["file"] for page in PAGES for found in BLOCK.finditer(page.read_text())}
    assert shown == {path.stem for path in RESULTS.glob("*.json")}


def test_a_table_is_made_anew_and_the_text_around_it_stays(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"rows": [{"case": "x | y", "median_us": 1.25, "samples": [1, 2]}]})
    page = "before\n<!-- a.json rows -->\nold\n<!-- end -->\nafter\n"
    made = render(page, tmp_path)
    assert made.startswith("before\n<!-- a.json rows -->\n| case | median_us |\n| --- | --- |\n| x \\| y | 1.25 |\n")
    assert made.endswith("<!-- end -->\nafter\n") and "cores" in made and "old" not in made
    assert render(made, tmp_path) == made


@pytest.mark.parametrize(("mark", "why"), [("b.json rows", "is not there"), ("a.json other", "has the tables rows")])
def test_a_table_that_is_not_there_is_named(tmp_path: Path, mark: str, why: str) -> None:
    write(tmp_path / "a.json", {"rows": [{"case": "x"}]})
    with pytest.raises(PageError, match=why):
        render(f"<!-- {mark} -->\n<!-- end -->", tmp_path)


def test_a_run_is_kept_with_what_it_ran_on_and_shown(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.json").write_text('[{"case": "x", "us": 1.5}]')
    (tmp_path / "run" / "b.json").write_text('{"machine": {"cores": 64}, "some": {"rows": [{"case": "y"}]}}')
    (tmp_path / "run" / "shown.png").write_bytes(b"new")
    (tmp_path / "run" / "other.png").write_bytes(b"new")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "shown.png").write_bytes(b"old")
    take(tmp_path / "run", tmp_path / "kept", tmp_path / "images")
    assert {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()} == {"shown.png": b"new"}
    kept = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "kept").iterdir()}
    assert kept["a"]["commit"] and kept["a"]["rows"] and kept["b"]["machine"] == {"cores": 64}
    page = with_sections("# Page\n<!-- a.json rows -->\n<!-- end -->\n", tmp_path / "kept")
    assert page.count("a.json") == 1 and "## benchmarks/b.py\n\n<!-- b.json some.rows -->" in page
    assert "| y |" in render(page, tmp_path / "kept")


def test_two_documents_compare_case_by_case() -> None:
    old = {"results": [{"case": "a", "peers": 9, "us": 2.0}, {"case": "gone", "us": 1.0}]}
    new = {"results": [{"case": "new", "us": 1.0}, {"case": "a", "peers": 9, "us": 3.0}]}
    both, alone = compare(old, new)
    assert both == [Compared("results: a, 9", "us", 2.0, 3.0)] and both[0].ratio == 1.5
    assert alone == ["- results: gone", "+ results: new"]
    assert both[0].differs(1.4) and not both[0].differs(1.6)


def test_a_document_that_only_one_side_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for side, names in ((old, "ab"), (new, "bc")):
        side.mkdir()
        for name in names:
            (side / f"{name}.json").write_text("[]")
    assert [name for name, *_ in pairs(old, new)] == ["b"]
    assert capsys.readouterr().out.splitlines() == [f"only in {old}: a.json", f"only in {new}: c.json"]


def test_a_message_s_size_says_what_was_measured_and_a_figure_that_was_not_had_does_not() -> None:
    old = {"points": [{"message_bytes": 1, "ratio": 0.5}, {"message_bytes": 4, "ratio": 0.9}]}
    new = {"points": [{"message_bytes": 4, "ratio": 0.9}, {"message_bytes": 1, "ratio": None}]}
    both, alone = compare(old, new)
    assert both == [Compared("points: 4", "ratio", 0.9, 0.9)] and alone == ["- points: 1"]


def test_a_figure_that_was_not_had_is_null_and_an_empty_cell(tmp_path: Path) -> None:
    rows = [{"case": "x", "us": float("nan"), "ms": 1.0}]
    write(tmp_path / "a.json", {"rows": rows, "rounds": {"x": [(float("inf"), 2.0)]}})
    document = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert document["rows"] == [{"case": "x", "us": None, "ms": 1.0}] and document["rounds"] == {"x": [[None, 2.0]]}
    assert markdown(rows).splitlines()[-1] == markdown(document["rows"]).splitlines()[-1] == "| x |  | 1 |"


def test_records_of_any_depth_are_tables_and_settings_are_no_figures() -> None:
    document = {"a": {"b": [{"rate": 2.0, "ok": True, "p95": 1.0}]}, "c": [1, 2]}
    [(name, [row])] = tables(document)
    assert name == "a.b" and figures(row) == {"p95": 1.0} and markdown([row]).splitlines()[-1] == "| 2 | True | 1 |"
    assert [name for name, _ in tables([{"x": 1}])] == ["rows"]


def test_kept_documents_say_what_they_ran_on() -> None:
    for path in RESULTS.glob("*.json"):
        document = json.loads(path.read_text(), parse_constant=lambda word, path=path: pytest.fail(f"{path}: {word}"))
        assert document["machine"]["cores"] and document["commit"]


def test_a_goal_is_met_when_all_that_it_is_for_was_had_and_is_within() -> None:
    cases = [("a", 0.1), ("b", 0.3)]
    assert Goal("x", 0.3, cases).row() == {
        "goal": "x", "limit": "at most 0.3", "worst": 0.3, "of": "b", "within": "2 of 2", "met": "yes"
    }  # fmt: skip
    assert [Goal("x", limit, cases).row()["met"] for limit in (0.2, 0.05)] == ["no", "no"]
    least = Goal("x", 0.2, cases, least=True).row()
    assert (least["worst"], least["of"], least["within"], least["met"]) == (0.1, "a", "1 of 2", "no")
    lacking = Goal("x", 0.3, [*cases, ("c", None)]).row()
    assert (lacking["of"], lacking["within"], lacking["met"]) == ("b, c not had", "2 of 3", "no")
    assert Goal("x", 0.3, []).row()["met"] == "no"


def test_the_goals_of_the_page_are_of_what_is_kept() -> None:
    """Each case of every document that has goals counts."""
    documents = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    rows = goals(documents.__getitem__)
    assert "<!-- goals -->" in PAGES[0].read_text()
    over = [row for row in documents["transports"]["summary"] if row["connector / bare, median"] < row["goal"]]
    missed = [row for row in rows if row["goal"].startswith("of the bare library's") and row["met"] == "no"]
    assert sum(int(row["within"].split()[2]) - int(row["within"].split()[0]) for row in missed) == len(over)
    steps = [row for row in documents["step"]["rows"] if "does nothing" not in row["case"]]
    assert sum(int(row["within"].split()[2]) for row in rows if row["goal"].endswith("thread, us")) == len(steps)
