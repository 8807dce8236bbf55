"""jit: stage a pure function once per shape, compile it, and update donated arguments in place.

    jit(f)(x) = f(x);     jit(f, donate=("s",))(s, x) = f(s, x), written into the memory of s

`jit` flattens a call to tensors. `make_fx` runs the function once on shapes and records its operations. Inductor makes
code of the graph. For a donated leaf with some rows replaced, the code returns rows that `jit` writes into the leaf.
"""

import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from funcrec.compile._ambient import is_transformed, surroundings
from funcrec.compile._compiled import Compiled, Followed, compile_function
from funcrec.compile._donated import refuse_donated
from funcrec.compile._function import bound_to, check_function, signature_of
from funcrec.compile._keys import leaf_key, many_compilations, refuse_other
from funcrec.compile._lower import Lowered, lowered
from funcrec.compile._method import Method
from funcrec.compile._program import LOCK
from funcrec.compile._recording import bring_to_cuda
from funcrec.compile._static_arguments import call_plain, static_names, with_static
from funcrec.compile._trace import any_fake, is_odd, refuse_odd
from funcrec.core import (
    Problem,
    Size,
    any_tracked,
    describe,
    fail,
    fast_flatten,
    flatten_like,
    is_in_derivative,
    leaf_paths,
    message,
    structure_key,
    sure,
    typed,
)
from funcrec.mesh import alone, others_changed, staged
from funcrec.tables import TableRef

A = ParamSpec("A")
R = TypeVar("R")
ALONE = nullcontext()
MOST_SEEN = 4  # compilations that a call of a known structure tries in turn, in C++
MANY, MOST = 10, 128  # compilations of one function: the MANY-th gives a warning, and `jit` keeps the last MOST
TRANSFORM = "a transform, funcrec.checked or a mode of torch"


@typed
def jit(
    fn: Callable[A, R],
    *,
    donate: str | Sequence[str] = (),
    static_argnames: str | Sequence[str] = (),
    static_argnums: Size | Sequence[Size] = (),
) -> "Jitted[A, R]":
    """Return a compiled form of `fn`, a pure function of pytrees.

    Args:
      fn: takes and returns pytrees of tensors. It reads no tensor's value on the host, writes to no argument and to
        nothing that it closes over, and uses no random generator of torch. Python numbers, strings and other values
        that cannot change are static: a new value means a new compilation. Each call reads the tensors that fn closes
        over. fn reads everything else from outside (a rebound variable, an attribute, a numpy array,
        `random.random()`, the time, a module's `train()` or `eval()` mode) only during compilation. Its effects on
        Python's objects, such as an append to a list, also happen only then; `debug_print` prints in every call.
      donate: names of parameters that the call may use up. An output that is a donated leaf with rows replaced
        (`index_put`, as in every row optimizer) takes the leaf's memory. A leaf that is returned unchanged keeps its
        memory. All other outputs are new, and the call frees the old leaf's memory. After an interrupted or failed
        call, the old value is unchanged, or any use of it raises. If a view, a `detach()`, a numpy array or a file also
        holds the memory, the call copies it before a write, with a warning; an explicit `fr.copy` avoids the warning.
        The other holder keeps the old values. The call does not notice a bare `data_ptr()`, a storage, or
        another thread that reads meanwhile. Under vmap, grad, jvp, another jit and `fr.checked` nothing is taken.
      static_argnames, static_argnums: parameters, by name and by place, whose arguments are static as they are: any
        hashable values without tensors, such as a configuration of your own class. Values of one class that are equal
        share a program, so their `==` must tell all that the function reads. (Numbers, strings, functions and frozen
        values are static without being named here.)

    Returns:
      a function of the same arguments, safe to call from several threads; it pickles if `fn` does.
      `fn.num_compiled()` returns the number of compilations: one for each form of the arguments (shapes, dtypes,
      strides, static values, order of keys) in each surroundings (grad and inference mode, autocast, default dtype and
      device, precision of products, meshes, bound axes, threads). The tenth gives a warning, and the function keeps
      the last 128. Results may share memory with arguments, as results of `fn` may, unless something is donated.
      `fn.lower(*args)` returns the program of the call as `Lowered`, without compiling or taking anything.

    A follower of the call sees `fn` itself, not compiled and donating nothing: transforms of torch.func, `checked`,
    `value_and_grad`, modes of torch, torch.compile, and autograd if an argument or captured tensor requires grad (a
    donating call then raises). A tensor that `fn` makes is no follower: it does not make a result require grad.
    An exchange with real ranks raises if it is differentiated, because other ranks may run the program. Then jit the
    derivative.

    Raises:
      DonatedError: if a donated value is used. The message names the argument and the call that took the value.
      ValueError: for an unknown name, memory donated twice, or a function that writes to arguments or captured tensors.
      TypeError: for a function that reads values on the host or draws random numbers without a key, a donating call
        that autograd tracks, objects that may change unnoticed, and tensors without plain dense memory (sparse,
        nested or quantized tensors, subclasses).

    Cost: a small job is faster without jit. The first step of a DLRM with 26 tables compiles for 5 s, or for 0.5 s if
      an earlier process kept its code (TORCHINDUCTOR_CACHE_DIR). At batch 512 a step takes 24 ms with jit, 51 without:
      200 steps repay the compilation, or 20 with kept code. Each form of the arguments compiles again. So pad the last
      batch to the shape of the other batches, also in evaluation.

    Law: jit(fn) returns the values of `fn`, keeps every bit of what is not donated, and compiles once for one form.

    Example:
      >>> import torch, funcrec as fr
      >>> step = fr.jit(lambda state, x: state + x, donate=("state",))
      >>> old = torch.zeros(2)
      >>> new = step(old, torch.ones(2))
      >>> new
      tensor([1., 1.])
      >>> old + 1  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      funcrec.DonatedError: ...
    """
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    return Jitted(fn, (donate,) if isinstance(donate, str) else tuple(donate), (*names, *numbers))


class Seen(NamedTuple):
    """The compilations that calls of one structure and surroundings, `here`, used last. read: as in `flatten_like`."""

    here: tuple[Any, ...]
    read: Callable[[Any], list[Any] | None] | None
    entries: tuple[Compiled, ...]


class Jitted(Generic[A, R]):
    """A function made by `jit`. A pickle holds `fn` and the options; a loaded function compiles again."""

    fn: Callable[..., Any]
    donate: tuple[str, ...]
    name: str

    def __init__(self, fn: Callable[..., Any], donate: tuple[str, ...], static: tuple[str | int, ...] = ()):
        check_function(fn)
        functools.update_wrapper(self, fn, updated=())
        vars(self).update({n: x for n, x in getattr(fn, "__dict__", {}).items() if not hasattr(type(self), n)})
        self.fn, self.donate = fn, donate
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.signature: inspect.Signature = signature_of(fn)
        parameters = self.signature.parameters
        unknown = [d for d in donate if d not in parameters]
        if unknown:
            got, need = f"{unknown}", f"among {list(parameters)}"
            fail(f"funcrec.jit({self.name})", "`donate` names no parameter.", got=got, need=need)
        self.static: tuple[str, ...] = static_names(self.name, static, self.signature, donate)
        self.staged_fn: Callable[..., Any] = functools.partial(call_plain, fn) if self.static else fn
        is_plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())
        self.positional: tuple[str, ...] | None = tuple(parameters) if is_plain else None
        self.compiled: dict[Any, Any] = {}  # the MOST compilations that calls used last
        self.seen: dict[Any, Seen] = {}  # {a key without the leaves' forms: the last used compilations}
        self.last_seen: Seen | None = None
        self.last: Any = None  # the key of the last compilation
        self.calls: itertools.count[int] = itertools.count(1)
        self.compilations: int = 0
        self.is_one: bool = False  # whether it may compile one form only, being a program of `lower`

    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            self.step_aside("torch.compile")
            return self.fn(*args, **kwargs)
        if not kwargs and self.positional is not None and len(args) == len(self.positional):
            names, arguments = self.positional, args
        else:
            bound = bound_to(self.name, self.signature, args, kwargs)
            names, arguments = tuple(bound.arguments), tuple(bound.arguments.values())
        arguments = with_static(self.name, self.static, names, arguments) if self.static else arguments
        if is_transformed():
            refuse_donated(fast_flatten(arguments)[0])
            self.step_aside(TRANSFORM)
            return self.followed(args, kwargs) if is_in_derivative() else self.fn(*args, **kwargs)
        when, around, seen = (self.name, next(self.calls)), surroundings(), self.last_seen
        # Most calls repeat the structure of the call before.
        if seen is not None and seen.read is not None and seen.here[0] == names and seen.here[3] == around:
            leaves = seen.read(arguments)
            if leaves is not None and (out := self.repeated(seen, leaves, when)):
                return out[0]
        leaves, structure = fast_flatten(arguments)
        here = (names, structure, structure_key(structure), around)
        found = self.seen.get(here)
        if found is not None and found is not seen:
            self.last_seen, out = found, self.repeated(found, leaves, when)
            if out is not None:
                return out[0]
        return self.stage_call(args, kwargs, leaves, here, when)

    def repeated(self, seen: Seen, leaves: list[Any], when: tuple[str, int]) -> tuple[Any] | None:
        """Return (the call's result,) if the leaves have the forms of a compilation, else None. C++ compares forms."""
        if self.donate and torch.cuda.is_initialized():
            leaves = bring_to_cuda(leaves)
        for entry in seen.entries:
            with entry.lock if self.donate else ALONE:
                known = leaves + entry.captured
                if entry.follows(known):
                    entry.used = when[1]
                    return (self.ran(entry, known, when),)
        return None

    def ran(self, entry: Any, known: list[Any], when: tuple[str, int]) -> Any:
        try:
            return entry(known, when)
        except RuntimeError as error:  # Perhaps an exchange broke off.
            said = others_changed(f"funcrec.jit({self.name})", error)
            if said is error:
                raise
            raise said from error

    def stage_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[Any, Any],
        leaves: list[Any],
        here: tuple[Any, ...],
        when: tuple[str, int],
    ) -> Any:
        """Return the result of a call, after a check of each leaf."""
        if self.donate and torch.cuda.is_initialized():
            leaves = bring_to_cuda(leaves)
        entry, leaves = (self.step_aside("a fake tensor"), leaves) if any_fake(leaves) else self.staged(leaves, here)
        if entry is None:
            return self.followed(args, kwargs)
        with entry.lock if self.donate else ALONE:
            known = leaves + entry.captured
            refuse_donated(known)  # once more, since another thread may have taken a leaf while this thread waited
            entry.used = when[1]
            entry.admit(known)
            before = self.seen.get(here) or Seen(here, flatten_like(here[1]), ())
            entries = (entry, *(e for e in before.entries if e is not entry))[:MOST_SEEN]
            self.last_seen = self.seen[here] = before._replace(entries=entries)
            return self.ran(entry, known, when)

    def followed(self, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        """Return the result of `fn` itself, because it is differentiated. Its exchanges with real ranks raise: other
        ranks may run the program, whose exchanges differ. (While an outer function is staged, all ranks run `fn`.)"""
        before = alone.get()
        try:
            alone.set("" if torch._C._len_torch_dispatch_stack() else self.name)
            return self.fn(*args, **kwargs)
        finally:
            alone.set(before)

    def staged(self, leaves: list[Any], here: tuple[Any, ...]) -> tuple[Compiled | None, list[Any]]:
        """Return the program for these leaves, and the leaves as plain memory. The program is None if a follower of the
        call must see `fn` itself."""
        refuse_donated(leaves)
        if any(isinstance(x, TableRef) for x in leaves):  # The leaves are tables of a loss.
            return self.step_aside("value_and_grad"), leaves
        if any_tracked(leaves):
            if self.donate or self.is_one:
                paths = leaf_paths(here[1], here[0])
                self.refuse_tracked(", ".join(f"`{paths[i][1]}`" for i, x in enumerate(leaves) if any_tracked([x])))
            return None, leaves
        if any(isinstance(x, Tensor) and x.is_meta for x in leaves):
            return self.step_aside("tensors on the device meta"), leaves
        leaves = self.in_memory(leaves, here)
        entry = self.find(leaves, here)
        if isinstance(entry, Followed):
            if self.donate or self.is_one:
                self.refuse_tracked(f"{', '.join(map(describe, entry.captured))}, closed over")
            return None, leaves
        return entry, leaves

    def step_aside(self, follower: str) -> None:
        """Return None, so that the call runs `fn` itself. Raise in a program of `lower`."""
        if self.is_one:
            what, need = "a program of `lower` has something to follow it.", "a call that nothing follows"
            hint = "fr.jit(fn) itself, which then runs `fn`"
            fail(f"funcrec.jit({self.name}).lower", what, got=follower, need=need, hint=hint, kind=TypeError)

    def refuse_tracked(self, which: str) -> None:
        call = f"funcrec.jit({self.name})" + (".lower" if self.is_one else "")
        what = f"{'a program of `lower`' if self.is_one else 'a donating call'} is followed by autograd."
        need = "values that nothing is differentiated by"
        hint = "`.detach()` or `requires_grad_(False)`, torch.no_grad(), "
        hint += "or fr.jit(fn) itself" if self.is_one else "or jit without donate="
        fail(call, what, got=f"requires_grad of {which}", need=need, hint=hint, kind=TypeError)

    def lower(self, *args: A.args, **kwargs: A.kwargs) -> Lowered[A, R]:
        """Return the program of a call, a `Lowered`. `lower` stages the function again, but does not compile or run the
        program, and takes no argument."""
        bound = bound_to(self.name, self.signature, args, kwargs)
        arguments = with_static(self.name, self.static, tuple(bound.arguments), tuple(bound.arguments.values()))
        leaves, structure = fast_flatten(arguments)
        program = Jitted(self.fn, self.donate, self.static)
        program.is_one = True
        if is_transformed():
            refuse_donated(leaves)
            program.step_aside(TRANSFORM)
        if self.donate and torch.cuda.is_initialized():
            leaves = bring_to_cuda(leaves)
        here = (tuple(bound.arguments), structure, structure_key(structure), surroundings())
        entry = sure(program.staged(leaves, here)[0])  # without a program, it would have raised

        (key,) = program.compiled

        def compile() -> Jitted[A, R]:
            now = ((*here[:-1], surroundings()), key[1])
            if now != key:
                refuse_other(self.name, key, now)
            with torch.no_grad(), torch._C._DisableAutocast():
                entry.code([x.meta["val"] for x in entry.staged.graph.graph.find_nodes(op="placeholder")])
            return program

        return lowered(entry, leaf_paths(structure, here[0]), key[1], compile)

    def in_memory(self, leaves: list[Any], here: tuple[Any, ...]) -> list[Any]:
        """Return the leaves as plain memory, with lazy conjugates, negatives and zeros computed; else raise."""
        out = list(leaves)
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                if is_odd(x):
                    refuse_odd(f"funcrec.jit({self.name})", x, f"`{leaf_paths(here[1], here[0])[i][1]}`")
                out[i] = x.clone() if x._is_zerotensor() else x.resolve_conj().resolve_neg()
        return out

    def find(self, leaves: list[Any], here: tuple[Any, ...]) -> Any:
        """Return the compilation for these leaves. It is a new one if there was none, or if a tensor that the function
        closes over has another form now."""
        key = (here, tuple(map(leaf_key, leaves)))
        entry = self.compiled.get(key)
        if entry is not None and entry.is_current():
            return entry
        with LOCK:  # torch stages and compiles one program at a time. Another thread may have made this one meanwhile.
            entry = self.compiled.get(key)
            if entry is None or not entry.is_current():
                if self.is_one and self.compiled:
                    refuse_other(self.name, next(iter(self.compiled)), key)
                names, structure, *_ = here
                before = staged.set("" if self.is_one else self.name)
                try:
                    given = self.staged_fn, self.name, self.signature, names, leaves, structure, self.donate
                    entry = compile_function(*given, in_parts=not self.is_one)
                finally:
                    staged.reset(before)
                self.keep(key, entry)
        return entry

    def keep(self, key: tuple[Any, ...], entry: Any) -> None:
        if isinstance(entry, Compiled):
            self.compilations += 1
            if self.compilations == MANY:
                warnings.warn(many_compilations(self.name, MANY, MOST, self.last, key), stacklevel=_frames_here())
            self.last = key
        self.compiled[key] = entry
        if len(self.compiled) > MOST:
            oldest = min((k for k in self.compiled if k != key), key=lambda k: self.compiled[k].used)
            gone = self.compiled.pop(oldest)
            self.last_seen, self.seen = None, {k: x for k, x in self.seen.items() if gone not in x.entries}

    def num_compiled(self) -> int:
        """Return the number of compilations of the function."""
        return self.compilations

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else Method(self, owner)

    def __getattr__(self, name: str) -> Any:
        """Return `init` if the function is the update of a step; raise for any other unknown attribute."""
        if name == "init" and hasattr(self.fn, "init"):
            return self.fn.init
        if name.startswith("_"):
            raise AttributeError(name)
        got, need = f".{name} of fr.jit({self.name})", "a call, .lower or .num_compiled of it, or .init of a step"
        hint = f"{self.name}.{name}, of the function itself" if hasattr(self.fn, name) else "fr.jit(fn)(*args)"
        problem = Problem("a jitted function has no such attribute.", got, need, hint)
        raise AttributeError(message("funcrec.jit", [problem]))

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.is_one:
            got, need = "a program of `lower`", "fr.jit(fn), which pickles, and compiles where it is loaded"
            fail(f"funcrec.jit({self.name}).lower", "a program does not pickle.", got=got, need=need, kind=TypeError)
        name = getattr(self.fn, "__qualname__", "")
        found = cast(Any, sys.modules.get(getattr(self.fn, "__module__", "")))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Jitted, (self.fn, self.donate, self.static))

    def __repr__(self) -> str:
        return f"<funcrec.jit of {self.fn!r}{f', donate={self.donate}' if self.donate else ''}>"


def _frames_here() -> int:
    """Return the number of frames from here to the caller of the jitted function."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, count = frame.f_back, count + 1
    return count
