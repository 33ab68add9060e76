"""Which file may import which: rooms have no circle, and those below never ask for those above."""

import ast
from pathlib import Path

import gemmery

ROOT = Path(gemmery.__file__).parent

#: The rooms and files on the way from tensors to a launch, from the bottom to the top. Above all of them stand the
#: products, the public functions, modules, tuning, the lab and the command.
FLOORS = (
    ("allocation", "dtensors", "dtypes", "devices", "documentation", "files", "memo", "reference"),
    ("kernels", "precision"),
    ("formats", "epilogues"),
    ("operands",),
    ("schedules",),
    ("problem",),
    ("layout",),
    ("select",),
    ("launch",),
)
#: Who may import the lab.
LAB = ("lab", "cli", "__main__")

#: Imports from below, as (file, what it imports), with their reason.
ALLOWED = {
    # `epilogues.check` is a user's name for what poses a product.
    ("epilogues/__init__.py", "product"),
    # A kernel unpacks the weight where the kernels of products can't load it.
    ("operands/packed.py", "launch"),
}


def room(parts):
    """The room or file of the package that a module, as a list of names without the package's, belongs to."""
    return parts[0] if parts else "__init__"


def imported(path):
    """What a file imports of the package: (room, whether only when a function runs). Imports for types do not count."""
    own = path.relative_to(ROOT).with_suffix("").parts
    found = []

    def visit(node, later):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(
                (room(x.name.split(".")[1:]), later) for x in node.names if x.name.split(".")[0] == "gemmery"
            )
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*own[: len(own) - node.level], *(node.module or "").split(".")]
            else:
                first, *base = node.module.split(".")
                base = base if first == "gemmery" else None
            if base is not None:
                base = [name for name in base if name]
                # `from .. import schedules` names rooms.
                found.extend((room(base or [x.name]), later) for x in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, later or isinstance(node, ast.FunctionDef))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def arrows():
    """All imports from room to room, as (file, room, room that it imports, whether only when a function runs)."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        for other, later in imported(path):
            if other != parts[0]:
                yield path.relative_to(ROOT).as_posix(), parts[0], other, later


ARROWS = [(file, own, other, later) for file, own, other, later in arrows() if (file, other) not in ALLOWED]


def test_the_allowed_imports_are_there():
    """Whoever removes one takes it from the list."""
    assert {(file, other) for file, _, other, _ in arrows()} >= ALLOWED


def test_no_circle_of_rooms():
    """Whatever a file imports when it is imported itself."""
    below = {}
    for _, own, other, later in ARROWS:
        if not later and own not in ("__init__", "_eager"):
            below.setdefault(own, set()).add(other)

    def reached(start):
        seen, left = set(), [start]
        while left:
            for other in below.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    assert [own for own in below if own in reached(own)] == []


def test_floors():
    """Nothing on a floor imports from a floor above, or from what stands above all floors, not even later."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    top = len(FLOORS)
    wrong = {
        (file, other)
        for file, own, other, _ in ARROWS
        if own in floor and floor.get(other, top) > floor[own]
    }  # fmt: skip
    assert wrong == set()


def test_nobody_imports_the_lab():
    assert {file for file, own, other, _ in ARROWS if other == "lab" and own not in LAB} == set()


def test_the_kernels_import_triton_alone():
    assert {other for _, own, other, _ in ARROWS if own == "kernels"} == set()
