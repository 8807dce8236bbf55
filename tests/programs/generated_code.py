"""What Inductor writes for a call, whatever is on disk."""

from torch._inductor import config
from torch._inductor.utils import run_and_get_code


def generated_code(call, *arguments):
    """(the call's value, the texts of the programs that were made for it)."""
    with config.patch(force_disable_caches=True):
        return run_and_get_code(call, *arguments)
