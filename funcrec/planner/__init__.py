"""Plans where tables lie, from hardware, constraints and costs: searches for the plan whose slowest rank is fastest."""

import funcrec.core as _core
from funcrec.planner._command import arguments_of as arguments_of
from funcrec.planner._command import main as main
from funcrec.planner._command import read as read
from funcrec.planner._command import solver_on_stderr as solver_on_stderr
from funcrec.planner._constraints import TableConstraint as TableConstraint
from funcrec.planner._costs import latency_s as latency_s
from funcrec.planner._costs import peer_s_per_byte as peer_s_per_byte
from funcrec.planner._hardware import Hardware as Hardware
from funcrec.planner._plan import plan as plan

_core.publish(globals())
