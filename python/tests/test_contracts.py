"""tools/check_contracts.py: the code throws the kinds that headers promise, and a changed kind is noticed."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
pytest.importorskip("tree_sitter_cpp", reason="the checker of contracts needs tree-sitter-cpp")

import check_contracts  # noqa: E402


def lines_if(path: str, old: str, new: str) -> list[str]:
    content = (ROOT / path).read_text()
    assert old in content
    return check_contracts.broken(check_contracts.Code(ROOT, {path: content.replace(old, new)}))


@pytest.mark.parametrize(
    "thrown, promised",
    [
        ("plumb/partition/balance.cpp", ("Partition", "plumb/partition/balance.h", "balance")),
        ("plumb/numerics/carrier.cpp", ("TensorMismatch", "plumb/numerics/carrier.h", "check_tensor")),
        ("plumb/recording/statistic.cpp", ("UnknownName", "plumb/recording/statistic.h", "parse")),
        ("plumb/core/output_file.cpp", ("CannotWrite", "plumb/core/output_file.h", "")),
    ],
)
def test_another_kind_in_the_code_breaks_the_headers_promise(thrown, promised):
    kind, header, function = promised
    lines = lines_if(thrown, f"ErrorKind::{kind}", "ErrorKind::Internal")
    assert any(line.startswith(header) and function in line and f"Error({kind}) is promised" in line for line in lines), lines


def test_another_kind_in_the_header_is_a_promise_that_nothing_keeps():
    lines = lines_if("plumb/partition/balance.h", "Error(Partition)", "Error(BadFile)")
    assert len(lines) == 1 and "Error(BadFile) is promised" in lines[0]
