"""tools/tables.py writes the tables of pages; tools and helpers of tests import no test files."""

import pathlib
import re

from tables import put, table

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_column_of_numbers_stands_to_the_right():
    assert table(["name", "after:"], [["a", 1], ["b", 2.5]]) == "| name | after |\n|---|---:|\n| a | 1 |\n| b | 2.5 |"
    assert table(["name"], iter(())) == "| name |\n|---|"


def test_a_section_takes_the_place_of_the_one_between_its_marks():
    page = "before\n<!-- a.py -->\nold\n<!-- end of a.py -->\n<!-- b -->\nkept\n<!-- end of b -->\n"
    written = put(page, "a.py", "\nnew \\1\n")
    assert written == page.replace("old\n", "\nnew \\1\n\n")
    assert put(written, "a.py", "new \\1") == written and put(page, "c", "new") == page


def test_no_file_imports_a_test_file():
    files = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "python" / "tests").glob("*.py")]
    found = [str(f) for f in files if re.search(r"^\s*(from|import) test_", f.read_text(), re.M)]
    assert len(files) > 100 and not found
