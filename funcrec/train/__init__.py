"""Training: the state, a step, a step on ranks, k steps in one call, steps undone, and states moved between plans."""

from funcrec.train._delta import ChangedRows as ChangedRows
from funcrec.train._delta import Delta as Delta
from funcrec.train._delta import apply_delta as apply_delta
from funcrec.train._delta import delta as delta
from funcrec.train._first_batch import trial_of as trial_of
from funcrec.train._logged import Logged as Logged
from funcrec.train._logged import logged as logged
from funcrec.train._logged import rewind as rewind
from funcrec.train._overflow import retry_overflow as retry_overflow
from funcrec.train._replicas import sync_replicas as sync_replicas
from funcrec.train._reshard import gather_state as gather_state
from funcrec.train._reshard import of_rows as of_rows
from funcrec.train._reshard import reshard as reshard
from funcrec.train._reshard import slot_problems as slot_problems
from funcrec.train._reshard import steps_of as steps_of
from funcrec.train._scan import scan as scan
from funcrec.train._stale import stale_of as stale_of
from funcrec.train._state import TrainState as TrainState
from funcrec.train._step import TrainStep as TrainStep
from funcrec.train._step import train_step as train_step
