"""Stages one rank's program of a step for a mesh of any size, and tells what it sends, holds and costs."""

import funcrec.core as _core
from funcrec.dry._command import main as main
from funcrec.dry._dry_run import DryRun as DryRun
from funcrec.dry._dry_run import dry_run as dry_run

_core.publish(globals())
