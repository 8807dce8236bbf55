"""jit(f).lower describes and compiles the program of a call without making the call."""

import inspect
import pickle
import weakref

import pytest
import torch
from programs import training_step
from programs.surroundings import on_threads

import funcrec as fr
from funcrec.testing import assert_trees_close

ONE = torch.tensor([1])
SHIFT = torch.tensor(0.5)
PARAMETER = torch.nn.Parameter(torch.ones(2))


def state():
    return {"w": torch.arange(4.0), "t": torch.zeros(4)}


def rows(s, x, power=1):
    return {"w": s["w"].index_put((ONE,), s["t"][:1] + x**power), "t": s["t"] + SHIFT}, s["w"].sum()


@pytest.mark.parametrize("kwargs", [{}, {"power": 2}], ids=str)
def test_the_program_is_the_call(kwargs):
    """lower(...).compile()(...) gives the values of the call, even for a call on the program's own result. The program
    takes its arguments as the call does."""
    made, (program, fn) = [], (fr.jit(rows, donate=("s",)) for _ in range(2))
    x, other = torch.tensor(2.0), torch.tensor(3.0)
    program = program.lower(state(), x, **kwargs).compile()
    for run in (rows, fn, program):
        given = s = state()
        for each in (x, other):
            s, total = run(s, each, **kwargs)
        made.append((s, total))
        assert run is rows or [type(v).__name__ for v in given.values()] == ["Donated"] * 2
    assert_trees_close(made[0], made[1])
    assert_trees_close(made[1], made[2], rtol=0, atol=0)
    with pytest.raises(fr.DonatedError, match=r"`s\['w'\]` was donated to call 1 of `rows`"):
        given["w"].sum()


def test_lowering_compiles_and_takes_nothing(monkeypatch):
    """lower runs no compiler, takes and keeps no argument, and does not count as a compilation of jit. compile does not
    change the graph."""
    fn, given = fr.jit(rows, donate=("s",)), state()
    with monkeypatch.context() as patch:
        patch.setattr("funcrec.compile._program.compile_graph", lambda graph, arguments: 1 / 0)
        lowered = fn.lower(given, SHIFT)
        with pytest.raises(ZeroDivisionError):
            lowered.compile()
    assert_trees_close(given, state())
    assert fn.num_compiled() == 0
    text, seen = lowered.as_text(), weakref.ref(given["w"])
    del given
    assert seen() is None
    lowered.compile()(state(), SHIFT)
    assert lowered.as_text() == text
    assert fn.num_compiled() == 0


def test_what_is_read_and_written_is_told(interpreted):
    """A lowered program lists the tensors that it reads, closed-over tensors included, with the tensors' forms. It also
    lists the donated tensors and those that it writes in place. The graph takes the tensors that the program reads."""
    given, x = state(), torch.tensor(2.0)
    lowered = fr.jit(lambda s, x, unread: rows(s, x), donate=("s",)).lower(given, x, torch.ones(3))
    inputs = {"s['t']": given["t"], "s['w']": given["w"], "x": x, "captured_1": SHIFT}
    forms = {"s['t']": "f32[4]", "s['w']": "f32[4]", "x": "f32[]", "captured_1": "f32[]", "captured_0": "i64[1]"}
    # only the write reads captured_0
    assert lowered.reads == forms and list(lowered.reads)[4:] == ["captured_0"]
    outputs = lowered.graph(*[inputs[path] for path in list(lowered.reads)[:4]])
    assert any(torch.equal(out, given["t"] + SHIFT) for out in outputs)
    assert lowered.donated == ("s['w']", "s['t']")
    assert lowered.written == ("s['w']",)
    assert lowered.exchanges == () and lowered.sent_bytes == 0
    assert all(form in lowered.as_text() for form in lowered.reads.values())


def test_a_training_step_writes_its_tables_and_slots(interpreted):
    """A donated training step takes its whole state, and writes the tables and their slots in place."""
    step = training_step.plain()
    lowered = fr.jit(step, donate=("state",)).lower(training_step.state_of(step), training_step.IDS)
    in_place = [p for p in lowered.donated if p.startswith(("state.tables", "state.slots"))]
    assert len(in_place) == 3 and set(lowered.written) == set(in_place)
    assert set(lowered.donated) > set(in_place)


def squares(x):
    return (x * x).sum()


def followed(x):
    return (x * PARAMETER).sum()


X = torch.ones(2)
FOLLOWED = {
    "vmap": (squares, lambda f: torch.vmap(f)(torch.ones(3, 2))),
    "grad": (squares, lambda f: torch.func.grad(f)(X)),
    "jvp": (squares, lambda f: torch.func.jvp(f, (X,), (X,))),
    "a forward tangent": (squares, lambda f: forward(f)),
    "requires_grad": (squares, lambda f: f(torch.ones(2, requires_grad=True))),
    "a closed-over Parameter": (followed, lambda f: f(X)),
    "the device meta": (squares, lambda f: f(torch.ones(2, device="meta"))),
    "another jit": (squares, lambda f: fr.jit(lambda x: f(x))(X)),
    "checked": (squares, lambda f: fr.checked(f)(X)),
    "torch.compile": (squares, lambda f: torch.compile(f, backend="eager", fullgraph=True)(X)),
}


def forward(f):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(X, X))


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_program_is_of_plain_calls_alone(name, interpreted):
    """Where a call of jit runs the plain function, lower raises. So does a program that was lowered before. No
    derivative is therefore silently lost."""
    fn, call = FOLLOWED[name]
    # a graph of torch.compile cannot contain lower
    if name != "torch.compile":
        with pytest.raises(TypeError, match=r"funcrec\.jit\(\w+\)\.lower: .*(?s:.*)  try "):
            call(lambda *args: fr.jit(fn).lower(*args) and args[0].sum())
    with torch.no_grad():
        program = fr.jit(fn).lower(X).compile()
        assert_trees_close(program(X), fn(X), rtol=0, atol=0)
    if fn is squares:
        program = fr.jit(fn).lower(X).compile()
        with pytest.raises((TypeError, torch._dynamo.exc.TorchDynamoException), match="program of `lower`"):
            call(program)


OTHERS = {
    "shape": (lambda p: p(torch.ones(3)), r"`x`: f32\[2\], then f32\[3\]"),
    "dtype": (lambda p: p(X.double()), r"`x`: f32\[2\], then f64\[2\]"),
    "structure": (lambda p: p({"a": X}), "another structure"),
    "names": (lambda p: p(X, power=3), "another structure"),
    "surroundings": (lambda p: elsewhere(p), "the number of threads: 1, then 2"),
}


def elsewhere(call):
    with on_threads(2):
        return call(X)


@pytest.mark.parametrize("name", OTHERS)
def test_a_program_has_one_form(name, interpreted):
    """A program refuses arguments and surroundings that differ from those of its lowering. The error says what differs.
    Nothing is compiled for other arguments or surroundings."""
    call, got = OTHERS[name]
    program = fr.jit(lambda x, power=2: x**power).lower(X).compile()
    with pytest.raises(TypeError, match=rf"\.lower: a program has one form.*\n  got   {got}"):
        call(program)
    assert program.num_compiled() == 1
    assert_trees_close(program(X), X**2)


def test_a_program_has_one_form_of_what_it_closes_over(interpreted):
    """A program refuses to run after a closed-over tensor changed its form."""
    held = torch.ones(2)
    program = fr.jit(lambda x: x + held.sum()).lower(X).compile()
    held.resize_(3)
    with pytest.raises(TypeError, match="another form of a tensor that it closes over"):
        program(X)


def test_a_program_is_compiled_where_it_was_lowered(interpreted):
    """compile refuses surroundings that differ from those of the lowering, because the code would differ."""
    lowered = fr.jit(squares).lower(X)
    with pytest.raises(TypeError, match="the number of threads: 1, then 2"):
        elsewhere(lambda x: lowered.compile())
    assert_trees_close(lowered.compile()(X), squares(X))


def test_what_cannot_be_lowered_says_why(interpreted):
    """lower raises the errors of the call: for donated values, host reads and unknown arguments. A program does not
    pickle."""
    fn, given = fr.jit(rows, donate=("s",)), state()
    fn(given, SHIFT)
    with pytest.raises(fr.DonatedError, match=r"`s\['w'\]` was donated to call 1"):
        fn.lower(given, SHIFT)
    with pytest.raises(TypeError, match="reads a tensor's value on the host"):
        fr.jit(lambda x: x.sum().item()).lower(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        fn.lower(state(), SHIFT, y=1)
    for program in (fr.jit(squares).lower(X), fr.jit(squares).lower(X).compile()):
        with pytest.raises(TypeError, match="a program does not pickle"):
            pickle.dumps(program)


def test_what_an_update_in_place_reads_is_told(interpreted):
    """A program reads the tables and slots that an optimizer updates in place. The program does not read rows that it
    replaces, but reads rows to which it adds."""
    opt, tables = fr.optim.adagrad(), {"t": torch.zeros(3, 2)}
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 2), num_embeddings=3)}
    update = lambda state, grads: opt.update(grads, state[1], state[0], 0)
    lowered = fr.jit(update, donate=("state",)).lower((tables, opt.init(tables)), grads)
    assert set(lowered.written) == {"state[0]['t']", "state[1]['t']['sum']"} <= lowered.reads.keys()
    put = lambda x, rows, new, is_sum: x.index_put((rows,), new, accumulate=is_sum)
    for is_sum in (False, True):
        lowered = fr.jit(put, donate=("x",)).lower(torch.zeros(3), torch.tensor([1]), torch.ones(1), is_sum)
        assert lowered.written == ("x",) and ("x" in lowered.reads) is is_sum


@fr.pytree
class Scaled:
    by: torch.Tensor

    @fr.jit
    def scale(self, x):
        """Return x * self.by."""
        return x * self.by


def test_a_jitted_method_is_lowered_for_its_object(interpreted):
    """obj.method.lower(x) binds x as obj.method(x) does. The bound method has the signature of the method, and
    pickles."""
    scaled, x = Scaled(torch.tensor(2.0)), torch.tensor(3.0)
    lowered = scaled.scale.lower(x)
    assert list(lowered.reads) == ["x", "self.by"] or list(lowered.reads) == ["self.by", "x"]
    assert lowered.compile()(scaled, x) == scaled.scale(x) == Scaled.scale(scaled, x) == 6
    assert list(inspect.signature(scaled.scale).parameters) == ["x"]
    assert scaled.scale == scaled.scale and scaled.scale != Scaled(torch.tensor(2.0)).scale
    assert len({scaled.scale, scaled.scale, Scaled(torch.tensor(2.0)).scale}) == 2
    assert scaled.scale.num_compiled() == Scaled.scale.num_compiled() >= 1
    assert pickle.loads(pickle.dumps(scaled.scale))(x) == 6
