"""The house's rules, as tests: imports go one way, files stay short, there is one index record and one kernel body."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import pytest

import blazeproto
from blazeproto import gemm

PACKAGE = Path(blazeproto.__file__).parent
MODULES = {
    ".".join(
        ("blazeproto", *(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"))
    ): path
    for path in PACKAGE.rglob("*.py")
}
FACE = "blazeproto"  # the package itself, which imports a room when it is named
LEVELS = (  # nobody imports from a line below its own
    {"activations", "runtime"},
    {"dispatch"},
    {"gemm"},
    {"stored"},
    {"autograd", "reference"},
    {"router"},
    {"layer", "blocksparse"},
    {"cost", "distributed"},
    {"lab", "integrations"},
    {"doctor", "__main__"},
)
IMPORTERS = ("import_module", "__import__", "any_library")  # functions that are told a module's name
UPWARDS = {("blazeproto.runtime.shown", "blazeproto.lab")}  # when an object is shown


def imports_of(source: str, package: str, *, types: bool = False) -> set[str]:
    """Modules of the package that a source imports, in functions too, by name as a string, or as attributes of the package.
    package: that the source is in, from which relative imports count.  types: whether imports for types alone count too."""
    tree = ast.parse(source)
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    faces = {FACE, *(alias.asname for alias in imported if alias.name == FACE)}
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    wanted: list[str] = []
    for node in ast.walk(tree):
        if id(node) in for_types and not types:
            continue
        if isinstance(node, ast.Import):
            wanted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            wanted += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in faces:
            wanted.append(f"{FACE}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTERS):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                wanted += modules_named(argument, package)
    return {module_of(name) for name in wanted if name.partition(".")[0] == FACE} - {FACE}


def modules_named(argument: ast.expr, package: str) -> list[str]:
    """The module that a string names; every one that an f-string may name, its variables being anything."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return [resolve_name(argument.value, package)]
    parts = argument.values if isinstance(argument, ast.JoinedStr) else []
    pattern = "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)
    return [name for name in MODULES if re.fullmatch(pattern, name)]


def module_of(name: str) -> str:
    """The module that holds a dotted name; names of the package's face are at home elsewhere."""
    home = blazeproto._HOME_OF.get(name.removeprefix(f"{FACE}."))
    name = f"{FACE}.{home}" if home else name
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def package_of(name: str) -> str:
    return name if MODULES[name].stem == "__init__" else name.rpartition(".")[0]


def all_imports(*, types: bool) -> dict[str, set[str]]:
    """What each module of the package imports. types: as in `imports_of`."""
    return {
        name: imports_of(path.read_text(), package_of(name), types=types) - {name}
        for name, path in MODULES.items()
        if name != FACE
    }


IMPORTS = all_imports(types=False)


@pytest.mark.parametrize(
    "source",
    [
        "from blazeproto.lab import views",
        "def f():\n    import blazeproto.lab.views",
        "def f():\n    from blazeproto.lab import views",
        "import blazeproto\nblazeproto.lab.views",
        "import importlib\nimportlib.import_module('blazeproto.lab.views')",
        "import_module(f'blazeproto.lab.{name}')",
        "from blazeproto import lab",
        "from blazeproto import lab as workshop",
        "import blazeproto as b\nb.lab",
        "import blazeproto.lab as workshop",
        "from .. import lab as workshop",
        "from ..lab import views as v",
        "from ..lab.views import view",
        "import_module(f'blazeproto.{room}.views')",
        "import_module(f'{face}.lab')",
        "import_module(name='blazeproto.lab')",
        "import_module('..lab', __package__)",
        "__import__('blazeproto.lab')",
        "__import__(f'blazeproto.{room}')",
    ],
)
def test_an_import_is_seen_however_it_is_written(source: str) -> None:
    found = imports_of(source, "blazeproto.gemm")
    assert any(name.startswith("blazeproto.lab") for name in found), found


def test_what_is_no_import_is_none() -> None:
    source = "import torch\nf'{a}.{b}'\nblaze.lab\nprint('blazeproto.lab is a room')\nfrom . import up"
    assert imports_of(source, "blazeproto.gemm") == {"blazeproto.gemm", "blazeproto.gemm.up"} - {"blazeproto.gemm"}


def test_types_count_where_they_are_asked_for() -> None:
    source = "if TYPE_CHECKING:\n    from blazeproto.lab import views"
    assert not imports_of(source, "blazeproto.gemm")
    assert imports_of(source, "blazeproto.gemm", types=True) == {"blazeproto.lab.views"}


def test_no_circle_of_imports() -> None:
    """Not of those for types either."""
    imports = all_imports(types=True)
    TopologicalSorter(
        {name: {other for other in found if (name, other) not in UPWARDS} for name, found in imports.items()}
    ).prepare()


def test_no_circle_of_imports_among_the_scripts() -> None:
    root = PACKAGE.parent
    sources = {path.relative_to(root).with_suffix(""): path.read_text() for path in (root / "scripts").rglob("*.py")}
    named = {".".join(path.parts): ast.walk(ast.parse(source)) for path, source in sources.items()}
    imports = {
        name: {
            f"{node.module}{end}"  # a module may be what is imported from, or what is imported
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for end in ("", *(f".{alias.name}" for alias in node.names))
        }
        for name, nodes in named.items()
    }
    assert "scripts.bench.result_tables" in imports["scripts.bench.running"]  # in a function
    TopologicalSorter({name: found & named.keys() for name, found in imports.items()}).prepare()


def test_imports_point_one_way() -> None:
    level = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
    upwards = {
        (name, other)
        for name, others in IMPORTS.items()
        for other in others
        if level[other.split(".")[1]] > level[name.split(".")[1]]
    }
    assert upwards == UPWARDS


@pytest.mark.parametrize("name", [name for name in IMPORTS if name.split(".")[1] in ("dispatch", "gemm", "runtime")])
def test_rooms_without_torch_import_none(name: str) -> None:
    nodes = [*ast.walk(ast.parse(MODULES[name].read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTERS)]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [str(word.value) for call in calls for word in ast.walk(call) if isinstance(word, ast.Constant)]
    assert not [module for module in modules if module.split(".")[0] == "torch"]


def test_what_dir_shows_is_what_there_is() -> None:
    names = dir(blazeproto)
    assert {"MoE", "moe_mlp", "Dispatch", "gemm", "dispatch", "router", "lab"} <= set(names)
    assert not [name for name in names if name.startswith("_")]
    for name in names:
        assert getattr(blazeproto, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'gem'"):
        _ = blazeproto.gem


def test_rooms_load_when_they_are_named() -> None:
    probe = (
        "import sys, blazeproto\n"
        "rooms = [m for m in sys.modules if m.startswith('blazeproto.')]\n"
        "assert not rooms and 'torch' not in sys.modules, rooms\n"
        "blazeproto.gemm.TileConfig, blazeproto.dispatch.Dispatch, blazeproto.router.topk_route\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


PTXSIM = PACKAGE.parent / "ptxsim"
SIMULATOR = sorted(PTXSIM.glob("*.py"))
ITS_TESTS = sorted((PTXSIM / "tests").glob("*.py"))


def libraries_of(path: Path) -> set[str]:
    """The first names of all that a source imports; no relative import, and no function that is told a module's name."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    assert not any(isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTERS) for node in nodes)
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("path", SIMULATOR, ids=lambda path: path.name)
def test_ptxsim_imports_numpy_alone(path: Path) -> None:
    """And rich, for its command. Its compiler's process imports nothing but Python's own library."""
    allowed = {"__main__": {"numpy", "rich", "ptxsim"}, "nvrtc": set[str]()}.get(path.stem, {"numpy", "ptxsim"})
    assert libraries_of(path) <= allowed | sys.stdlib_module_names


@pytest.mark.parametrize("path", ITS_TESTS, ids=lambda path: path.name)
def test_the_tests_of_ptxsim_import_it_and_pytest_alone(path: Path) -> None:
    beside = {other.stem for other in ITS_TESTS}
    assert libraries_of(path) <= beside | {"numpy", "pytest", "ptxsim"} | sys.stdlib_module_names


def test_only_the_lab_imports_ptxsim() -> None:
    users = {name for name, path in MODULES.items() if re.search(r"^\s*(?:from|import) ptxsim", path.read_text(), re.M)}
    assert users == {"blazeproto.lab.target"}


def test_ptxsim_is_found_in_the_repository_without_being_installed() -> None:
    """A folder without an ``__init__.py`` would be a package without contents there."""
    code = "import sys, ptxsim; print(ptxsim.__file__, ptxsim.run.__name__, *{'torch', 'blazeproto'} & {*sys.modules})"
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path += {[p for p in sys.path if 'site-packages' in p]}; {code}",
    ]
    done = subprocess.run(command, cwd=PTXSIM.parent, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(PTXSIM / "__init__.py"), "run"], done.stderr


def test_without_ptxsim_the_lab_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['ptxsim'] = None\nfrom blazeproto.lab import Workbench"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: ptxsim: expected" in done.stderr and "pip install ./ptxsim" in done.stderr


CEILINGS = {
    "blazeproto/*.py": 865,
    "blazeproto/runtime/**/*.py": 1068,
    "blazeproto/dispatch/**/*.py": 735,
    "blazeproto/router/**/*.py": 2350,
    "blazeproto/gemm/**/*.py": 2352,
    "blazeproto/stored/**/*.py": 306,
    "blazeproto/autograd/**/*.py": 2165,
    "blazeproto/blocksparse/**/*.py": 592,
    "blazeproto/distributed/**/*.py": 502,
    "blazeproto/integrations/**/*.py": 380,
    "blazeproto/lab/**/*.py": 3038,
    "ptxsim/*.py": 2991,
    "scripts/**/*.py": 9262,
    "tests/**/*.py ptxsim/tests/**/*.py": 25450,
    "blazeproto/**/*.cu blazeproto/**/*.cuh": 6979,
}
"""How large rooms may be: statements of Python, lines of CUDA. To lower a ceiling is free, to raise one takes a line in
docs/decisions.md ("What the ceilings bought") that says what for."""


@pytest.mark.parametrize("room", CEILINGS)
def test_rooms_stay_below_their_ceilings(room: str) -> None:
    paths = [path for pattern in room.split() for path in PACKAGE.parent.glob(pattern)]
    assert 0 < sum(map(size_of, {*paths})) <= CEILINGS[room]


def size_of(path: Path) -> int:
    text = path.read_text()
    return statements(text) if path.suffix == ".py" else len(text.splitlines())


def statements(source: str) -> int:
    """How many a source has, inner ones too, but no docstrings."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


@pytest.mark.parametrize(
    "path",
    [p for p in (*PACKAGE.rglob("*"), *SIMULATOR) if p.suffix in (".py", ".cu", ".cuh")],
    ids=lambda p: p.name,
)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_one_index_record() -> None:
    """No other class has the lists of a dispatch as its fields, but `Addresses`, which has where they lie."""
    holders = [
        f"{name}.{node.name}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(f, ast.AnnAssign) and getattr(f.target, "id", "") == "token_index_map" for f in node.body)
    ]
    assert sorted(holders) == ["blazeproto.dispatch.structures.Addresses", "blazeproto.dispatch.structures.Dispatch"]


def test_no_two_classes_share_a_name() -> None:
    bodies = (ast.parse(path.read_text()).body for path in MODULES.values())
    names = [node.name for body in bodies for node in body if isinstance(node, ast.ClassDef)]
    assert not Counter(names) - Counter({*names})


@pytest.mark.parametrize("folder", ["blazeproto", "ptxsim", "scripts", "tests"])
def test_no_docstring_begins_with_of(folder: str) -> None:
    found = [
        f"{path}: {doc.splitlines()[0]}"
        for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if (doc := ast.get_docstring(node)) and doc.startswith("Of ")
    ]
    assert not found


def test_one_kernel_body() -> None:
    """The mainloop is called in one place."""
    calls = [path.name for path in (PACKAGE / "gemm/cuda").glob("*.cu*") if "multiply<" in path.read_text()]
    assert len(calls) == 1, calls


WITHOUT_A_TWIN = {  # they compute sizes, or compile: no array goes in or out
    "gemm": {"all_kernels", "candidates", "kernel_for", "prepare", "score_partials", "weight_workspace"},
    "dispatch": {"prepare_dispatch", "workspace_bytes"},
    "router": {"make_router", "routing_stats"},  # these are torch's
}


def functions_with_twins(room: str) -> dict[str, tuple[Callable, Callable]]:
    """Every public function of a room that is not named above, and its twin: of its name in the module that `any_library` is
    told, or what gemm makes of the product's formula."""
    module, holder = importlib.import_module(f"blazeproto.{room}"), "fallback" if room == "router" else "reference"
    twins = gemm.TWINS if room == "gemm" else vars(importlib.import_module(f"blazeproto.{room}.{holder}"))
    functions = {name: getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    assert functions.keys() > WITHOUT_A_TWIN[room]
    return {name: (functions[name], twins[name]) for name in functions.keys() - WITHOUT_A_TWIN[room]}


@pytest.mark.parametrize("room", WITHOUT_A_TWIN)
def test_public_functions_have_twins_of_the_same_signature(room: str) -> None:
    """Names, order, kinds and defaults of the parameters; a twin's arrays are NumPy's, and only it has a ``round_to``."""
    for name, functions in functions_with_twins(room).items():
        ours, twin = (inspect.signature(function).parameters.values() for function in functions)
        of_the_twin = [(p.name, p.kind, p.default) for p in twin if p.name != "round_to"]
        assert [(p.name, p.kind, p.default) for p in ours] == of_the_twin, name


@pytest.mark.parametrize("room", ["dispatch", "gemm"])
def test_twins_take_the_same_types_but_for_arrays(room: str) -> None:
    for name, functions in functions_with_twins(room).items():
        ours, twin = (inspect.signature(function).parameters for function in functions)
        for parameter in ours.values():
            if parameter.annotation is not Any:  # an array
                assert twin[parameter.name].annotation == parameter.annotation, f"{name}: {parameter}"


def test_every_public_function_of_gemm_is_a_product_with_a_twin() -> None:
    products = gemm.PRODUCTS | gemm.BLOCK_PRODUCTS
    runs = {name: entry.run for name, entry in products.items()} | {"grouped_mm": gemm.grouped_mm}
    assert runs.keys() == gemm.TWINS.keys() and all(entry.name == name for name, entry in products.items())
    assert all(runs[name] is ours for name, (ours, _) in functions_with_twins("gemm").items())
