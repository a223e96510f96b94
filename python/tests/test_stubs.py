"""The stub of the extension module says what is in it."""

import ast
import pathlib

import plumb

STUB = pathlib.Path(plumb.__file__).parent / "_C.pyi"


def members(body):
    """Returns the definitions in a module or class, by name."""
    found = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname: node for alias in node.names if alias.asname})
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = node
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
    return found


def test_every_function_and_class_of_the_engine_is_in_the_stub_with_its_types():
    module = members(ast.parse(STUB.read_text()).body)
    public = [name for name in vars(plumb._C) if not name.startswith("__")]
    assert set(public) == set(module)
    functions = [node for node in ast.walk(ast.parse(STUB.read_text())) if isinstance(node, ast.FunctionDef)]
    untyped = [f.name for f in functions if f.args.vararg is not None]
    assert len(untyped) <= len(functions) // 20, untyped
    for name, node in module.items():
        cls = getattr(plumb._C, name)
        if isinstance(node, ast.ClassDef):
            assert {m for m in vars(cls) if not m.startswith("_")} <= set(members(node.body)), name


def test_the_stub_gives_arguments_their_names_and_types():
    module = members(ast.parse(STUB.read_text()).body)
    to_string = members(module["Graph"].body)["to_string"]
    assert ast.unparse(to_string.args) == "self: Graph, types: bool=True, locations: bool=True"
    assert ast.unparse(to_string.returns) == "str"
    assert ast.unparse(module["parse_graph"].args) == "text: str"
