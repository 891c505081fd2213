"""Write a class, and all that it uses of this repository, as one Python file.

The file holds imports, then definitions in the order in which Python would run them, with the
comments above them. A definition is a class, a function, an assignment, or a statement that begins
with a defined name, such as `operator.register_autograd(...)`.
"""

import ast
import re
import symtable
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
Rewrite = Callable[[str, set[str]], str]  # of a definition's source and all attributes in the file

OPERATORS = (
    "# torch finds operators by name: each copy of this file needs names of its own.",
    'OPERATORS = f"speedrun_{uuid.uuid4().hex}"',
)


class Name(NamedTuple):
    """Where something is defined."""

    module: str
    name: str  # "": the module itself


class Part(NamedTuple):
    """A definition in the file."""

    module: str
    line: int
    text: str
    uses: dict[str, Name]  # names as the text has them


def one_file(root: Name, rewritten: Mapping[str, Rewrite]) -> str:
    """Return the source of `root` and of all that it uses.

    rewritten: for each definition that the file holds in another form, how to write it.
    """
    attributes: set[str] = set()
    while True:  # a method brings attributes, which may bring methods
        parts = collect(root, rewritten, attributes)
        found = {node.attr for part in parts for node in attributes_in(part.text)}
        if found == attributes:
            break
        attributes = found
    lines = [*import_lines(parts), "", *OPERATORS]
    owners = Counter(name for _, name in {each for part in parts for each in part.uses.values()})
    for module in in_order_of_imports(parts):
        lines += ["", "", f"# ---- {path_of(module).relative_to(ROOT)}", ""]
        for part in sorted(part for part in parts if part.module == module):
            text = part.text
            for name, (source, new) in part.uses.items():
                if owners[new] > 1:  # modules may use one name for different things, as `_save`
                    new += "_" + source.rpartition(".")[2]
                if is_ours(source) and new != name:
                    text = re.sub(rf"(?<![\w.]){re.escape(name)}\b", new, text)
            defines = re.search(r"^(@|class |def )", text, re.MULTILINE)
            lines += ["", "", text] if defines else [text]
    return "\n".join([*lines, ""]).replace('"speedrun::', 'f"{OPERATORS}::')


def collect(root: Name, rewritten: Mapping[str, Rewrite], attributes: set[str]) -> list[Part]:
    """The definitions of `root` and of all that it uses."""
    parts: dict[tuple[str, int], Part] = {}
    waiting = [root]
    while waiting:
        module, name = waiting.pop()
        statements = list(read_module(module).statements[name].items())
        if name in rewritten:
            line, text = statements[0]  # it will hold all that the others add
            statements = [(line, rewritten[name](text, attributes))]
        for line, text in statements:
            if (module, line) not in parts:
                part = Part(module, line, text, dict(references(module, text)))
                parts[module, line] = part
                waiting += [each for each in part.uses.values() if is_ours(each.module)]
    return list(parts.values())


def only_used(text: str, attributes: set[str]) -> str:
    """Return the source of a class without the methods that nothing in the file names."""
    (definition,), lines = ast.parse(text).body, text.splitlines()
    assert isinstance(definition, ast.ClassDef)
    for node in reversed(definition.body):
        if isinstance(node, ast.FunctionDef) and node.name not in attributes | {"__init__"}:
            del lines[first_line(lines, node) : node.end_lineno]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()


# ---- Reading modules


class Module:
    """The statements of a module by the names that they define or add to, and its imports."""

    def __init__(self, name: str):
        text = path_of(name).read_text(encoding="utf-8")
        lines = text.splitlines()
        self.imports: dict[str, Name] = {}
        self.statements: dict[str, dict[int, str]] = defaultdict(dict)  # by line
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = Name(node.module or "", alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.split(".")[0]] = Name(alias.name, "")
            else:
                first = first_line(lines, node)
                source = "\n".join(lines[first : node.end_lineno])
                for defined in defined_by(node, source):
                    self.statements[defined][first] = source


read_module = cache(Module)


def path_of(module: str) -> Path:
    file = ROOT / (module.replace(".", "/") + ".py")
    return file if file.is_file() else ROOT / module / "__init__.py"


def is_ours(module: str) -> bool:
    return path_of(module).is_file()


def first_line(lines: list[str], node: Any) -> int:
    """The index of a statement's first line: that of its decorators, or of comments above it."""
    line = min(each.lineno for each in [node, *getattr(node, "decorator_list", [])]) - 1
    while re.match(r" *#(?! ----)", lines[line - 1]):
        line -= 1
    return line


def defined_by(node: ast.stmt, source: str) -> list[str]:
    """The names that a statement defines or, beginning with them, adds to."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "_":
        return [node.name]
    begins = re.search(r"^@?(\w+(, \w+)*)", source, re.MULTILINE)
    return begins[1].split(", ") if begins else []


def references(module: str, text: str) -> Iterator[tuple[str, Name]]:
    """What a part of a module uses: each name as it is written, and where it is defined."""
    for name in sorted(free_names(symtable.symtable(text, module, "exec"))):
        source, original = definition = definition_of(module, name)
        if not is_ours(source) or original in read_module(source).statements:
            yield name, definition
        elif not original:
            for node in attributes_in(text):
                if isinstance(node.value, ast.Name) and node.value.id == name:
                    yield f"{name}.{node.attr}", definition_of(source, node.attr)


def definition_of(module: str, name: str) -> Name:
    """Where a name of a module is defined, through all imports in this repository."""
    while is_ours(module) and name in read_module(module).imports:
        module, name = read_module(module).imports[name]
        if name and is_ours(f"{module}.{name}"):  # from package import module
            module, name = f"{module}.{name}", ""
    return Name(module, name)


def free_names(table: symtable.SymbolTable) -> set[str]:
    """The names that some source reads from its module, or defines there."""
    top = table.get_type() == "module"
    names = {each.get_name() for each in table.get_symbols() if top or each.is_global()}
    return names.union(*map(free_names, table.get_children()))


def attributes_in(text: str) -> list[ast.Attribute]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]


# ---- Putting the file together


def import_lines(parts: list[Part]) -> list[str]:
    """The imports of other packages, and what names the operators."""
    lines, names = {"import uuid"}, defaultdict(set)
    for name, (module, original) in {pair for part in parts for pair in part.uses.items()}:
        if not is_ours(module):
            renamed = "" if name == (original or module) else f" as {name}"
            if original:
                names[module].add(original + renamed)
            else:
                lines.add(f"import {module}{renamed}")
    return sorted(lines) + [f"from {each} import {', '.join(sorted(names[each]))}"
                            for each in sorted(names)]  # fmt: skip


def in_order_of_imports(parts: list[Part]) -> Iterable[str]:
    """The modules, each after those that it uses."""
    needs: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        needs[part.module] |= {module for module, _ in part.uses.values() if is_ours(module)}
    graph = {module: sorted(needs[module] - {module}) for module in sorted(needs)}
    return TopologicalSorter(graph).static_order()
