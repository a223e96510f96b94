"""Puts libraries that do nothing in place of those of CUDA: without_cuda.py TORCH_LIB SYSTEM_LIB...

torch's wheels of PyPI are builds for CUDA. Their libraries name those of CUDA, gigabytes that nothing on a CPU calls. Each
library that is named and not there becomes one with every symbol that is then missing: as data it is zeros, as
a function it returns the address of some, which is an error's number where one is asked for. There is no device.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

# By the number of the machine in an ELF file: the prefix of its tools, a function's text, and that of cudaGetDeviceCount, which
# returns cudaErrorNoDevice: torch warns of others.
MACHINES = {
    183: ("aarch64-linux-gnu-", "adrp x0, nothing; add x0, x0, :lo12:nothing; ret", "mov w0, #100; ret"),
    62: ("x86_64-linux-gnu-", "lea nothing(%rip), %rax; ret", "mov $100, %eax; ret"),
}
PREFIX, FUNCTION, NO_DEVICE = "", "", ""


def lines_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def needed_by(library):
    rows = [row for row in lines_of(f"{PREFIX}readelf", "-d", library) if "(NEEDED)" in row]
    return [row.split("[")[1].rstrip("]") for row in rows]


def symbols_of(library, which):
    """Returns a library's dynamic symbols, "undefined" or "defined": names and their versions, which may be empty."""
    found = {}
    for row in lines_of(f"{PREFIX}nm", "-D", f"--{which}-only", library):
        kind, name = row.split()[-2:]
        if which == "defined" or kind == "U":
            name, _, version = name.partition("@")
            found[name] = version.lstrip("@")
    return found


def assembly_of(names):
    text = [".bss", ".balign 64", "nothing: .zero 512"]
    for name in sorted(names):
        is_data = name.startswith(("_ZTV", "_ZTI", "_ZTS", "_ZTT"))
        text += [".data" if is_data else ".text", f'.globl "{name}"', ".balign 16", f'"{name}":']
        if name.startswith("_ZTI"):  # type info of a class without bases; tables of types ask for the name
            text += [".quad _ZTVN10__cxxabiv117__class_type_infoE + 16", ".quad . + 8", f'.asciz "{name[4:]}"']
        else:
            text += [".zero 512" if is_data else NO_DEVICE if name == "cudaGetDeviceCount" else FUNCTION]
    text.append('.section .note.GNU-stack, "", %progbits')  # a stack that may be executed is refused by glibc 2.41
    return "\n".join([*text, ""])


def versions_of(symbols):
    """Returns a version script: the loader asks for the version that a symbol is used with."""
    text = ""
    for version in sorted(set(symbols.values()) - {""}):
        names = "; ".join(sorted(name for name in symbols if symbols[name] == version))
        text += f"{version} {{ global: {names}; }};\n"
    return text or "{ global: *; };\n"


def make_library(path, symbols):
    compiler = next(name for name in (f"{PREFIX}g++", *(f"{PREFIX}g++-{n}" for n in range(20, 10, -1))) if shutil.which(name))
    with tempfile.NamedTemporaryFile("w") as script:
        script.write(versions_of(symbols))
        script.flush()
        linked = f"-Wl,-soname,{path.name},--version-script,{script.name}"
        command = [compiler, "-shared", "-nostdlib", linked, "-o", path, "-x", "assembler", "-", "-x", "none", "-lstdc++"]
        subprocess.run(command, input=assembly_of(symbols), text=True, check=True)


def main():
    global PREFIX, FUNCTION, NO_DEVICE
    folder, *system = (pathlib.Path(argument) for argument in sys.argv[1:])
    PREFIX, FUNCTION, NO_DEVICE = MACHINES[int.from_bytes((folder / "libc10.so").read_bytes()[18:20], "little")]
    kept = sorted(path for path in folder.iterdir() if ".so" in path.name)
    needed = {name for path in kept for name in needed_by(path)}
    there = {place / name for name in needed for place in system if (place / name).exists()} | set(kept)
    defined = set().union(*(symbols_of(path, "defined") for path in there))
    undefined = {name: version for path in kept for name, version in symbols_of(path, "undefined").items()}
    # The interpreter's own are the program's.
    missing = {n: v for n, v in undefined.items() if n not in defined and not n.startswith(("Py", "_Py"))}
    for name in sorted(needed):
        if name not in {path.name for path in there}:
            make_library(folder / name, missing)


if __name__ == "__main__":
    main()
