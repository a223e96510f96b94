"""tools/joined_names.py: which names keep a room's files from being compiled as one."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from joined_names import clashes  # noqa: E402

ONE = """namespace plumb {
namespace {

constexpr int kDepth = 64, kWidth = 3;
using Names = std::vector<std::string>;
struct Row {
  int count(const Row& other);
};
bool is_even(const std::map<int, int>& x, int start = 0) { return x.at(start) % 2; }

}  // namespace

int shown(int x) { return x; }

}  // namespace plumb
"""


@pytest.fixture
def room(tmp_path):
    folder = tmp_path / "plumb" / "graph"
    folder.mkdir(parents=True)
    (folder / "one.cpp").write_text(ONE)

    def found(text, name="two.cpp"):
        (folder / name).write_text(f"namespace plumb {{\nnamespace {{\n{text}\n}}  // namespace\n}}  // namespace plumb\n")
        return clashes(tmp_path)

    return found


@pytest.mark.parametrize(
    "text",
    [
        "const int kDepth = 8;",
        "const double kOther = 1, kWidth = 2;",
        "using Names = std::set<std::string>;",
        "class Row final {\n};",
        "enum class Row { A };",
        "bool is_even(const std::map<int, int>& numbers, int first) {",
        "bool is_even(const map<int, int>& numbers, bool strictly = true) {",
    ],
)
def test_two_things_of_one_name_are_found(room, text):
    (line,) = room(text)
    assert line.startswith("plumb/graph/one.cpp:") and "plumb/graph/two.cpp:3" in line


@pytest.mark.parametrize(
    "text",
    [
        "bool is_even(int x) {",
        "using Names = std::vector<std::string>;",
        "struct Row;",
        'const char* page = R"js(\nconst kDepth = 3;\n)js";',
        "}  // namespace\nint kDepth(Other x) {\n}\nnamespace {",
        "// constexpr int kDepth = 8;",
    ],
)
def test_other_names_and_overloads_are_left_alone(room, text):
    assert room(text) == []


def test_tests_are_compiled_apart_from_what_they_test(room):
    assert room("const int kDepth = 8;", "one_test.cpp") == []


def test_static_functions_count_and_rooms_do_not_meet(room, tmp_path):
    (tmp_path / "plumb" / "core").mkdir()
    (tmp_path / "plumb" / "core" / "one.cpp").write_text("static int depth(int x) {\n}\n")
    assert room("int nothing = 0;") == []
    (tmp_path / "plumb" / "core" / "two.cpp").write_text("static int depth(int y) {\n}\n")
    (line,) = room("int nothing = 0;")
    assert "'depth'" in line


def test_plumb_itself_has_none():
    assert clashes(ROOT) == []
