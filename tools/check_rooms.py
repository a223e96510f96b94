"""Checks that a room includes only itself and rooms listed above it in CMakeLists.txt. Ends with 1 if one does not."""

import pathlib
import re
import sys


def violations(root: pathlib.Path) -> list[str]:
    listed = re.findall(r"^plumb_room\((\w+)", (root / "CMakeLists.txt").read_text(), re.M)
    found = []
    for room in sorted(p.name for p in (root / "plumb").iterdir() if p.is_dir()):
        # The command stands on every room and no room on it.
        allowed = listed[: listed.index(room) + 1] if room in listed else [*listed, room]
        for file in sorted((root / "plumb" / room).rglob("*")):
            if file.suffix not in (".h", ".cpp"):
                continue
            for number, line in enumerate(file.read_text().splitlines(), 1):
                target = re.match(r'\s*#\s*include\s*["<]plumb/(\w+)/', line)
                if target and target.group(1) not in allowed:
                    found.append(
                        f"{file.relative_to(root)}:{number}: {room} may not include {target.group(1)}: it is no room above "
                        f"{room} in CMakeLists.txt. Move what is needed up, or the file down."
                    )
    return found


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    lines = violations(root)
    print("\n".join(lines) if lines else "rooms: every include points up")
    sys.exit(bool(lines))
