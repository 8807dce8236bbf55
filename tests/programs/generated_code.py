"""Find the code that Inductor generates for a call, even if Inductor's cache on disk has the compiled code."""

from torch._inductor import config
from torch._inductor.utils import run_and_get_code


def generated_code(call, *arguments):
    """Return (the call's value, the texts of the programs that Inductor generates for the call)."""
    with config.patch(force_disable_caches=True):
        return run_and_get_code(call, *arguments)
