"""Draws docs/images/house.svg: the rooms of CMakeLists.txt, each on the rooms that it includes."""

import itertools
import pathlib
import re

PICTURE = "docs/images/house.svg"
WIDTH, BOX_WIDTH, BOX_HEIGHT, FLOOR = 760, 116, 38, 78


def listed_rooms(root: pathlib.Path) -> list[str]:
    """From the ground up."""
    return re.findall(r"^plumb_room\((\w+)", (root / "CMakeLists.txt").read_text(), re.M)


def room_includes(root: pathlib.Path, room: str):
    """(file, line, included room) of every include of a room in its folder."""
    for file in sorted((root / "plumb" / room).rglob("*")):
        if file.suffix not in (".h", ".cpp"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            target = re.match(r'\s*#\s*include\s*["<]plumb/(\w+)/', line)
            if target:
                yield file, number, target.group(1)


def _stands_on(root: pathlib.Path) -> dict[str, set[str]]:
    """Returns the rooms that each room's product code includes; tests may reach further."""
    rooms = listed_rooms(root)
    on = {
        room: {t for f, _, t in room_includes(root, room) if not f.name.endswith("_test.cpp")} & set(rooms) - {room}
        for room in rooms
    }
    return {**on, "cli": set(rooms), "python": set(rooms)}


def _below(on: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns all rooms that a room stands on, directly or not. `on` goes from the ground up."""
    below: dict[str, set[str]] = {}
    for room, direct in on.items():
        below[room] = direct.union(*(below[d] for d in direct))
    return below


def _lay_out(on: dict[str, set[str]], edges: dict[str, set[str]]) -> tuple[dict, list]:
    """The middle of each room's box, and every line's points from top to bottom. A room is one floor above the highest that it
    stands on; a line that passes a floor has a place of its own on it, so that it runs beside the boxes."""
    floors: dict[str, int] = {}
    for room, direct in on.items():
        floors[room] = 1 + max((floors[d] for d in direct), default=-1)
    top = max(floors.values())
    lines = [
        [room, *((room, low, floor) for floor in range(floors[room] - 1, floors[low], -1)), low]
        for room in on
        for low in sorted(edges[room])
    ]
    here: dict[int, list] = {floor: [room for room in on if floors[room] == floor] for floor in range(top + 1)}
    below: dict[object, list] = {room: [] for room in on}
    for line in lines:
        for upper, lower in itertools.pairwise(line):
            below.setdefault(upper, []).append(lower)
        for turn in line[1:-1]:
            here[turn[2]].append(turn)
    x: dict[object, float] = {}
    for floor in range(top + 1):
        order = sorted(here[floor], key=lambda p: sum(x[b] for b in below[p]) / max(1, len(below[p])))
        room_for = [1.0 if isinstance(p, str) else 0.45 for p in order]
        x.update({p: (sum(room_for[:i]) + room_for[i] / 2) / sum(room_for) * WIDTH for i, p in enumerate(order)})

    def point(p: object) -> tuple[float, float]:
        floor = floors[p] if isinstance(p, str) else p[2]
        return x[p], (top - floor + 0.5) * FLOOR

    return {room: point(room) for room in on}, [[point(p) for p in line] for line in lines]


def _path(points: list[tuple[float, float]]) -> str:
    """Returns a line that leaves and meets every floor upright."""
    d = ""
    for (x, y), (x2, y2) in itertools.pairwise(points):
        start, end = y + BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2
        middle = (start + end) / 2
        d += f"{'L' if d else 'M'}{x:.0f} {start:.0f}C{x:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {end:.0f}"
    return f'<path d="{d}"/>'


def draw(root: pathlib.Path) -> str:
    on = _stands_on(root)
    below = _below(on)
    edges = {room: {d for d in direct if not any(d in below[e] for e in direct)} for room, direct in on.items()}
    at, lines = _lay_out(on, edges)
    height = max(y for _, y in at.values()) + FLOOR / 2
    boxes = [
        f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}">{room}</text>'
        for room, (x, y) in at.items()
    ]
    newline = "\n"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">
<title>The rooms of plumb; a line leads from a room down to a room that it includes</title>
<style>
svg {{ background: #fff }}
path {{ fill: none; stroke: #8a94a6; stroke-width: 1.5 }}
rect {{ fill: #eef3fb; stroke: #3f63a8 }}
text {{ font: 15px sans-serif; text-anchor: middle; fill: #1c2733 }}
</style>
{newline.join(_path(line) for line in lines)}
{newline.join(boxes)}
</svg>
"""


if __name__ == "__main__":
    root = pathlib.Path(__file__).resolve().parent.parent
    (root / PICTURE).write_text(draw(root))
    print(f"{PICTURE}: drawn")
