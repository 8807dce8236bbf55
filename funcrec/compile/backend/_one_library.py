"""Make one file of code per graph: Inductor's Python, and one library of all loops, which Inductor compiles apart.

Inductor's module  →  text: Python without torch's compiler;  source: C++ of all its loops and of the text

Loading a file imports nothing of Inductor, which would take a second or two. One library of seventeen loops compiles as
fast as four libraries of one loop each, because headers take most of the time. The compiler gets the flags that
Inductor uses for a single loop.
"""

import ast
import re
from collections.abc import Callable, Sequence
from importlib import machinery, util
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcrec.core import sure
from funcrec.kernels import choice, files

NAME = "funcrec_program"  # the library's name as a module of Python
KERNEL = "cpp_pybinding"  # the function that Inductor's module calls with argument types and C++
BINDING = """
#include <Python.h>
#include <cstring>
#include <stdexcept>
static void* (*memory)(PyObject*);

template <class F> static PyObject* guarded(bool fits, F run) {
  try {
    if (!fits) throw std::runtime_error("another number of arguments");
    run();
    Py_RETURN_NONE;
  } catch (std::exception const& error) {
    const char* index = std::strstr(error.what(), "index out of bounds");
    PyErr_SetString(index ? PyExc_IndexError : PyExc_RuntimeError, index ? index : error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unhandled error");
  }
  return nullptr;
}
"""
MODULE = """
static PyObject* link_to(PyObject*, PyObject* address) {{
  memory = reinterpret_cast<decltype(memory)>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}}

static PyMethodDef methods[] = {{
  {{"link", link_to, METH_O, ""}},
{methods}
  {{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{name}", nullptr, -1, methods}};

PyMODINIT_FUNC PyInit_{name}() {{
  PyObject* made = PyModule_Create(&definition);
  if (made && PyModule_AddStringConstant(made, "text", {text})) return nullptr;
  return made;
}}
"""


class Generated(NamedTuple):
    """The parts of a generated module.

    text: Python that binds `call`, and needs the loops by name. kernels: {name: (types of the arguments, C++)}.
    """

    text: str
    kernels: dict[str, tuple[list[str], str]]


def generated(module: str, extern: object) -> Generated | None:
    """Return the parts of Inductor's module, or None if it has more than loops for a CPU and calls of operators.

    Args:
      extern: Inductor's `extern_kernels`, whose matrix products are torch's own functions.
    """
    body, kernels = [], {}
    for x in ast.parse(module).body:
        if (found := _kernel(x)) is None:
            body.append(x)
        else:
            kernels |= found
    for node in (n for x in body for n in ast.walk(x)):
        if name := _operator(node):
            cast(ast.Call, node).func = ast.Call(ast.Name("direct", ast.Load()), [ast.Constant(name)], [])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "extern_kernels":
            own = getattr(torch, node.attr, None)
            node.value.id = "torch" if own is not None and own is getattr(extern, node.attr) else node.value.id
    text = "\n".join(map(ast.unparse, _needed(body)))
    return None if "_inductor" in text or "async_compile" in text else Generated(text, kernels)


def _operator(node: ast.AST) -> str:
    """Return the name of a call of an operator of "cpp" with positional arguments, or "" for anything else."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)) or node.keywords:
        return ""
    found = re.fullmatch(r"torch\.ops\.funcrec_cpp\.(\w+)\.default", ast.unparse(node.func))
    return found[1] if found else ""


def _kernel(x: ast.stmt) -> dict[str, tuple[list[str], str]] | None:
    """Return {name: (types of the arguments, C++)} of the loop that a statement makes.

    Return None if the statement makes no loop, or a loop with an argument that is no pointer.
    """
    call, target = (x.value, x.targets[0]) if isinstance(x, ast.Assign) else (None, None)
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == KERNEL):
        return None
    types, code = map(ast.literal_eval, call.args)
    if call.keywords or not all(t.endswith("*") for t in types):
        return None
    return {cast(ast.Name, target).id: (types, code)}


def _needed(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that `call` needs, in order, without the module's other imports and examples."""
    binds = {name: x for x in body for name in _names(x)}
    kept, left = set(), ["call"]
    while left:
        x = binds.get(left.pop())
        if x is not None and x not in kept:
            kept.add(x)
            left += [n.id for n in ast.walk(x) if isinstance(n, ast.Name)]
    return [x for x in body if x in kept]


def _names(x: ast.stmt) -> list[str]:
    if isinstance(x, ast.Import | ast.ImportFrom):
        return [(a.asname or a.name).split(".")[0] for a in x.names]
    if isinstance(x, ast.Assign):
        return [t.id for t in x.targets if isinstance(t, ast.Name)]
    return [x.name] if isinstance(x, ast.FunctionDef | ast.ClassDef) else []


def source(code: Generated) -> str:
    """Return the C++ of a library.

    It has each loop unchanged in a namespace, then the functions that Python calls, and the text.
    """
    included: dict[str, None] = {}
    parts, methods = [], []
    for i, (name, (types, loop)) in enumerate(code.kernels.items()):
        lines = loop.splitlines()
        included |= dict.fromkeys(x for x in lines if x.startswith("#include"))
        own = "\n".join(x for x in lines if not x.startswith("#include")).replace('extern "C"', "")
        given = ", ".join(f"reinterpret_cast<{t}>(memory(x[{j}]))" for j, t in enumerate(types))
        call = f"guarded(n == {len(types)}, [&] {{ loop_{i}::kernel({given}); }})"
        parts.append(f"namespace loop_{i} {{\n{own}\n}}")
        parts.append(f"static PyObject* call_{i}(PyObject*, PyObject* const* x, Py_ssize_t n) {{ return {call}; }}")
        methods.append(f'  {{"{name}", reinterpret_cast<PyCFunction>(call_{i}), METH_FASTCALL, ""}},')
    text = f'R"funcrec({code.text})funcrec"'
    end = MODULE.format(methods="\n".join(methods), name=NAME, text=text)
    return "\n".join([*included, BINDING, *parts, end])


def load(path: Path) -> Callable[[list], Sequence[Tensor]]:
    """Return `call` of the text, with the loops of the library. The file of a program without loops is text alone."""
    content = path.read_bytes()
    if not content.startswith(b"\x7fELF"):
        return _call({}, content[: -files.SIZE].decode(), path)
    loader = machinery.ExtensionFileLoader(NAME, str(path))
    library = util.module_from_spec(sure(util.spec_from_file_location(NAME, path, loader=loader)))
    library.link(cast(Any, torch._C)._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)
    return _call(vars(library), library.text, path)


def _call(loops: dict[str, Any], text: str, path: Path) -> Callable[[list], Sequence[Tensor]]:
    scope = {**loops, "__name__": NAME, "direct": choice.direct}
    exec(compile(text, str(path), "exec"), scope)
    return scope["call"]
