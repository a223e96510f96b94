"""Google Benchmark's JSON on standard input -> a Markdown table.

Benchmarks whose names differ only in one part that holds "eager" against "plumb" stand beside each other in a row. A
benchmark's own counters are columns of its row."""

import json
import re
import sys

from tables import table

# Keys that Google Benchmark writes itself.
OWN = """name run_name run_type repetitions repetition_index threads iterations real_time cpu_time time_unit family_index
per_family_instance_index aggregate_name aggregate_unit label bytes_per_second items_per_second error_occurred
error_message""".split()


def span(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def rate(value: float, unit: str) -> str:
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def compared(benchmarks: list[dict]) -> str:
    rows: dict[str, dict[str, dict]] = {}
    for b in benchmarks:
        if b.get("run_type") == "aggregate" and b.get("aggregate_name") != "median":
            continue
        parts = [p for p in b["name"].split("/") if not re.search("eager|^plumb$", p)]
        who = next((p for p in b["name"].split("/") if "eager" in p), "plumb")
        rows.setdefault("/".join(parts), {})[who] = b
    others = sorted({who for row in rows.values() for who in row} - {"plumb"})
    rated = any("bytes_per_second" in b or "items_per_second" in b for row in rows.values() for b in row.values())
    head = ["benchmark", "plumb:", *([] if not rated else ["rate:"])]
    for who in others:
        head += [f"{who}:", f"plumb / {who}:"]
    counters = list(dict.fromkeys(key for row in rows.values() for b in row.values() for key in b if key not in OWN))
    head += [f"{name}:" for name in counters]
    lines = []
    for name, row in rows.items():
        ns = {
            w: b["real_time"] * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[b["time_unit"]]
            for w, b in row.items()
            if "error_occurred" not in b
        }
        cells = [name, span(ns["plumb"]) if "plumb" in ns else ""]
        if rated:
            b = row.get("plumb", {})
            cells.append(
                rate(b["bytes_per_second"], "B/s")
                if "bytes_per_second" in b
                else rate(b["items_per_second"], "items/s")
                if "items_per_second" in b
                else ""
            )
        for who in others:
            both = who in ns and "plumb" in ns
            cells += [span(ns[who]) if who in ns else "", f"{ns['plumb'] / ns[who]:.2f}" if both else ""]
        cells += [f"{row['plumb'][c]:.3f}" if c in row.get("plumb", {}) else "" for c in counters]
        lines.append(cells)
    return table(head, lines)


if __name__ == "__main__":
    text = sys.stdin.read()
    measured = json.loads(text[text.index("{") :])["benchmarks"] if "{" in text else []
    broken = [b["name"] for b in measured if b.get("error_occurred")]
    print(compared(measured))
    if broken or not measured:
        sys.exit("no result from " + (", ".join(broken) or "the benchmark"))
