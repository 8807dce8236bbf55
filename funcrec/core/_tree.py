"""Values are frozen dataclasses and pytrees, in torch's registry and in optree's registry.

`unflatten(flatten(x)) == x`. torch's registry is the authority (torch.func and torch.compile use it). optree's
registry, namespace "funcrec", gives users paths, prefixes and optree's tools. The two registries order dict keys
differently, so never zip leaves of one registry with leaves of the other.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, dataclass_transform, overload

import optree
import torch
import torch.utils._pytree as torch_tree
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from funcrec.core._devices import to as moved
from funcrec.core._errors import Problem, check, describe, message
from funcrec.core._static import OWN_NODES, fix, loosen

T = TypeVar("T")

if TYPE_CHECKING:

    class Movable:
        """What `pytree` adds to a class, for type checkers alone."""

        def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
            """Return the value on a device, or with its floats in a dtype, as `fr.tree.to` does."""
            return moved(self, device, dtype)
else:

    class Movable:
        """A base without content: at run time `pytree` alone adds the method `to`."""

        __slots__ = ()
        __module__ = "funcrec.core"  # what `help` shows


NAMESPACE = "funcrec"
CALLS = "funcrec.jit"  # namespace of a jitted call's arguments: values that a program can tell apart differ in it
CLASSES: dict[
    str, tuple[Callable[..., Any], Callable[..., Any]]
] = {}  # {class_name: (flatten, unflatten)}, for checkpoints
STATIC_DEFAULTS: dict[
    str, tuple[Any, ...]
] = {}  # defaults of static fields, for a checkpoint that is older than a field
CALL_FLATTENS: dict[type, Callable[..., Any]] = {}  # {class: flatten in the namespace CALLS}
UNPADDED: dict[type, Callable[..., Any]] = {}  # {class: value -> the same value without padding}, for comparisons

_as_written = optree.dict_insertion_ordered(True, namespace=CALLS)  # a context that is never left
_as_written.__enter__()

tree_map: Callable[..., Any] = torch_tree.tree_map
tree_flatten: Callable[..., Any] = torch_tree.tree_flatten
tree_unflatten: Callable[..., Any] = torch_tree.tree_unflatten
tree_leaves: Callable[..., Any] = torch_tree.tree_leaves
tree_structure: Callable[..., Any] = torch_tree.tree_structure


@overload
@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(cls: type[T], *, static: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> type[T]: ...
@overload
@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(*, static: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]: ...
def pytree(cls: type | None = None, *, static: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> Any:
    """Return the class as a frozen dataclass whose fields torch.func, torch.compile, `fr.jit` and optree can reach.

    Args:
      static: fields that belong to the tree's structure; they must be hashable and are part of the compile key.
      optional: fields that may be None; then None belongs to the structure and is no leaf (so `vmap` does not meet it).

    The class gets a method `x.to(device, dtype)`, which is `fr.tree.to(x, device, dtype)`, unless it has its own `to`.

    Law: unflatten(flatten(x)) has the same leaves and the same static fields.

    Example:
      >>> import torch, funcrec as fr
      >>> @fr.pytree(static=("name",))
      ... class Batch:
      ...     label: torch.Tensor
      ...     name: str
      >>> torch.func.vmap(lambda b: b.label * 2)(Batch(torch.tensor([1.0, 2.0]), "train"))
      tensor([2., 4.])
      >>> Batch(torch.tensor([1.0, 2.0]), "train").to(torch.float16).label
      tensor([1., 2.], dtype=torch.float16)
    """
    made = lambda c: registered(c, static, optional)
    return made if cls is None else made(cls)


def registered(cls: Any, static: tuple[str, ...], optional: tuple[str, ...]) -> Any:
    """Return the class as `pytree` says, known to both registries. Its attributes are still being written."""
    check("funcrec.pytree", class_problems(cls, static, optional))
    cls = dataclasses.dataclass(frozen=True, eq=False, repr="__repr__" not in cls.__dict__)(cls)
    cls.__setattr__, cls.__delattr__ = refuse_write, refuse_write
    names = tuple(f.name for f in dataclasses.fields(cls))
    children = tuple(n for n in names if n not in static)
    if "to" not in names and not hasattr(cls, "to"):
        cls.to = to_of(cls)

    def present(value) -> tuple[str, ...]:
        return tuple(n for n in children if n not in optional or getattr(value, n) is not None)

    def flatten(value):
        fields = present(value)
        return [getattr(value, n) for n in fields], (fields, tuple(getattr(value, n) for n in static))

    def flatten_with_keys(value) -> tuple[list[tuple[Any, Any]], tuple]:
        leaves, context = flatten(value)
        return [(torch_tree.GetAttrKey(n), x) for n, x in zip(context[0], leaves, strict=True)], context

    def unflatten(leaves, context):
        fields, fixed = context
        value = object.__new__(cls)  # without __init__, because leaves may be placeholders of any kind
        for n in children:
            object.__setattr__(value, n, None)
        for n, x in (*zip(fields, leaves, strict=True), *zip(static, fixed, strict=True)):
            object.__setattr__(value, n, x)
        return value

    CLASSES[class_name(cls)] = (flatten, unflatten)
    STATIC_DEFAULTS[class_name(cls)] = tuple(cls.__dataclass_fields__[n].default for n in static)
    torch_tree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=class_name(cls), flatten_with_keys_fn=flatten_with_keys
    )
    optree.register_pytree_node(
        cls,
        lambda value: (*flatten(value), present(value)),
        lambda context, leaves: unflatten(leaves, context),
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )

    OWN_NODES.add(cls)
    fast = converters(cls, children, static, optional) if has_dict(cls, names) else (flatten, unflatten)
    register_call(cls, (flatten, unflatten), fast)
    return cls


def refuse_write(self: Any, name: str, *value: Any) -> NoReturn:
    """Raise a FrozenInstanceError: the `__setattr__` and `__delattr__` of a value."""
    what, need = f"`{name}` of a value cannot be changed.", "values stay as they are; functions return new ones"
    hint = f"dataclasses.replace(value, {name}=...)" if value else "a new value without it"
    problem = Problem(what, f"a {type(self).__name__}", need, hint)
    raise dataclasses.FrozenInstanceError(message("funcrec", [problem]))


def register_call(cls: type, plain: tuple[Callable, Callable], fast: tuple[Callable, Callable]) -> None:
    """Register a class in the namespace of calls, with pairs (flatten, unflatten). torch.compile traces `plain`."""

    def flatten_call(value):
        leaves, (fields, fixed) = (plain if is_dynamo_compiling() else fast)[0](value)
        return leaves, (fields, fix(fixed)), fields

    def unflatten_call(context, leaves):
        return (plain if is_dynamo_compiling() else fast)[1](leaves, (context[0], loosen(context[1])))

    CALL_FLATTENS[cls] = flatten_call
    optree.register_pytree_node(cls, flatten_call, unflatten_call, path_entry_type=optree.GetAttrEntry, namespace=CALLS)


def converters(
    cls: type, children: tuple[str, ...], static: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[Callable, Callable]:
    """Return (flatten, unflatten) that take half the time. torch.compile cannot trace them."""
    parts_of, static_of, blank = getter(children), getter(static), dict.fromkeys(children)

    def present(value) -> tuple[str, ...]:
        for n in optional:
            if getattr(value, n) is None:
                return tuple([n for n in children if n not in optional or getattr(value, n) is not None])
        return children

    def flatten(value):
        fields = present(value)
        parts = parts_of(value) if fields is children else [getattr(value, n) for n in fields]
        return [*parts], (fields, static_of(value))

    def unflatten(leaves, context):
        fields, fixed = context
        value = object.__new__(cls)
        own = value.__dict__
        if len(fields) < len(children):
            own.update(blank)
        own.update(zip((*fields, *static), (*leaves, *fixed), strict=True))
        return value

    return flatten, unflatten


def getter(names: tuple[str, ...]) -> Callable[[Any], tuple]:
    """Return a function from a value to the tuple of these attributes."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return (lambda value: (getattr(value, names[0]),)) if names else lambda value: ()


def has_dict(cls: type, names: tuple[str, ...]) -> bool:
    """Return whether a value's `__dict__` holds all of these fields."""
    return cls.__dictoffset__ != 0 and not any(hasattr(getattr(cls, n, None), "__set__") for n in names)


def to_of(cls: type) -> Callable:
    """Return a method `to` for a class."""

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None):
        """Return the value on a device, or with its floats in a dtype, as `fr.tree.to` does."""
        return moved(self, device, dtype)

    to.__module__, to.__qualname__ = cls.__module__, f"{cls.__qualname__}.to"
    return to


def class_problems(cls: object, static: object, optional: object) -> Iterator[Problem]:
    if not isinstance(cls, type):
        hint = "@fr.pytree above a class, or @fr.pytree(static=(...,))"
        yield Problem("`cls` is not a class.", describe(cls), "a class with annotated fields", hint, TypeError)
    elif cls.__module__ == "builtins" or "__dataclass_params__" in vars(cls):
        own = "a dataclass or a pytree already" if cls.__module__ != "builtins" else "Python's own"
        what, need = f"`cls` is {own}.", "a plain class with annotated fields"
        yield Problem(what, describe(cls), need, "class State: table: torch.Tensor", TypeError)
    for name, x in (("static", static), ("optional", optional)):
        if not isinstance(x, tuple) or not all(isinstance(n, str) for n in x):
            hint = f'{name}=("name",), with a comma'
            yield Problem(f"`{name}` are not names of fields.", describe(x), "a tuple of strings", hint, TypeError)


def class_name(cls: type) -> str:
    """Return the name of a class in checkpoints. Names of funcrec's classes omit the module, because files may move."""
    module = "funcrec" if cls.__module__.startswith("funcrec.") else cls.__module__
    return f"{module}.{cls.__qualname__}"


replace = dataclasses.replace


def paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Return (path, leaf) of each leaf in torch's order, such as ("tables['item']", leaf).

    The paths are for people to read.
    """
    flat, _ = torch_tree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(torch_tree.keystr(path).lstrip("."), leaf) for path, leaf in flat]


def on_root(path: str) -> str:
    """Return a path of `paths` as it follows the name of its tree, such as ".values" or "['item']"."""
    return path if not path or path.startswith("[") else f".{path}"


def map_with_names(fn: Callable[[str, Any], Any], tree: T) -> T:
    """Return the tree of fn(name, leaf), where the name is the last key or field on the leaf's path."""
    return torch_tree.tree_map_with_path(lambda path, x: fn(_last_name(path), x), tree)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (the last key or field on its path, the leaf) for each leaf."""
    return [(_last_name(path), x) for path, x in torch_tree.tree_flatten_with_path(tree)[0]]


def _last_name(path: Sequence) -> str:
    return path[-1].key if hasattr(path[-1], "key") else path[-1].name


def fast_flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return (leaves, structure) of a tree, computed in C++. Dicts keep their own order of keys.

    `structure.unflatten(leaves)` makes the tree again. `==` of structures compares the order of a dict's keys and the
    types of static fields. Dict keys may compare equal although a program can tell them apart, such as 1 and True.
    `structure_key` tells such keys apart.
    """
    return optree.tree_flatten(tree, namespace=CALLS)


def leaf_paths(structure: optree.PyTreeSpec, names: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Return {number of a leaf: (name, path)} for a tuple that `fast_flatten` flattened.

    `names` are the names of the tuple's elements; a path reads "name['key'].field".
    """
    roots = [(names[int(a[0].entry)], a[1:]) for a in structure.accessors()]
    return {i: (root, inside.codify(root)) for i, (root, inside) in enumerate(roots)}


def map_tensors(fn: Callable[[Tensor], Any], tree: T) -> T:
    """Return the tree of fn(tensor) for the tensors of `tree`; other leaves stay."""
    return tree_map(lambda x: fn(x) if isinstance(x, Tensor) else x, tree)
