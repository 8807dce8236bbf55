"""What is asked of torch's private levels of transforms."""

import torch
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad, peek_interpreter_stack
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled


def one_level_below(rule, tensors, tangents):
    """rule(tensors, tangents), a tensor or a tuple of them, as transforms further out must see it.

    torch 2.13 runs a jvp rule at its own level, with forward derivatives off: jvp of jvp would be silently zero. So the rule runs
    one level below, as torch.func runs `forward`.
    """
    if peek_interpreter_stack() is None:
        return rule(tensors, tangents)
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    plain = [[x if x is None else _unwrap_for_grad(x, level) for x in xs] for xs in (tensors, tangents)]
    with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
        out = rule(*plain)
    wrap = lambda x: None if x is None else _wrap_for_grad(x, level)
    return tuple(map(wrap, out)) if isinstance(out, tuple) else wrap(out)
