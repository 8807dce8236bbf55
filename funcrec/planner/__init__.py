"""Plans where tables lie, from hardware, constraints and costs: searches for the plan whose slowest rank is fastest."""

import funcrec.core as _core
from funcrec.planner._command import main as main
from funcrec.planner._constraints import TableConstraint as TableConstraint
from funcrec.planner._hardware import Hardware as Hardware
from funcrec.planner._plan import plan as plan

_core.publish(globals())
