"""The command that was built, and its run, for tests and tools."""

import json
import os
import subprocess
import sys

COMMAND = os.path.abspath(os.path.join(os.environ.get("PLUMB_BUILD_DIR", "build"), "bin", "plumb"))


def run(arguments, folder, dies=False):
    """Returns the JSON that `plumb` prints."""
    done = subprocess.run([COMMAND, *arguments], cwd=folder, text=True, capture_output=True)
    if (done.returncode != 0) != dies:
        sys.exit(f"plumb {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
