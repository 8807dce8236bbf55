"""Training: the state, a step, a step on ranks, k steps in one call, and functions that move states between plans."""

from funcrec.train._first_batch import error_of_loss as error_of_loss
from funcrec.train._first_batch import trial_of as trial_of
from funcrec.train._overflow import retry_overflow as retry_overflow
from funcrec.train._rank_step import state_specs as state_specs
from funcrec.train._recipe import Gathered as Gathered
from funcrec.train._recipe import Recipe as Recipe
from funcrec.train._recipe import Stages as Stages
from funcrec.train._recipe import run_recipe as run_recipe
from funcrec.train._replicas import sync_replicas as sync_replicas
from funcrec.train._reshard import gather_state as gather_state
from funcrec.train._reshard import mesh_problems as mesh_problems
from funcrec.train._reshard import of_rows as of_rows
from funcrec.train._reshard import reshard as reshard
from funcrec.train._reshard import slot_problems as slot_problems
from funcrec.train._reshard import steps_of as steps_of
from funcrec.train._scan import scan as scan
from funcrec.train._stale import stale_of as stale_of
from funcrec.train._state import TrainState as TrainState
from funcrec.train._step import TrainStep as TrainStep
from funcrec.train._step import Update as Update
from funcrec.train._step import admission as admission
from funcrec.train._step import own_memory as own_memory
from funcrec.train._step import state_problems as state_problems
from funcrec.train._step import train_step as train_step
from funcrec.train._step import update_of as update_of
