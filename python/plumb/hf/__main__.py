"""``plumb import``: the command starts this, with what it was asked for as JSON."""

import json
import sys

import plumb
from plumb import hf


def main() -> int:
    asked = json.loads(sys.argv[1])
    try:
        graph = hf.import_folder(**asked)
    except plumb.Error as error:
        print(f"plumb: {error}", file=sys.stderr)
        return 1
    for note in graph.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
