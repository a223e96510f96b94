"""Checks that a room includes only itself and rooms listed above it in CMakeLists.txt, that the picture of the rooms in
docs/design.md shows what they include, and that the files of a room can be compiled as one. Ends with 1 if not."""

import pathlib
import re
import sys

from draw_house import PICTURE, draw, listed_rooms, room_includes
from joined_names import clashes


def violations(root: pathlib.Path) -> list[str]:
    listed = listed_rooms(root)
    found = []
    for room in sorted(p.name for p in (root / "plumb").iterdir() if p.is_dir()):
        # The command stands on every room and no room on it.
        allowed = listed[: listed.index(room) + 1] if room in listed else [*listed, room]
        for file, number, target in room_includes(root, room):
            if target not in allowed:
                found.append(
                    f"{file.relative_to(root)}:{number}: {room} may not include {target}: it is no room above {room} in "
                    "CMakeLists.txt. Move what is needed up, or the file down."
                )
    # Rooms in a circle have no picture.
    if not found and (root / PICTURE).exists() and (root / PICTURE).read_text() != draw(root):
        found.append(f"{PICTURE} does not show what the rooms include now: run python tools/draw_house.py")
    design = root / "docs" / "design.md"
    if design.exists():
        table = re.findall(r"^\| `(\w+)` \|", design.read_text(), re.M)
        if table != listed:
            found.append(f"docs/design.md: its table of rooms is {table}, CMakeLists.txt lists {listed}: make them the same")
    return found


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    lines = violations(root) + clashes(root)
    print("\n".join(lines) if lines else "rooms: every include points up, every name stands once")
    sys.exit(bool(lines))
