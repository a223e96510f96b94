"""tools/check_words.py: comments stand alone, and one that does not is counted."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FULL = "//   - a value that is used further than the next stage goes straight from the stage that makes it to each user, and in\n"


def check(root, *options):
    run = subprocess.run([sys.executable, ROOT / "tools/check_words.py", root, *options], capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def test_comments_keep_the_bars():
    code, table = check(ROOT)
    assert code == 0, table


@pytest.mark.parametrize(
    "row, file, text",
    [
        ("begins with Of", "plumb/x.h", "// Of a row.\nint f();\n" * 6),
        ("begins with Of", "plumb/x.h", "int f();  // The mean. Of a row.\n" * 6),
        ("answer for return", "python/plumb/x.py", 'def f():\n    """Answers nothing."""\n' * 6),
        ("raises in C++", "plumb/x.cpp", "// Raises Error(BadFile).\nint f();\n"),
        ("throws in Python", "python/tests/x.py", "# Throws Error(BadFile).\nf()\n"),
        ("unclear phrase", "tests/x.h", "int f();  // rounded as said\n"),
        ("unclear phrase", "tests/x.h", "/* It is let go by\n   whoever holds it. */\nint f();\n"),
        ("begins with What, Where, Who", "plumb/x.cu", "// What a rank sends.\nint f();\n" * 6),
        ("broken by the formatter", "plumb/x.h", FULL + "//   input of\n//     the graph\nint f();\n"),
    ],
)
def test_a_comment_that_does_not_stand_alone_is_beyond_its_bar(tmp_path, row, file, text):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    code, table = check(tmp_path)
    assert code == 1
    assert [line.split("  ")[0] for line in table.splitlines() if line.endswith("beyond")] == [row]
    assert file in check(tmp_path, "--list", row)[1]


def test_code_strings_and_questions_are_left_alone(tmp_path):
    (tmp_path / "plumb").mkdir()
    (tmp_path / "plumb/x.cpp").write_text(
        'auto s = "// Raises Error";\nauto r = R"(// as said)";\nint n = 100\'000;  // Where does it end?\n' * 6
        + FULL + "//   of 3.\n//   the end\nint f();\n"
    )
    assert check(tmp_path)[0] == 0
