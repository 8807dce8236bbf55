"""python -m funcrec COMMAND ...

plan    places tables on ranks: python -m funcrec plan --help
dryrun  tells what a step on many ranks sends, holds and takes: python -m funcrec dryrun --help
serve   serves a package over HTTP: python -m funcrec serve --help
"""

import sys

from funcrec.dry import main as dryrun
from funcrec.planner import main as plan
from funcrec.serve import main as serve


def main(words: list[str]) -> int:
    """Return the command's exit code; 2 for an unknown command."""
    if words[:1] == ["plan"]:
        return plan(words)
    if words[:1] == ["dryrun"]:
        return dryrun(words[1:])
    if words[:1] == ["serve"]:
        return serve(words[1:])
    asked = words[:1] in (["-h"], ["--help"])
    print(__doc__, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
