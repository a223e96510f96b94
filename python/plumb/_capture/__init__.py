"""Python's part of the capture: what is watched while a forward runs. README.md says what is patched and what puts it back."""
